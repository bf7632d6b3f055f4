"""One command-line option per setting, made from the schema, so that none can be missing or called otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from appliance.settings_facts import choices, facts, values
from appliance.settings_schema import Settings
from appliance.settings_vllm import FOREIGN, RENAMED

_MODEL = "A model's name, or a path to a .gguf file or a model folder."


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**flags` an argument for the model and an option for every setting.

    Spellings and settings that only vLLM has are options as well, unseen in the help.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
    parameters = [_parameter("model_name", model)]
    parameters += [_parameter(name, _option(name)) for name in Settings.model_fields]
    parameters += [_parameter(name, _hidden_option(name)) for name in (*RENAMED, *FOREIGN)]
    command.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
    return command


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, by their settings' names.

    Raises:
        typer.BadParameter: two models were.
    """
    # An option that may be repeated and was not given is an empty list. Given once, it may hold a list as text.
    values = {name: value for name, value in flags.items() if value is not None and value != []}
    values = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in values.items()
    }
    named = values.pop("model_name", None)
    if named is not None and values.setdefault("model", named) != named:
        raise typer.BadParameter(f"the model is given twice, as {named} and as --model {values['model']}")
    return values


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str) -> Any:
    field = Settings.model_fields[name]
    if name == "model":
        return Annotated[str | None, typer.Option("--model", help="The same as MODEL.", show_default=False)]
    shown = facts(name)["shown"] or field.default
    default = facts(name)["absent"] if shown in (None, ()) else shown
    text = f"{field.description} [{values(name)}; default: {default}]"
    if field.annotation is bool:
        text = f"{field.description} [default: {'on' if default else 'off'}]"
    metavar = "PATH" if Path in (field.annotation, *get_args(field.annotation)) else None
    return Annotated[_type(name), typer.Option(_flag(name), help=text, show_default=False, metavar=metavar)]


def _hidden_option(name: str) -> Any:
    if name in RENAMED:
        return Annotated[_type(RENAMED[name]), typer.Option(_plain(name), hidden=True)]
    if FOREIGN[name].is_switch:
        return Annotated[bool | None, typer.Option(f"{_plain(name)}/--no-{_plain(name)[2:]}", hidden=True)]
    return Annotated[str | None, typer.Option(_plain(name), hidden=True)]


def _flag(name: str) -> str:
    is_switch = Settings.model_fields[name].annotation is bool
    return f"{_plain(name)}/--no-{_plain(name)[2:]}" if is_switch else _plain(name)


def _plain(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _type(name: str) -> Any:
    annotation = Settings.model_fields[name].annotation
    if get_origin(annotation) is tuple:
        return list[str] | None
    if choices(name):
        return type(choices(name)[0]) | None
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    assert kinds[0] in (str, int, float, bool, Path), f"no option is known for {annotation}"
    # A path is taken as text, because "" takes one back that is set elsewhere, and Path("") is the working folder.
    return (str if kinds[0] is Path else kinds[0]) | None
