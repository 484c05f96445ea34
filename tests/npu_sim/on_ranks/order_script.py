"""What `test_trace.py` traces on each of two ranks: a collective whose result the current stream uses, and FSDP."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hsdp_fn_torch import fully_shard
from tests.npu_sim import simulator

RANK = int(os.environ["RANK"])
torch.npu.set_device(RANK)
dist.init_process_group("hccl")


@contextmanager
def section(name: str) -> Iterator[None]:
    """Lines of the trace between two notes, with nothing else under way."""
    torch.npu.synchronize()
    simulator.note(f"begin {name}")
    yield
    torch.npu.synchronize()
    simulator.note(f"end {name}")


mine, out = torch.ones(3, device="npu"), torch.empty(6, device="npu")
dist.all_gather_single(out, mine)  # the communicator is made with the first collective
with section("all_gather"):
    work = dist.all_gather_single(out, mine, async_op=True)
    work.wait()
    out.add_(1)

model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to("npu")
for layer in model:
    fully_shard(layer, mesh=init_device_mesh("npu", (2,)))
x = torch.ones(2, 4, device="npu")
model(x).sum().backward()
with section("training"):
    model(x).sum().backward()
sys.stdout.flush()
dist.destroy_process_group()
