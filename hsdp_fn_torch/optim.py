"""Optimizers over the shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hsdp_fn import GradPhase, HSDPState, LayoutError, apply_updates, grads, masters
from hsdp_fn.lifecycle import Op, check

from .backend import TorchBackend, torch_backend


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
        max_norm: clip the gradient's global 2-norm to this.

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
            params[name].grad = grad
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
