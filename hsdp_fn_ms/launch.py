"""Joining and leaving the world of processes: under msrun, under plain processes, or alone."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import mindspore.mint.distributed as dist
from mindspore.communication import init
from mindspore.communication.management import GlobalComm, _init_with_store

from hsdp_fn import BackendError

from .probe import facts, settle

#: The communication backend of each device target.
BACKENDS = {"CPU": "mccl", "Ascend": "hccl"}


def init_process_group(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    timeout: float = 60.0,
) -> tuple[int, int]:
    """Join the world. Communicates: all ranks must call it. Does nothing when this process has joined already.

    Under msrun (which sets ``MS_ROLE``) no argument is needed. Otherwise rank 0 serves a store at ``address``; what
    isn't given is taken from the environment: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.
    (``mindspore.mint.distributed.init_process_group`` refuses CPU.)

    Args:
        rank: of this process, ``0 .. world_size - 1``.
        world_size: number of processes.
        address: ``ip:port`` of rank 0's store, a free port on its machine.
        timeout: seconds to wait for the others.

    Returns:
        Rank and number of ranks.

    Raises:
        BackendError: a device or numpy that MindSpore can't be used with, see `probe`.
        ValueError: what isn't given isn't in the environment either, or out of range.
    """
    device = facts().device
    if GlobalComm.INITED:
        return world()
    if device not in BACKENDS:
        raise BackendError(f"hsdp_fn_ms runs on {' and '.join(BACKENDS)}, found device target {device}")
    if os.environ.get("MS_ROLE"):
        init(BACKENDS[device])
        return world()
    rank = _number("rank", rank, "RANK")
    world_size = _number("world_size", world_size, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0 .. {world_size - 1}, found {rank}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, found {timeout!r}")
    if address is None:
        address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{_number('address', None, 'MASTER_PORT')}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address must be ip:port, found {address!r}")
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, int(port), world_size, rank == 0, limit)
    _init_with_store(backend=BACKENDS[device], timeout=limit, world_size=world_size, rank=rank, store=store)
    return world()


def world() -> tuple[int, int]:
    """Rank and number of ranks; ``(0, 1)`` for a process that has joined none. Does not communicate."""
    return (dist.get_rank(), dist.get_world_size()) if GlobalComm.INITED else (0, 1)


def leave(code: int = 0) -> NoReturn:
    """End the process with this exit code. Communicates: a barrier of all ranks when the code is 0.

    MindSpore's own teardown of ``mccl`` may wait for peers that have gone; this skips it, except under msrun, whose
    scheduler has to be told.
    """
    if code == 0 and GlobalComm.INITED:
        dist.barrier()
        settle()
    if os.environ.get("MS_ROLE"):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _number(name: str, given: int | None, variable: str) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if not text.isdigit():
        raise ValueError(f"{name} isn't given and {variable} isn't a number in the environment: {text!r}")
    return int(text)
