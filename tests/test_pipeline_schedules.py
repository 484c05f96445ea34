"""Stages of pipelines: forwards and backwards of several microbatches in turn, reductions at the end of the step.

A schedule is a table of what a rank does at each tick, as ``(what, stage, lag)``: at tick ``t`` it does this with
microbatch ``t - lag``. ``F`` is a forward, ``B`` a backward, ``I`` a backward for the stage's input alone, ``W`` the
backward for the weights that belongs to it.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hsdp_fn_torch as ht
from hsdp_fn import Keep, PeerFailed, PhaseError, Sync, grads, microbatches
from hsdp_fn_torch import recoverable
from tests.live_bytes import LiveBytes
from tests.test_facade_backward import all_sharded, sent
from tests.workers_facade import OURS, Boom, Trace, assert_parity, data, full, shard_blocks, tripwire
from tests.workers_recovery import local, require_at_rest, require_equal
from tests.workers_torch import WIDTH, Block, Traffic, close, fsdp_mesh, local_rows, mesh_for, on_ranks

MICRO, STEPS, UNITS = 4, 3, 3

ONE_STAGE = {
    "GPipe": [("F", 0, 0), ("B", 0, MICRO)],
    "1F1B": [("F", 0, 0), ("B", 0, 1)],
    "1F1B, long warm-up": [("F", 0, 0), ("B", 0, 2)],
    "newest first": [("F", 0, 0), ("B", 0, 0)],
    "zero bubble": [("F", 0, 0), ("I", 0, 1), ("W", 0, 3)],
}
TWO_STAGES = {
    "GPipe": [("F", 0, 0), ("F", 1, 1), ("B", 1, MICRO), ("B", 0, MICRO + 2)],
    "1F1B": [("F", 0, 0), ("F", 1, 1), ("B", 1, 2), ("B", 0, 3)],
    "zero bubble": [("F", 0, 0), ("F", 1, 1), ("I", 1, 2), ("B", 0, 3), ("W", 1, 4)],
}


class Part(nn.Module):
    """A stage: two blocks and a layer of its own, so three units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.own(x).tanh()


def parts(count: int) -> list[Part]:
    torch.manual_seed(0)
    return [Part() for _ in range(count)]


def actions(table):
    """All that a rank does in a step: what, with which stage and microbatch."""
    ticks = range(MICRO + max(lag for _, _, lag in table))
    return [(what, at, t - lag) for t in ticks for what, at, lag in table if 0 <= t - lag < MICRO]


def seed_of(rank: int, i: int) -> Tensor:
    """The gradient that comes back to the last stage."""
    return data(rank, 1000 + i)


def settings(module: nn.Module, *, last: bool, sums: str = "whole") -> None:
    """As before the last backward of a step, or an earlier one: gradients are held whole, or as sums over shards."""
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last)
    module.set_requires_gradient_sync(last or sums == "sharded")
    module.set_requires_all_reduce(last or sums != "sharded")


def begin(stages: Iterable[nn.Module], by: str = "hand", sums: str = "whole") -> None:
    """A step begins: gradients are held, and every unit is gathered, unless its forward is to do it."""
    for stage in stages:
        settings(stage, last=False, sums=sums)
        for unit in [stage, *stage.layers] if by in ("hand", "handles") else []:
            handle = unit.unshard(async_op=by == "handles")
            assert (handle is None) == (by == "hand")


class Wire:
    """What goes between stages of one process, or two: activations on ``F``, their gradients on ``B``."""

    def __init__(self, rank: int, first: int, stages: int, other: int | None = None) -> None:
        self.rank, self.first, self.end, self.other = rank, first, stages - 1, other
        self.there: dict[tuple[str, int, int], Tensor] = {}
        self.posted: list[dist.Work] = []

    def take(self, what: str, at: int, i: int) -> Tensor:
        if (what, at) == ("F", 0):
            return data(self.rank, self.first + i)
        if (what, at) == ("B", self.end):
            return seed_of(self.rank, self.first + i)
        if self.other is None:
            return self.there[what, at - 1 if what == "F" else at + 1, i]
        dist.recv(tensor := torch.empty(4, WIDTH), self.other)
        return tensor

    def give(self, what: str, at: int, i: int, tensor: Tensor) -> None:
        self.there[what, at, i] = tensor.detach()
        if self.other is not None and (what, at) in (("F", 0), ("B", 1)):
            self.posted.append(dist.isend(tensor.detach(), self.other))


def step_through(stages, table, wire, around=lambda *_: nullcontext()):
    """One step of the schedule on the stages of one rank, which are given by number; ``around`` each action."""
    alive, came = {}, {}
    for what, at, i in actions(table):
        with around(what, at, i):
            if what == "F":
                x = wire.take("F", at, i).requires_grad_()
                alive[at, i] = x, stages[at](x)
                wire.give("F", at, i, alive[at, i][1])
                continue
            x, out = alive[at, i]
            if what != "W":
                came[at, i] = wire.take("B", at, i)
            if what == "I":
                wire.give("B", at, i, *torch.autograd.grad(out, x, came[at, i], retain_graph=True))
                continue
            if i == MICRO - 1:
                settings(stages[at], last=True)
            torch.autograd.backward([out], [came.pop((at, i))])
            del alive[at, i]
            if what == "B":
                wire.give("B", at, i, x.grad)


def alone(stages, world, first):
    """By one process that runs every rank's microbatches: gradients of each stage, and of each rank's inputs."""
    whole, back = nn.Sequential(*stages), {}
    whole.zero_grad()
    for rank in range(world):
        for i in range(MICRO):
            x = back[rank, i] = data(rank, first + i).requires_grad_()
            (whole(x) * seed_of(rank, first + i)).sum().div(world).backward()
    return [[p.grad for p in stage.parameters()] for stage in stages], {at: x.grad * world for at, x in back.items()}


def train(api, count, places, table, rank, mesh, *, by="hand", sums="whole", wires=Wire):
    """Steps of the stages ``places``. Returns what they gave, and what each has sent, for the gathers and then."""
    trace, seen, all_stages = Trace(), [], parts(count)
    stages = {at: shard_blocks(api, all_stages[at], mesh, reshard_after_forward=by == "each call") for at in places}
    optimizer = torch.optim.SGD([p for stage in stages.values() for p in stage.parameters()], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        with Traffic() as gathers:
            begin(stages.values(), by, sums)
        with Traffic() as rest:
            step_through(stages, table, wire := wires(rank, 10 * step, count))
        for work in wire.posted:
            work.wait()
        seen.append((sent(gathers), sent(rest)))
        for i in range(MICRO if 0 in places else 0):
            trace.note(f"input {i}", wire.there["B", 0, i])
        for stage in stages.values():
            trace.note_grads(stage)
            assert api is not OURS or all_sharded(stage)
        optimizer.step()
        optimizer.zero_grad()
    for stage in stages.values():
        trace.note_params(stage)
    return trace, seen


def train_as_torch(places, table, rank, world, mesh, *, count=None, **options):
    """`train` gives torch's bits, and within rounding what one process gives. Returns what was sent, torch's first."""
    seen, count = [], count or len(places)

    def run(api):
        trace, ops = train(api, count, places, table, rank, mesh, **options)
        seen.append(ops)
        return trace

    found, expected, stages = [value for _, value in assert_parity(run).records], [], parts(count)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        gradients, back = alone(stages, world, 10 * step)
        expected += [back[rank, i] for i in range(MICRO)] if 0 in places else []
        expected += [g.clone() for place in places for g in gradients[place]]
        optimizer.step()
    close(found, expected + [p for place in places for p in stages[place].parameters()], 1e-4)
    return seen


# ---------------------------------------------------------------------------------------------- stages of one process


@pytest.mark.parametrize("sums", ["whole", "sharded"])
@pytest.mark.parametrize("name", ONE_STAGE)
@on_ranks(2, 4)
def test_a_stage_that_is_gathered_up_front(rank, world, name, sums):
    """One gather a unit before the step and one reduction a unit at its end, as in torch. Where sums over the shard
    axis are held (HSDP), every backward reduce-scatters, and the last one all-reduces."""
    times = MICRO if sums == "sharded" else 1
    expected = ["all_reduce"] * (UNITS if world == 4 else 0) + ["reduce_scatter"] * UNITS * times
    for ops in train_as_torch([0], ONE_STAGE[name], rank, world, mesh_for(world), sums=sums):
        assert [(g, sorted(r)) for g, r in ops] == [(["all_gather"] * UNITS, expected)] * STEPS


@pytest.mark.parametrize("by", ["handles", "forward", "each call"])
@pytest.mark.parametrize("name", ["1F1B, long warm-up", "zero bubble"])
@on_ranks(2)
def test_other_ways_to_gather(rank, world, by, name):
    """What the first forward gathers stays as well; with resharding, calls and backwards gather."""
    for ops in train_as_torch([0], ONE_STAGE[name], rank, world, fsdp_mesh(world), by=by):
        for gathers, rest in ops:
            assert rest.count("reduce_scatter") == UNITS
            assert (gathers + rest).count("all_gather") == UNITS or by == "each call"


@pytest.mark.parametrize("name", TWO_STAGES)
@on_ranks(2)
def test_two_stages_on_one_rank(rank, world, name):
    """Each is a root of its own; what one holds back is nothing to the other."""
    for ops in train_as_torch([0, 1], TWO_STAGES[name], rank, world, fsdp_mesh(world)):
        assert ops == [(["all_gather"] * 2 * UNITS, ["reduce_scatter"] * 2 * UNITS)] * STEPS


@on_ranks(2)
def test_a_step_leaves_no_bytes_behind(rank, world):
    """After a step with two stages, what is alive is what was before it."""
    stages = [shard_blocks(OURS, stage, fsdp_mesh(world)) for stage in parts(2)]
    with LiveBytes() as live:
        clean_step(stages, TWO_STAGES["1F1B"], rank)
        require_at_rest(live, 64, "the first step")  # a few scalars of each tree
        before = live.now
        for table in TWO_STAGES.values():
            begin(stages)
            assert live.now >= before + sum(p.numel() for stage in parts(2) for p in stage.parameters()) * 4
            step_through(stages, table, Wire(rank, 0, len(stages)))
            for stage in stages:
                assert all_sharded(stage)
                stage.zero_grad()
            require_at_rest(live, before, str(table))


@on_ranks(2)
def test_gradients_of_the_weights_by_name_are_refused(rank, world):
    """A split by `torch.autograd.grad` of the parameters can't be had, and says so."""
    (stage,) = parts(1)
    shard_blocks(OURS, stage, fsdp_mesh(world), reshard_after_forward=False)
    begin([stage])
    out = stage(data(rank, 0))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out, list(stage.parameters()), seed_of(rank, 0))


# ------------------------------------------------------------------------------------------------- stages of several


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "zero bubble"])
@on_ranks(4)
def test_a_pipeline_of_two_stages_over_four_ranks(rank, world, name):
    """Two stages of two ranks each; activations and gradients travel between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    at, row = mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    wires = functools.partial(Wire, other=dist.get_global_rank(mesh.get_group("pipe"), 1 - at))
    lag = {"GPipe": (MICRO, MICRO), "1F1B": (1, 0), "zero bubble": (1, 0)}[name][at]
    split = name == "zero bubble" and at == 1
    table = [("F", at, 0), ("I", at, 0), ("W", at, 2)] if split else [("F", at, 0), ("B", at, lag)]
    for ops in train_as_torch([at], table, row, 2, mesh["data"], count=2, wires=wires):
        assert ops == [(["all_gather"] * UNITS, ["reduce_scatter"] * UNITS)] * STEPS


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
@on_ranks(4)
def test_the_schedules_of_torch(rank, world, name):
    """They run stages as plain modules: hold gradients back before the step, and finish them after it."""
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    at, row = mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    places = [at] if name == "Schedule1F1B" else [at, at + 2]
    single = parts(2 * len(places))
    modules = [shard_blocks(OURS, copy.deepcopy(single[i]), mesh["data"], reshard_after_forward=False) for i in places]
    stages = [
        pipelining.PipelineStage(module, i, len(single), torch.device("cpu"), group=mesh.get_group("pipe"))
        for i, module in zip(places, modules, strict=True)
    ]
    schedule = getattr(pipelining, name)(
        stages if len(stages) > 1 else stages[0], MICRO, loss_fn=lambda out, y: (out * y).sum(), scale_grads=False
    )
    x, y = (torch.cat([make(row, i) for i in range(MICRO)]) for make in (data, seed_of))
    for _ in range(2):
        begin(modules)
        with Traffic() as traffic:
            schedule.step(*([x] if at == 0 else []), **({"target": y} if at == 1 else {}))
        assert sent(traffic) == []
        with Traffic() as traffic:
            for module in modules:
                settings(module, last=True)
                module.finish_accumulation()
        assert sent(traffic) == ["reduce_scatter"] * UNITS * len(modules)
        expected, _ = alone(single, 2, 0)
        for i, module in zip(places, modules, strict=True):
            close([full(p.grad) for p in module.parameters()], expected[i], 1e-5, f"stage {i}")
            assert all_sharded(module)
            module.zero_grad()


# ---------------------------------------------------------------------------------------------------- functional API


@pytest.mark.parametrize("how", [Sync.NONE, Sync.SHARD])
@on_ranks(2, 4)
def test_the_same_step_with_an_explicit_state(rank, world, how):
    """Microbatches that hold back give the facade's bits with as many reductions; each of them gathers."""
    mesh, (single,), (stage,) = mesh_for(world), parts(1), parts(1)
    model = shard_blocks(OURS, copy.deepcopy(single), mesh, reshard_after_forward=False)
    state = ht.shard_module(stage, mesh, ("layers.0", "layers.1"), reshard_after_forward=False)
    step = ht.value_and_grad(lambda p, x, g: (ht.functional_call(stage, p, x) * g).sum())
    begin([model], sums="sharded" if how is Sync.SHARD else "whole")
    with Traffic() as facade:
        step_through([model], ONE_STAGE["1F1B"], wire := Wire(rank, 0, 1))
    inputs = [data(rank, i).requires_grad_() for i in range(MICRO)]
    with Traffic() as functional:
        for i, sync in enumerate(microbatches(MICRO, hold=how)):
            (_, _), state = step(state, inputs[i], seed_of(rank, i), sync=sync)
        state, rows = grads(state)
    found = {name: local(p.grad) for name, p in model.named_parameters()}
    require_equal([rows[name] for name in found], list(found.values()), "gradients")
    require_equal([x.grad for x in inputs], [wire.there["B", 0, i] for i in range(MICRO)], "inputs")
    (gradients,), _ = alone([single], world, 0)
    close(rows, local_rows(state, dict(zip(found, gradients, strict=True))), 1e-5)
    reduced = UNITS * (MICRO if how is Sync.SHARD else 1), UNITS if world == 4 else 0
    for traffic, gathers in ((facade, 0), (functional, UNITS * MICRO)):
        ops = [sent(traffic).count(op) for op in ("all_gather", "reduce_scatter", "all_reduce")]
        assert ops == [gathers, *reduced]


# ---------------------------------------------------------------------------------------------------------- failures


def clean_step(stages, table, rank):
    """Local gradients and collectives of a step; everything is as before it."""
    with Traffic() as traffic:
        begin(stages)
        step_through(stages, table, Wire(rank, 0, len(stages)))
    found = [local(p.grad).clone() for stage in stages for p in stage.parameters()]
    for stage in stages:
        stage.zero_grad()
    return found, sent(traffic)


def failing(stages, place, when):
    """For `step_through`: the action ``place`` raises, in the second block of its stage."""
    return lambda *action: tripwire(stages[action[1]].layers[1], when) if action == place else nullcontext()


FAILURES = {
    "the first forward": (("F", 1, 0), "before"),
    "a forward between backwards": (("F", 0, 3), "after"),
    "a backward between forwards": (("F", 0, 1), "backward"),
    "a backward that reduces": (("F", 1, 3), "backward"),
    "the last backward": (("F", 0, 3), "backward"),
}


@pytest.mark.parametrize("where", FAILURES)
@on_ranks(2)
def test_an_exception_in_the_middle_and_the_step_again(rank, world, where):
    """After `reset_iter_state` of the stages the step gives the bits and the collectives of a clean one."""
    stages = [shard_blocks(OURS, stage, fsdp_mesh(world), reshard_after_forward=False) for stage in parts(2)]
    table, left = TWO_STAGES["1F1B"], []
    expected = clean_step(stages, table, rank)
    begin(stages)
    for stage in stages:
        stage.layers[0].register_forward_hook(lambda module, args, out: left.append(out))
    place, when = FAILURES[where]
    with pytest.raises(Boom):
        step_through(stages, table, Wire(rank, 0, 2), around=failing(stages, place, when))
    for stage in stages:
        stage.reset_iter_state()
        stage.zero_grad()  # the other one may have finished
        assert all_sharded(stage)
    with pytest.raises(PhaseError, match=r"dropped|ended"):
        left[-1].sum().backward()  # a graph of the failed step
    left.clear()
    found, ops = clean_step(stages, table, rank)
    require_equal(found, expected[0], where)
    assert ops == expected[1]


@pytest.mark.parametrize("when", ["before", "after", "backward"])
@on_ranks(2)
def test_go_on_from_the_microbatch_that_failed(rank, world, when):
    """`Keep.ACCUMULATED` keeps the sums of the backwards that had ended; the rest of the step is run again."""
    (stage,) = stages = [shard_blocks(OURS, stage, fsdp_mesh(world), reshard_after_forward=False) for stage in parts(1)]
    table = ONE_STAGE["1F1B"]
    expected, _ = clean_step(stages, table, rank)
    begin(stages)
    with pytest.raises(Boom):
        step_through(stages, table, wire := Wire(rank, 0, 1), around=failing(stages, ("F", 0, 2), when))
    done = sum(what == "B" for what, _, _ in wire.there)
    assert done == {"before": 1, "after": 1, "backward": 2}[when]
    stage.reset_iter_state(keep=Keep.ACCUMULATED)
    begin(stages)
    for i in range(done, MICRO):
        out = stage(data(rank, i))
        if i == MICRO - 1:
            settings(stage, last=True)
        torch.autograd.backward(out, seed_of(rank, i))
    require_equal([local(p.grad) for p in stage.parameters()], expected, when)


@pytest.mark.parametrize("gathered", ["inside", "before"])
@on_ranks(2, 4)
def test_one_rank_fails_alone_in_a_step_that_is_one_attempt(rank, world, gathered):
    """From the second time on a rank knows what it owes wherever it fails; all ranks are where they were."""
    (stage,) = stages = [shard_blocks(OURS, stage, mesh_for(world), reshard_after_forward=False) for stage in parts(1)]
    table = ONE_STAGE["1F1B"]
    expected, _ = clean_step(stages, table, rank)

    def attempt(**options):
        begin(stages, by="hand" if gathered == "before" else "forward")
        with recoverable(stage) as this:
            for unit in [stage, *stage.layers] if gathered == "inside" else []:
                unit.unshard()
            step_through(stages, table, Wire(rank, 0, 1), **options)
            assert {p.grad for p in stage.parameters()} == {None}, "delivered before the end"
        assert this.committed

    attempt()
    require_equal([local(p.grad) for p in stage.parameters()], expected, "the first attempt")
    stage.zero_grad()
    places = [(("F", 0, i), when) for i in (0, 2, 3) for when in ("before", "backward")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, (place, when) in enumerate(places):
            odd = rank == number % world
            with pytest.raises(Boom if odd else PeerFailed) as caught:
                attempt(**({"around": failing(stages, place, when)} if odd else {}))
            assert not getattr(caught.value, "__notes__", ())
            assert {p.grad for p in stage.parameters()} == {None}
        attempt()
    require_equal([local(p.grad) for p in stage.parameters()], expected, "afterwards")
    assert all_sharded(stage)
