"""Steps of several microbatches: `microbatches`, what a reset keeps, strict iterations, checked use."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import hsdp_fn_torch as ht
from hsdp_fn import (
    Keep,
    PhaseError,
    PolicyError,
    RankMismatchError,
    ReductionPolicy,
    Sync,
    apply_updates,
    clone,
    expected_comm,
    grads,
    masters,
    microbatches,
    shard,
    unshard,
)
from hsdp_fn_torch import fully_shard
from tests.workers_facade import OURS, Boom, chain, data, mean_square, shard_blocks, tripwire
from tests.workers_recovery import local, require_equal, set_sync
from tests.workers_torch import (
    LAYERS,
    Block,
    Checkpointed,
    assert_untouched,
    close,
    equal,
    fsdp_mesh,
    mesh_for,
    on_ranks,
    snapshot,
)

UNITS = LAYERS[:2]


def local_grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


# -------------------------------------------------------------------------------------------------------- the helper


@pytest.mark.parametrize("hold", list(Sync))
def test_all_but_the_last_are_held(hold):
    assert list(microbatches(1, hold=hold)) == [Sync.FULL]
    assert list(microbatches(4, hold=hold)) == [hold] * 3 + [Sync.FULL]
    assert list(microbatches(3)) == [Sync.NONE, Sync.NONE, Sync.FULL]
    assert next(microbatches(2)) is Sync.NONE


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "2", None])
def test_counts_that_make_no_sense_are_refused_at_once(count):
    with pytest.raises(PolicyError, match=r"count must be an int of at least 1"):
        microbatches(count)


@pytest.mark.parametrize("hold", ["none", None, True])
def test_only_a_sync_can_be_held(hold):
    with pytest.raises(PolicyError, match="hold must be a Sync"):
        microbatches(2, hold=hold)


@pytest.mark.parametrize("hold", list(Sync))
@on_ranks(2, 4)
def test_a_step_of_three_microbatches_is_the_sum(rank, world, hold):
    model = chain(depth=2)
    state = ht.shard_module(model, mesh_for(world), UNITS)
    step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).square().mean())
    total: dict[str, Tensor] = {}
    for i in range(3):
        (_, _), state = step(state, data(rank, i))
        state, rows = grads(state)
        total = {n: g + total.get(n, 0) for n, g in rows.items()}
    for i, sync in enumerate(microbatches(3, hold=hold)):
        (_, _), state = step(state, data(rank, i), sync=sync)
    state, rows = grads(state)
    close(rows, total)


@pytest.mark.parametrize("block", [Block, Checkpointed])
@pytest.mark.parametrize("gathered", [True, False])
@on_ranks(2, 4)
def test_units_may_stay_gathered_between_the_microbatches_of_a_step(rank, world, gathered, block):
    model = chain(depth=2, block=block)
    state = ht.shard_module(model, mesh_for(world), UNITS)
    step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).square().mean())
    twin = clone(state)
    if gathered:
        state = unshard(state)
    for i, sync in enumerate(microbatches(3)):
        before = len(state.ledger)
        (_, _), state = step(state, data(rank, i), sync=sync, reshard_after_backward=sync is Sync.FULL)
        (_, _), twin = step(twin, data(rank, i), sync=sync)
        gathers = [c.op for c in state.ledger[before:]].count("all_gather")
        assert gathers == (0 if gathered or i else 2 * len(UNITS) + 1)
        full = [t for unit in state.units for t in unit.full or ()]
        assert bool(full) == (sync is not Sync.FULL)
        assert not any(t.requires_grad or t.grad is not None for t in full)
    state, rows = grads(state)
    require_equal(list(rows.values()), list(grads(twin)[1].values()), "kept gathered")


@on_ranks(2)
def test_what_stays_gathered_doesnt_outlive_an_update(rank, world):
    model = chain(depth=2)
    state = ht.shard_module(model, mesh_for(world), UNITS)
    step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).square().mean())
    with pytest.raises(TypeError, match="reshard_after_backward must be a bool, found 0"):
        step(state, data(rank, 0), reshard_after_backward=0)
    (_, _), state = step(state, data(rank, 0), reshard_after_backward=False)
    state, _ = grads(state)
    with pytest.raises(PhaseError, match="full parameters of the old values would outlive the update"):
        apply_updates(state, masters(state))
    state = shard(state)
    apply_updates(state, masters(state))


# ------------------------------------------------------------------------------------------------- what a reset keeps


@pytest.mark.parametrize("hold", [Sync.NONE, Sync.SHARD])
@pytest.mark.parametrize("keep", list(Keep))
@on_ranks(4)
def test_a_reset_keeps_or_drops_what_is_held_back(rank, world, keep, hold):
    model = shard_blocks(OURS, chain(depth=2), mesh_for(world))

    def run(at, sync):
        set_sync(model, sync)
        mean_square(model, data(rank, at)).backward()

    def both():
        run(0, hold)
        run(1, Sync.FULL)
        found = local_grads(model)
        model.zero_grad()
        return found

    together = both()
    run(1, Sync.FULL)
    alone = local_grads(model)
    model.zero_grad()
    for when in ("before", "after", "backward", "never"):
        run(0, hold)
        held, micro = snapshot(model.hsdp_state)[1], model.hsdp_state.micro
        if when != "never":
            with tripwire(model.layers[1], when), pytest.raises(Boom):
                run(1, hold)
        model.reset_iter_state(keep=keep)
        assert {p.grad for p in model.parameters()} == {None}
        assert model.hsdp_state.micro == (micro if keep is Keep.ACCUMULATED else 0)
        if keep is Keep.ACCUMULATED:
            equal(snapshot(model.hsdp_state)[1], held)
        run(1, Sync.FULL)
        require_equal(local_grads(model), together if keep is Keep.ACCUMULATED else alone, when)
        model.zero_grad()
    require_equal(both(), together, "afterwards")


@on_ranks(2)
def test_a_reset_leaves_gradients_that_were_given(rank, world):
    model = shard_blocks(OURS, chain(depth=2), mesh_for(world))
    mean_square(model, data(rank, 0)).backward()
    before = local_grads(model)
    for keep in Keep:
        model(data(rank, 1))
        model.reset_iter_state(keep=keep)
        require_equal(local_grads(model), before, str(keep))
    with pytest.raises(PolicyError, match="keep must be a Keep"):
        model.reset_iter_state(keep="accumulated")
    with pytest.raises(RuntimeError, match="root"):
        model.layers[0].reset_iter_state(keep=Keep.ACCUMULATED)


@on_ranks(2)
def test_a_reset_before_anything_ran(rank, world):
    model = shard_blocks(OURS, chain(depth=2), mesh_for(world))
    for keep in Keep:
        model.reset_iter_state(keep=keep)
    mean_square(model, data(rank, 0)).backward()


# -------------------------------------------------------------------------------------------------- undone backwards


@on_ranks(2)
def test_the_warning_names_the_unit_where_backward_stopped(rank, world):
    model = shard_blocks(OURS, chain(depth=2), fsdp_mesh(world))
    mean_square(model, data(rank, 0)).backward()
    expected = local_grads(model)
    model.zero_grad()
    for module, unit in ((model.last, "(root)"), (model.layers[1].up, "layers.1"), (model.layers[0].down, "layers.0")):
        loss = None
        with tripwire(module, "backward"):
            loss = mean_square(model, data(rank, 1))
            with pytest.raises(Boom):
                loss.backward()
        with pytest.warns(UserWarning, match="the last backward stopped") as caught:
            mean_square(model, data(rank, 0)).backward()
        assert [str(w.message) for w in caught if unit in str(w.message)], [str(w.message) for w in caught]
        require_equal(local_grads(model), expected, unit)
        model.zero_grad()


@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_strict_iterations_want_a_reset(rank, world, early):
    model = shard_blocks(OURS, chain(depth=2), fsdp_mesh(world))
    if early:
        model.set_strict_iterations()
    mean_square(model, data(rank, 0)).backward()
    expected = local_grads(model)
    model.zero_grad()
    if not early:
        model.set_strict_iterations(True)
    with tripwire(model.layers[1].up, "backward"), pytest.raises(Boom):
        mean_square(model, data(rank, 1)).backward()
    message = r"stopped in unit '?layers\.1'?.*reset_iter_state"
    for _ in range(2):
        for call in (lambda: model(data(rank, 0)), model.state_dict, lambda: list(model.parameters()), model.zero_grad):
            with pytest.raises(RuntimeError, match=message):
                call()
    with pytest.raises(RuntimeError, match=message), ht.recoverable(model):
        raise AssertionError("refused before anything runs")
    model.reset_iter_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean_square(model, data(rank, 0)).backward()
    require_equal(local_grads(model), expected, "after the reset")
    model.zero_grad()
    with tripwire(model.layers[0], "after"), pytest.raises(Boom):
        model(data(rank, 1))  # a forward that raised needs no answer
    mean_square(model, data(rank, 0)).backward()
    require_equal(local_grads(model), expected, "after a forward that raised")
    model.zero_grad()
    model.set_strict_iterations(False)
    with tripwire(model.layers[1].up, "backward"), pytest.raises(Boom):
        mean_square(model, data(rank, 1)).backward()
    with pytest.warns(UserWarning, match=r"layers\.1"):
        mean_square(model, data(rank, 0)).backward()
    with pytest.raises(PolicyError, match="strict"):
        model.set_strict_iterations(1)


# ------------------------------------------------------------------------------------------------------- checked use


class Branches(nn.Module):
    """Two layers in one unit, two units, a head: which take part is chosen in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.left, self.right, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, inner: str, units: str) -> Tensor:
        x = self.pair[inner](x)
        outs = {"left": self.left(x), "right": self.right(x)}  # all ranks gather all
        return self.head(sum((outs[u] for u in units.split("+")), torch.zeros_like(x)))


UNEQUAL = {
    "parameters of one unit": (("a", "left+right"), ("b", "left+right"), r"a\.weight.*b\.weight|b\.weight.*a\.weight"),
    "units": (("a", "left"), ("a", "right"), r"left\.weight.*right\.weight|right\.weight.*left\.weight"),
    "a unit or nothing": (("a", "left+right"), ("a", "left"), r"right\.weight"),
}


@pytest.mark.parametrize("case", list(UNEQUAL))
@on_ranks(2, 4)
def test_unequal_use_raises_on_every_rank_before_any_gradient(rank, world, case):
    torch.manual_seed(0)
    model, mesh = Branches(), mesh_for(world)
    for unit in (model.left, model.right, model):
        fully_shard(unit, mesh=mesh)
    model.set_check_unused_params(True)

    def step(inner="a", units="left+right"):
        model(data(rank, 0), inner, units).square().mean().backward()

    step()
    expected, before = local_grads(model), snapshot(model.hsdp_state)
    first, second, names = UNEQUAL[case]
    held = [p.grad for p in model.parameters()]
    for odd in range(world):
        with pytest.raises(RankMismatchError, match="different parameters") as caught:
            step(*(second if rank == odd else first))
        assert re.search(names, str(caught.value)), caught.value
        model.reset_iter_state()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
        require_equal(local_grads(model), expected, case)
        equal(snapshot(model.hsdp_state)[1], before[1])
    model.zero_grad()
    step()
    require_equal(local_grads(model), expected, case)


@on_ranks(2)
def test_ranks_without_any_gradient_raise_too(rank, world):
    """One rank's loss reaches no parameter of a unit: a functional step, whose state stays."""
    model = chain(depth=2)
    policy = ReductionPolicy(unused="checked")  # gathers must match: there are none in this backward
    checked = ht.shard_module(model, fsdp_mesh(world), UNITS, reduction=policy, reshard_after_forward=False)
    before = snapshot(checked)

    def loss(p, x, detach):
        out = ht.functional_call(model, p, x)
        return p["last.bias"].sum() if detach else out.square().mean()

    step = ht.value_and_grad(loss)
    for odd in range(world):
        with pytest.raises(RankMismatchError, match=r"layers\.1\.down\.weight"):
            step(checked, data(rank, 0), rank == odd)
        assert_untouched(checked, before)
    (_, _), checked = step(checked, data(rank, 0), False)
    _, rows = grads(checked)
    assert all(g is not None for g in rows.values())


@pytest.mark.parametrize("hold", list(Sync))
@on_ranks(2, 4)
def test_equal_use_gives_the_same_numbers_as_unchecked(rank, world, hold):
    found = {}
    for unused in ("none", "checked"):
        model = chain(depth=2)
        state = ht.shard_module(model, mesh_for(world), UNITS, reduction=ReductionPolicy(unused=unused))
        assert {u.reduction.unused for u in state.layout.units} == {unused}
        step = ht.value_and_grad(lambda p, x, model=model: ht.functional_call(model, p, x).square().mean())
        for i, sync in enumerate(microbatches(2, hold=hold)):
            (_, _), state = step(state, data(rank, i), sync=sync)
        assert state.ledger == expected_comm(state.layout, sync=hold) + expected_comm(state.layout)
        state, rows = grads(state)
        found[unused] = [*rows.values(), *masters(state).values()]
    require_equal(found["checked"], found["none"], str(hold))


@on_ranks(2)
def test_the_check_is_a_setting_of_the_facade(rank, world):
    model = shard_blocks(OURS, chain(depth=2), fsdp_mesh(world))
    mean_square(model, data(rank, 0)).backward()
    expected = local_grads(model)
    for check, wanted in ((True, "checked"), (False, "none")):
        model.zero_grad()
        model.set_check_unused_params(check)
        mean_square(model, data(rank, 0)).backward()
        assert {u.reduction.unused for u in model.hsdp_state.layout.units} == {wanted}
        require_equal(local_grads(model), expected, wanted)
    model.layers[0].set_check_unused_params(True, recurse=False)
    model.zero_grad()
    mean_square(model, data(rank, 0)).backward()
    units = {u.name: u.reduction.unused for u in model.hsdp_state.layout.units}
    assert units == {"": "none", "layers.0": "checked", "layers.1": "none"}
    with pytest.raises(PolicyError, match="check"):
        model.set_check_unused_params("yes")
    with pytest.raises(PolicyError, match="unused must be"):
        ReductionPolicy(unused="check")
