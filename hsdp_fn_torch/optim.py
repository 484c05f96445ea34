"""Optimizers over the shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp_fn import GradPhase, HSDPState, LayoutError, apply_updates, grads, masters
from hsdp_fn.lifecycle import Op, check

from .backend import TorchBackend, torch_backend
from .dtensor import local_of


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
) -> tuple[HSDPState, Tensor | None]:
    """Take the gradients out of the state, step the optimizer over the shards, and count the step.

    Communicates: as `grads`; with ``max_norm`` one all-reduce of one element over the shard group.

    Args:
        state: with finished gradients.
        optimizer: built over ``params``.
        params: what `shard_parameters` gave for this state or an ancestor of it whose masters were updated in place.
        max_norm: clip the gradient's global 2-norm to this; of main gradients before they are cast to the parameters'
            dtype, which is what ``torch.optim`` takes.

    Returns:
        The next state, and the norm before clipping (None without ``max_norm``).

    Raises:
        LayoutError: the parameters aren't the state's masters, so that the step would be lost.
        PhaseError: a unit is unsharded.
        Whatever the optimizer raises: the masters may then be updated in part, and the gradients are gone.
    """
    _check_alias(state, params)
    for unit in state.units:
        check(unit.name, unit.params_phase, GradPhase.EMPTY, Op.APPLY)
    state, rows = grads(state)
    norm = None
    if max_norm is not None:
        norm = global_norm(state, rows)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
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
    return apply_updates(state, {name: p.detach() for name, p in params.items() if p.requires_grad}), norm


def global_norm(state: HSDPState, rows: Mapping[str, Tensor | None]) -> Tensor:
    """2-norm of a gradient whose rows are spread over the shard group, the same on every rank.

    Communicates: one all-reduce of one float32 element over the shard group (none with one shard).

    Args:
        state: whose layout the gradient has.
        rows: what `grads` gave.
    """
    backend = torch_backend(state)
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    for plan in state.layout.units:
        for bucket in plan.buckets:
            target = sharded if bucket.mesh.shard_size > 1 else whole
            members = bucket.grads.members if bucket.grads is not None else ()
            target += [g for m in members if (g := rows[m.spec.name]) is not None]
    total = _sum_of_squares(sharded, backend)
    if state.layout.mesh.shard_size > 1:
        dist.all_reduce(total, group=backend.group(state.layout.mesh.shard))
    return (total + _sum_of_squares(whole, backend)).sqrt()


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

    Communicates: one all-reduce a mesh axis over which gradients are split, for each mesh.

    Returns:
        The global norm before clipping, a plain tensor, the same on every rank.

    Raises:
        RuntimeError: with ``error_if_nonfinite``, if the norm isn't finite; gradients are unchanged then.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[object, list[Tensor]] = {}
    for param in params:
        grad = param.grad if param.grad is not None else getattr(param, "main_grad", None)
        if grad is not None:
            by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = []
    for grads_ in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(grads_, norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
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
