"""hsdp-fn on PyTorch: FSDP and HSDP over ``torch.distributed``, functional training with an explicit state."""

from . import pytree  # noqa: F401  (registers the state types)
from .backend import TorchBackend
from .differentiable import differentiable_unshard
from .functional import Params, evaluate, functional_call, value_and_grad
from .mesh import mesh_spec
from .model import param_specs, plan_module, shard_module
from .optim import global_norm, optimizer_step, shard_parameters

__all__ = [
    "Params",
    "TorchBackend",
    "differentiable_unshard",
    "evaluate",
    "functional_call",
    "global_norm",
    "mesh_spec",
    "optimizer_step",
    "param_specs",
    "plan_module",
    "shard_module",
    "shard_parameters",
    "value_and_grad",
]
