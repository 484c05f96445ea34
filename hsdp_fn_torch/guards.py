"""Mistakes around `fully_shard` that would otherwise only show as a worse loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

_SAMPLES = 1024

_taken = 0  # how many parameters have been replaced by shards in this process
_watching = False


def mark_taken(originals: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Parameters were replaced by sharded ones. Who still holds them can be told; an optimizer is, at its next step."""
    global _taken, _watching
    for param, name in zip(originals, names, strict=True):
        param._hsdp_taken = name  # type: ignore[attr-defined]
    _taken += len(originals)
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_require_sharded)


def taken_as(param: nn.Parameter) -> str | None:
    """The name under which a parameter was replaced by a sharded one."""
    return getattr(param, "_hsdp_taken", None)


def fingerprint(params: Iterable[Tensor]) -> str:
    """A hash of up to 1,024 evenly spaced values of each parameter; "" if one has no values yet."""
    digest = hashlib.sha256()
    for param in params:
        if param.is_meta:
            return ""
        flat = param.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // _SAMPLES))].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def broadcast_module(module: nn.Module, mesh: DeviceMesh | None = None, *, src: int = 0) -> None:
    """Give all ranks the parameters and buffers of one of them. Call it before `fully_shard`, unless every rank
    initializes from the same seed or loads the same checkpoint: sharding itself sends no weights, so that ranks with
    different ones would train a mixture of them.

    Communicates: one broadcast a parameter and buffer.

    Args:
        mesh: the ranks; None: all.
        src: position of the source among them.

    Raises:
        ValueError: a parameter is on the meta device or sharded already; nothing was sent then.
    """
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta or hasattr(tensor, "placements"):
            kind = "on the meta device" if tensor.is_meta else "sharded already"
            raise ValueError(f"{name!r} is {kind}; broadcast_module takes a module before fully_shard, with values")
    groups = None if mesh is None else mesh if mesh.ndim == 1 else mesh._flatten()
    for _, tensor in tensors:
        dist.broadcast(tensor.detach(), group=groups.get_group() if groups is not None else None, group_src=src)


def _require_sharded(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before an optimizer's step: does it hold parameters that have since been replaced by shards?"""
    seen = _taken, [len(group["params"]) for group in optimizer.param_groups]
    if optimizer.__dict__.get("_hsdp_checked") == seen:
        return
    lost = [name for group in optimizer.param_groups for p in group["params"] if (name := taken_as(p)) is not None]
    if lost:
        raise RuntimeError(
            f"this optimizer holds parameters from before fully_shard, such as {lost[:3]} ({len(lost)} in all); its "
            f"steps would change nothing. Make it after fully_shard, from module.parameters()"
        )
    optimizer.__dict__["_hsdp_checked"] = seen
