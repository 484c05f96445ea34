"""A failed step never happened: a fault before and after every launch and every wait of generated programs, and what is
left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import hsdp_fn as h
from hsdp_fn import HSDPState, Keep, MeshSpec, ParamSpec, PhaseError, Sync
from tests.probe import InjectedFault, Probe, handles
from tests.strategies import Case, assert_same, cases

Call = tuple[Any, ...]
no_explaining = settings(phases=[phase for phase in Phase if phase is not Phase.explain])

#: Which units: all, the first, the last.
which = st.sampled_from(["all", "all", "first", "last"])
calls = st.one_of(
    st.tuples(st.just("unshard"), which, st.booleans()),
    st.tuples(st.just("wait"), which),
    st.tuples(st.just("shard"), which, st.booleans()),
    st.tuples(st.just("reduce"), which, st.sampled_from(Sync), st.booleans()),
    st.tuples(st.just("reduce"), which, st.sampled_from(Sync), st.booleans()),
    st.tuples(st.just("finish"), st.booleans()),
    st.tuples(st.just("grads")),
    st.tuples(st.just("reset"), st.sampled_from(Keep)),
)


@dataclass
class Run:
    """A program half-way: the state, the gradients taken so far, and a number for the next microbatch."""

    case: Case
    state: HSDPState
    taken: list[dict[str, Any]] = field(default_factory=list)
    micro: int = 0

    def do(self, call: Call) -> None:
        """Make one call; one that is illegal now is skipped. When it raises, nothing here has changed."""
        state, layout = self.state, self.case.layout
        name, *args = call
        units = None
        if args and isinstance(args[0], str) and args[0] != "all":
            units = layout.units[0 if args[0] == "first" else -1].name
        try:
            if name == "unshard":
                self.state = h.unshard(state, units, async_op=args[1])
            elif name == "wait":
                self.state = h.wait(state, units)
            elif name == "shard":
                self.state = h.shard(state, units, after_forward=args[1])
            elif name == "reduce":
                wanted = {p.name for i in layout.select(units) for p in layout.units[i].trainable}
                grads = {n: g for n, g in self.case.grads(self.micro).items() if n in wanted}
                self.state = h.reduce_grads(state, grads, sync=args[1], units=units, async_op=args[2])
                self.micro += 1
            elif name == "finish":
                self.state = h.reduce_grads(state, None, async_op=args[0])
            elif name == "grads":
                self.state, rows = h.grads(state)
                self.taken.append(rows)
            elif name == "reset":
                self.state = h.reset_iter(state, keep=args[0])
        except PhaseError:
            assert self.state is state


def start(case: Case, **options: Any) -> Run:
    return Run(case, h.shard(case.params(), case.layout, backend=Probe(case.mesh, **options)))


def full_step(state: HSDPState, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Forward, backward and update; the gradients and the new masters."""
    state = h.shard(h.unshard(state))
    state, rows = h.grads(h.reduce_grads(state, case.grads(99)))
    old = h.masters(state)
    state = h.apply_updates(state, {n: old[n] - g for n, g in rows.items() if g is not None})
    return rows, h.masters(state)


def faults(case: Case, program: list[Call]) -> Iterator[tuple[str, int]]:
    """Before and after every launch and every wait of the program."""
    clean = start(case)
    for call in program:
        clean.do(call)
    backend: Any = clean.state.backend
    for kind, times in backend.calls.items():
        yield from ((kind, k) for k in range(times))


def until_the_fault(case: Case, program: list[Call], fault: tuple[str, int], **options: Any) -> tuple[Run, list[Call]]:
    """Run until a call raises: the run as that call left it, and the calls still to make, that one included."""
    run = start(case, fault=fault, **options)
    for i, call in enumerate(program):
        try:
            run.do(call)
        except InjectedFault:
            return run, program[i:]
    return run, []


def ending(run: Run) -> list[dict[str, Any]]:
    """Finish whatever the program left; all gradients taken, the last ones included."""
    for call in (("wait", "all"), ("finish", False), ("grads",)):
        run.do(call)
    return run.taken


@st.composite
def programs(draw: st.DrawFn) -> tuple[Case, list[Call]]:
    """A model and calls on it that communicate."""
    case, program = draw(cases(4)), draw(st.lists(calls, min_size=5, max_size=7))
    assume(len(list(faults(case, program))) >= 4)
    return case, program


@given(programs(), st.booleans(), st.booleans())
@settings(no_explaining, max_examples=80)
def test_after_a_fault_anywhere_a_reset_and_a_full_step_are_a_clean_step(
    scenario: tuple[Case, list[Call]], lasting: bool, in_place: bool
) -> None:
    case, program = scenario
    expected = full_step(start(case).state, case)
    for fault in faults(case, program):
        run, _ = until_the_fault(case, program, fault, lasting=lasting, in_place=in_place)
        backend: Any = run.state.backend
        assert backend.in_flight <= handles(run.state)
        assert_same(h.masters(run.state), case.rows(case.values()))
        state = h.reset_iter(run.state)
        assert not backend.in_flight
        assert (state.micro, state.ledger) == (0, ())
        for found, wanted in zip(full_step(state, case), expected, strict=True):
            assert_same(found, wanted)


@given(programs(), st.booleans())
@settings(no_explaining, max_examples=80)
def test_after_a_fault_anywhere_trying_again_ends_as_if_nothing_had_happened(
    scenario: tuple[Case, list[Call]], in_place: bool
) -> None:
    case, program = scenario
    clean = start(case)
    for call in program:
        clean.do(call)
    last = clean.state
    expected = ending(clean)
    for fault in faults(case, program):
        run, left = until_the_fault(case, program, fault, in_place=in_place)
        for call in left:
            run.do(call)
        assert run.state.ledger == last.ledger
        assert [line for line in h.diff(run.state, last) if "masters" not in line] == []
        for found, wanted in zip(ending(run), expected, strict=True):
            assert_same(found, wanted)


@given(
    cases(4, exact=True),
    st.lists(st.sampled_from(Sync), min_size=1, max_size=2),
    st.sampled_from(Sync),
    st.booleans(),
    st.booleans(),
)
@settings(no_explaining, max_examples=80)
def test_a_reset_that_keeps_accumulated_gradients_forgets_the_failed_microbatch_only(
    case: Case, earlier: list[Sync], sync: Sync, lasting: bool, in_place: bool
) -> None:
    micros = [case.grads(i) for i in range(len(earlier) + 1)]
    microbatch = (
        lambda s: h.unshard(s, async_op=True),
        h.wait,
        h.shard,
        lambda s: h.reduce_grads(s, micros[-1], sync=sync),
    )
    for kind in ("launch", "wait"):
        for k in count():
            backend = Probe(case.mesh, lasting=lasting, in_place=in_place)
            state = h.shard(case.params(), case.layout, backend=backend)
            for grads, how in zip(micros, earlier, strict=False):
                state = h.reduce_grads(state, grads, sync=how)
            backend.fault = (kind, backend.calls[kind] + k)
            try:
                for move in microbatch:
                    state = move(state)
                break  # the microbatch has no k-th launch or wait
            except InjectedFault:
                state = h.reset_iter(state, keep=Keep.ACCUMULATED)
            assert not backend.in_flight
            assert state.micro == len(earlier)
            for move in microbatch:
                state = move(state)
            state, rows = h.grads(h.reduce_grads(state, None))
            for name, row in rows.items():
                case.assert_gradient(name, row, sum(m[name].astype("float64") for m in micros))


# ------------------------------------------------------------------------------------------------------- known faults

SPECS = [ParamSpec("w", (3, 2), "float32"), ParamSpec("a.w", (4,), "float32"), ParamSpec("b.w", (5,), "float32")]
KNOWN = Case(h.plan_layout(SPECS, MeshSpec.hsdp(2, 2), ["a", "b"]), 1)


def test_the_faults_of_a_program_are_all_its_launches_and_waits() -> None:
    program = [("unshard", "all", False), ("reduce", "all", Sync.FULL, True), ("grads",)]
    found = list(faults(KNOWN, program))
    assert found == [(kind, k) for kind in ("launch", "issued", "wait", "landed") for k in range(9)]
    left = [len(until_the_fault(KNOWN, program, fault)[1]) for fault in found]
    launches, waits = [3, 3, 3, 2, 2, 2, 1, 1, 1], [3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert left == launches * 2 + waits * 2


FINISH = {
    "wait": h.wait,
    "grads": h.grads,
    "reset_iter": lambda s: h.reset_iter(s, keep=Keep.ACCUMULATED),
    "reduce_grads": lambda s: h.reduce_grads(s, None),
}


@pytest.mark.parametrize("mesh", [MeshSpec.fsdp(4), MeshSpec.hsdp(2, 2), MeshSpec.replicated(4)])
@pytest.mark.parametrize(
    ("sync", "finish"), [(Sync.FULL, f) for f in FINISH if f != "reduce_grads"] + [(Sync.SHARD, "reduce_grads")]
)
def test_finishing_again_after_a_fault_doesnt_count_any_gradient_twice(sync: Sync, finish: str, mesh: MeshSpec) -> None:
    """The first unit is finished when a later one fails; on a backend that works in place its sum is gone unless it was
    kept."""
    case = Case(h.plan_layout(SPECS, mesh, ["a", "b"]), 1)
    grads = case.grads(0)
    for kind in ("launch", "wait"):
        for k in count():
            backend = Probe(mesh, in_place=True)
            state = h.shard(case.params(), case.layout, backend=backend)
            state = h.reduce_grads(state, grads, sync=sync, async_op=sync is Sync.FULL)
            backend.fault = (kind, backend.calls[kind] + k)
            try:
                FINISH[finish](state)
                break  # finishing has no k-th launch or wait
            except InjectedFault:
                assert backend.in_flight <= handles(state)
            if sync is Sync.SHARD:
                state = FINISH[finish](state)
            for name, row in h.grads(state)[1].items():
                assert row is not None
                case.assert_gradient(name, row, np.asarray(grads[name]))


def test_a_reduction_that_failed_for_good_cant_be_kept_but_can_be_dropped() -> None:
    backend = Probe(KNOWN.mesh, fault=("wait", 0), lasting=True)
    state = h.shard(KNOWN.params(), KNOWN.layout, backend=backend)
    state = h.reduce_grads(state, KNOWN.grads(0), async_op=True)
    for call in (h.wait, h.grads, h.wait, lambda s: h.reset_iter(s, keep=Keep.ACCUMULATED)):
        with pytest.raises(InjectedFault):
            call(state)
    state = h.reset_iter(state)
    assert not backend.in_flight
    for found, wanted in zip(full_step(state, KNOWN), full_step(start(KNOWN).state, KNOWN), strict=True):
        assert_same(found, wanted)


def test_a_gather_that_failed_for_good_doesnt_keep_accumulated_gradients_from_being_kept() -> None:
    backend = Probe(KNOWN.mesh, lasting=True)
    state = h.shard(KNOWN.params(), KNOWN.layout, backend=backend)
    state = h.unshard(h.reduce_grads(state, KNOWN.grads(0), sync=Sync.NONE), async_op=True)
    backend.fault = ("wait", 1)
    with pytest.raises(InjectedFault):
        h.wait(state)
    state = h.reset_iter(state, keep=Keep.ACCUMULATED)
    _, rows = h.grads(h.reduce_grads(state, None))
    for name, row in rows.items():
        assert row is not None
        KNOWN.assert_gradient(name, row, np.asarray(KNOWN.grads(0)[name]))


def test_masters_survive_a_fault_while_they_are_replaced() -> None:
    class Refusing(Probe):
        joined = 0

        def join(self, *args: Any) -> Any:
            self.joined += 1
            if self.joined == 2:
                raise InjectedFault("no memory")
            return super().join(*args)

    state = h.shard(KNOWN.params(), KNOWN.layout, backend=Refusing(KNOWN.mesh))
    new = KNOWN.rows(KNOWN.values(1))
    with pytest.raises(InjectedFault):
        h.apply_updates(state, new)
    assert_same(h.masters(state), KNOWN.rows(KNOWN.values()))
    after = h.apply_updates(state, new)
    assert_same(h.masters(after), new)
    assert after.step == 1
