from __future__ import annotations

import pytest

from appliance.names import ModelName, ModelNameError, choose, did_you_mean


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2:135m", ModelName("smollm2", "135m")),
        (" SmolLM2:135M ", ModelName("smollm2", "135m")),
        ("qwen2.5-coder", ModelName("qwen2.5-coder")),
        ("a" * 64, ModelName("a" * 64)),
    ],
)
def test_names_are_read_in_any_case(text: str, name: ModelName) -> None:
    assert ModelName.parse(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a:",
        ":b",
        "..",
        "../x",
        "a/b",
        "a:../b",
        ".partial",
        "a:b:c",
        "a b",
        "a\0",
        "-x",
        "a\n:b",
        "é",
        "a" * 65,
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ModelNameError, match="is not a model name; expected name or name:tag"):
        ModelName.parse(text)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct.q4_1"),
        ("my model (1)", "my-model-1-"),
        ("..hidden", "hidden"),
        ("x" * 99, "x" * 64),
    ],
)
def test_a_file_gives_its_name(stem: str, name: str) -> None:
    assert str(ModelName.from_stem(stem)) == name


def test_a_stem_without_a_usable_letter_is_refused() -> None:
    with pytest.raises(ModelNameError):
        ModelName.from_stem("模型")


def test_a_name_without_tag_means_latest_before_all_others() -> None:
    among = ["a:1", "a:2", "b:latest", "b:1", "ab:1"]
    assert choose(ModelName("a"), among) == ["a:1", "a:2"]
    assert choose(ModelName("b"), among) == ["b:latest"]
    assert choose(ModelName("a", "2"), among) == ["a:2"]
    assert choose(ModelName("a", "3"), among) == []


def test_near_matches_are_whole_names() -> None:
    assert did_you_mean("smolm", ["smollm2:135m", "qwen3:8b"]) == "; did you mean smollm2:135m?"
    assert did_you_mean("zzz", ["smollm2:135m", "qwen3:8b"]) == ""
