"""hsdp-fn: sharded data-parallel training whose state is a value.

The functional core, free of any framework. `hsdp_fn_torch` and `hsdp_fn_ms` provide the backends.
"""

from .backend import Backend
from .errors import (
    BackendError,
    GradientError,
    HSDPError,
    LayoutError,
    MeshError,
    PeerFailed,
    PendingError,
    PhaseError,
    PolicyError,
    RankMismatchError,
    StaleStateError,
    UnknownUnitError,
)
from .inspect import describe, diff, memory_bytes
from .layout import ROOT, Collective, Layout, OnMesh, ParamSpec, Replicate, Shard, UnitSpec
from .lifecycle import GradPhase, ParamPhase
from .mesh import DataParallelMeshDims, MeshSpec
from .ops import (
    apply_updates,
    clone,
    full_params,
    grads,
    load_masters,
    masters,
    reduce_grads,
    reset_iter,
    shard,
    unshard,
    wait,
)
from .planner import plan_layout
from .policy import (
    CPUOffloadPolicy,
    Keep,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchPolicy,
    ReductionPolicy,
    Sync,
    microbatches,
)
from .schedule import CommTotal, expected_comm, totals
from .state import GradShards, HSDPState, Pending, Regrouped, UnitState

__all__ = [
    "ROOT",
    "Backend",
    "BackendError",
    "CPUOffloadPolicy",
    "Collective",
    "CommTotal",
    "DataParallelMeshDims",
    "GradPhase",
    "GradShards",
    "GradientError",
    "HSDPError",
    "HSDPState",
    "Keep",
    "Layout",
    "LayoutError",
    "MeshError",
    "MeshSpec",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OnMesh",
    "ParamPhase",
    "ParamSpec",
    "PeerFailed",
    "Pending",
    "PendingError",
    "PhaseError",
    "PolicyError",
    "PrefetchPolicy",
    "RankMismatchError",
    "ReductionPolicy",
    "Regrouped",
    "Replicate",
    "Shard",
    "StaleStateError",
    "Sync",
    "UnitSpec",
    "UnitState",
    "UnknownUnitError",
    "apply_updates",
    "clone",
    "describe",
    "diff",
    "expected_comm",
    "full_params",
    "grads",
    "load_masters",
    "masters",
    "memory_bytes",
    "microbatches",
    "plan_layout",
    "reduce_grads",
    "reset_iter",
    "shard",
    "totals",
    "unshard",
    "wait",
]
