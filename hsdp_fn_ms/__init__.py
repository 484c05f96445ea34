"""hsdp-fn on MindSpore: FSDP and HSDP over ``mindspore.mint.distributed``.

Functional training with an explicit state (`shard_cell`, `value_and_grad`, `optimizer_step`, `recoverable`), in
PyNative mode. Not written yet: the facade (``fully_shard``), checkpoints, offloading from a device, cells that are
recomputed or compiled. Run with ``mccl`` on CPU; never on Ascend.
"""

from hsdp_fn import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from .backend import MSBackend
from .functional import Params, evaluate, functional_call, value_and_grad
from .launch import init_process_group, leave
from .mesh import DeviceMesh, init_device_mesh, mesh_spec
from .model import param_specs, plan_cell, shard_cell
from .optim import clipped, global_norm, optimizer_step, shard_parameters
from .probe import Facts, facts
from .recovery import recoverable

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DeviceMesh",
    "Facts",
    "MSBackend",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Params",
    "clipped",
    "evaluate",
    "facts",
    "functional_call",
    "global_norm",
    "init_device_mesh",
    "init_process_group",
    "leave",
    "mesh_spec",
    "optimizer_step",
    "param_specs",
    "plan_cell",
    "recoverable",
    "shard_cell",
    "shard_parameters",
    "value_and_grad",
]
