"""One rank's process: ``python -m tests.npu_sim.rank PARENT active|plain script.py arguments``; started by `run`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from .simulator import activate

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, mode, script, *arguments = sys.argv[1:]
    # Killed with the parent, however that ends: a rank that waits for others would go on for a minute.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the launcher is gone")
    if mode == "active":
        activate()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
