"""The pure functions on the whole state.

Every function that returns a state *consumes* the one it was given: the old value's memory may be reused, and using it
again raises `StaleStateError`. A call that raises consumes nothing and leaves the old state as usable as before.
Each checks names, shapes, dtypes and the transition table first, then communicates, then builds the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import overload

from . import unit as on_unit
from .backend import Backend, Tensor
from .checks import check_grads, check_params
from .errors import LayoutError, PolicyError, RankMismatchError
from .layout import Bucket, Collective, Layout, Member, UnitLayout
from .lifecycle import GradPhase, Op, check
from .policy import Keep, Sync
from .schedule import Log
from .state import GradShards, HSDPState, Pending, Regrouped, Token, UnitState

Units = str | Iterable[str] | None


@overload
def shard(source: Mapping[str, Tensor], layout: Layout, *, backend: Backend) -> HSDPState: ...
@overload
def shard(source: HSDPState, layout: Units = None, *, after_forward: bool = False) -> HSDPState: ...
def shard(
    source: Mapping[str, Tensor] | HSDPState,
    layout: Layout | Units = None,
    *,
    backend: Backend | None = None,
    after_forward: bool = False,
) -> HSDPState:
    """``shard(params, layout, backend=backend)``: full parameters to the first state.
    ``shard(state, units)``: drop gathered parameters ("reshard"); the second argument names units, None for all.

    Communicates: the first form exchanges one short message a rank (the layout's digest or the error found), so that
    all ranks fail together; no tensor travels. The second form not at all.

    Args:
        source: a mapping from fully qualified name to full parameter (each rank passes all rows and keeps its own;
            the tensors aren't changed), or a state.
        after_forward: of a state: where the layout's ``reshard_after_forward`` is a group size, go no further than to
            that (phase REGROUPED); the next `unshard` gathers over these groups.

    Raises:
        LayoutError: a missing or unknown parameter, another shape or dtype than planned.
        MeshError, BackendError: the layout doesn't fit this world or device.
        RankMismatchError: ranks have different layouts, or another rank failed its checks.
        PhaseError: a unit is still being gathered.
    """
    if isinstance(source, HSDPState):
        if isinstance(layout, Layout):
            raise TypeError("shard(state, units) takes unit names; shard(params, layout, backend=...) takes a layout")
        backend = source.backend

        def reshard(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
            return on_unit.reshard_after_forward(u, plan, backend) if after_forward else on_unit.reshard(u)

        return _each(source, layout, Op.SHARD, reshard)
    if not isinstance(layout, Layout) or backend is None:
        raise TypeError("shard(params, layout, *, backend): give a Layout and a backend")
    failure: Exception | None = None
    try:
        backend.check(layout)
        check_params(source, layout, backend)
    except Exception as error:  # whatever it is, the peers must learn of it
        failure = error
    answers = backend.exchange(f"error: {failure}" if failure else f"layout {layout.digest}")
    if failure is not None:
        raise failure
    first = min(answers)
    if wrong := [f"rank {rank}: {answer}" for rank, answer in answers.items() if answer != answers[first]]:
        raise RankMismatchError(
            f"shard: ranks disagree. rank {first}: {answers[first]}; {'; '.join(wrong)}. All ranks must plan from the "
            f"same names, shapes, mesh and policies."
        )
    backend.prepare(layout)
    units = []
    for plan in layout.units:
        masters = tuple(
            backend.shard_params(b.mesh, b.params, [source[m.spec.name] for m in b.params.members])
            for b in plan.buckets
        )
        units.append(UnitState(plan.name, masters))
    return HSDPState(tuple(units), layout, backend, 0, 0, (), Token())


def unshard(state: HSDPState, units: Units = None, *, async_op: bool = False) -> HSDPState:
    """Gather full parameters.

    Communicates: for each sharded unit one all-gather a bucket over its shard group, or over the smaller group that it
    was resharded to (output bytes: the padded unit in compute dtype). Units that are gathered already cost nothing.

    Args:
        units: names; None for all.
        async_op: leave the gathers in flight (phase GATHERING) for a later `wait`.

    Raises:
        UnknownUnitError, StaleStateError: before any collective.
    """

    def gather(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
        return on_unit.start_gather(u, plan, state.backend, log)

    started = _each(state, units, Op.UNSHARD, gather, consume=False)
    if not async_op:
        selected = state.layout.select(units)
        done = list(started.units)
        try:
            for i in selected:
                done[i] = on_unit.finish_gather(done[i], state.layout.units[i], state.backend)
            state.backend.settle()
        except BaseException:
            for u in started.units:
                on_unit.drop_flight(u, state.backend)
            raise
        started = _next(started, done, ())
    state.token.consume("unshard")
    return started


def wait(state: HSDPState, units: Units = None) -> HSDPState:
    """Finish what is in flight: gathers, reductions.

    Communicates: only where a ``Sync.FULL`` reduction still owes its all-reduce (buckets with more than one replicate
    rank): one all-reduce each, over the replicate group.

    Raises:
        UnknownUnitError, StaleStateError: before any collective.
    """

    def finish(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
        u = on_unit.finish_gather(u, plan, state.backend)
        u = on_unit.finish_reduce(u, plan, state.backend, log)
        state.backend.settle()
        return u

    return _each(state, units, Op.WAIT, finish)


def full_params(state: HSDPState, units: Units = None) -> dict[str, Tensor]:
    """Full parameters of unsharded units by name, aliases included. Does not communicate, doesn't consume.

    Returns:
        Tensors of the full shape in compute dtype. They are the state's memory: read them, don't write.

    Raises:
        PhaseError: a unit is sharded or still being gathered.
    """
    state.token.require("full_params")
    out: dict[str, Tensor] = {}
    for i in state.layout.select(units):
        u, plan = state.units[i], state.layout.units[i]
        check(u.name, u.params_phase, u.grads_phase, Op.FULL_PARAMS)
        assert isinstance(u.full, tuple)
        out.update((name, u.full[at]) for name, at in plan.positions.items())
    return out


def reduce_grads(
    state: HSDPState,
    grads: Mapping[str, Tensor | None] | None,
    *,
    sync: Sync = Sync.FULL,
    units: Units = None,
    async_op: bool = False,
) -> HSDPState:
    """Take in one microbatch's whole gradients and reduce them as far as ``sync`` says.

    Communicates: ``NONE`` nothing; ``SHARD`` one reduce-scatter a bucket over its shard group; ``FULL`` that and one
    all-reduce a bucket over its replicate group, where those have more than one rank. NONE, NONE, FULL and SHARD,
    SHARD, FULL give the same gradient as FULL of the sum.

    Args:
        grads: every trainable parameter of the selected units by name: a tensor of the full shape in compute dtype (or
            accumulation dtype), or None for one that wasn't used. None instead of a mapping adds nothing and only
            finishes what is held.
        sync: see `Sync`.
        units: names; None for all, which also counts the microbatch.
        async_op: leave reductions in flight for `wait` or `grads`.

    Raises:
        GradientError: names missing, unknown or of frozen parameters; another shape or dtype. Before any collective.
        PhaseError: an earlier reduction of a unit is still in flight.
    """
    state.token.require("reduce_grads")
    if not isinstance(sync, Sync):
        raise TypeError(f"reduce_grads: sync must be a Sync (NONE, SHARD or FULL), found {sync!r}")
    selected = state.layout.select(units)
    rows = None if grads is None else check_grads(state, selected, grads)
    if rows is not None and sync is Sync.NONE:  # what is held must not change with the caller's tensors
        rows = {unit: [None if g is None else state.backend.clone(g) for g in row] for unit, row in rows.items()}

    def reduce(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
        given = None if rows is None else rows[plan.name]
        u = on_unit.start_reduce(u, plan, state.backend, given, sync, log)
        if not async_op:
            u = on_unit.finish_reduce(u, plan, state.backend, log)
            state.backend.settle()
        return u

    micro = state.micro + (1 if grads is not None and units is None else 0)
    return _each(state, units, Op.REDUCE, reduce, micro=micro)


def grads(state: HSDPState) -> tuple[HSDPState, dict[str, Tensor | None]]:
    """Take the finished gradients out of the state, waiting for those in flight.

    Communicates: as `wait` does.

    Returns:
        The state without them, and for each trainable parameter this rank's rows of the gradient (shape of the local
        shard, master dtype or with `MixedPrecisionPolicy.apply_grad_on_fp32_main_grad` reduce dtype, scaled by the
        layout's `ReductionPolicy`), or None where no microbatch used it.

    Raises:
        PhaseError: a unit holds microbatches that aren't fully reduced.
    """
    backend = state.backend
    out: dict[str, Tensor | None] = {}
    state.token.require("grads")
    for u in state.units:  # a SHARD reduction in flight will end in HELD: refuse it before anything is awaited
        if u.reducing is not None and u.reducing.sync is not Sync.FULL:
            check(u.name, u.params_phase, GradPhase.HELD, Op.GRADS)

    def take(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
        u = on_unit.finish_reduce(u, plan, backend, log)
        out.update((p.name, None) for p in plan.trainable)
        if u.grad is not None:
            for bucket, flat in zip(plan.buckets, u.grad.flats, strict=True):
                if flat is not None and bucket.grads is not None:
                    rows = backend.split(bucket.mesh, bucket.grads, flat)
                    for member, row in zip(bucket.grads.members, rows, strict=True):
                        if u.grad.present[member.index]:
                            out[member.spec.name] = row
        backend.settle()
        return UnitState(u.name, u.master, u.full)

    return _each(state, None, Op.GRADS, take), out


def masters(state: HSDPState) -> dict[str, Tensor]:
    """This rank's rows of every parameter, by name: views of the masters. Does not communicate, doesn't consume.

    A parameter with fewer rows than ranks has zero rows on some; the other dims stay.
    """
    state.token.require("masters")
    state.backend.settle()  # they may be updated in place
    out: dict[str, Tensor] = {}
    for u, plan in zip(state.units, state.layout.units, strict=True):
        for bucket, flat in zip(plan.buckets, u.master, strict=True):
            rows = state.backend.split(bucket.mesh, bucket.params, flat)
            out.update((m.spec.name, row) for m, row in zip(bucket.params.members, rows, strict=True))
    return out


def apply_updates(state: HSDPState, masters: Mapping[str, Tensor]) -> HSDPState:
    """New master values: the end of an optimizer step. Does not communicate.

    Args:
        masters: this rank's rows of parameters by name, shapes and dtypes as `masters` gives them. Those left out stay
            as they are. Rows that are views of the present masters, updated in place, are taken without a copy.

    Returns:
        The state with ``step + 1``, no microbatches and an empty ledger.

    Raises:
        LayoutError: an unknown name, another shape or dtype.
        PhaseError: a unit is unsharded, or has gradients that would be lost.
    """
    return _replace_masters(state, masters, Op.APPLY, state.step + 1)


def load_masters(state: HSDPState, masters: Mapping[str, Tensor], *, step: int) -> HSDPState:
    """Master values of a checkpoint: like `apply_updates`, but sets the step count. Does not communicate."""
    return _replace_masters(state, masters, Op.LOAD, step)


def reset_iter(state: HSDPState, *, keep: Keep = Keep.NOTHING) -> HSDPState:
    """Back to the start of the step, from any phase: waits for what is in flight, drops gathered parameters and, unless
    kept, all gradients of the step. Masters are untouched.

    Communicates: nothing with ``NOTHING``; with ``ACCUMULATED`` as `wait` does, to finish reductions in flight.

    Args:
        keep: ``ACCUMULATED`` keeps the gradients of microbatches that had succeeded, so that only the failed one has to
            be run again.
    """
    if not isinstance(keep, Keep):
        raise TypeError(f"reset_iter: keep must be a Keep (NOTHING or ACCUMULATED), found {keep!r}")
    backend = state.backend
    kept = keep is Keep.ACCUMULATED

    def reset(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
        if kept:
            u = on_unit.finish_reduce(u, plan, backend, log)
            on_unit.drop_flight(u, backend)
            return UnitState(u.name, u.master, None, u.acc_full, u.acc_partial, None, u.grad)
        on_unit.drop_flight(u, backend)
        return UnitState(u.name, u.master)

    new = _each(state, None, Op.RESET, reset)
    if kept:
        return new
    return HSDPState(new.units, new.layout, new.backend, new.step, 0, (), new.token)


def clone(state: HSDPState) -> HSDPState:
    """A second state with its own memory, for branching. Does not communicate, doesn't consume.

    Raises:
        PendingError: something is in flight.
    """
    state.token.require("clone")
    copy = state.backend.clone

    def flats(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(None if t is None else copy(t) for t in tensors)

    def shards(g: GradShards | None) -> GradShards | None:
        return None if g is None else GradShards(flats(g.flats), g.present)

    units = []
    for u in state.units:
        if u.reducing is not None:
            u.reducing.read()
        if isinstance(u.full, Pending):
            u.full.read()
        full: tuple[Tensor, ...] | Regrouped | None = None
        if isinstance(u.full, Regrouped):
            full = Regrouped(flats(u.full.flats))
        elif isinstance(u.full, tuple):
            full = flats(u.full)
        acc = None if u.acc_full is None else flats(u.acc_full)
        units.append(UnitState(u.name, flats(u.master), full, acc, shards(u.acc_partial), None, shards(u.grad)))
    return HSDPState(tuple(units), state.layout, state.backend, state.step, state.micro, state.ledger, Token())


def _each(
    state: HSDPState,
    units: Units,
    op: Op,
    move: Callable[[UnitState, UnitLayout, Log], UnitState],
    *,
    micro: int | None = None,
    consume: bool = True,
) -> HSDPState:
    """Check all selected units against the table, then move each, then build the new state and consume the old."""
    state.token.require(op.value)
    selected = state.layout.select(units)
    for i in selected:
        u = state.units[i]
        check(u.name, u.params_phase, u.grads_phase, op)
    done = list(state.units)
    log = Log(state.token.journal)
    try:
        for i in selected:
            done[i] = move(done[i], state.layout.units[i], log)
    except BaseException:
        for before, after in zip(state.units, done, strict=True):
            if after is not before:
                on_unit.drop_flight(after, state.backend)
        raise
    new = _next(state, done, tuple(log), micro)
    if consume:
        state.token.consume(op.value)
    return new


def _next(
    state: HSDPState, units: Sequence[UnitState], log: tuple[Collective, ...], micro: int | None = None
) -> HSDPState:
    micro = state.micro if micro is None else micro
    return HSDPState(
        tuple(units), state.layout, state.backend, state.step, micro, state.ledger + log, Token(state.token.journal)
    )


def _replace_masters(state: HSDPState, masters: Mapping[str, Tensor], op: Op, step: int) -> HSDPState:
    state.token.require(op.value)
    backend, layout = state.backend, state.layout
    given = dict(masters)

    def expect(b: Bucket, m: Member) -> tuple[str, tuple[int, ...]]:
        return b.dtype, backend.local_shape(b.mesh, m)

    expected = {m.spec.name: expect(b, m) for plan in layout.units for b in plan.buckets for m in b.params.members}
    for name, rows in given.items():
        if name not in expected:
            raise LayoutError(f"{op.value}: {name!r} is no parameter of this layout")
        try:
            found = (backend.dtype(rows), backend.shape(rows))
        except (AttributeError, TypeError, PolicyError):
            raise LayoutError(f"{op.value}: {name!r} is {type(rows).__name__}, no tensor of this backend") from None
        if found != expected[name]:
            raise LayoutError(
                f"{op.value}: {name!r} has dtype {found[0]} and shape {found[1]}; this rank's rows are "
                f"{expected[name][0]} {expected[name][1]}. Give the local rows, as masters(state) does."
            )

    def replace(u: UnitState, plan: UnitLayout, log: Log) -> UnitState:
        flats = tuple(
            backend.join(b.mesh, b.params, flat, [given.get(m.spec.name) for m in b.params.members])
            for b, flat in zip(plan.buckets, u.master, strict=True)
        )
        return UnitState(u.name, flats)

    new = _each(state, None, op, replace)
    return HSDPState(new.units, layout, backend, step, 0, (), new.token)
