"""Whole programs on generated layouts: every call in every order, against a model that only adds dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hsdp_fn as h
from hsdp_fn import Collective, GradPhase, HSDPState, Keep, ParamPhase, PendingError, PhaseError, StaleStateError, Sync
from hsdp_fn.lifecycle import Op
from hsdp_fn.state import NAMESPACE
from tests.known_model import ILLEGAL_GRADS, ILLEGAL_PARAMS
from tests.lifecycle_model import UnitModel
from tests.probe import Probe, handles
from tests.strategies import Case, assert_same, cases

draw_units = st.one_of(st.none(), st.none(), st.sets(st.integers(0, 3)))


class Lifecycle(RuleBasedStateMachine):
    """Calls in any order, legal or not. After each: phases, masters, ledger, memory in flight and the consumed state
    are what the model says."""

    @initialize(case=cases(4, exact=True), in_place=st.booleans())
    def shard_parameters(self, case: Case, in_place: bool) -> None:
        self.case = case
        self.backend = Probe(case.mesh, in_place=in_place)
        self.state = h.shard(case.params(), case.layout, backend=self.backend)
        self.units = [UnitModel(plan) for plan in case.layout.units]
        self.values = case.values()
        self.masters = [u.master for u in self.state.units]
        self.ledger: list[Collective] = []
        self.issued: list[Collective] = []
        self.step = self.micro = self.drawn = 0
        self.left: list[tuple[HSDPState, list[Any]]] = []

    # ----------------------------------------------------------------------------------------------------- the calls

    @rule(units=draw_units, async_op=st.booleans())
    def unshard(self, units: set[int] | None, async_op: bool) -> None:
        chosen, names = self.choose(units)
        if self.call(Op.UNSHARD, chosen, lambda s: h.unshard(s, names, async_op=async_op)):
            for unit in chosen:
                self.log(unit.gather())
            for unit in chosen if not async_op else ():
                unit.land()

    @rule(units=draw_units)
    def wait(self, units: set[int] | None) -> None:
        chosen, names = self.choose(units)
        if self.call(Op.WAIT, chosen, lambda s: h.wait(s, names)):
            for unit in chosen:
                unit.land()
                self.log(unit.finish())

    @rule(units=draw_units, after_forward=st.booleans())
    def reshard(self, units: set[int] | None, after_forward: bool) -> None:
        chosen, names = self.choose(units)
        if self.call(Op.SHARD, chosen, lambda s: h.shard(s, names, after_forward=after_forward)):
            for unit in chosen:
                unit.reshard(after_forward=after_forward)

    @rule(units=draw_units, async_op=st.booleans())
    def forward(self, units: set[int] | None, async_op: bool) -> None:
        """Gather and go back to the groups that backward gathers from; then perhaps gather from these."""
        self.unshard(units, False)
        self.reshard(units, True)
        if async_op:
            self.unshard(units, True)

    @rule(
        units=draw_units,
        sync=st.sampled_from(Sync),
        async_op=st.booleans(),
        unused=st.sampled_from(["none", "none", "some", "all", "nothing given"]),
    )
    def reduce(self, units: set[int] | None, sync: Sync, async_op: bool, unused: str) -> None:
        chosen, names = self.choose(units)
        given = None
        if unused != "nothing given":
            self.drawn += 1
            skipped = {"none": (), "some": self.case.trainable[self.drawn % 2 :: 2], "all": self.case.trainable}[unused]
            grads = self.case.grads(self.drawn, skipped)
            given = {p.name: grads[p.name] for unit in chosen for p in unit.plan.trainable}
        if self.call(Op.REDUCE, chosen, lambda s: h.reduce_grads(s, given, sync=sync, units=names, async_op=async_op)):
            self.micro += given is not None and names is None
            for unit in chosen:
                self.log(unit.reduce(self.case, given or {}, sync))
                self.log(unit.finish() if not async_op else [])

    @rule()
    def grads(self) -> None:
        rows: dict[str, Any] = {}

        def take(state: HSDPState) -> HSDPState:
            state, found = h.grads(state)
            rows.update(found)
            return state

        unfinished = any(u.flight is not None and (u.flight[0] is Sync.SHARD) for u in self.units)
        if not self.call(Op.GRADS, self.units, take, legal=not unfinished):
            return
        assert set(rows) == set(self.case.trainable)
        for unit in self.units:
            self.log(unit.finish())
            total, unit.ready = unit.ready or {}, None
            for name in (p.name for p in unit.plan.trainable):
                assert (rows[name] is None) == (name not in total)
                if name in total:
                    self.case.assert_gradient(name, rows[name], total[name])

    @rule(sync=st.sampled_from(Sync), unused=st.sampled_from(["none", "some"]))
    def finish_step(self, sync: Sync, unused: str) -> None:
        """One more microbatch, then whatever it takes to have the gradients of all."""
        self.wait(None)
        self.reduce(None, sync, False, unused)
        self.reduce(None, Sync.FULL, True, "nothing given")
        self.grads()

    @rule(load=st.booleans(), some=st.booleans())
    def new_masters(self, load: bool, some: bool) -> None:
        self.drawn += 1
        new = self.case.values(self.drawn)
        new = {n: v for i, (n, v) in enumerate(new.items()) if i % 2 or not some}
        rows = self.case.rows(new, padding=77)
        op = Op.LOAD if load else Op.APPLY
        call = (lambda s: h.load_masters(s, rows, step=9)) if load else (lambda s: h.apply_updates(s, rows))
        if self.call(op, self.units, call):
            self.values |= new
            self.masters = [u.master for u in self.state.units]
            self.step, self.micro = 9 if load else self.step + 1, 0
            self.ledger.clear()

    @rule(keep=st.sampled_from(Keep))
    def reset(self, keep: Keep) -> None:
        assert self.call(Op.RESET, self.units, lambda s: h.reset_iter(s, keep=keep))
        for unit in self.units:
            self.log(unit.finish() if keep is Keep.ACCUMULATED else [])
            unit.drop(gradients=keep is Keep.NOTHING)
        if keep is Keep.NOTHING:
            self.micro = 0
            self.ledger.clear()

    @precondition(lambda self: len(self.left) < 3)
    @rule()
    def branch(self) -> None:
        if handles(self.state) or any(u.params is ParamPhase.GATHERING or u.flight for u in self.units):
            with pytest.raises(PendingError):
                h.clone(self.state)
            return
        copy = h.clone(self.state)
        leaves = optree.tree_leaves(self.state, namespace=NAMESPACE)
        self.left.append((self.state, [leaf.copy() for leaf in leaves]))
        self.state = copy
        self.masters = [u.master for u in copy.units]

    @rule(units=draw_units)
    def read(self, units: set[int] | None) -> None:
        chosen, names = self.choose(units)
        if any(unit.params is not ParamPhase.UNSHARDED for unit in chosen):
            with pytest.raises(PhaseError):
                h.full_params(self.state, names)
            return
        expected = {}
        for unit in chosen:
            for spec in unit.plan.params:
                value = self.values[spec.name].astype(self.case.places[spec.name][0].compute_dtype)
                stacked = np.repeat(value[None], self.case.mesh.size, 0)
                expected |= {name: stacked for name in (spec.name, *spec.aliases)}
        assert_same(h.full_params(self.state, names), expected)

    # -------------------------------------------------------------------------------------------------- what must hold

    @invariant()
    def phases_are_the_models(self) -> None:
        found = [(u.params_phase, u.grads_phase) for u in self.state.units]
        assert found == [(u.params, u.grads) for u in self.units]
        assert (self.state.step, self.state.micro) == (self.step, self.micro)

    @invariant()
    def masters_keep_their_identity_and_values_outside_updates(self) -> None:
        for unit, masters in zip(self.state.units, self.masters, strict=True):
            assert all(a is b for a, b in zip(unit.master, masters, strict=True))
        assert_same(h.masters(self.state), self.case.rows(self.values))

    @invariant()
    def the_ledger_is_what_was_issued_and_what_the_layout_predicts(self) -> None:
        assert self.state.ledger == tuple(self.ledger)
        assert self.backend.issued == [(c.op, c.nbytes, c.group_size) for c in self.issued]

    @invariant()
    def what_is_in_flight_is_owned_by_the_state(self) -> None:
        assert self.backend.in_flight == handles(self.state)

    def teardown(self) -> None:
        for state, leaves in getattr(self, "left", []):
            for now, then in zip(optree.tree_leaves(state, namespace=NAMESPACE), leaves, strict=True):
                np.testing.assert_array_equal(now, then)

    # -------------------------------------------------------------------------------------------------------- helpers

    def choose(self, units: set[int] | None) -> tuple[list[UnitModel], list[str] | None]:
        """Models and names of the units drawn; None for all."""
        if units is None:
            return self.units, None
        chosen = [self.units[i] for i in sorted(units) if i < len(self.units)]
        return chosen, [unit.plan.name for unit in chosen]

    def log(self, collectives: list[Collective]) -> None:
        self.ledger += collectives
        self.issued += collectives

    def call(
        self, op: Op, chosen: list[UnitModel], call: Callable[[HSDPState], HSDPState], *, legal: bool = True
    ) -> bool:
        """Make a call that the model allows, and see the old state consumed; or see it refused, with no effect."""
        old, issued = self.state, len(self.backend.issued)
        if not legal or any((u.params, op) in ILLEGAL_PARAMS or (u.grads, op) in ILLEGAL_GRADS for u in chosen):
            with pytest.raises(PhaseError, match=op.value):
                call(old)
            assert len(self.backend.issued) == issued
            return False
        self.state = call(old)
        issued = len(self.backend.issued)
        for again in (h.wait, h.masters, call):
            with pytest.raises(StaleStateError, match=rf"consumed by {op.value}\(\)"):
                again(old)
        assert len(self.backend.issued) == issued
        return True


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=150, stateful_step_count=25, phases=[phase for phase in Phase if phase is not Phase.explain]
)


def test_the_model_reaches_every_phase() -> None:
    """A machine whose rules never fire together would prove nothing."""
    machine = Lifecycle()
    w = h.ParamSpec("w", (3,), "float32")
    case = Case(h.plan_layout([w], h.MeshSpec.hsdp(2, 4), reshard_after_forward=2), 0)
    machine.shard_parameters(case, False)
    seen = set()
    for step in (
        lambda: machine.unshard(None, True),
        lambda: machine.wait(None),
        lambda: machine.read(None),
        lambda: machine.reshard(None, True),
        lambda: machine.unshard(None, False),
        lambda: machine.read(None),
        lambda: machine.reduce(None, Sync.SHARD, False, "none"),
        lambda: machine.reduce(None, Sync.FULL, True, "none"),
        lambda: machine.wait(None),
        machine.grads,
        lambda: machine.reshard(None, False),
        lambda: machine.new_masters(False, False),
    ):
        step()
        machine.phases_are_the_models()
        seen |= {machine.units[0].params, machine.units[0].grads}
    assert seen == {*ParamPhase, *GradPhase}
    assert machine.step == 1
    assert [(c.op, c.group_size) for c in machine.issued[:2]] == [("all_gather", 4), ("all_gather", 2)]
