"""`hsdp_fn_torch.pipelining.PipelineStage` under torch's pipeline schedules, beside torch's own stage with FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from hsdp_fn_torch import pipelining
from tests.workers_facade import OURS, THEIRS, data, full, shard_blocks
from tests.workers_torch import WIDTH, Block, Traffic, close, on_ranks

MICRO, UNITS = 4, 3  # microbatches of a step, units of a stage
STAGES = {OURS.name: pipelining.PipelineStage, THEIRS.name: PipelineStage}
#: Schedules, and stages a rank.
SCHEDULES = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "looped BFS": (ScheduleLoopedBFS, 2),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "zero bubble V": (ScheduleZBVZeroBubble, 2),
}


class Part(nn.Module):
    """What a stage runs: two blocks, and a layer of the root's own. Its input needs a gradient, its weights too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.own(x)


def distance(out, target):
    return (out - target).square().mean()


class Pipeline:
    """Two ranks of stages, each on two data-parallel ranks.

    Attributes:
        modules: of this rank's stages, which are at ``places`` of the whole model.
        whole: the same weights on one rank.
    """

    def __init__(self, api, rank, schedule, stages, *, scale=False, frozen=False):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        torch.manual_seed(0)
        parts = [Part() for _ in range(2 * stages)]
        if frozen:
            parts[-1].layers[0].requires_grad_(False)
        self.whole = copy.deepcopy(nn.Sequential(*parts))
        self.dp, pp, last = mesh["dp"].get_local_rank(), mesh["pp"], 2 * stages - 1
        r = pp.get_local_rank()
        other = last - r if schedule is ScheduleZBVZeroBubble else r + 2
        self.places = [r, other][:stages]
        self.modules = [shard_blocks(api, parts[at], mesh["dp"]) for at in self.places]
        for module in self.modules:
            module.set_reshard_after_forward(False)
        kind = STAGES[api.name]
        made = [
            kind(m, at, 2 * stages, torch.device("cpu"), group=pp.get_group())
            for m, at in zip(self.modules, self.places, strict=True)
        ]
        self.schedule = schedule(made if stages > 1 else made[0], MICRO, loss_fn=distance, scale_grads=scale)
        self.first, self.last = 0 in self.places, last in self.places

    def step(self, index):
        args = [data(self.dp, 2 * index, rows=2 * MICRO)] if self.first else []
        self.schedule.step(*args, **({"target": data(self.dp, 2 * index + 1, rows=2 * MICRO)} if self.last else {}))

    def grads(self):
        return [None if p.grad is None else full(p.grad) for m in self.modules for p in m.parameters()]

    def expected(self, index):
        """Sums over microbatches, means over data-parallel ranks, of one process."""
        self.whole.zero_grad()
        for dp in range(2):
            x, y = data(dp, 2 * index, rows=2 * MICRO), data(dp, 2 * index + 1, rows=2 * MICRO)
            for a, b in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
                (distance(self.whole(a), b) / 2).backward()
        return [p.grad for at in self.places for p in self.whole[at].parameters()]

    def at_rest(self):
        return all(hasattr(p, "placements") for m in self.modules for p in m.parameters())


def whole_values(pipeline):
    """Parameters of the whole model, from all ranks."""
    mine = {
        f"{at}.{name}": full(p.detach())
        for at, m in zip(pipeline.places, pipeline.modules, strict=True)
        for name, p in m.named_parameters()
    }
    everybody = [{} for _ in range(4)]
    dist.all_gather_object(everybody, mine)
    return {name: value for values in everybody for name, value in values.items()}


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(4)
def test_every_schedule_gives_torchs_gradients_with_one_gather_and_one_reduction_a_unit(rank, world, name):
    schedule, stages = SCHEDULES[name]
    ours, theirs = Pipeline(OURS, rank, schedule, stages), Pipeline(THEIRS, rank, schedule, stages)
    for index in range(3):
        for pipeline in (ours, theirs):
            with Traffic() as traffic:
                pipeline.step(index)
            ops = [op for op, _, _ in traffic.seen]
            if index:  # the first step also learns shapes
                assert ops.count("all_gather") == ops.count("reduce_scatter") == UNITS * stages
        found, wanted = ours.grads(), theirs.grads()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        close(found, ours.expected(index))
        assert ours.at_rest()
        for m in (*ours.modules, *theirs.modules):
            with torch.no_grad():
                for p in m.parameters():
                    p.sub_(p.grad, alpha=0.125)
            m.zero_grad()
        ours.whole.load_state_dict(whole_values(ours))


@pytest.mark.parametrize("name", ["1F1B", "zero bubble"])
@on_ranks(4)
def test_scaled_gradients_and_frozen_layers(rank, world, name):
    schedule, stages = SCHEDULES[name]
    pipeline = Pipeline(OURS, rank, schedule, stages, scale=True, frozen=True)
    pipeline.step(0)
    wanted = [None if g is None else g / MICRO for g in pipeline.expected(0)]
    found = pipeline.grads()
    assert [g is None for g in found] == [g is None for g in wanted]
    close([g for g in found if g is not None], [g for g in wanted if g is not None])


@on_ranks(4)
def test_gradients_that_are_there_before_a_step_are_added_to(rank, world):
    """What the first step runs to learn shapes drops what was there, as torch's stage does; later steps don't."""
    pipeline = Pipeline(OURS, rank, Schedule1F1B, 1)
    pipeline.step(0)
    before = pipeline.grads()
    pipeline.step(1)
    once = [a + b for a, b in zip(before, pipeline.expected(1), strict=True)]
    close(pipeline.grads(), once)


@on_ranks(4)
def test_a_plain_module_is_left_to_torch(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp = mesh["pp"]
    torch.manual_seed(0)
    parts = [Part(), Part()]
    whole = copy.deepcopy(nn.Sequential(*parts))
    at = pp.get_local_rank()
    stage = pipelining.PipelineStage(parts[at], at, 2, torch.device("cpu"), group=pp.get_group())
    schedule = Schedule1F1B(stage, MICRO, loss_fn=distance, scale_grads=False)
    x, y = data(0, 0, rows=2 * MICRO), data(0, 1, rows=2 * MICRO)
    schedule.step(*([x] if at == 0 else []), **({"target": y} if at == 1 else {}))
    for a, b in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        distance(whole(a), b).backward()
    close([p.grad for p in parts[at].parameters()], [p.grad for p in whole[at].parameters()])
