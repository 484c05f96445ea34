"""Collectives in NCCL's symmetric memory, after FSDP2's classes of the same names.

Read, never run: no CUDA device was at hand. torch's private module is imported on use, as other builds may lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .backend import _ALL_GATHER, _REDUCE_SCATTER


class _SymmMem:
    def __init__(self, group: dist.ProcessGroup, backend: str = "NCCL") -> None:
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.set_backend(backend)  # type: ignore[arg-type]
        dist.barrier(group=group)  # makes the communicator, which rendezvous needs

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `comm.Comm.allocate`."""
        import torch.distributed._symmetric_memory as symm_mem

        with torch.cuda.use_mem_pool(symm_mem.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)


class SymmMemAllGather(_SymmMem):
    """NCCL's all-gather in place in symmetric memory. See `UnitComm.set_symm_mem`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """See `comm.AllGather`."""
        import torch.distributed._symmetric_memory as symm_mem

        own = output_tensor.view(group.size(), -1)[group.rank()].copy_(input_tensor)
        symm_mem.rendezvous(output_tensor, group=group.group_name)
        work: dist.Work | None = getattr(dist, _ALL_GATHER)(output_tensor, own, group=group, async_op=async_op)
        return work


class SymmMemReduceScatter(_SymmMem):
    """NCCL's reduce-scatter in symmetric memory. See `UnitComm.set_symm_mem`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `comm.ReduceScatter`."""
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.rendezvous(input_tensor, group=group.group_name)
        symm_mem.rendezvous(output_tensor, group=group.group_name)
        work: dist.Work | None = getattr(dist, _REDUCE_SCATTER)(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def no_symm_mem(group: dist.ProcessGroup, device: torch.device, backend: str) -> str | None:
    """Why symmetric memory can't be used, or None."""
    if backend != "NCCL":
        return f"the only backend is 'NCCL', found {backend!r}"
    if device.type != "cuda":
        return f"it needs CUDA devices, and this process computes on {device}"
    if not dist.is_nccl_available() or not isinstance(group._get_backend(device), dist.ProcessGroupNCCL):
        return f"it needs an NCCL process group, found {dist.get_backend_config(group)}"
    try:
        import torch.distributed._symmetric_memory as symm_mem
    except ImportError as error:
        return f"this torch has no torch.distributed._symmetric_memory ({error})"
    missing = [n for n in ("set_backend", "get_mem_pool", "rendezvous") if not hasattr(symm_mem, n)]
    return f"this torch's torch.distributed._symmetric_memory lacks {missing}" if missing else None
