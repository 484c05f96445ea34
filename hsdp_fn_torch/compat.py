"""The names of ``torch.distributed.fsdp``, so that a script migrates by its import line alone.

    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, FSDPModule
    from hsdp_fn_torch.compat import fully_shard, MixedPrecisionPolicy, FSDPModule

Only what belongs to FSDP2 is here; FSDP1 (``FullyShardedDataParallel`` and its options) is another library.
"""

from __future__ import annotations

from typing import NoReturn

import torch.distributed.fsdp

from hsdp_fn import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from .facade import ReplicateModule, fully_shard, register_fsdp_forward_method, replicate, share_comm_ctx
from .module import HSDPModule, UnshardHandle

FSDPModule = HSDPModule

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]


def __getattr__(name: str) -> NoReturn:
    if hasattr(torch.distributed.fsdp, name) and not name.startswith("_"):
        raise AttributeError(f"{name} belongs to FSDP1; use fully_shard and its policies instead (see docs/parity.md)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
