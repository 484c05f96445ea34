"""Runs a script on N ranks over the simulator: ``python -m tests.npu_sim.run --nproc 2 script.py arguments``.

Each rank is a process with ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun
gives them, in which the simulator is active before the script starts. Options come from the environment (README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import libraries

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0
"""How long the other ranks may go on once one has failed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: its exit code; None if it was killed, since the time was up or another rank had failed.
        output: what it wrote to stdout and stderr; empty if that went to the terminal.
    """

    rank: int
    code: int | None
    output: str


def run_ranks(
    script: Sequence[str | os.PathLike[str]],
    nproc: int,
    *,
    options: Mapping[str, str] | None = None,
    limit_s: float = 120.0,
    capture: bool = False,
    active: bool = True,
) -> list[Ended]:
    """Run ``script`` (a path and its arguments) on ``nproc`` ranks; returns when none is left.

    Args:
        options: variables for the ranks' environment, over this process's own.
        limit_s: after so many seconds, what still runs is killed.
        capture: keep the ranks' output instead of passing it on.
        active: whether the simulator is active before the script starts; else it is a plain Python process.
    """
    libraries()  # built once, before the ranks ask for them
    run_id = secrets.token_hex(4)
    shared = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # an abort in a library below Python shows where Python was
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(nproc),
        "NPU_SIM_RUN_ID": run_id,
    }
    module = "tests.npu_sim.rank"
    command = [sys.executable, "-u", "-m", module, str(os.getpid()), "active" if active else "plain", *map(str, script)]
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="npu-sim-run-") as folder:
        try:
            for rank in range(nproc):
                environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(options or {})}
                with contextlib.ExitStack() as files:
                    out = files.enter_context(open(_output(folder, rank), "wb")) if capture else None
                    files_of_rank: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                    ranks.append(subprocess.Popen(command, env=environment, **files_of_rank))
            _await(ranks, limit_s)
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
            for leftover in Path("/dev/shm").glob(f"npu-sim-{run_id}-*"):  # of ranks that died before they all met
                leftover.unlink(missing_ok=True)
        texts = [_output(folder, rank).read_text(errors="replace") if capture else "" for rank in range(nproc)]
    return [Ended(rank, code, text) for rank, (code, text) in enumerate(zip(codes, texts, strict=True))]


def _await(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Wait until all have ended, the time is up, or some seconds have passed since one failed."""
    deadline = time.monotonic() + limit_s
    failed = False
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        if not failed and any(process.poll() not in (None, 0) for process in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


def _output(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.txt")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.npu_sim.run", description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks, each with a device of its own (2)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which all ranks are killed (600)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    arguments = parser.parse_args()
    if not arguments.script:
        parser.error("which script?")
    bad = [one for one in run_ranks(arguments.script, arguments.nproc, limit_s=arguments.limit) if one.code != 0]
    for one in bad:
        print(f"rank {one.rank}", "was killed" if one.code is None else f"ended with {one.code}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
