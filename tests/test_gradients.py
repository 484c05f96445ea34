"""Numbers: what is gathered, and what becomes of gradients in every mode, policy and dtype, against numpy sums."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsdp_fn as h
from hsdp_fn import HSDPState, MeshSpec, MixedPrecisionPolicy, ParamSpec, ReductionPolicy, Sync
from hsdp_fn.dtypes import ITEMSIZE
from hsdp_fn.unit import advance_reduce, start_reduce
from tests.probe import Probe
from tests.strategies import Case, assert_same, cases

NONE, SHARD, FULL = Sync.NONE, Sync.SHARD, Sync.FULL


def start(case: Case) -> HSDPState:
    return h.shard(case.params(), case.layout, backend=Probe(case.mesh))


def run(case: Case, *micros: tuple[Any, Sync], async_op: bool = False) -> dict[str, Any]:
    """Gradients after microbatches, each given with how far it is reduced."""
    state = start(case)
    for grads, sync in micros:
        state = h.reduce_grads(h.wait(state), grads, sync=sync, async_op=async_op)
    return h.grads(state)[1]


def one_parameter(mesh: MeshSpec, numel: int = 4, dtype: str = "float32", **policies: Any) -> Case:
    return Case(h.plan_layout([ParamSpec("w", (numel,), dtype)], mesh, **policies), 0)


def whole(case: Case, *per_rank: float) -> dict[str, Any]:
    """A gradient of parameter ``w`` that is constant on each rank."""
    bucket, member = case.places["w"]
    value = np.array(per_rank * (case.mesh.size if len(per_rank) == 1 else 1))
    return {"w": np.broadcast_to(value[:, None], (case.mesh.size, *member.spec.shape)).astype(bucket.acc_dtype)}


# ------------------------------------------------------------------------------------------------------- parameters


@given(cases(main_grads=True))
def test_shard_then_gather_is_the_identity_and_padding_is_zero(case: Case) -> None:
    state = start(case)
    assert_same(h.masters(state), case.rows(case.values(), padding=0))
    full = h.full_params(h.unshard(state))
    for name, value in case.params().items():
        bucket, member = case.places[name]
        for alias in (name, *member.spec.aliases):
            assert full[alias].dtype == bucket.compute_dtype
            np.testing.assert_array_equal(full[alias], value, err_msg=alias)


@given(cases(main_grads=True), st.booleans())
def test_gathering_in_flight_and_by_unit_gives_the_same_parameters(case: Case, async_op: bool) -> None:
    state = start(case)
    for unit in reversed(case.layout.units):
        state = h.unshard(state, unit.name, async_op=async_op)
    assert_same(h.full_params(h.wait(state)), h.full_params(h.unshard(start(case))))


@pytest.mark.parametrize("dtype", [d for d in ITEMSIZE if not d.startswith(("bfloat", "float8"))])
def test_frozen_parameters_of_every_dtype_are_gathered_as_they_are(dtype: str) -> None:
    spec = ParamSpec("w", (3,), dtype, requires_grad=False)
    half = MixedPrecisionPolicy("float16", "float16")
    case = Case(h.plan_layout([spec], MeshSpec.fsdp(2), mp_policy=half if "float" not in dtype else None), 0)
    assert_same(h.full_params(h.unshard(start(case))), case.params())


# ------------------------------------------------------------------------------------------------------------- modes


@given(cases(main_grads=True))
def test_a_gradient_is_the_scaled_sum_over_data_parallel_ranks_of_each_ranks_own(case: Case) -> None:
    grads = case.grads(0)
    rows = run(case, (grads, FULL))
    assert set(rows) == set(case.trainable)
    for name, row in rows.items():
        case.assert_gradient(name, row, grads[name])


@given(cases(main_grads=True), st.lists(st.sampled_from([NONE, SHARD]), min_size=1, max_size=3), st.booleans())
def test_accumulating_whole_or_sharded_or_both_gives_the_gradient_of_the_sum(
    case: Case, syncs: list[Sync], async_op: bool
) -> None:
    micros = [case.grads(i) for i in range(len(syncs) + 1)]
    total = {n: sum(m[n].astype("float64") for m in micros) for n in case.trainable}
    for last in (micros[-1], None):
        given_ = micros if last is not None else [*micros[:-1], {n: None for n in case.trainable}]
        sums = total if last is not None else {n: total[n] - micros[-1][n] for n in total}
        syncs_ = [*syncs, FULL]
        rows = run(case, *((g, s) for g, s in zip(given_, syncs_, strict=True)), async_op=async_op)
        for name, row in rows.items():
            case.assert_gradient(name, row, sums[name])


@given(cases(exact=True, main_grads=True))
def test_none_none_full_and_shard_shard_full_and_three_times_full_are_full_of_the_sum_bit_for_bit(case: Case) -> None:
    a, b, c = (case.grads(i) for i in range(3))
    expected = run(case, ({n: a[n] + b[n] + c[n] for n in case.trainable}, FULL))
    for mode in (NONE, SHARD, FULL):
        assert_same(run(case, (a, mode), (b, mode), (c, FULL)), expected)
        assert_same(run(case, (a, mode), (b, mode), (c, mode), (None, FULL)), expected)


@given(cases(main_grads=True), st.lists(st.sampled_from(Sync), max_size=2))
def test_a_donated_unit_ends_with_the_same_gradient_where_the_backend_overwrites_what_it_may(
    case: Case, earlier: list[Sync]
) -> None:
    micros = [(case.grads(i), sync) for i, sync in enumerate([*earlier, FULL])]
    backend = Probe(case.mesh, in_place=True)
    state = h.shard(case.params(), case.layout, backend=backend)
    for grads, sync in micros:
        units = []
        for unit, plan in zip(state.units, case.layout.units, strict=True):
            given_ = [grads.get(p.name) for p in plan.params]
            unit = start_reduce(unit, plan, backend, given_, sync, [])
            while unit.reducing is not None:
                unit = advance_reduce(unit, plan, backend, [], donate=True)
            units.append(unit)
        state = replace(state, units=tuple(units))
    assert_same(h.grads(state)[1], run(case, *micros))


@pytest.mark.parametrize("mesh", [MeshSpec.fsdp(4), MeshSpec.hsdp(2, 2), MeshSpec.replicated(4)])
@pytest.mark.parametrize("reduce_dtype", [None, "float16"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ReductionPolicy(), 2.5),
        (ReductionPolicy("sum"), 10.0),
        (ReductionPolicy("sum", divide_factor=8.0), 1.25),
        (ReductionPolicy("avg", divide_factor=1.0), 10.0),
        (ReductionPolicy("avg", divide_factor=0.5), 20.0),
        (ReductionPolicy(scaling_factor=8.0), 20.0),
        (ReductionPolicy("sum", divide_factor=2.0, scaling_factor=0.25), 1.25),
    ],
)
def test_the_gradient_of_one_two_three_four_under_each_policy(
    policy: ReductionPolicy, expected: float, reduce_dtype: str | None, mesh: MeshSpec
) -> None:
    case = one_parameter(mesh, reduction=policy, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    grads = whole(case, 1.0, 2.0, 3.0, 4.0)
    for micros in ([(grads, FULL)], [(grads, NONE), (None, FULL)], [(grads, SHARD), (None, FULL)]):
        row = run(case, *micros)["w"]
        assert row.dtype == np.float32
        np.testing.assert_array_equal(row, np.full_like(row, expected))


# ------------------------------------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("mode", Sync)
@pytest.mark.parametrize("mesh", [MeshSpec.hsdp(2, 1), MeshSpec.hsdp(2, 2), MeshSpec.fsdp(2)])
@pytest.mark.parametrize(("power", "exact"), [(9, 1.015625), (12, 1.001953125)])
def test_small_gradients_arent_lost_beside_a_large_one_when_float16_is_only_the_dtype_of_reduction(
    power: int, exact: float, mesh: MeshSpec, mode: Sync
) -> None:
    """1.0 and eight times 2^-12: adding in float16 would give 1.0, its neighbours are 2^-10 apart."""
    case = one_parameter(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype="float16"))
    micros = [whole(case, 1.0), *[whole(case, 2.0**-power)] * 8]
    row = run(case, *((g, mode) for g in micros), (None, FULL))["w"]
    np.testing.assert_array_equal(row, np.full_like(row, exact))


@pytest.mark.parametrize("mode", Sync)
def test_float64_reduction_of_float32_masters_accumulates_in_float64(mode: Sync) -> None:
    case = one_parameter(MeshSpec.fsdp(2), mp_policy=MixedPrecisionPolicy("float32", "float64"))
    micros = [whole(case, 1.0), whole(case, 2.0**-30), whole(case, -1.0)]
    row = run(case, *((g, mode) for g in micros), (None, FULL))["w"]
    assert row.dtype == np.float32
    # Finished gradients are in master dtype, so three times FULL loses what float32 can't hold.
    np.testing.assert_array_equal(row, np.full_like(row, 0.0 if mode is FULL else 2.0**-30))


@given(st.integers(1, 8), st.sampled_from([NONE, SHARD, FULL]))
@settings(max_examples=24)
def test_a_float16_sum_that_would_overflow_is_scaled_before_it_is_made(world: int, mode: Sync) -> None:
    case = one_parameter(MeshSpec.fsdp(world), mp_policy=MixedPrecisionPolicy(reduce_dtype="float16"))
    row = run(case, (whole(case, 2.0**14), mode), (None, FULL))["w"]
    owned = case.local("w", np.full((world, 4), 2.0**14))
    np.testing.assert_allclose(row, owned, rtol=0 if world in (1, 2, 4, 8) else 2**-9)


@pytest.mark.parametrize("mode", Sync)
@pytest.mark.parametrize("mesh", [MeshSpec.fsdp(2), MeshSpec.hsdp(2, 2), MeshSpec.replicated(2)])
def test_a_main_gradient_keeps_what_the_parameters_own_dtype_would_round_away(mesh: MeshSpec, mode: Sync) -> None:
    """1.0 and 2^-12 in a step of float16 parameters: their mean is 0.5 + 2^-13, float16's next value 0.5 + 2^-11."""
    for main, dtype, exact in ((True, "float32", 1.0 + 2.0**-12), (False, "float16", 1.0)):
        policy = MixedPrecisionPolicy(reduce_dtype="float32", apply_grad_on_fp32_main_grad=main)
        case = one_parameter(mesh, dtype="float16", mp_policy=policy)
        row = run(case, (whole(case, 1.0), mode), (whole(case, 2.0**-12), FULL))["w"]
        assert row.dtype == dtype
        np.testing.assert_array_equal(row, np.full_like(row, exact))


def test_three_finished_main_gradients_add_up_in_the_reduce_dtype() -> None:
    policy = MixedPrecisionPolicy("float32", "float64", apply_grad_on_fp32_main_grad=True)
    case = one_parameter(MeshSpec.fsdp(2), mp_policy=policy)
    row = run(case, *((whole(case, v), FULL) for v in (1.0, 2.0**-30, -1.0)))["w"]
    assert row.dtype == np.float64
    np.testing.assert_array_equal(row, np.full_like(row, 2.0**-30))


def test_a_main_gradient_takes_the_reduce_dtypes_bytes_and_leaves_the_master_as_it_is() -> None:
    for main, nbytes in ((False, 2 * 2), (True, 2 * 4)):
        policy = MixedPrecisionPolicy(reduce_dtype="float32", apply_grad_on_fp32_main_grad=main)
        case = one_parameter(MeshSpec.fsdp(2), dtype="float16", mp_policy=policy)
        state = h.reduce_grads(start(case), whole(case, 1.0))
        held = h.memory_bytes(state)
        assert (held["master"], held["grad"], held["total"]) == (4, nbytes, 4 + nbytes)
        state, rows = h.grads(state)
        masters = h.masters(state)
        state = h.apply_updates(state, {"w": (masters["w"] - rows["w"]).astype("float16")})
        assert h.masters(state)["w"].dtype == np.float16


def test_the_accumulators_dtype_is_the_layouts_whatever_arrives_first() -> None:
    case = one_parameter(MeshSpec.fsdp(2), mp_policy=MixedPrecisionPolicy("float16", "float16"))
    for first in ("float16", "float32"):
        state = h.reduce_grads(start(case), {"w": whole(case, 1.0)["w"].astype(first)}, sync=NONE)
        (held,) = state.units[0].acc_full or ()
        assert held is not None
        assert held.dtype == np.float32
        partial = h.reduce_grads(state, None, sync=SHARD).units[0].acc_partial
        assert partial is not None
        assert [flat.dtype for flat in partial.flats if flat is not None] == [np.float32]


# ------------------------------------------------------------------------------------------------------------ unused


@pytest.mark.parametrize("mesh", [MeshSpec.fsdp(2), MeshSpec.hsdp(2, 2), MeshSpec.replicated(2)])
@pytest.mark.parametrize(("first", "second"), list(product(Sync, Sync)))
def test_parameters_used_in_different_microbatches_all_have_a_gradient(
    first: Sync, second: Sync, mesh: MeshSpec
) -> None:
    specs = [ParamSpec(n, (3,), "float32") for n in ("early", "late", "never")]
    case = Case(h.plan_layout(specs, mesh), 0)
    micros = [case.grads(0, {"late", "never"}), case.grads(1, {"early", "never"})]
    rows = run(case, (micros[0], first), (micros[1], second), (None, FULL))
    case.assert_gradient("early", rows["early"], np.asarray(micros[0]["early"]))
    case.assert_gradient("late", rows["late"], np.asarray(micros[1]["late"]))
    assert rows["never"] is None


@given(cases(main_grads=True), st.data(), st.sampled_from([NONE, SHARD, FULL]), st.booleans())
def test_a_parameter_without_any_gradient_is_none_or_zeros_as_the_policy_says(
    case: Case, data: st.DataObject, mode: Sync, async_op: bool
) -> None:
    subset = st.sets(st.sampled_from(case.trainable)) if case.trainable else st.just(set())
    skipped = [data.draw(subset), data.draw(subset)]
    micros = [case.grads(i, unused) for i, unused in enumerate(skipped)]
    rows = run(case, (micros[0], mode), (micros[1], FULL), async_op=async_op)
    for name, row in rows.items():
        parts = [m[name].astype("float64") for m in micros if m[name] is not None]
        if parts:
            assert row is not None
            if case.exact or len(parts) == 1 or mode is not FULL:
                case.assert_gradient(name, row, sum(parts))
        elif case.reductions[name].unused == "none":
            assert row is None
        else:
            assert row.dtype == case.grad_dtypes[name]
            np.testing.assert_array_equal(
                row, case.local(name, np.zeros((case.mesh.size, *case.places[name][1].spec.shape)))
            )


@given(cases(main_grads=True), st.data())
def test_a_unit_issues_collectives_for_buckets_with_a_gradient_only_unless_zeros_are_asked_for(
    case: Case, data: st.DataObject
) -> None:
    subset = st.sets(st.sampled_from(case.trainable)) if case.trainable else st.just(set())
    skipped = data.draw(subset)
    ledger = h.reduce_grads(start(case), case.grads(0, skipped)).ledger
    expected = []
    for unit in case.layout.units:
        names = {p.name for p in unit.trainable}
        used = names if unit.reduction.unused == "zeros" else names - skipped
        taking = [b for b in unit.buckets if any(m.spec.name in used for m in b.params.members)]
        # Buckets without a shard group are all-reduced at once, the others after their reduce-scatter.
        expected += [c for b in taking if (c := b.reduce_scatter or b.all_reduce)]
        expected += [c for b in taking if b.reduce_scatter and (c := b.all_reduce)]
    assert list(ledger) == expected


def test_zeros_come_at_the_first_reduction_and_none_before_it() -> None:
    case = one_parameter(MeshSpec.hsdp(2, 2), reduction=ReductionPolicy(unused="zeros"))
    state = h.reduce_grads(start(case), {"w": None}, sync=NONE)
    assert (state.ledger, state.units[0].acc_full) == ((), None)
    state = h.reduce_grads(state, {"w": None}, sync=SHARD)
    assert [c.op for c in state.ledger] == ["reduce_scatter"]
    state = h.reduce_grads(state, {"w": None})
    assert [c.op for c in state.ledger] == ["reduce_scatter", "reduce_scatter", "all_reduce"]
    _, rows = h.grads(state)
    np.testing.assert_array_equal(rows["w"], np.zeros((4, 2), "float32"))
