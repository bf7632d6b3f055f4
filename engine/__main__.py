"""The engine worker's process: `python -m appliance.engine ADDRESS PARENT_PID`, started by the daemon."""

from __future__ import annotations

import os
import signal
import sys

from appliance.engine.lifeline import die_with_parent

if __name__ == "__main__":
    address, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid), signal.SIGKILL)
    # Ctrl-C is the daemon's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Weights in huge pages: they are faster to get from the system, and to read. Torch asks before its first use.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Only now, because importing torch takes seconds.
    from appliance.engine.worker import main

    sys.exit(main(address))
