"""States that a person can read: what is where, what differs, what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .backend import Tensor
from .layout import UnitLayout
from .mesh import MeshSpec
from .schedule import totals
from .state import GradShards, HSDPState, Pending, Regrouped, UnitState

_FIELDS = ("master", "full", "acc_full", "acc_partial", "reducing", "grad")


def memory_bytes(state: HSDPState) -> dict[str, int]:
    """Bytes that this rank holds, by field of `UnitState`, and their ``total``. What is a view of the masters counts
    once, as masters; ``regrouped`` is what ``full`` holds while it is split over smaller groups, ``in_flight`` the
    buffers of running collectives."""
    sums = dict.fromkeys(("master", "full", "regrouped", "acc_full", "acc_partial", "grad", "in_flight"), 0)
    for u in state.units:
        for field in _FIELDS:
            value = getattr(u, field)
            key = "in_flight" if field == "reducing" or isinstance(value, Pending) else field
            key = "regrouped" if isinstance(value, Regrouped) else key
            sums[key] += sum(state.backend.nbytes(t) for t in _tensors(u, field, state))
    sums["total"] = sum(sums.values())
    return sums


def describe(state: HSDPState) -> str:
    """The state as a table: a line a unit with phases, parameters, shard, and bytes held; then the collectives issued
    since the last step. Does not communicate and works on a consumed state too."""
    layout, mesh = state.layout, state.layout.mesh
    consumed = f", consumed by {state.token.consumer} at {state.token.line}" if state.token.consumer else ""
    meshes = Counter(b.mesh for plan in layout.units for b in plan.buckets for _ in b.params.members)
    lines = [
        f"HSDPState step {state.step}, microbatch {state.micro}, layout {layout.digest}, backend {state.backend.name}"
        f"{consumed}",
        f"mesh {_roles(mesh)}",
        *(f"mesh {_roles(m)}: {n} parameters" for m, n in meshes.items() if m not in (mesh, mesh.as_replicated())),
        f"{'unit':<24} {'params':<10} {'grads':<9} {'tensors':>7} {'elements':>12} {'shard':>12} {'bytes':>12}",
    ]
    for u, plan in zip(state.units, layout.units, strict=True):
        held = sum(state.backend.nbytes(t) for f in _FIELDS for t in _tensors(u, f, state))
        lines.append(
            f"{plan.title:<24.24} {u.params_phase.value:<10} {u.grads_phase.value:<9} {len(plan.params):>7} "
            f"{sum(p.numel for p in plan.params):>12,} {sum(b.params.numel for b in plan.buckets):>12,} {held:>12,}"
        )
    for op, total in totals(state.ledger).items():
        lines.append(f"issued: {total.count} {op}, {total.nbytes:,} bytes ({total.padding:,} of them padding)")
    return "\n".join(lines)


def diff(a: HSDPState, b: HSDPState) -> list[str]:
    """What differs between two states, a line each; empty when nothing does. Compares counters, phases and which
    parameters have gradients, not values. Does not communicate."""
    if a.layout != b.layout:
        return [f"layouts differ: {a.layout.digest} and {b.layout.digest}"]
    out = []
    for field in ("step", "micro"):
        if getattr(a, field) != getattr(b, field):
            out.append(f"{field}: {getattr(a, field)} -> {getattr(b, field)}")
    if a.ledger != b.ledger:
        out.append(f"ledger: {len(a.ledger)} collectives -> {len(b.ledger)}")
    for x, y, plan in zip(a.units, b.units, a.layout.units, strict=True):
        where = f"unit {plan.title}"
        if x.params_phase is not y.params_phase:
            out.append(f"{where}: parameters {x.params_phase.value} -> {y.params_phase.value}")
        if x.grads_phase is not y.grads_phase:
            out.append(f"{where}: gradients {x.grads_phase.value} -> {y.grads_phase.value}")
        if any(p is not q for p, q in zip(x.master, y.master, strict=True)):
            out.append(f"{where}: masters are other tensors")
        for field in ("acc_full", "acc_partial", "grad"):
            p, q = _present(getattr(x, field), plan), _present(getattr(y, field), plan)
            if p != q:
                out.append(f"{where}: {field} of {sorted(p)} -> {sorted(q)}")
    return out


def _roles(mesh: MeshSpec) -> str:
    axes = " x ".join(f"{name}={n}" for name, n in zip(mesh.names, mesh.shape, strict=True))
    return f"{axes}: shard over {mesh.shard or 'nothing'}, replicate over {mesh.replicate or 'nothing'}"


def _present(value: Any, plan: UnitLayout) -> set[str]:
    if value is None:
        return set()
    mask = value.present if isinstance(value, GradShards) else [t is not None for t in value]
    return {p.name for p, has in zip(plan.params, mask, strict=True) if has}


def _tensors(u: UnitState, field: str, state: HSDPState) -> Iterator[Tensor]:
    """Tensors of a field, each once, without those that are views of the masters."""
    value = getattr(u, field)
    if field == "master":
        yield from value
        return
    if isinstance(value, (GradShards, Regrouped)):
        value = value.flats
    elif isinstance(value, Pending):
        value = (*value.outputs, *(k for k in value.keepalive if all(k is not o for o in value.outputs)))
    storage = state.backend.storage
    masters = {storage(m) for m in u.master}
    yield from (t for t in value or () if t is not None and storage(t) not in masters)
