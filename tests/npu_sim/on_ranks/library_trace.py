"""What `test_library.py` traces of this library on each of two ranks: a step in which each layer holds up the compute
stream, in forward and in backward, until what should run beside it has ended. If that doesn't run beside it, it never
ends, and the script fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hsdp_fn import Pending
from hsdp_fn_torch import fully_shard
from tests.npu_sim import simulator
from tests.npu_sim.on_ranks.device_gate import gate

RANK, LAYERS, WIDTH = int(os.environ["RANK"]), 3, 4
torch.npu.set_device(RANK)
dist.init_process_group("hccl")
MESH = init_device_mesh("npu", (2,))


class Held(torch.autograd.Function):
    """Identity that calls something in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Callable[[], None], after: Callable[[], None]) -> Tensor:
        ctx.after = after
        before()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.after()
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(Held.apply(x, lambda: hold("forward", self.number), lambda: None))
        return Held.apply(x, lambda: None, lambda: hold("backward", self.number))


def hold(what: str, number: int) -> None:
    """Hold the compute stream until the next layer's gather, and in backward the last one's reduction, have ended."""
    if not holding:
        return
    gate_of_layer = gate()
    simulator.note(f"{what} {number} held")
    following = number + 1 if what == "forward" else number - 1
    if 0 <= following < LAYERS:
        await_pending(following, "full")
    if what == "backward" and number + 1 < LAYERS:
        await_pending(number + 1, "reducing")
    simulator.note(f"{what} {number} goes on")
    gate_of_layer.set()


def await_pending(number: int, what: str) -> None:
    pending = getattr(model.hsdp_state.units[number], what)
    assert isinstance(pending, Pending), (number, what, pending)
    deadline = time.monotonic() + 8.0
    while not all(handle.is_completed() for handle in pending.handles):
        assert time.monotonic() < deadline, f"{what} of layer {number} waits for the compute stream"
        time.sleep(0.001)


@contextmanager
def section(name: str) -> Iterator[None]:
    torch.npu.synchronize()
    simulator.note(f"begin {name}")
    yield
    torch.npu.synchronize()
    simulator.note(f"end {name}")


def step() -> None:
    model(torch.ones(2, WIDTH, device="npu", requires_grad=True)).sum().backward()


for name in ("one group", "two groups"):
    holding = False
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer(i) for i in range(LAYERS))).to("npu")
    for module in (*model, model):
        fully_shard(module, mesh=MESH, reshard_after_forward=True)
    if name == "two groups":
        model.set_separate_reduce_scatter_group()
    step()  # communicators are made with the first collectives
    holding = True
    with section(name):
        step()
dist.destroy_process_group()
