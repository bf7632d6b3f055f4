"""What a client of the daemon sees on this machine: `make bench`.

Starts the daemon on the starter model as its own process, twice: the second start is timed, and then asked by
`appliance bench`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

APPLIANCE = Path(sys.executable).with_name("appliance")
PORT = 8017
URL = f"http://127.0.0.1:{PORT}"
MODEL = "smollm2:135m"


@contextlib.contextmanager
def daemon() -> Iterator[float]:
    """A running daemon; yields the seconds it took from process start to ready."""
    start = time.perf_counter()
    child = subprocess.Popen([APPLIANCE, "serve", MODEL, "--port", str(PORT)], stdout=subprocess.DEVNULL)
    try:
        while True:
            if child.poll() is not None:
                sys.exit(f"the daemon ended with exit code {child.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{URL}/ready"):
                break
            time.sleep(0.02)
        yield time.perf_counter() - start
    finally:
        child.terminate()
        child.wait()


def main() -> int:
    with daemon():
        pass  # pulls the model, packs its weights and warms the disk cache
    with daemon() as ready_s:
        print(f"second start, from process start to ready: {ready_s:.1f} s", flush=True)
        return subprocess.call([APPLIANCE, "bench", "--url", URL, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
