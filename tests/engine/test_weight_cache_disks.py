"""Repacked weights beside other processes, on full disks and where nothing can be written: no harm is done."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from weight_caches import VERSION, build, cache_home, is_filled, model, names

__all__ = ["cache_home", "model"]


def script(text: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from appliance.engine.weight_cache import WeightCache\n"
        "def opened(path): return WeightCache.open(Path(path), [Path(path)], 7, 2)\n" + text
    )
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_rest_of_a_killed_writer_is_removed_and_that_of_a_living_one_is_not(model: Path) -> None:
    writer = script(
        "cache = opened(sys.argv[1]); cache.allocate(100).fill_(1); print('ready', flush=True); sys.stdin.read()\n"
        "import time; time.sleep(60)",
        model,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    (rest,) = [name for name in names(model.parent) if name.endswith(".tmp")]
    build(model)
    assert names(model.parent) == ["m.gguf", "m.gguf.packed", rest]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert is_filled(model)
    assert not is_filled(model, VERSION + 1)
    assert names(model.parent) == ["m.gguf", "m.gguf.packed"]


def test_memory_is_shared_between_processes(model: Path) -> None:
    build(model)
    shared = "print(sum('m.gguf.packed' in line and ' r--s ' in line for line in open('/proc/self/maps')))"
    reader = script(f"cache = opened(sys.argv[1]); {shared}", model)
    assert reader.communicate()[0] == "1\n"


def mounted(options: str) -> tuple[str, ...]:
    """A command that runs another with a small file system of its own at /mnt; skips where that is not possible."""
    mount = f'mount -t tmpfs -o {options} tmpfs /mnt && exec "$0" "$@"'
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount)
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    return prefix


FULL = """
import os, shutil
model = shutil.copy(sys.argv[1], "/mnt")
os.truncate(model, 2**25)
cache = opened(model)
kept = [cache.allocate(2**25) for _ in range(4)]
for index, data in enumerate(kept):
    data.fill_(index + 1)
    cache.add(str(index), {}, data, None)
cache.commit()
cache.__exit__()
print(cache.note)
print([int(data.sum()) // 2**25 for data in kept], sorted(os.listdir("/mnt")))
"""


def test_a_full_disk_costs_the_cache_and_nothing_else(model: Path) -> None:
    prefix = mounted("size=100m")
    said = script(FULL, model, prefix=prefix).communicate()[0].splitlines()
    assert said[0].startswith("the repacked weights are not kept")
    assert "No space left" in said[0]
    assert said[1] == "[1, 2, 3, 4] ['m.gguf']"


READ_ONLY = """
import os, shutil, subprocess
model = shutil.copy(sys.argv[1], "/mnt")
subprocess.run(["mount", "-o", "remount,ro", "/mnt"], check=True)
for _ in range(2):
    with opened(model) as cache:
        print(cache.is_filled, cache.note, [] if cache.is_filled else cache.allocate(3).tolist())
        if not cache.is_filled:
            cache.add("a", {}, cache.allocate(3), None)
        cache.commit()
"""


def test_beside_a_model_that_cannot_be_written_it_is_kept_in_the_users_cache(
    model: Path, cache_home: Path
) -> None:
    prefix = mounted("size=1m")
    assert script(READ_ONLY, model, prefix=prefix).communicate()[0] == "False  [0, 0, 0]\nTrue  []\n"
    (name,) = names(cache_home)
    # That model is gone: the next one that is kept there removes what is left of it.
    other = model.rename(model.with_name("other.gguf"))
    script(READ_ONLY, other, prefix=prefix).communicate()
    (left,) = names(cache_home)
    assert left != name


def test_where_nothing_can_be_written_it_works_without(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    code = READ_ONLY.replace("cache.note,", "cache.note[:33],")
    said = script(code, model, prefix=mounted("size=1m")).communicate()[0]
    assert said == "False the repacked weights are not kept [0, 0, 0]\n" * 2


def test_a_limit_on_the_size_of_files_costs_the_cache_and_nothing_else(model: Path, cache_home: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "with opened(sys.argv[1]) as cache:\n"
        "    data = cache.allocate(2**22).fill_(1); cache.add('a', {}, data, None); cache.commit()\n"
        "print(int(data.sum()) == 2**22, cache.note)"
    )
    said = script(code, model).communicate()[0]
    assert said.startswith("True the repacked weights are not kept")
    assert [name for name in names(model.parent) if name != "cache"] == ["m.gguf"]
    assert names(cache_home) == []
