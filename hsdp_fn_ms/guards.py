"""Mistakes around `fully_shard` that would otherwise only show as a worse loss."""

from __future__ import annotations

import mindspore as ms
import mindspore.mint.distributed as dist
from mindspore import Tensor, nn

from .binding import named_cells
from .group import group_of
from .launch import world
from .mesh import DeviceMesh, process_group
from .probe import settle


def broadcast_module(cell: nn.Cell, mesh: DeviceMesh | None = None, *, src: int = 0) -> None:
    """Give all ranks the parameters and buffers of one of them. Call it before `fully_shard`, unless every rank
    initializes from the same seed or loads the same checkpoint: sharding itself sends no weights, so that ranks with
    different ones would train a mixture of them.

    Communicates: one broadcast a parameter and buffer.

    Args:
        mesh: the ranks; None: all.
        src: position of the source among them.

    Raises:
        ValueError: a parameter has no values yet or is sharded already; nothing was sent then.
    """
    targets: dict[int, tuple[str, Tensor]] = {}
    for prefix, below in named_cells(cell):
        sharded = "_hsdp_group" in below.__dict__ and group_of(below).layout is not None
        for local, value in (*below._params.items(), *below._buffers.items()):
            name = f"{prefix}.{local}" if prefix else local
            if sharded or getattr(value, "_hsdp_taken_in", None) is not None:
                raise ValueError(f"{name!r} is sharded already; broadcast_module takes a cell before fully_shard")
            if getattr(value, "has_init", False):
                raise ValueError(f"{name!r} hasn't been initialized; call init_data() on it first")
            if value is not None:
                targets.setdefault(id(value), (name, value))
    ranks = sorted(mesh.mesh.reshape(-1).tolist()) if mesh is not None else list(range(world()[1]))
    if not 0 <= src < len(ranks):
        raise ValueError(f"src must be in 0 .. {len(ranks) - 1}, found {src!r}")
    if len(ranks) == 1:
        return
    group = process_group(ranks)
    with ms._no_grad():
        for _, value in targets.values():
            sent = Tensor(value).copy()
            settle()
            dist.broadcast(sent, ranks[src], group=group)
            settle()
            value.copy_(sent)
