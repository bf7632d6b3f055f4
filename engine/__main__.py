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
    # Threads that wait for each other spin briefly, then sleep. By default they spin for long, and with another busy
    # program beside keep the thread they wait for from its core, and a step takes many times as long. Read with torch.
    os.environ.setdefault("GOMP_SPINCOUNT", "50000")
    # Only now, because importing torch takes seconds.
    from appliance.engine.worker import main

    sys.exit(main(address))
