"""A fault at every place of an attempt, on one rank, another, or all: nobody hangs, and the attempt never happened.

What is checked after each fault is in `workers_recovery.one_fault`.
"""

from __future__ import annotations

from collections import Counter

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import hsdp_fn_torch as ht
from hsdp_fn import Keep, MixedPrecisionPolicy, PeerFailed, PrefetchPolicy, Sync, expected_comm
from hsdp_fn_torch import FSDPMeshInfo, ShardPlacementResult, fully_shard, recoverable, replicate
from tests.workers_facade import OURS, Boom, chain, data, mean_square, shard_blocks
from tests.workers_meshes import mesh_of
from tests.workers_recovery import COLLECTIVES, Facade, Functional, Places, names_of, set_sync, sweep
from tests.workers_torch import LAYERS, Checkpointed, Reentrant, equal, fsdp_mesh, mesh_for, on_ranks

UNITS = LAYERS[:2]
MODULES = 9  # of a chain of two blocks that aren't lists: itself, first, last, and three of each block


def facade(world: int, sync: Sync = Sync.FULL, *, rank: int, **options) -> Facade:
    return Facade(shard_blocks(OURS, chain(depth=2), mesh_for(world), **options), rank, sync)


def functional(world: int, sync: Sync = Sync.FULL, *, rank: int, finish: bool = False, **options) -> Functional:
    model = chain(depth=2)
    return Functional(model, ht.shard_module(model, mesh_for(world), UNITS, **options), rank, sync, finish)


def require_all_places(injected: Counter[str], ledger, modules: int = MODULES, times: int = 1, passes: int = 1) -> None:
    """There was a fault before and after each collective, around as many waits, and in each call of each module."""
    issued = Counter(c.op for c in ledger)
    for op in COLLECTIVES:
        assert injected[f"before {op}"] == injected[f"after {op}"] == times * issued[op], (op, injected, issued)
    waits = times * sum(issued.values())
    assert 0.7 * waits <= injected["before wait"] <= waits, injected  # the last ones may be made outside
    assert injected["after wait"] == injected["before wait"]
    assert injected["before"] == injected["after"] == times * modules * passes, injected
    assert injected["backward of"] == times * modules, injected


# ------------------------------------------------------------------------------------------- everywhere, and on whom


@on_ranks(2)
def test_everywhere_in_a_functional_attempt_whoever_fails(rank, world):
    subject = functional(world, rank=rank)
    injected = sweep(rank, world, subject, who=(0, 1, 2))
    require_all_places(injected, expected_comm(subject.target.layout), times=3)
    assert injected.total() >= 150


@on_ranks(2)
def test_everywhere_in_an_attempt_of_the_facade_whoever_fails(rank, world):
    subject = facade(world, rank=rank)
    injected = sweep(rank, world, subject, who=(0, 1, 2))
    require_all_places(injected, expected_comm(subject.model.hsdp_state.layout), times=3)
    assert injected.total() >= 150


# ----------------------------------------------------------------------------------------------------- ways to train


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("sync", [Sync.SHARD, Sync.NONE])
@on_ranks(2)
def test_functional_accumulation(rank, world, sync, reshard):
    subject = functional(world, sync, rank=rank, reshard_after_forward=reshard)
    injected = sweep(rank, world, subject)
    require_all_places(injected, expected_comm(subject.target.layout, sync=sync))


@pytest.mark.parametrize("sync", list(Sync))
@on_ranks(4)
def test_functional_hsdp(rank, world, sync):
    subject = functional(world, sync, rank=rank)
    injected = sweep(rank, world, subject)
    require_all_places(injected, expected_comm(subject.target.layout, sync=sync))


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_accumulation_in_the_facade(rank, world, reshard):
    subject = facade(world, Sync.NONE, rank=rank, reshard_after_forward=reshard)
    injected = sweep(rank, world, subject)
    require_all_places(injected, expected_comm(subject.model.hsdp_state.layout, sync=Sync.NONE))


@pytest.mark.parametrize("sync", list(Sync))
@on_ranks(4)
def test_hsdp_in_the_facade(rank, world, sync):
    subject = facade(world, sync, rank=rank)
    injected = sweep(rank, world, subject)
    require_all_places(injected, expected_comm(subject.model.hsdp_state.layout, sync=sync))


@pytest.mark.parametrize("way", ["facade", "functional"])
@on_ranks(4)
def test_resharding_to_groups_of_two(rank, world, way):
    mesh = fsdp_mesh(world)
    if way == "facade":
        subject = Facade(shard_blocks(OURS, chain(depth=2), mesh, reshard_after_forward=2), rank)
        layout = subject.model.hsdp_state.layout
    else:
        model = chain(depth=2)
        state = ht.shard_module(model, mesh, UNITS, reshard_after_forward=dict.fromkeys(UNITS, 2))
        subject, layout = Functional(model, state, rank), state.layout
    owed = expected_comm(layout)
    assert {c.group_size for c in owed if c.op == "all_gather"} == {2, 4}
    require_all_places(sweep(rank, world, subject), owed)


@pytest.mark.parametrize("prefetch", [PrefetchPolicy(0, 0), PrefetchPolicy(2, 2)])
@on_ranks(2)
def test_prefetching_and_gradients_taken_inside(rank, world, prefetch):
    subject = functional(world, rank=rank, finish=True, prefetch=prefetch)
    injected = sweep(rank, world, subject)
    require_all_places(injected, expected_comm(subject.target.layout))


@pytest.mark.parametrize("way", ["facade", "functional"])
@on_ranks(2)
def test_mixed_precision(rank, world, way):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    make = facade if way == "facade" else functional
    injected = sweep(rank, world, make(world, rank=rank, mp_policy=policy))
    assert injected.total() >= 55


@pytest.mark.parametrize("block", [Checkpointed, Reentrant])
@pytest.mark.parametrize("way", ["facade", "functional"])
@on_ranks(2)
def test_activation_checkpointing(rank, world, way, block):
    model = chain(block=block, depth=2)
    if way == "facade":
        subject = Facade(shard_blocks(OURS, model, mesh_for(world)), rank)
    else:
        subject = Functional(model, ht.shard_module(model, mesh_for(world), UNITS), rank)
    injected = sweep(rank, world, subject, learn=True)
    assert injected["before"] > MODULES, "no module was recomputed"
    assert injected["before all_gather"] == injected["after all_gather"] >= 5
    assert injected.total() >= 60


class Routed(nn.Module):
    """A dense layer and stacked experts on a mesh of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        return x + sum(torch.relu(x @ w) for w in self.experts.unbind())


@on_ranks(4)
def test_experts_on_a_mesh_of_their_own(rank, world):
    mesh = mesh_of(edp=2, ep=2)
    dense = FSDPMeshInfo(mesh_of(dp=4), shard_mesh_dim=0)
    small = FSDPMeshInfo(mesh["edp"], shard_mesh_dim=0)
    torch.manual_seed(0)
    model = nn.Sequential(Routed(), Routed())
    for layer in model:
        own = layer.experts

        def place(param, own=own):
            return ShardPlacementResult(Shard(0), small if param is own else dense)

        fully_shard(layer, mesh=dense.mesh, shard_placement_fn=place)
    fully_shard(model, mesh=dense.mesh)
    subject = Facade(model, rank)
    owed = expected_comm(model.hsdp_state.layout)
    assert {c.group_size for c in owed} == {2, 4}
    require_all_places(sweep(rank, world, subject), owed, modules=5)


@on_ranks(4)
def test_replicated_parameters_and_modules(rank, world):
    model = chain(depth=2)
    mesh = mesh_for(world)
    fully_shard(model.layers[0], mesh=mesh, replicate_params=[model.layers[0].up.bias])
    replicate(model.layers[1], mesh=mesh_of(dp=4))
    fully_shard(model, mesh=mesh)
    subject = Facade(model, rank)
    owed = expected_comm(model.hsdp_state.layout)
    assert {c.group_size for c in owed if c.op == "all_reduce"} == {2, 4}
    require_all_places(sweep(rank, world, subject), owed)


@on_ranks(2)
def test_first_attempts_that_nothing_is_remembered_of(rank, world):
    """The first microbatch of a new module, a new state: what is still owed comes from the layout alone."""
    injected = 0
    for k in range(0, 60, 7):
        for way in ("facade", "functional"):
            model = chain(depth=2)
            if way == "facade":
                target = shard_blocks(OURS, model, mesh_for(world))
            else:
                target = ht.shard_module(model, mesh_for(world), UNITS)
            step = ht.value_and_grad(lambda p, x, model=model: ht.functional_call(model, p, x).square().mean())

            def body(attempt, way=way, target=target, step=step):
                if way == "facade":
                    mean_square(target, data(rank, 0)).backward()
                else:
                    (_, _), attempt.state = step(attempt.state, data(rank, 0))

            places, failing = Places(model), (k // 7) % world
            try:
                with recoverable(target) as attempt, places.armed(k if rank == failing else None):
                    body(attempt)
                raise AssertionError(f"{way} {k}: nobody failed")
            except Boom as error:
                assert rank == failing and not getattr(error, "__notes__", ())
            except PeerFailed as error:
                assert error.ranks == (failing,) and rank != failing
            with recoverable(target) as attempt:
                body(attempt)
            injected += 1
    assert injected == 18


# --------------------------------------------------------------------------------------------- beside the microbatch


@pytest.mark.parametrize("way", ["facade", "functional"])
@on_ranks(2)
def test_outside_of_the_model(rank, world, way):
    """Before anything (a data loader that fails) and after everything; in the facade also on a first attempt. (What a
    first attempt on a state is to issue isn't known before its step is called.)"""
    subject = (facade if way == "facade" else functional)(world, rank=rank)
    if way == "functional":
        subject.succeed()
    expected = subject.clean()
    for _ in range(2):
        for where in ("before", "after"):
            for failing in range(world):
                before = subject.look()
                error = Boom if rank == failing else PeerFailed
                with pytest.raises(error, match=r"Boom|somewhere") as caught, recoverable(subject.target) as attempt:
                    if where == "before" and rank == failing:
                        raise Boom("somewhere")
                    subject.body(attempt)
                    if rank == failing:
                        raise Boom("somewhere")
                assert not getattr(caught.value, "__notes__", ())
                subject.require_untouched(attempt, before, where)
                equal(subject.clean(), expected)
        with recoverable(subject.target) as attempt:
            subject.body(attempt)
        assert attempt.committed
        if way == "functional":
            break  # the state is used up
        subject._begin()


@on_ranks(2)
def test_a_ranks_loss_that_isnt_finite(rank, world):
    """What users do with it: skip the microbatch everywhere."""
    subject = facade(world, rank=rank)
    skipped = 0
    for i in range(4):
        try:
            with recoverable(subject.target) as attempt:
                loss = mean_square(subject.model, data(rank, i) * (float("inf") if (i, rank) == (2, 1) else 1.0))
                if not loss.isfinite():
                    raise FloatingPointError("the loss isn't finite")
                loss.backward()
        except (FloatingPointError, PeerFailed):
            skipped += 1
            assert attempt.committed is False
        if i == 2:
            assert skipped == 1
            finite = [bool(p.grad.to_local().isfinite().all()) for p in subject.model.parameters()]
            assert all(finite)
    assert skipped == 1


@on_ranks(4)
def test_several_faults_one_after_the_other_then_the_microbatch(rank, world):
    """Each try has a fault somewhere else, on another rank; in the end everything is as after one clean run."""
    subject = facade(world, Sync.SHARD, rank=rank)
    places = Places(subject.model)
    expected = subject.clean()
    names = names_of(subject, places)
    for i, k in enumerate(range(0, len(names), 5)):
        armed = places.armed(k if rank == i % world else None)
        with pytest.raises((Boom, PeerFailed)), recoverable(subject.target) as attempt, armed:
            subject.body(attempt)
    with recoverable(subject.target) as attempt:
        subject.body(attempt)
    assert attempt.committed and attempt.journal
    found = [p.grad.to_local() for p in subject.model.parameters()]
    equal(found + optree.tree_leaves(subject.model.hsdp_state, namespace="hsdp_fn"), expected)
    subject.model.reset_iter_state(keep=Keep.ACCUMULATED)
    set_sync(subject.model, Sync.FULL)
    mean_square(subject.model, data(rank, 3)).backward()
    answers = [None] * world
    dist.all_gather_object(answers, len(attempt.journal))
    assert len(set(answers)) == 1
