"""API keys: the file of hashes, and the ring that keys are tried on."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.api_keys import KeyFile, KeyFileError, KeyRing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "api_keys"


def test_a_new_key_is_kept_as_its_hash_only(path: Path) -> None:
    name, key = KeyFile(path).new("alice")
    assert name == "alice"
    assert path.read_text() == f"alice:{hashlib.sha256(key.encode()).hexdigest()}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key) == len("ak-") + 43


def test_keys_without_a_name_are_numbered_and_gaps_are_filled(path: Path) -> None:
    file = KeyFile(path)
    assert [file.new()[0], file.new("bob")[0], file.new()[0]] == ["key-1", "bob", "key-2"]
    file.revoke("key-1")
    assert file.new()[0] == "key-1"
    assert set(file.entries()) == {"bob", "key-1", "key-2"}


def test_names_are_checked(path: Path) -> None:
    file = KeyFile(path)
    file.new("alice")
    with pytest.raises(KeyFileError, match="'alice' already; revoke it first"):
        file.new("alice")
    with pytest.raises(KeyFileError, match="no name for a key"):
        file.new("a:b")
    with pytest.raises(KeyFileError, match=r"no key called 'bob' in .*; there are: alice"):
        file.revoke("bob")


@pytest.mark.parametrize("line", ["alice", "alice:abc", f"alice:{'A' * 64}", f"al ice:{'a' * 64}"])
def test_a_damaged_line_is_named(line: str, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(f"# ours\n\nbob:{'0' * 64}\n{line}\n")
    with pytest.raises(KeyFileError, match=r"line 4 of .* is not name:sha256"):
        KeyFile(path).entries()


def test_two_keys_of_one_name_are_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(f"bob:{'0' * 64}\nbob:{'1' * 64}\n")
    with pytest.raises(KeyFileError, match=r"line 2 of .* names 'bob' again"):
        KeyFile(path).entries()


def test_a_link_to_the_file_stays_one(path: Path, tmp_path: Path) -> None:
    KeyFile(path).new("alice")
    link = tmp_path / "link"
    link.symlink_to(path)
    KeyFile(link).new("bob")
    assert link.is_symlink()
    assert set(KeyFile(path).entries()) == {"alice", "bob"}


def test_the_ring_accepts_every_key_and_no_other(path: Path) -> None:
    _, filed = KeyFile(path).new()
    ring = KeyRing(("first", "second"), path)
    assert [ring.accepts(key.encode()) for key in ("first", "second", filed)] == [True] * 3
    hashed = next(iter(KeyFile(path).entries().values()))
    wrong = ("", "firs", "first ", "firstsecond", filed[:-1], hashed)
    assert [ring.accepts(key.encode()) for key in wrong] == [False] * 6
    assert not ring.accepts(bytes.fromhex(hashed))


def test_what_changes_in_the_file_holds_at_once(path: Path) -> None:
    file = KeyFile(path)
    ring = KeyRing((), path)
    assert not ring.is_required
    _, key = file.new("alice")
    assert ring.is_required
    assert ring.accepts(key.encode())
    _, other = file.new("bob")
    file.revoke("alice")
    assert not ring.accepts(key.encode())
    assert ring.accepts(other.encode())


def test_no_loss_of_the_file_opens_the_door(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, key = KeyFile(path).new()
    ring = KeyRing(("fixed",), path)
    assert ring.accepts(key.encode())
    with caplog.at_level(logging.ERROR), path.open("a") as file:
        file.write("damaged\n")
        file.flush()
        assert not ring.accepts(key.encode())
    assert "line 2" in caplog.text
    assert ring.accepts(b"fixed")
    path.unlink()
    assert not ring.accepts(key.encode())
    KeyFile(path).new("last")
    only_filed = KeyRing((), path)
    path.unlink()
    assert only_filed.is_required
    assert not only_filed.accepts(b"")


def test_a_file_that_could_not_be_read_for_a_while_is_read_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = KeyFile(path).new()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    ring = KeyRing((), path)
    os.utime(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert [ring.accepts(key.encode()), ring.accepts(key.encode())] == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caplog.text.count("no key of the file is accepted: ") == 1
    assert ring.accepts(key.encode())


def test_a_link_that_comes_to_lead_elsewhere_is_followed(path: Path, tmp_path: Path) -> None:
    _, old = KeyFile(path).new()
    _, new = KeyFile(tmp_path / "next").new()
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(path)
    ring = KeyRing((), link)
    assert ring.accepts(old.encode())
    other.symlink_to(tmp_path / "next")
    other.replace(link)
    assert [ring.accepts(key.encode()) for key in (old, new)] == [False, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_file_stays_its_owners_when_root_changes_it(path: Path) -> None:
    KeyFile(path).new("alice")
    os.chown(path, 12345, 12346)
    path.chmod(0o640)
    KeyFile(path).revoke("alice")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 12346, 0o640)


def medians(*actions: Callable[[], bool], rounds: int = 41) -> list[float]:
    """Median seconds of each action; they take turns, so that whatever else runs slows all of them."""
    times: list[list[float]] = [[] for _ in actions]
    for _, (action, found) in itertools.product(range(rounds), zip(actions, times, strict=True)):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in times]


def test_the_time_of_a_refusal_does_not_tell_where_a_key_differs(path: Path) -> None:
    # A comparison that ends at the first difference is thousands of times faster for `early` at this length.
    right = b"k" * 2**20
    ring = KeyRing((right.decode(),), path)
    early, late = b"x" + right[1:], right[:-1] + b"x"
    first, last = medians(lambda: ring.accepts(early), lambda: ring.accepts(late))
    assert 0.5 < first / last < 2


def test_the_time_does_not_tell_which_key_it_was(path: Path) -> None:
    # A search that ends at the first match is thousands of times faster for the first of so many keys.
    keys = tuple(f"key-{index}" for index in range(5000))
    ring = KeyRing(keys, path)
    first, last, none = medians(
        lambda: ring.accepts(keys[0].encode()),
        lambda: ring.accepts(keys[-1].encode()),
        lambda: ring.accepts(b"wrong"),
    )
    assert 0.5 < first / last < 2
    assert 0.5 < none / last < 2
