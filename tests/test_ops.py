"""Each pure function on a small known model: what it does, what it refuses by name; a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hsdp_fn as h
from hsdp_fn import (
    BackendError,
    GradientError,
    GradPhase,
    HSDPError,
    LayoutError,
    MeshError,
    MeshSpec,
    ParamPhase,
    ParamSpec,
    RankMismatchError,
    Sync,
)
from tests.known_model import CASE, SPECS, refused, start
from tests.probe import Probe
from tests.strategies import assert_same

# ------------------------------------------------------------------------------------------------------------ shard


def test_shard_gives_every_rank_its_rows_and_leaves_the_parameters_alone() -> None:
    params = CASE.params()
    state = h.shard(params, CASE.layout, backend=Probe(CASE.mesh))
    assert_same(params, CASE.params())
    assert_same(h.masters(state), CASE.rows(CASE.values()))
    assert (state.step, state.micro, state.ledger) == (0, 0, ())
    for array in params.values():
        array[...] = 0
    assert_same(h.masters(state), CASE.rows(CASE.values()))


def test_shard_takes_tied_and_ignored_names_or_does_without_them() -> None:
    layout = h.plan_layout([*SPECS, ParamSpec("extra", (1,), "float32")], CASE.mesh, ignored=["extra"])
    params = CASE.params()
    full = {**params, "head.w": params["embed.w"], "extra": np.zeros((8, 1), "float32")}
    assert_same(
        h.masters(h.shard(params, layout, backend=Probe(CASE.mesh))),
        h.masters(h.shard(full, layout, backend=Probe(CASE.mesh))),
    )


def test_shard_takes_both_names_of_an_ignored_tied_parameter() -> None:
    layout = h.plan_layout(SPECS, CASE.mesh, ignored=["head.w"])
    params = CASE.params()
    h.shard({**params, "head.w": params["embed.w"]}, layout, backend=Probe(CASE.mesh))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("a.w"), "weren't given: ['a.w']"),
        (lambda p: p.update({"a.q": p["a.w"]}), "doesn't have: ['a.q']"),
        (lambda p: p.update({"a.w": p["a.w"][:, :4]}), "'a.w' has dtype float32 and shape (4, 2)"),
        (lambda p: p.update({"a.w": p["a.w"].astype("float64")}), "'a.w' has dtype float64"),
    ],
)
def test_shard_refuses_parameters_that_arent_the_layouts(change: Callable[[Any], Any], message: str) -> None:
    params = CASE.params()
    change(params)
    with pytest.raises(LayoutError) as caught:
        h.shard(params, CASE.layout, backend=Probe(CASE.mesh))
    assert message in str(caught.value)


def test_shard_refuses_a_backend_of_another_world_a_dtype_it_hasnt_and_a_call_without_a_backend() -> None:
    with pytest.raises(MeshError, match=r"\(0, 1, 2, 3, 4, 5, 6, 7\).*\(0, 1\)"):
        h.shard(CASE.params(), CASE.layout, backend=Probe(MeshSpec.fsdp(2)))
    brain = h.plan_layout([ParamSpec("w", (2,), "bfloat16")], CASE.mesh)
    with pytest.raises(BackendError, match="'w'"):
        h.shard({}, brain, backend=Probe(CASE.mesh))
    with pytest.raises(TypeError, match="backend"):
        h.shard(CASE.params(), CASE.layout)


def test_shard_of_a_state_refuses_a_layout_in_the_place_of_unit_names() -> None:
    state = start()
    with refused(state, TypeError, "unit names"):
        h.shard(state, CASE.layout)


def test_shard_fails_on_every_rank_when_one_rank_fails_or_plans_otherwise() -> None:
    class Other(Probe):
        def exchange(self, message: str) -> dict[int, str]:
            return {**super().exchange(message), 2: "layout of another rank"}

    mine = f"rank 0: layout {CASE.layout.digest}"
    with pytest.raises(RankMismatchError, match=rf"{mine}; rank 2: layout of another rank\."):
        h.shard(CASE.params(), CASE.layout, backend=Other(CASE.mesh))
    with pytest.raises(LayoutError, match="weren't given"):
        h.shard({}, CASE.layout, backend=Other(CASE.mesh))


# ---------------------------------------------------------------------------------------------------------- reading


def test_full_params_holds_whole_parameters_in_compute_dtype_under_all_their_names() -> None:
    full = h.full_params(h.unshard(start()))
    expected = {n: v if n == "embed.frozen" else v.astype("float16") for n, v in CASE.params().items()}
    assert_same(full, {**expected, "head.w": expected["embed.w"]})
    assert full["head.w"] is full["embed.w"]
    assert set(h.full_params(h.unshard(start(), "a"), "a")) == {"a.w", "a.b"}


def test_unshard_of_some_units_leaves_the_others_sharded_and_a_gathered_unit_costs_nothing() -> None:
    state = h.unshard(start(), "a")
    assert [u.params_phase for u in state.units] == [ParamPhase.SHARDED, ParamPhase.UNSHARDED]
    tensors = state.units[1].full
    issued = len(state.ledger)
    state = h.unshard(state)
    assert state.units[1].full is tensors
    assert [c.unit for c in state.ledger[issued:]] == ["", ""]
    assert h.shard(state, "a").units[1].full is None


def test_an_async_gather_is_in_flight_until_wait_or_a_second_unshard() -> None:
    for finish in (h.wait, h.unshard):
        state = h.unshard(start(), async_op=True)
        assert {u.params_phase for u in state.units} == {ParamPhase.GATHERING}
        ledger = state.ledger
        done = finish(state)
        assert done.ledger == ledger
        assert_same(h.full_params(done), h.full_params(h.unshard(start())))


# ---------------------------------------------------------------------------------------------------------- masters


def test_apply_updates_takes_rows_keeps_the_others_zeroes_padding_and_starts_a_step() -> None:
    state, _ = h.grads(h.reduce_grads(h.shard(h.unshard(start())), CASE.grads(0)))
    assert (state.step, state.micro, len(state.ledger) > 0) == (0, 1, True)
    new = CASE.rows(CASE.values(1), padding=55)
    after = h.apply_updates(state, {"a.w": new["a.w"]})
    assert_same(h.masters(after), CASE.rows({**CASE.values(), "a.w": CASE.values(1)["a.w"]}))
    assert (after.step, after.micro, after.ledger) == (1, 0, ())


def test_rows_updated_in_place_are_the_new_masters() -> None:
    state = start()
    rows = h.masters(state)
    for row in rows.values():
        row *= 3
    assert_same(h.masters(h.apply_updates(state, rows)), CASE.rows({n: 3 * v for n, v in CASE.values().items()}))


def test_load_masters_sets_values_and_step() -> None:
    state = h.load_masters(h.apply_updates(start(), {}), CASE.rows(CASE.values(1)), step=41)
    assert_same(h.masters(state), CASE.rows(CASE.values(1)))
    assert (state.step, state.micro, state.ledger) == (41, 0, ())


@pytest.mark.parametrize("op", ["apply_updates", "load_masters"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a.q": np.zeros((8, 2, 2), "float32")}, "'a.q' is no parameter"),
        ({"a.w": np.zeros((8, 5, 2), "float32")}, "'a.w' has dtype float32 and shape (5, 2)"),
        ({"a.w": np.zeros((8, 2, 2), "float16")}, "'a.w' has dtype float16"),
    ],
)
def test_masters_of_another_name_shape_or_dtype_are_refused(op: str, rows: Any, message: str) -> None:
    state = start()
    call = h.apply_updates if op == "apply_updates" else lambda s, r: h.load_masters(s, r, step=1)
    with refused(state, LayoutError, f"{op}: ", message):
        call(state, rows)


# -------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("sync", list(Sync))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.pop("a.w"), "no gradient for 'a.w' of unit 'a'"),
        (lambda g: g.pop("embed.w"), "no gradient for 'embed.w' of unit '(root)'"),
        (lambda g: g.update({"a.q": g["a.w"]}), "['a.q']"),
        (lambda g: g.update({"head.w": g["embed.w"]}), "['head.w']"),
        (lambda g: g.update({"embed.frozen": None}), "['embed.frozen']"),
        (lambda g: g.update({"a.w": g["a.w"][:, :3]}), "'a.w' has shape (3, 2), expected the full shape (5, 2)"),
        (lambda g: g.update({"a.b": g["a.b"].astype("float32")}), "'a.b' has dtype float32, expected float16"),
        (lambda g: g.update({"a.w": g["a.w"].astype("int64")}), "'a.w' has dtype int64, expected float16"),
    ],
)
def test_gradients_that_arent_the_layouts_are_refused(change: Callable[[Any], Any], message: str, sync: Sync) -> None:
    grads: dict[str, Any] = CASE.grads(0)
    change(grads)
    state = start()
    with refused(state, GradientError, "reduce_grads: ", message):
        h.reduce_grads(state, grads, sync=sync)


def test_gradients_of_other_units_than_the_selected_are_refused() -> None:
    state = start()
    with refused(state, GradientError, "['embed.w']"):
        h.reduce_grads(state, CASE.grads(0), units="a")
    state = h.reduce_grads(start(), {n: g for n, g in CASE.grads(0).items() if n != "embed.w"}, units="a")
    assert [u.grads_phase for u in state.units] == [GradPhase.EMPTY, GradPhase.READY]
    assert state.micro == 0


def test_gradients_may_come_in_accumulation_dtype_too_and_leave_in_master_dtype() -> None:
    wide = {n: g.astype(CASE.places[n][0].acc_dtype) for n, g in CASE.grads(0).items() if g is not None}
    for sync in (Sync.NONE, Sync.SHARD, Sync.FULL):
        state = h.reduce_grads(start(), wide, sync=sync)
        _, rows = h.grads(h.reduce_grads(state, None))
        for name, row in rows.items():
            assert row is not None
            CASE.assert_gradient(name, row, wide[name])


def test_arguments_of_the_callers_own_gradients_are_never_written() -> None:
    given = [CASE.grads(i) for i in range(3)]
    state = start()
    for sync, grads in zip((Sync.NONE, Sync.SHARD, Sync.FULL), given, strict=True):
        state = h.reduce_grads(state, grads, sync=sync)
    h.grads(state)
    for i, grads in enumerate(given):
        assert_same(grads, CASE.grads(i))


@pytest.mark.parametrize("wrong", ["none", "full", None])
def test_a_sync_of_another_type_is_refused_and_never_guessed(wrong: Any) -> None:
    state = start()
    with refused(state, (HSDPError, TypeError)):
        h.reduce_grads(state, CASE.grads(0), sync=wrong)


@pytest.mark.parametrize("wrong", ["accumulated", None])
def test_a_keep_of_another_type_is_refused_and_never_guessed(wrong: Any) -> None:
    state = h.reduce_grads(start(), CASE.grads(0), sync=Sync.NONE)
    with refused(state, (HSDPError, TypeError)):
        h.reset_iter(state, keep=wrong)


def test_gradients_that_are_held_do_not_change_with_the_tensors_they_were_given_as() -> None:
    mesh = h.MeshSpec.fsdp(2)
    layout = h.plan_layout([h.ParamSpec("w", (2, 3), "float32")], mesh)
    ones = np.ones((2, 2, 3), "float32")  # in accumulation dtype already, so that no cast copies it
    state = h.shard({"w": ones}, layout, backend=Probe(mesh))
    given = ones.copy()
    held = h.reduce_grads(state, {"w": given}, sync=Sync.NONE)
    given[...] = 7
    _, found = h.grads(h.reduce_grads(held, None))
    assert found["w"] is not None and (found["w"] == 1).all()
