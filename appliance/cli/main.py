"""The `appliance` command: what holds for all of its commands."""

from __future__ import annotations

import sys

from appliance.cli.console import note, open_missing_streams

INTERRUPTED = 130


def main() -> None:
    """Run the command line. Exit codes: 1 for an error, 2 for a usage error, 130 for Ctrl-C."""
    open_missing_streams()
    try:
        # Here, because it takes long enough to be interrupted.
        from appliance.cli.commands import EXPECTED_ERRORS, app
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        app()
    except EXPECTED_ERRORS as error:
        note(f"error: {' '.join(str(error).split())}")
        sys.exit(1)


if __name__ == "__main__":
    main()
