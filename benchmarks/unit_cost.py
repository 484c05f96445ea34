"""What a unit costs when communication and compute cost next to nothing: microseconds of software, and buffers.

A chain of linear layers, each a unit, in one process, on a group of two ranks whose collectives do nothing.
"""

from __future__ import annotations

import gc
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from .contenders import FACADE, FLOOR, FSDP2, OURS, Contender, contenders, rotated
from .observe import Observer

UNITS = 64
WIDTH = 8
BUFFER_UNITS = 12
BUFFER_WIDTH = 256
FURTHER = 6


class Layer(nn.Module):
    """A linear layer with ``further`` more parameters, each added to the output."""

    def __init__(self, width: int, further: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.further = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(further))

    def forward(self, x: Tensor) -> Tensor:
        """`x[B, width]` to `[B, width]`."""
        x = self.linear(x)
        for bias in self.further:
            x = x + bias
        return x


def measure(steps: int, warmup: int) -> dict[str, Any]:
    """Cost of a unit by contender. Starts and ends a process group of its own.

    Returns:
        ``cost``: median CPU microseconds a unit and step, by contender: ``forward``, ``backward``, ``total`` and
        ``net`` (total less the floor's) of 64 x Linear(8, 8), and ``further_parameter``, what each more parameter in a
        unit adds to the net total. The first three contain the layer's own compute.
        ``unit_cost_ratio``, ``unit_cost_ratio_net``: ours over FSDP2's total and net; under ``facade`` the facade's,
        also over ours.
        ``buffers``: peak in one step above the sharded parameters and their gradients, in buffers of a whole unit, and
        ``buffers_ratio``: the whole peak over FSDP2's. 12 x Linear(256, 256), so that activations count for nothing.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        cost = _time_chain(mesh, 0, steps, warmup)
        more = _time_chain(mesh, FURTHER, max(1, steps // 2), warmup)
        for name, values in cost.items():
            values["further_parameter"] = (more[name]["net"] - values["net"]) / FURTHER
        peaks = _peaks(mesh)
    finally:
        dist.destroy_process_group()
    at_rest, unit = peaks.pop("at_rest"), peaks.pop("unit")
    return {
        "unit_cost_ratio": cost[OURS]["total"] / cost[FSDP2]["total"],
        "unit_cost_ratio_net": cost[OURS]["net"] / cost[FSDP2]["net"],
        "buffers_ratio": peaks[OURS] / peaks[FSDP2],
        "facade": {
            "unit_cost_ratio": cost[FACADE]["total"] / cost[FSDP2]["total"],
            "unit_cost_ratio_net": cost[FACADE]["net"] / cost[FSDP2]["net"],
            "unit_cost_ratio_to_ours": cost[FACADE]["total"] / cost[OURS]["total"],
            "unit_cost_ratio_net_to_ours": cost[FACADE]["net"] / cost[OURS]["net"],
            "buffers_ratio": peaks[FACADE] / peaks[FSDP2],
        },
        "cost": cost,
        "buffers": {name: (peak - 2 * at_rest) / unit for name, peak in peaks.items()},
        "steps": steps,
    }


def _time_chain(mesh: DeviceMesh, further: int, steps: int, warmup: int) -> dict[str, dict[str, float]]:
    """Contenders take turns step by step; gradients are dropped outside the clock."""
    model = nn.Sequential(*(Layer(WIDTH, further) if further else nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    field = _field(model, mesh)
    batch = (torch.ones(1, WIDTH),)
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in field}
    for step in range(warmup + steps):
        if step == warmup:
            gc.collect()
            gc.freeze()
        for contender in rotated(field, step):
            pair = _timed(contender, batch)
            if step >= warmup:
                times[contender.name].append(pair)
    gc.unfreeze()
    scale = 1e6 / UNITS
    result = {
        name: {
            "forward": median(f for f, _ in pairs) * scale,
            "backward": median(b for _, b in pairs) * scale,
            "total": median(f + b for f, b in pairs) * scale,
        }
        for name, pairs in times.items()
    }
    for values in result.values():
        values["net"] = values["total"] - result[FLOOR]["total"]
    return result


def _timed(contender: Contender, batch: tuple[Tensor, ...]) -> tuple[float, float]:
    """Seconds of forward and of backward, the latter until every gradient is in the optimizer's hands."""
    between = 0.0

    def mark() -> None:
        nonlocal between
        between = process_time()

    contender.mark = mark
    start = process_time()
    contender.gradients(batch)
    end = process_time()
    contender.forget()
    return between - start, end - between


def _peaks(mesh: DeviceMesh) -> dict[str, int]:
    """Peak bytes of a step by contender; also ``at_rest``, bytes of this rank's parameters, and ``unit``, of a whole
    unit's."""
    model = nn.Sequential(*(nn.Linear(BUFFER_WIDTH, BUFFER_WIDTH) for _ in range(BUFFER_UNITS)))
    batch = (torch.ones(1, BUFFER_WIDTH),)
    result = {}
    for contender in _field(model, mesh):
        if contender.name == FLOOR:
            continue
        for _ in range(2):
            contender.gradients(batch)
            contender.forget()
        gc.collect()
        with Observer(contender.at_rest()) as observer:
            contender.gradients(batch)
        contender.forget()
        result[contender.name] = observer.peak
        result["at_rest"] = sum(t.nbytes for t in contender.at_rest())
    result["unit"] = sum(p.nbytes for p in model[0].parameters())
    return result


def _field(model: nn.Sequential, mesh: DeviceMesh) -> list[Contender]:
    return contenders(model, [str(i) for i in range(len(model))], mesh, lambda out: out.sum(), hand_out=True)
