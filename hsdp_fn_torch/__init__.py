"""hsdp-fn on PyTorch: FSDP and HSDP over ``torch.distributed``.

Two ways in: functional training with an explicit state (`value_and_grad`), and `fully_shard`, which threads the same
state through a module's calls.
"""

from hsdp_fn import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from hsdp_fn.params import Params

from . import pytree  # noqa: F401  (registers the state types)
from .backend import TorchBackend
from .comm import AllGather, Comm, ReduceScatter
from .compiling import pass_over
from .differentiable import differentiable_unshard
from .facade import (
    ReplicateModule,
    fully_shard,
    hsdp_sync_stream,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from .functional import evaluate, functional_call, value_and_grad
from .guards import broadcast_module
from .mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult, mesh_spec
from .model import param_specs, plan_module, shard_module
from .module import HSDPModule, UnshardHandle, describe
from .optim import clip_grad_norm_, global_norm, optimizer_step, shard_parameters
from .p2p import PointToPointAllGather, PointToPointReduceScatter
from .recovery import recoverable
from .state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FSDPModule = HSDPModule
pass_over("hsdp_fn")
pass_over("hsdp_fn_torch")

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Params",
    "PointToPointAllGather",
    "PointToPointReduceScatter",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "TorchBackend",
    "UnshardHandle",
    "broadcast_module",
    "clip_grad_norm_",
    "describe",
    "differentiable_unshard",
    "evaluate",
    "fully_shard",
    "functional_call",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "global_norm",
    "hsdp_sync_stream",
    "mesh_spec",
    "optimizer_step",
    "param_specs",
    "plan_module",
    "recoverable",
    "register_fsdp_forward_method",
    "replicate",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "shard_module",
    "shard_parameters",
    "share_comm_ctx",
    "value_and_grad",
]
