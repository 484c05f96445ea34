"""What `ops` checks of the tensors it is given, before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .backend import Backend, Tensor
from .errors import GradientError, LayoutError, PolicyError
from .layout import Layout
from .state import HSDPState


def check_params(params: Mapping[str, Tensor], layout: Layout, backend: Backend) -> None:
    """Full parameters by name are those that the layout was planned for.

    Raises:
        LayoutError: naming the parameter.
    """
    specs = {p.name: p for p in layout.params()}
    if missing := [name for name in specs if name not in params]:
        raise LayoutError(f"shard: parameters of the layout that weren't given: {missing}")
    known = {n for p in specs.values() for n in (p.name, *p.aliases)} | set(layout.ignored)
    if unknown := [name for name in params if name not in known]:
        raise LayoutError(f"shard: parameters that the layout doesn't have: {unknown}; was it planned for this model?")
    for name, spec in specs.items():
        if (objection := backend.objection(params[name])) is not None:
            raise LayoutError(f"shard: parameter {name!r} {objection}")
        try:
            found = (backend.dtype(params[name]), backend.shape(params[name]))
        except PolicyError as error:
            raise LayoutError(f"shard: parameter {name!r}: {error}") from None
        if found != (spec.dtype, spec.shape):
            raise LayoutError(
                f"shard: parameter {name!r} has dtype {found[0]} and shape {found[1]}, but the layout was planned for "
                f"{spec.dtype} {spec.shape}"
            )


def check_grads(
    state: HSDPState, selected: Sequence[int], grads: Mapping[str, Tensor | None]
) -> dict[str, list[Tensor | None]]:
    """Gradients in each selected unit's parameter order.

    Raises:
        GradientError: naming the parameter.
    """
    backend = state.backend
    rows: dict[str, list[Tensor | None]] = {}
    used: set[str] = set()
    for i in selected:
        plan = state.layout.units[i]
        row: list[Tensor | None] = [None] * len(plan.params)
        for bucket in plan.buckets:
            for member in bucket.grads.members if bucket.grads is not None else ():
                name = member.spec.name
                if name not in grads:
                    raise GradientError(
                        f"reduce_grads: no gradient for {name!r} of unit {plan.title!r}; give None if it wasn't used"
                    )
                used.add(name)
                g = row[member.index] = grads[name]
                if g is None:
                    continue
                if backend.shape(g) != member.spec.shape:
                    raise GradientError(
                        f"reduce_grads: gradient of {name!r} has shape {backend.shape(g)}, expected the full shape "
                        f"{member.spec.shape}"
                    )
                if backend.dtype(g) not in (bucket.compute_dtype, bucket.acc_dtype):
                    raise GradientError(
                        f"reduce_grads: gradient of {name!r} has dtype {backend.dtype(g)}, expected "
                        f"{bucket.compute_dtype} (compute) or {bucket.acc_dtype} (accumulation)"
                    )
        rows[plan.name] = row
    if unknown := [name for name in grads if name not in used]:
        raise GradientError(
            f"reduce_grads: gradients of {unknown}, which are no trainable parameters of the selected units (frozen, "
            f"an alias, or another unit's)"
        )
    return rows
