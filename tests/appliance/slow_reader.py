"""The commands with workers that read a model slowly, as from an old disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Stands in for the interpreter: `-m MODULE ARGUMENTS`, with itself as what further processes are started with.
_SCRIPT = """
import runpy, sys, time

from appliance.quant.hf.checkpoint import HFCheckpoint

read = HFCheckpoint.read

def read_slowly(self, name):
    if len(self.shape(name)) == 2:
        time.sleep({pause_s})
    return read(self, name)

HFCheckpoint.read = read_slowly
sys.executable = {program!r}
sys.argv = sys.argv[sys.argv.index("-m") + 1 :]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def slow_python(home: Path, pause_s: float) -> str:
    """A program to be called like Python, which pauses before it reads a matrix."""
    program, script = home / "slow-python", home / "slow.py"
    script.write_text(_SCRIPT.format(pause_s=pause_s, program=str(program)))
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    os.chmod(program, 0o755)
    return str(program)
