"""hsdp-fn on MindSpore: FSDP and HSDP over ``mindspore.mint.distributed``, in PyNative mode.

Functional training with an explicit state (`shard_cell`, `value_and_grad`, `optimizer_step`, `recoverable`), and
`fully_shard` for cells. Run with ``mccl`` on CPU; never on Ascend.
"""

from hsdp_fn import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from hsdp_fn.params import Params

from .backend import MSBackend
from .checkpoint import Loaded, load_checkpoint, save_checkpoint, save_full, torch_names
from .compat import enable_mindspore_backward_compat
from .facade import (
    ReplicateModule,
    fully_shard,
    hsdp_sync_stream,
    register_fsdp_forward_method,
    replicate,
)
from .functional import evaluate, functional_call, value_and_grad
from .graph import UnitGraph, jit_unit
from .guards import broadcast_module
from .launch import init_process_group, leave
from .mesh import DeviceMesh, init_device_mesh, mesh_spec
from .model import param_specs, plan_cell, shard_cell
from .module import HSDPModule, UnshardHandle
from .optim import clip_grad_norm, clipped, global_norm, optimizer_step, shard_parameters
from .probe import Facts, facts
from .recovery import recoverable
from .state_dict import get_model_state_dict, set_model_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DeviceMesh",
    "Facts",
    "HSDPModule",
    "Loaded",
    "MSBackend",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Params",
    "ReplicateModule",
    "UnitGraph",
    "UnshardHandle",
    "broadcast_module",
    "clip_grad_norm",
    "clipped",
    "enable_mindspore_backward_compat",
    "evaluate",
    "facts",
    "fully_shard",
    "functional_call",
    "get_model_state_dict",
    "global_norm",
    "hsdp_sync_stream",
    "init_device_mesh",
    "init_process_group",
    "jit_unit",
    "leave",
    "load_checkpoint",
    "mesh_spec",
    "optimizer_step",
    "param_specs",
    "plan_cell",
    "recoverable",
    "register_fsdp_forward_method",
    "replicate",
    "save_checkpoint",
    "save_full",
    "set_model_state_dict",
    "shard_cell",
    "shard_parameters",
    "torch_names",
    "value_and_grad",
]
