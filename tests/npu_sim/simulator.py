"""Makes device ``npu`` and backend ``hccl`` work in this process, and steers the simulator while it runs."""

from __future__ import annotations

import ctypes
import os

from .build import ALIASES, MAIN, libraries

_main: ctypes.CDLL | None = None


def activate() -> None:
    """Load the simulated libraries, import torch and torch_npu, and put the CPU's kernels below device ``npu``.

    Call it first in a program, with the options in the environment (see README.md). A second call does nothing.

    Raises:
        RuntimeError: ``TORCH_DEVICE_BACKEND_AUTOLOAD`` isn't 0, so that importing torch would import torch_npu before
            the simulator is there; or the simulator can't be built.
    """
    global _main
    if _main is not None:
        return
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        raise RuntimeError("set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before Python starts")
    strict = os.environ.get("NPU_SIM_STRICT_MEMORY", "0") != "0"
    if strict:
        # torch_npu's own queue in front of the streams would let a free overtake the work that it must follow.
        os.environ["TASK_QUEUE_ENABLE"] = "0"
    _main = load()
    from . import aten

    aten.install(_main)
    if strict:
        from . import strict_memory

        strict_memory.install(_main)


def load() -> ctypes.CDLL:
    """Load the simulated libraries alone. Whoever asks for one of their names later, as the wheel does, gets these."""
    folder = libraries()
    main = ctypes.CDLL(str(folder / MAIN), mode=ctypes.RTLD_GLOBAL)
    for name in ALIASES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return main


def arm(faults: str) -> None:
    """Replace the list of faults, as of NPU_SIM_FAULTS; calls are counted from now on. An empty one disarms."""
    _active().npu_sim_arm(faults.encode())


def note(text: str) -> None:
    """Write a line ``note TEXT`` to the trace."""
    _active().npu_sim_note(text.encode())


def check_freed() -> None:
    """Abort the process, with a message, if memory was written after it was given back to ACL."""
    _active().npu_sim_check_freed()


def _active() -> ctypes.CDLL:
    if _main is None:
        raise RuntimeError("the simulator isn't active in this process: call activate() first")
    return _main
