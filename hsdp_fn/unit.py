"""The pure functions on one unit. `ops` lifts them to whole states; a running forward and backward calls them directly.

Each takes a `UnitState` and returns a new one, and never writes into memory that the old one holds (unless that was
donated), so that whatever fails later, the old one can be used again. ``log`` collects the
collectives issued. When a collective can't be issued, those already launched by the same call are awaited before the
error leaves, so that no buffer is freed under a running collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from .backend import Backend, Handle, Tensor
from .layout import Bucket, Collective, UnitLayout
from .lifecycle import Op, check
from .policy import Sync
from .schedule import Log
from .state import GradShards, Pending, Regrouped, UnitState


def start_gather(unit: UnitState, plan: UnitLayout, backend: Backend, log: Log) -> UnitState:
    """Communicates: one all-gather a bucket over its shard group, or over the smaller group that the unit was resharded
    to. SHARDED or REGROUPED -> GATHERING; otherwise the unit itself."""
    if unit.full is not None and not isinstance(unit.full, Regrouped):
        return unit
    check(unit.name, unit.params_phase, unit.grads_phase, Op.UNSHARD)
    outputs: list[Tensor] = []
    keepalive: list[Tensor] = []
    handles: list[Handle] = []
    regathering = isinstance(unit.full, Regrouped)
    pieces = unit.full.flats if isinstance(unit.full, Regrouped) else (None,) * len(plan.buckets)
    with _Awaiting(backend, handles):
        for bucket, master, piece in zip(plan.buckets, unit.master, pieces, strict=True):
            if piece is not None and bucket.regather is not None:
                mesh, gather, source = bucket.regather.mesh, bucket.regather.gather, piece
            else:
                mesh, gather, source = bucket.mesh, bucket.gather, backend.load(master, bucket.compute_dtype)
            # Without a gather full parameters would be the masters' own memory; an edit in place would reach them.
            output, handle = backend.clone(source) if source is master and gather is None else source, None
            if gather is not None:
                output, handle = backend.all_gather(mesh, source)
                log.append(gather)
            outputs.append(output)
            keepalive.append(source)
            handles.append(handle)
    pending = Pending(
        "all_gather", unit.name, tuple(outputs), tuple(keepalive), tuple(handles), regathering=regathering
    )
    return UnitState(unit.name, unit.master, pending, unit.acc_full, unit.acc_partial, unit.reducing, unit.grad)


def finish_gather(unit: UnitState, plan: UnitLayout, backend: Backend) -> UnitState:
    """Does not communicate: waits. GATHERING -> UNSHARDED; otherwise the unit itself."""
    pending = unit.full
    if not isinstance(pending, Pending):
        return unit
    await_all(backend, pending.handles)
    if len(plan.buckets) == 1:  # members are then in the unit's order
        full = _unpacked(plan.buckets[0], pending, pending.outputs[0], backend)
    else:
        placed: list[Tensor] = [None] * len(plan.params)
        for bucket, output in zip(plan.buckets, pending.outputs, strict=True):
            tensors = _unpacked(bucket, pending, output, backend)
            for member, tensor in zip(bucket.params.members, tensors, strict=True):
                placed[member.index] = tensor
        full = tuple(placed)
    return UnitState(unit.name, unit.master, full, unit.acc_full, unit.acc_partial, unit.reducing, unit.grad)


def reshard(unit: UnitState) -> UnitState:
    """Does not communicate: drops the full parameters, or pieces of them. UNSHARDED or REGROUPED -> SHARDED; illegal
    while they are gathered."""
    if unit.full is None:
        return unit
    check(unit.name, unit.params_phase, unit.grads_phase, Op.SHARD)
    return UnitState(unit.name, unit.master, None, unit.acc_full, unit.acc_partial, unit.reducing, unit.grad)


def reshard_after_forward(unit: UnitState, plan: UnitLayout, backend: Backend) -> UnitState:
    """Does not communicate: `reshard`, but where the plan says a group size, this rank keeps its piece of its group's.
    UNSHARDED -> REGROUPED then; REGROUPED stays so."""
    pieces = isinstance(unit.full, (tuple, Regrouped)) and any(b.regather for b in plan.buckets)
    if not pieces or type(plan.reshard_after_forward) is bool:
        return reshard(unit)
    if not isinstance(unit.full, tuple):
        return unit
    flats = tuple(
        backend.piece(b.regather.mesh, b.regather.params, [unit.full[m.index] for m in b.regather.params.members])
        if b.regather is not None
        else None
        for b in plan.buckets
    )
    full = Regrouped(flats)
    return UnitState(unit.name, unit.master, full, unit.acc_full, unit.acc_partial, unit.reducing, unit.grad)


def start_reduce(
    unit: UnitState,
    plan: UnitLayout,
    backend: Backend,
    grads: Sequence[Tensor | None] | None,
    sync: Sync,
    log: Log,
) -> UnitState:
    """Take in one microbatch's whole gradients.

    Communicates: with ``SHARD`` and ``FULL`` one reduce-scatter a bucket over its shard group (with nothing held and no
    gradient at all: none). ``FULL`` all-reduces later, in `advance_reduce`; at once where there is no shard group.

    Args:
        grads: one a parameter in the unit's order, in compute dtype; None for a frozen or unused one. None altogether
            finishes what is held.

    Returns:
        With NONE a unit that holds ``acc_full``; otherwise one that is REDUCING, or the unit itself when there was
        nothing to reduce.
    """
    check(unit.name, unit.params_phase, unit.grads_phase, Op.REDUCE)
    if grads is None:
        grads = (None,) * len(plan.params)
    if plan.reduction.unused == "zeros" and sync is not Sync.NONE:
        wanted = tuple(p.requires_grad for p in plan.params)
    else:
        wanted = (False,) * len(plan.params)
    if sync is Sync.NONE:
        acc = _accumulate(unit, plan, backend, grads)
        return UnitState(unit.name, unit.master, unit.full, acc, unit.acc_partial, None, unit.grad)
    held = grads if unit.acc_full is None else _accumulate(unit, plan, backend, grads)
    assert held is not None
    present = tuple(g is not None or w for g, w in zip(held, wanted, strict=True))
    finishing = sync is Sync.FULL and unit.acc_partial is not None
    if not any(present) and not finishing:
        return unit
    outputs: list[Tensor | None] = []
    keepalive: list[Tensor | None] = []
    handles: list[Handle] = []
    summed: list[bool] = []
    with _Awaiting(backend, handles):
        for i, bucket in enumerate(plan.buckets):
            output = source = handle = None
            done = False
            if bucket.grads is not None and any(present[m.index] for m in bucket.grads.members):
                before, _ = plan.reduction.factors(bucket.mean_over, bucket.reduce_dtype)
                tensors = [held[m.index] for m in bucket.grads.members]
                output = source = backend.pack(bucket.mesh, bucket.grads, tensors, bucket.reduce_dtype, before)
                if bucket.reduce_scatter is not None:
                    output, handle = backend.reduce_scatter(bucket.mesh, source)
                    log.append(bucket.reduce_scatter)
            if bucket.reduce_scatter is None and bucket.all_reduce is not None and sync is Sync.FULL:
                total = _sum(_partial(unit, i), source, bucket, backend)
                if total is not None:
                    buffer = backend.cast(total, bucket.reduce_dtype)
                    buffer = backend.clone(buffer) if buffer is _partial(unit, i) else buffer
                    output, handle = backend.all_reduce(bucket.mesh, buffer)
                    log.append(bucket.all_reduce)
                    done = True
            outputs.append(output)
            keepalive.append(source)
            handles.append(handle)
            summed.append(done)
    pending = Pending(
        "reduce", unit.name, tuple(outputs), tuple(keepalive), tuple(handles), sync, present, tuple(summed)
    )
    return UnitState(unit.name, unit.master, unit.full, None, unit.acc_partial, pending, unit.grad)


def advance_reduce(
    unit: UnitState,
    plan: UnitLayout,
    backend: Backend,
    log: Log,
    *,
    donate: bool = False,
) -> UnitState:
    """One step further with a reduction in flight.

    Communicates: after the reduce-scatter of a ``FULL`` reduction, one all-reduce a bucket over its replicate group
    when that has more than one rank. Waits for what is in flight before.

    Args:
        donate: the caller gives the unit up even if the call fails: its buffers in flight may be overwritten.

    Returns:
        A unit that is REDUCING still (its all-reduce runs), or READY, or HELD (after ``SHARD``).
    """
    pending = unit.reducing
    if pending is None:
        return unit
    await_all(backend, pending.handles)
    held = unit.acc_partial
    present = pending.present if held is None else _either(pending.present, held.present)
    sums = [
        new if done else _sum(_partial(unit, i), new, bucket, backend)
        for i, (bucket, new, done) in enumerate(zip(plan.buckets, pending.outputs, pending.summed, strict=True))
    ]
    if pending.sync is Sync.SHARD:
        flats = tuple(
            None if s is None else backend.cast(s, b.acc_dtype) for s, b in zip(sums, plan.buckets, strict=True)
        )
        return UnitState(unit.name, unit.master, unit.full, None, GradShards(flats, present), None, unit.grad)
    handles: list[Handle] = []
    outputs: list[Tensor | None] = []
    with _Awaiting(backend, handles):
        for i, (bucket, total, done) in enumerate(zip(plan.buckets, sums, pending.summed, strict=True)):
            handle = None
            if total is not None and bucket.all_reduce is not None and not done:
                buffer = backend.cast(total, bucket.reduce_dtype)
                if (buffer is pending.outputs[i] and not donate) or buffer is _partial(unit, i):
                    # This unit still holds the memory: should the call fail, it must find its own sum there.
                    buffer = backend.clone(buffer)
                total, handle = backend.all_reduce(bucket.mesh, buffer)
                log.append(bucket.all_reduce)
            outputs.append(total)
            handles.append(handle)
    if all(handle is None for handle in handles):
        mine = tuple(donate and a is b for a, b in zip(outputs, pending.outputs, strict=True))
        return _finished(unit, plan, backend, outputs, present, mine)
    everything = (True,) * len(outputs)
    pending = Pending("reduce", unit.name, tuple(outputs), (), tuple(handles), Sync.FULL, present, everything)
    return UnitState(unit.name, unit.master, unit.full, None, None, pending, unit.grad)


def finish_reduce(unit: UnitState, plan: UnitLayout, backend: Backend, log: Log) -> UnitState:
    """`advance_reduce` until nothing is in flight."""
    while unit.reducing is not None:
        unit = advance_reduce(unit, plan, backend, log)
    return unit


def drop_flight(unit: UnitState, backend: Backend) -> None:
    """Wait for whatever the unit has in flight, ignoring failures: its buffers may be freed afterwards."""
    for pending in (unit.full, unit.reducing):
        if isinstance(pending, Pending):
            for handle in pending.handles:
                with suppress(Exception):
                    backend.wait(handle)


def pay(owed: Collective, plan: UnitLayout, unit: UnitState, backend: Backend) -> None:
    """Take part in a collective that peers wait for, for a rank that has failed: with zeros, or its own shard, and the
    result is thrown away. Communicates: that collective; and waits for it."""
    bucket = plan.buckets[owed.bucket]
    if owed.op == "all_gather" and bucket.regather is not None and owed == bucket.regather.gather:
        piece = backend.zeros(bucket.regather.params.numel, bucket.compute_dtype)
        _, handle = backend.all_gather(bucket.regather.mesh, piece)
    elif owed.op == "all_gather":
        _, handle = backend.all_gather(bucket.mesh, backend.load(unit.master[owed.bucket], bucket.compute_dtype))
    elif owed.op == "reduce_scatter":
        _, handle = backend.reduce_scatter(bucket.mesh, backend.zeros(owed.numel, owed.dtype))
    else:
        _, handle = backend.all_reduce(bucket.mesh, backend.zeros(owed.numel, owed.dtype))
    backend.wait(handle)


def await_all(backend: Backend, handles: Sequence[Handle]) -> None:
    """Wait for all handles; the first failure is raised after the last wait."""
    failure: Exception | None = None
    for handle in handles:
        if handle is not None:
            try:
                backend.wait(handle)
            except Exception as error:
                failure = failure or error
    if failure is not None:
        raise failure


def _unpacked(bucket: Bucket, pending: Pending, output: Tensor, backend: Backend) -> tuple[Tensor, ...]:
    if pending.regathering and bucket.regather is not None:
        return backend.unpack(bucket.regather.mesh, bucket.regather.params, output)
    return backend.unpack(bucket.mesh, bucket.params, output)


def _accumulate(
    unit: UnitState, plan: UnitLayout, backend: Backend, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...] | None:
    """Earlier whole gradients plus these, in the layout's accumulation dtype; None when there is none at all."""
    held = unit.acc_full or (None,) * len(plan.params)
    out: list[Tensor | None] = list(held)
    for bucket in plan.buckets:
        for member in bucket.grads.members if bucket.grads is not None else ():
            old, new = held[member.index], grads[member.index]
            if new is not None:
                out[member.index] = (
                    backend.cast(new, bucket.acc_dtype) if old is None else backend.add(old, new, bucket.acc_dtype)
                )
    return tuple(out) if any(t is not None for t in out) else None


def _finished(
    unit: UnitState,
    plan: UnitLayout,
    backend: Backend,
    sums: Sequence[Tensor | None],
    present: tuple[bool, ...],
    mine: Sequence[bool],
) -> UnitState:
    """Scale the sums into the gradient, in place where they are ``mine``, adding to one that is there already."""
    flats: list[Tensor | None] = []
    old = unit.grad
    for i, (bucket, total) in enumerate(zip(plan.buckets, sums, strict=True)):
        before = None if old is None else old.flats[i]
        if total is None:
            flats.append(before)
            continue
        _, after = plan.reduction.factors(bucket.mean_over, bucket.reduce_dtype)
        total = backend.store(total, bucket.grad_dtype, after, donate=mine[i])
        flats.append(total if before is None else backend.add(before, total, bucket.grad_dtype))
    if old is not None:
        present = _either(present, old.present)
    return UnitState(unit.name, unit.master, unit.full, None, None, None, GradShards(tuple(flats), present))


def _partial(unit: UnitState, bucket: int) -> Tensor | None:
    return None if unit.acc_partial is None else unit.acc_partial.flats[bucket]


def _sum(held: Tensor | None, new: Tensor | None, bucket: Bucket, backend: Backend) -> Tensor | None:
    """Earlier microbatches' sum plus the new one, either of which may be missing."""
    if held is None or new is None:
        return new if held is None else held
    return backend.add(held, new, bucket.acc_dtype)


def _either(a: Sequence[bool], b: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(x or y for x, y in zip(a, b, strict=True))


class _Awaiting:
    """On an error inside, wait for the collectives launched so far, then let it pass."""

    __slots__ = ("backend", "handles")

    def __init__(self, backend: Backend, handles: Sequence[Handle]) -> None:
        self.backend, self.handles = backend, handles

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            for handle in self.handles:
                if handle is not None:
                    with suppress(Exception):
                        self.backend.wait(handle)
