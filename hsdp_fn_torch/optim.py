"""Optimizers over the shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp_fn import GradPhase, HSDPState, LayoutError, MeshError, apply_updates, grads, masters
from hsdp_fn.lifecycle import Op, check

from .backend import TorchBackend, torch_backend
from .dtensor import local_of
from .mesh import process_group


def shard_parameters(state: HSDPState) -> dict[str, nn.Parameter]:
    """This rank's rows of every parameter as leaf parameters that share the masters' memory. Does not communicate.

    Give them to any elementwise ``torch.optim`` optimizer; it updates the masters in place. Frozen parameters don't
    require gradients. A rank may own zero rows of a small parameter.
    """
    trainable = {p.name for p in state.layout.params() if p.requires_grad}
    return {name: nn.Parameter(rows, requires_grad=name in trainable) for name, rows in masters(state).items()}


def optimizer_step(
    state: HSDPState,
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    *,
    max_norm: float | None = None,
    norm: Callable[[HSDPState, Mapping[str, Tensor | None]], Tensor] | None = None,
) -> tuple[HSDPState, Tensor | None]:
    """Take the gradients out of the state, step the optimizer over the shards, and count the step.

    Communicates: as `grads`; with ``max_norm`` one all-reduce of one element over the shard group.

    Args:
        state: with finished gradients.
        optimizer: built over ``params``.
        params: what `shard_parameters` gave for this state or an ancestor of it whose masters were updated in place.
        max_norm: clip the gradient's global 2-norm to this; of main gradients before they are cast to the parameters'
            dtype, which is what ``torch.optim`` takes.
        norm: how to compute that norm, instead of `global_norm`; needed on a mesh with axes that aren't data parallel,
            along which ranks may hold other parameters or the same.

    Returns:
        The next state, and the norm before clipping (None without ``max_norm``).

    Raises:
        LayoutError: the parameters aren't the state's masters, so that the step would be lost.
        PhaseError: a unit is unsharded.
        MeshError: ``max_norm`` without ``norm`` on a mesh with other axes; before anything has changed.
        Whatever the optimizer raises: the masters may then be updated in part, and the gradients are gone.
    """
    _check_alias(state, params)
    mesh = state.layout.mesh
    others = [
        n for n, size in zip(mesh.names, mesh.shape, strict=True) if size > 1 and n not in mesh.shard + mesh.replicate
    ]
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
        scale = (max_norm / (found + 1e-6)).clamp(max=1.0)
        present = [g for g in rows.values() if g is not None]
        if present:
            torch._foreach_mul_(present, scale.to(present[0].device))
    try:
        for name, grad in rows.items():
            params[name].grad = None if grad is None else grad.to(params[name].dtype)  # main gradients are wider
        optimizer.step()
    finally:
        for param in params.values():
            param.grad = None
    return apply_updates(state, {name: p.detach() for name, p in params.items() if p.requires_grad}), found


def global_norm(state: HSDPState, rows: Mapping[str, Tensor | None]) -> Tensor:
    """2-norm of a gradient, the same on every rank.

    Communicates: one all-reduce of one float32 element over the shard group (none with one shard). With parameters on
    other meshes than the layout's (experts), of which other ranks hold others, over its shard and replicate groups.
    Ranks along axes that aren't data parallel (tensor parallel ones) aren't asked.

    Args:
        state: whose layout the gradient has.
        rows: what `grads` gave.
    """
    backend, mesh = torch_backend(state), state.layout.mesh
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
    total = torch.zeros((), device=backend.device)
    for copies, tensors in by_copies.items():
        total += _sum_of_squares(tensors, backend) / copies
    for along in axes:
        if along and len(mesh.group(backend.rank, along)) > 1:
            dist.all_reduce(total, group=backend.group(mesh, along))
    return (total + _sum_of_squares(everywhere, backend)).sqrt()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients on several meshes, or of which some are DTensors and some plain
    tensors (of ignored parameters, equal on all ranks), where torch's own raises. Takes ``main_grad`` where
    ``.grad`` is None.

    Communicates: one all-reduce a mesh axis over which gradients are split, for each mesh; and one over a unit's ranks
    for parameters that `ShardPlacementResult` has put on some of them (experts), since the others hold others.

    Returns:
        The global norm before clipping, a plain tensor, the same on every rank.

    Raises:
        RuntimeError: with ``error_if_nonfinite``, if the norm isn't finite; gradients are unchanged then.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[tuple[Any, Any], list[Tensor]] = {}
    for param in params:
        grad = param.grad if param.grad is not None else getattr(param, "main_grad", None)
        if grad is None and isinstance(param, DTensor) and param.requires_grad:
            grad = torch.zeros_like(param)  # other ranks may have one, and then all must take part
        if grad is not None:
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            by_mesh.setdefault((mesh, getattr(param, "_hsdp_peers", None)), []).append(grad)
    norms = []
    for (mesh, peers), grads_ in by_mesh.items():
        if math.isinf(norm_type):
            norm = _largest(grads_)
        else:
            norm = torch.nn.utils.get_total_norm(grads_, norm_type, False, foreach)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(norm if peers is None else _norm_over(norm, norm_type, mesh, peers))
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they can't be clipped"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads_ in by_mesh.values():
        locals_ = [local_of(g) for g in grads_]
        torch._foreach_mul_(locals_, scale.to(locals_[0].device))
    return total


def _largest(grads_: Sequence[Tensor]) -> Tensor:
    """The largest magnitude. (Torch's infinity norm raises on a rank without an element, and its peers wait.)"""
    rows = [local_of(g) for g in grads_]
    found = torch.zeros((), dtype=max((r.dtype for r in rows), key=lambda d: d.itemsize), device=rows[0].device)
    for row in rows:
        if row.numel():
            found = torch.maximum(found, row.abs().max().to(found.dtype))
    sharded = [g for g in grads_ if isinstance(g, DTensor)]
    for axis in sorted({axis for g in sharded for axis, p in enumerate(g.placements) if not p.is_replicate()}):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=sharded[0].device_mesh.get_group(axis))
    return found


def _norm_over(norm: Tensor, norm_type: float, mesh: DeviceMesh, ranks: tuple[int, ...]) -> Tensor:
    """The norm of what several meshes of the size of ``mesh`` hold, which together are ``ranks``, from that of each."""
    group = process_group(mesh.device_type, sorted(ranks))
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    total = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type / mesh.size()
    dist.all_reduce(total, group=group)
    return (total ** (1.0 / norm_type)).to(norm.dtype)


def _sum_of_squares(tensors: list[Tensor], backend: TorchBackend) -> Tensor:
    total = torch.zeros((), device=backend.device)
    if tensors:
        norms = torch._foreach_norm([t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors])
        total += torch.stack([n.float() for n in norms]).square().sum().to(total.device)
    return total


def _check_alias(state: HSDPState, params: Mapping[str, nn.Parameter]) -> None:
    for name, rows in masters(state).items():
        if name not in params:
            raise LayoutError(f"optimizer_step: no parameter {name!r} was given; pass shard_parameters(state)")
        mine = params[name]
        same = mine.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        if not same or mine.storage_offset() != rows.storage_offset():  # also where this rank has no row
            raise LayoutError(
                f"optimizer_step: parameter {name!r} isn't this state's master (other memory), so the update would be "
                f"lost; build the optimizer over shard_parameters(state) of the present state"
            )
