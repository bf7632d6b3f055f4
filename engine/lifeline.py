"""A child process that does not outlive its parent. Imports nothing slow, so that no moment is left unguarded."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here: in a child between fork and exec, loading a library may wait for a lock that nobody holds any more.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int, sign: signal.Signals) -> None:
    """Have Linux send `sign` to this process when its parent ends, however that ends; exit if it has ended already.

    Args:
        parent_pid: as the parent knows it, since a child may ask for its parent too late.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(sign))
    if os.getppid() != parent_pid:
        os._exit(1)
