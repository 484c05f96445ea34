"""Optimizers over the shards: MindSpore's own, and the pieces for one written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hsdp_fn import GradPhase, HSDPState, LayoutError, MeshError, apply_updates, grads, masters
from hsdp_fn.lifecycle import Op, check
from hsdp_fn.setters import existing_tree

from .backend import ms_backend
from .roots import names_of


def shard_parameters(state: HSDPState) -> dict[str, Parameter]:
    """This rank's rows of every trainable parameter, as parameters of their own memory: for a MindSpore optimizer that
    `optimizer_step` runs. Does not communicate. Parameters of which this rank has no row are left out.

    Example:
        params = shard_parameters(state)
        optimizer = nn.Adam(list(params.values()), learning_rate=1e-3)
        state, norm = optimizer_step(state, optimizer, params, max_norm=1.0)
    """
    trainable = {p.name for p in state.layout.params() if p.requires_grad}
    rows = {name: row for name, row in masters(state).items() if name in trainable and row.size}
    return {name: Parameter(row.copy(), name=name) for name, row in rows.items()}


def optimizer_step(
    state: HSDPState,
    optimizer: nn.Optimizer | None,
    params: Mapping[str, Parameter],
    *,
    max_norm: float | None = None,
    norm: Callable[[HSDPState, Mapping[str, Tensor | None]], Tensor] | None = None,
) -> tuple[HSDPState, Tensor | None]:
    """Take the gradients out of the state, step the optimizer over the shards, and count the step.

    The parameters are set to the state's rows first, so that any state of this layout can be stepped; afterwards the
    rows go into the new state. MindSpore's optimizers need a gradient for each parameter: one that no microbatch used
    is given zeros.

    Communicates: as `grads`; with ``max_norm`` one all-reduce of one element over the shard group.

    Args:
        state: with finished gradients.
        optimizer: built over ``params``. None on a rank that has no row of any trainable parameter, as MindSpore makes
            no optimizer of nothing.
        params: what `shard_parameters` gave for a state of this layout.
        max_norm: clip the gradient's global 2-norm to this.
        norm: how to compute that norm, instead of `global_norm`; needed on a mesh with axes that aren't data parallel.

    Returns:
        The next state, and the norm before clipping (None without ``max_norm``).

    Raises:
        LayoutError: the parameters aren't of the state's layout, or the optimizer has others.
        PhaseError: a unit is unsharded.
        MeshError: ``max_norm`` without ``norm`` on a mesh with other axes; before anything has changed.
        Whatever the optimizer raises: the gradients are gone then.
    """
    _check_params(state, optimizer, params)
    others = _other_axes(state)
    if max_norm is not None and norm is None and others:
        raise MeshError(
            f"optimizer_step: the mesh has axes {others} that aren't data parallel, and the state doesn't know whether "
            f"ranks along them hold other parameters or the same; pass norm=, a function of the state and the gradient"
        )
    for unit in state.units:
        check(unit.name, unit.params_phase, GradPhase.EMPTY, Op.APPLY)
    state, rows = grads(state)
    found = None
    if max_norm is not None:
        found = (norm or global_norm)(state, rows)
        rows = clipped(rows, found, max_norm)
    current = masters(state)
    for name, param in params.items():
        # Not `set_data`, after which MindSpore 2.10's Adam makes other steps on CPU (guarded by test_optim.py), nor
        # `ops.assign`, which has no bfloat16 there.
        with ms._no_grad():
            param.copy_(current[name].copy())
    if optimizer is not None:
        given = {id(param): rows[name] for name, param in params.items()}
        optimizer(
            tuple(
                mint.zeros(param.shape, dtype=param.dtype) if (g := given[id(param)]) is None else _like(g, param)
                for param in optimizer.parameters
            )
        )
    return apply_updates(state, dict(params)), found


def global_norm(state: HSDPState, rows: Mapping[str, Tensor | None]) -> Tensor:
    """2-norm of a gradient, the same on every rank: float32, no axes.

    Communicates: one all-reduce of one float32 element over the shard group (none with one shard). With parameters on
    other meshes than the layout's, over its shard and replicate groups. Ranks along axes that aren't data parallel
    aren't asked.

    Args:
        state: whose layout the gradient has.
        rows: what `grads` gave.
    """
    backend, mesh = ms_backend(state), state.layout.mesh
    buckets = [b for plan in state.layout.units for b in plan.buckets if b.grads is not None]
    usual = all(b.mesh in (mesh, mesh.as_replicated()) for b in buckets)
    axes = (mesh.shard,) if usual else (mesh.shard, mesh.replicate)
    asked = mesh.shard_size if usual else mesh.data_parallel_size
    by_copies: dict[int, list[Tensor]] = {}  # on how many of the ranks that are asked the same gradient is
    for bucket in buckets:
        copies = asked // bucket.mesh.shard_size if usual else bucket.mesh.replicate_size
        members = bucket.grads.members if bucket.grads is not None else ()
        by_copies.setdefault(copies, []).extend(g for m in members if (g := rows[m.spec.name]) is not None)
    everywhere = by_copies.pop(asked, []) if asked > 1 else []
    total = Tensor(np.zeros(1, np.float32))
    for copies, tensors in by_copies.items():
        total = total + _sum_of_squares(tensors) * (1.0 / copies)
    total = backend.sum_over(total, [along for along in axes if along])
    return ops.sqrt(total + _sum_of_squares(everywhere)).reshape(())


def clipped(rows: Mapping[str, Tensor | None], norm: Tensor, max_norm: float) -> dict[str, Tensor | None]:
    """The gradient scaled down to ``max_norm`` where ``norm`` is larger. Does not communicate.

    Raises:
        ValueError: ``max_norm`` isn't positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, found {max_norm!r}")
    scale = ops.minimum(max_norm / (norm + 1e-6), Tensor(1.0, ms.float32))
    return {name: None if g is None else g * scale.astype(g.dtype) for name, g in rows.items()}


def clip_grad_norm(
    cell: nn.Cell, gradients: Sequence[Tensor], max_norm: float, *, parameters: Sequence[Parameter] | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of a sharded cell, scaled down to a global 2-norm of ``max_norm`` at most, and the norm before.
    Communicates: as `global_norm`.

    Args:
        cell: the root, after its first forward.
        gradients: this rank's rows, from ``mindspore.value_and_grad`` or of ``param.grad``.
        parameters: what they are of; None: ``cell.trainable_params()``.

    Raises:
        ValueError: another number of gradients than of parameters; ``max_norm`` isn't positive.
        LayoutError: a parameter isn't sharded in this cell.
        RuntimeError: the cell hasn't run yet.
    """
    params = list(cell.trainable_params() if parameters is None else parameters)
    if len(gradients) != len(params):
        raise ValueError(f"clip_grad_norm: {len(gradients)} gradients of {len(params)} parameters")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, found {max_norm!r}")
    names = names_of(cell)
    if strangers := [p.name for p in params if id(p) not in names]:
        raise LayoutError(f"clip_grad_norm: parameters {strangers} aren't sharded in this cell")
    state = existing_tree(cell).state
    rows: dict[str, Tensor | None] = {p.name: None for p in state.layout.params()}
    rows |= {names[id(p)]: g for p, g in zip(params, gradients, strict=True)}
    norm = global_norm(state, rows)
    scaled = clipped(rows, norm, max_norm)
    return tuple([scaled[names[id(p)]] for p in params]), norm


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    total = Tensor(np.zeros(1, np.float32))
    for tensor in tensors:
        if tensor.size:
            wide = tensor.astype(ms.float32)
            total = total + (wide * wide).sum().reshape(1)
    return total


def _like(grad: Tensor, param: Parameter) -> Tensor:
    """A gradient in the parameter's dtype (main gradients are wider)."""
    return grad if grad.dtype == param.dtype else grad.astype(param.dtype)


def _other_axes(state: HSDPState) -> list[str]:
    mesh = state.layout.mesh
    data = mesh.shard + mesh.replicate
    return [n for n, size in zip(mesh.names, mesh.shape, strict=True) if size > 1 and n not in data]


def _check_params(state: HSDPState, optimizer: nn.Optimizer | None, params: Mapping[str, Parameter]) -> None:
    backend = ms_backend(state)
    expected = {
        m.spec.name: (b.dtype, backend.local_shape(b.mesh, m))
        for plan in state.layout.units
        for b in plan.buckets
        for m in (b.grads.members if b.grads is not None else ())
    }
    wanted = {name for name, (_, shape) in expected.items() if 0 not in shape}
    if set(params) != wanted:
        raise LayoutError(
            f"optimizer_step: the parameters are {sorted(params)}, this rank's trainable ones are {sorted(wanted)}; "
            f"pass shard_parameters(state)"
        )
    for name, param in params.items():
        if (found := (backend.dtype(param), backend.shape(param))) != expected[name]:
            raise LayoutError(f"optimizer_step: {name!r} is {found}, this rank's rows are {expected[name]}")
    stepped = optimizer.parameters if optimizer is not None else ()
    strangers = {id(p) for p in stepped} ^ {id(p) for p in params.values()}
    if strangers:
        raise LayoutError("optimizer_step: the optimizer must be built over exactly the given params")
