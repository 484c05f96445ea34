"""Functional training on real ranks equals plain MindSpore in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn

import hsdp_fn_ms as hm
from hsdp_fn import (
    GradPhase,
    HSDPState,
    MixedPrecisionPolicy,
    ParamPhase,
    PhaseError,
    PrefetchPolicy,
    ReductionPolicy,
    Replicate,
    Shard,
    Sync,
    UnitSpec,
    apply_updates,
    clone,
    expected_comm,
    grads,
    masters,
    microbatches,
    reset_iter,
    shard,
    unshard,
)
from hsdp_fn.state import phases_of
from tests.ms.pool import on_ranks
from tests.ms.workers import (
    LAYERS,
    Block,
    Chain,
    Plain,
    Single,
    Tied,
    array,
    batch,
    close,
    fill,
    full_values,
    linear,
    local_rows,
    mesh_of,
    momentum_step,
    squares,
)


def step_of(cell: nn.Cell, loss: Any = squares) -> Any:
    return hm.value_and_grad(lambda p, x, y: loss(hm.functional_call(cell, p, x), y))


def start(cell: nn.Cell, kind: str, world: int, **policies: Any) -> HSDPState:
    return hm.shard_cell(cell, mesh_of(kind, world), LAYERS, **policies)


def train_against_single(rank: int, world: int, kind: str, steps: int = 5, **policies: Any) -> HSDPState:
    """Train both; every step's loss, and at the end every parameter, must be the single process's."""
    cell, single = fill(Chain()), Single(fill(Chain()))
    state, velocity = start(cell, kind, world, **policies), {}
    step = step_of(cell)
    for i in range(steps):
        batches = [batch(r, i) for r in range(world)]
        (loss, _), state = step(state, *batches[rank])
        assert state.ledger == expected_comm(state.layout)
        assert array(loss) == pytest.approx(array(single.loss(single.cell(batches[rank][0]), batches[rank][1])), 1e-5)
        state = momentum_step(state, velocity)
        single.step(batches)
    assert state.step == steps
    close(full_values(state), {n: array(p) for n, p in single.params.items()})
    return state


@pytest.mark.parametrize("kind", ["shard", "replicate"])
@on_ranks(2)
def test_five_steps_of_training_equal_a_single_process(rank, world, kind):
    train_against_single(rank, world, kind)


@on_ranks(4)
def test_five_steps_of_hybrid_training_equal_a_single_process(rank, world):
    train_against_single(rank, world, "both")


@on_ranks(4)
def test_units_resharded_to_smaller_groups_train_the_same(rank, world):
    state = train_against_single(rank, world, "shard", steps=2, reshard_after_forward=2)
    assert {u.name: u.reshard_after_forward for u in state.layout.units}["layers.0"] == 2


WAYS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "mixed": {"reshard_after_forward": {"": True, "layers.1": False}},
    "unfused": {"prefetch": PrefetchPolicy(0, 0), "fused": False},
    "columns": {
        "prefetch": PrefetchPolicy(2, 2),
        "placement_fn": lambda s: Replicate() if len(s.shape) == 1 else Shard(1),
    },
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_how_units_are_kept_fetched_and_cut_changes_no_value(rank, world, way):
    train_against_single(rank, world, "shard", steps=2, **WAYS[way])


@pytest.mark.parametrize("kind", ["shard", "replicate"])
@pytest.mark.parametrize("hold", ["NONE", "SHARD", "FULL"])
@on_ranks(2)
def test_microbatches_of_any_sync_give_the_gradient_of_their_sum(rank, world, kind, hold):
    cell, single = fill(Chain(Plain), integers=True), Single(fill(Chain(Plain), integers=True), linear)
    state, step = start(cell, kind, world, reduction=ReductionPolicy("sum")), step_of(cell, linear)
    syncs = list(microbatches(3, hold=Sync[hold]))
    for i, sync in enumerate(syncs):
        (_, _), state = step(state, *batch(rank, i, integers=True), sync=sync)
        held = GradPhase.READY if sync is Sync.FULL else GradPhase.HELD
        assert held is Sync.FULL or {u.grads_phase for u in state.units} <= {held, GradPhase.REDUCING}
    assert state.micro == 3
    state, found = grads(state)
    everything = [batch(r, i, integers=True) for i in range(3) for r in range(world)]
    _, expected = single.gradients(everything)
    close(
        {n: array(g) for n, g in found.items()},
        local_rows(state, {n: g * len(everything) for n, g in expected.items()}),
    )


@pytest.mark.parametrize("block", [Plain, Block])
@pytest.mark.parametrize("gathered", [True, False])
@on_ranks(2)
def test_units_may_stay_gathered_between_the_microbatches_of_a_step(rank, world, gathered, block):
    cell = fill(Chain(block))
    state = start(cell, "shard", world)
    step, twin = step_of(cell), clone(state)
    own = {p.name: p.asnumpy().copy() for p in cell.get_parameters()}
    if gathered:
        state = unshard(state)
    for i, sync in enumerate(microbatches(3)):
        before = len(state.ledger)
        (_, _), state = step(state, *batch(rank, i), sync=sync, reshard_after_backward=sync is Sync.FULL)
        (_, _), twin = step(twin, *batch(rank, i), sync=sync)
        gathers = [c.op for c in state.ledger[before:]].count("all_gather")
        assert gathers == (0 if gathered or i else 2 * len(LAYERS) + 1)
        phases = {unit.params_phase for unit in state.units}
        assert phases == {ParamPhase.SHARDED if sync is Sync.FULL else ParamPhase.UNSHARDED}
        for p in cell.get_parameters():
            np.testing.assert_array_equal(p.asnumpy(), own[p.name])
    (state, found), (twin, expected) = grads(state), grads(twin)
    assert found.keys() == expected.keys() == own.keys()
    for name in found:
        np.testing.assert_array_equal(array(found[name]), array(expected[name]), name)


@on_ranks(2)
def test_what_stays_gathered_doesnt_outlive_an_update(rank, world):
    cell = fill(Chain(Plain))
    state, step = start(cell, "shard", world), step_of(cell)
    with pytest.raises(TypeError, match="reshard_after_backward must be a bool, found 0"):
        step(state, *batch(rank, 0), reshard_after_backward=0)
    (_, _), state = step(state, *batch(rank, 0), reshard_after_backward=False)
    state, _ = grads(state)
    with pytest.raises(PhaseError, match="full parameters of the old values would outlive the update"):
        apply_updates(state, masters(state))
    state = shard(state)
    apply_updates(state, masters(state))


@on_ranks(2)
def test_tied_frozen_and_unused_parameters_train_as_in_a_single_process(rank, world):
    cell, single = fill(Tied()), Single(fill(Tied()))
    state, step, velocity = start(cell, "shard", world), step_of(cell), {}
    assert {p.name: p.aliases for p in state.layout.params()}["first.weight"] == ("last.weight",)
    for i in range(3):
        batches = [batch(r, i, outputs=6) for r in range(world)]
        (_, _), state = step(state, *batches[rank])
        state = momentum_step(state, velocity)
        single.step(batches)
    trained = full_values(state)
    expected = {n: array(p) for n, p in single.params.items()}
    close({n: trained[n] for n in expected}, expected)
    np.testing.assert_array_equal(trained["last.weight"], trained["first.weight"])
    assert not any(name.startswith(("layers.1", "layers.2")) for name in velocity)


@on_ranks(2)
def test_zeros_are_reduced_for_units_that_one_rank_alone_uses(rank, world):
    """Gathers must match too, so the units are gathered beforehand."""
    cell = fill(Chain(Plain), integers=True)
    state = unshard(start(cell, "shard", world, reduction=ReductionPolicy("sum", unused="zeros")))

    def loss(p: hm.Params, x: Tensor, y: Tensor) -> Tensor:
        out = p["first.weight"].sum() if rank == 0 else p["layers.1.up.weight"].sum() + p["layers.0.up.bias"].sum()
        return out + 0 * x.sum()

    (_, _), state = hm.value_and_grad(loss)(state, *batch(rank))
    _, found = grads(state)
    for name, value in found.items():
        one = name in ("first.weight", "layers.1.up.weight", "layers.0.up.bias")
        assert (array(value) == (1.0 if one else 0.0)).all(), name


@on_ranks(2)
def test_float16_compute_with_float32_masters_is_exact_on_integers(rank, world):
    cell, single = fill(Chain(Plain, 2), integers=True), Single(fill(Chain(Plain, 2), integers=True), linear)
    units = [UnitSpec(name, mp_policy=MixedPrecisionPolicy("float16", "float32")) for name in LAYERS[:2]]
    whole = MixedPrecisionPolicy("float16", "float32", output_dtype="float32")
    state = hm.shard_cell(cell, mesh_of("shard", world), units, mp_policy=whole)
    seen = []

    def loss(p: hm.Params, x: Tensor, y: Tensor) -> Tensor:
        out = hm.functional_call(cell, p, x)
        seen.append((str(p["first.weight"].dtype), str(out.dtype)))
        return linear(out, y)

    (_, _), state = hm.value_and_grad(loss)(state, *batch(rank, integers=True))
    assert seen == [("Float16", "Float32")]
    state, found = grads(state)
    _, expected = single.gradients([batch(r, integers=True) for r in range(world)])
    assert {str(g.dtype) for g in found.values()} == {"Float32"}
    close({n: array(g) for n, g in found.items()}, local_rows(state, expected))


@on_ranks(2)
def test_units_that_come_gathered_stay_so_until_backward_and_cost_no_gather(rank, world):
    cell = fill(Chain())
    state, step = start(cell, "shard", world), step_of(cell)
    copy = unshard(clone(state))
    phases = phases_of(copy)
    before = len(copy.ledger)
    (loss, _), copy = step(copy, *batch(rank))
    assert copy.ledger[before:] == expected_comm(copy.layout, phases=phases)
    assert all(op.op != "all_gather" for op in copy.ledger[before:])
    assert set(phases_of(copy).values()) == {ParamPhase.SHARDED}
    (again, _), state = step(state, *batch(rank))
    assert array(loss) == array(again)
    one, two = grads(state)[1], grads(copy)[1]
    for name, value in one.items():
        np.testing.assert_array_equal(array(value), array(two[name]))


@on_ranks(2)
def test_evaluation_gives_the_models_output_and_leaves_the_state_as_it_was(rank, world):
    cell, single = fill(Chain()), Single(fill(Chain()))
    state = start(cell, "shard", world)
    predict = hm.evaluate(lambda p, x: hm.functional_call(cell, p, x))
    x, _ = batch(rank)
    out, state = predict(state, x)
    np.testing.assert_allclose(array(out), array(single.cell(x)), rtol=1e-6)
    assert not out._requires_grad
    assert state.ledger == expected_comm(state.layout, backward=False)
    assert set(phases_of(state).values()) == {ParamPhase.SHARDED} and state.micro == 0
    state = unshard(state)
    before = state.ledger
    for _ in range(1 + rank):  # as often as a rank likes: nothing is communicated
        out, state = predict(state, x)
    assert state.ledger == before and set(phases_of(state).values()) == {ParamPhase.UNSHARDED}


@on_ranks(2)
def test_parameters_by_name_and_functions_of_a_unit_take_part_in_training(rank, world):
    cell = fill(Chain(Plain), integers=True)
    state = start(cell, "shard", world, reduction=ReductionPolicy("sum"))
    aux_of = []

    def loss(p: hm.Params, x: Tensor) -> tuple[Tensor, Any]:
        out = p.run("layers.0", lambda q, x: (q["layers.0.up.weight"] * 2).sum() * x.sum(), x)
        out = out + p["last.weight"].sum() * 3
        with pytest.raises(KeyError, match="no parameter 'nobody'"):
            p["nobody"]
        aux_of.append(out)
        return out, {"out": out, "n": 1}

    x, _ = batch(rank, integers=True)
    (value, aux), state = hm.value_and_grad(loss, has_aux=True)(state, x)
    assert array(value) == array(aux["out"]) and aux["n"] == 1 and not aux["out"]._requires_grad
    _, found = grads(state)
    inputs = sum(float(array(batch(r, integers=True)[0]).sum()) for r in range(world))
    assert (array(found["layers.0.up.weight"]) == 2 * inputs).all()
    assert (array(found["last.weight"]) == 3 * world).all()
    assert found["layers.2.up.weight"] is None


@on_ranks(2)
def test_a_reset_drops_what_a_microbatch_has_added(rank, world):
    cell = fill(Chain())
    state, step = start(cell, "shard", world), step_of(cell)
    before = {n: array(v) for n, v in masters(state).items()}
    (_, _), state = step(state, *batch(rank, 0), sync=Sync.NONE)
    state = reset_iter(state)
    assert state.micro == 0 and {u.grads_phase for u in state.units} == {GradPhase.EMPTY}
    for name, value in masters(state).items():
        np.testing.assert_array_equal(array(value), before[name])
    (_, _), state = step(state, *batch(rank, 1))
    single = Single(fill(Chain()))
    _, expected = single.gradients([batch(r, 1) for r in range(world)])
    state, found = grads(state)
    close({n: array(g) for n, g in found.items()}, local_rows(state, expected))
