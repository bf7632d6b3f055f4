"""API keys: a file of hashes that can be changed while the daemon runs, and the ring that a request's key is tried on.

The file has one line per key, `name:sha256` in hexadecimal. A plain SHA-256 is enough because the keys are random
and 256 bits long: there is nothing to guess that salt or slowness would protect.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from appliance.files import open_lock, sync

PREFIX = "ak-"
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}):([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


class KeyFileError(Exception):
    """The file of keys cannot be used as it is, or as was asked; the message says which line or key, and why."""


class KeyFile:
    """A file of hashed keys. What changes it holds a lock, and replaces the file as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> dict[str, str]:
        """The hash of each key by its name; {} where there is no file.

        Raises:
            KeyFileError: the file cannot be read, or a line is not `name:sha256`.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"cannot read the API keys in {self.path}: {error}") from None
        entries: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if not found:
                raise KeyFileError(
                    f"line {number} of {self.path} is not name:sha256, with 64 hexadecimal digits in lower case; "
                    "`appliance key new` writes such lines"
                )
            if found[1] in entries:
                raise KeyFileError(
                    f"line {number} of {self.path} names {found[1]!r} again; names must differ"
                )
            entries[found[1]] = found[2]
        return entries

    def new(self, name: str | None = None) -> tuple[str, str]:
        """Make a key and keep its hash; (name, key). The key itself is nowhere else.

        Args:
            name: what to call it, to tell it from others; None: key-1, key-2, …

        Raises:
            KeyFileError: the name is taken or unusable, or the file cannot be used.
        """
        if name is not None and not _NAME.fullmatch(name):
            raise KeyFileError(
                f"{name!r} is no name for a key; expected up to 64 letters, digits, '.', '_' and '-'"
            )
        with self._locked():
            entries = self.entries()
            if name in entries:
                raise KeyFileError(
                    f"there is a key called {name!r} already; revoke it first, or choose another name"
                )
            chosen = name or next(
                n for n in (f"key-{i + 1}" for i in range(len(entries) + 1)) if n not in entries
            )
            key = PREFIX + secrets.token_urlsafe(32)
            self._write({**entries, chosen: digest(key.encode()).hex()})
        return chosen, key

    def revoke(self, name: str) -> None:
        """Forget a key: a daemon that runs refuses it from its next request on.

        Raises:
            KeyFileError: there is none of that name (says which there are), or the file cannot be used.
        """
        with self._locked():
            entries = self.entries()
            if name not in entries:
                names = ", ".join(entries) or "none"
                raise KeyFileError(f"there is no key called {name!r} in {self.path}; there are: {names}")
            del entries[name]
            self._write(entries)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._target.with_name(f".{self._target.name}.lock")
        try:
            handle = open_lock(lock, 0o600)
        except OSError as error:
            raise KeyFileError(f"cannot write to {lock.parent}: {error}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @property
    def _target(self) -> Path:
        """The file behind the links, so that replacing it does not replace a link to it."""
        return Path(os.path.realpath(self.path))

    def _write(self, entries: dict[str, str]) -> None:
        target = self._target
        fresh = target.with_name(f".{target.name}.new")
        text = "".join(f"{name}:{value}\n" for name, value in entries.items())
        try:
            before = target.stat() if target.exists() else None
            fresh.write_text(text, encoding="utf-8")
            fresh.chmod(before.st_mode & 0o777 if before else 0o600)
            if before and before.st_uid != os.geteuid():
                # Root has changed what belongs to the daemon's user, who must be able to read it still.
                os.chown(fresh, before.st_uid, before.st_gid)
            sync(fresh)
            fresh.replace(target)
            # Or a key that was revoked could be back after a power cut.
            sync(target.parent)
        except OSError as error:
            raise KeyFileError(f"cannot write {self.path}: {error}") from None


class KeyRing:
    """Every key that is good right now: those of the settings, and those of the file, read again when it changes.

    Once a key has been needed, one is needed for as long as this lives: a file that vanishes opens no door.
    """

    def __init__(self, keys: tuple[str, ...], path: Path) -> None:
        self._fixed = tuple(digest(key.encode()) for key in keys)
        self._file = KeyFile(path)
        self._filed: tuple[bytes, ...] = ()
        self._seen: tuple[int, ...] | None = None
        self._problem = ""
        self._was_required = False
        self._refresh()

    @property
    def is_required(self) -> bool:
        """Whether a request must bring a key: there are some, or there is a file for them, though it be empty."""
        self._refresh()
        return self._was_required

    def accepts(self, key: bytes) -> bool:
        """Whether the key is good. How long this takes depends on the number of keys, not on what they are."""
        self._refresh()
        given = digest(key)
        is_good = False
        for known in (*self._fixed, *self._filed):
            is_good |= hmac.compare_digest(given, known)
        return is_good

    def _refresh(self) -> None:
        try:
            found = os.stat(self._file.path)
            # The time of the last change, permissions included.
            seen: tuple[int, ...] | None = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError:
            seen = None
        # What could not be read is tried again: perhaps only files were short.
        if seen != self._seen or self._problem:
            self._seen, self._filed = seen, self._read()
        self._was_required = self._was_required or bool(self._fixed) or seen is not None

    def _read(self) -> tuple[bytes, ...]:
        try:
            entries = self._file.entries()
        except KeyFileError as error:
            # Rather nobody than somebody whose key was to be revoked.
            if str(error) != self._problem:
                log.error("no key of the file is accepted: %s", error)
            self._problem = str(error)
            return ()
        self._problem = ""
        return tuple(bytes.fromhex(value) for value in entries.values())


def digest(key: bytes) -> bytes:
    """What is kept of a key: keys of any length become equally long, so that comparing tells nothing of them."""
    return hashlib.sha256(key).digest()
