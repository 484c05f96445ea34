"""What `fully_shard` and its kind were given, checked. Policies may be another library's, of the same fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .errors import MeshError, PolicyError
from .mesh import DataParallelMeshDims
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M")
P = TypeVar("P")


def modules_of(
    given: object, function: str, kind: type[M], sharded: type, is_container: Callable[[M], bool]
) -> list[M]:
    """The modules of one call: one, or those of a list.

    Args:
        function: its name, for messages.
        kind: the framework's class of modules; ``sharded``: of those that were given before.
        is_container: whether a module only holds others, without a forward of its own.

    Raises:
        ValueError: none, one twice, something else, or a container. AssertionError: one was given before.
    """
    modules: list[Any] = list(given) if isinstance(given, list) else [given]
    for i, m in enumerate(modules):
        if not isinstance(m, kind):
            where = f" at index {i}" if isinstance(given, list) else ""
            raise ValueError(f"{function} takes a module or a list of modules, found {type(m).__name__}{where}")
        if isinstance(m, sharded):
            raise AssertionError(
                f"{function}: fully_shard or replicate was applied to this module before; each distinct composable API "
                f"can be applied to a module once only"
            )
        if is_container(m):
            raise ValueError(f"{function} does not support containers that do not implement forward: {m}")
    if not modules:
        raise ValueError(f"{function} got an empty list of modules")
    if len({id(m) for m in modules}) < len(modules):
        raise ValueError(f"{function} got a module twice in one list")
    return modules


def parameters_of(name: str, given: Iterable[P] | None, kind: type[P], tensor: type) -> list[P]:
    """The parameters that an argument lists.

    Args:
        name: the argument's, for messages.
        kind: the framework's class of parameters; ``tensor``: of tensors, which are iterables, too.

    Raises:
        TypeError: it is a tensor, or holds something else.
    """
    if isinstance(given, tensor):
        raise TypeError(f"{name} must be a set or list of parameters, found a tensor")
    params = list(given or ())
    for p in params:
        if not isinstance(p, kind):
            raise TypeError(f"{name} must hold parameters, found {type(p).__name__}")
    return params


def mp_policy_of(policy: object) -> MixedPrecisionPolicy:
    """Ours, or torch's or HyperParallel's of the same fields; None: without mixed precision.

    Raises:
        PolicyError: something else.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if type(policy).__name__ == "MixedPrecisionPolicy":
        p: Any = policy
        main = getattr(p, "apply_grad_on_fp32_main_grad", False)  # HyperParallel's has it
        return MixedPrecisionPolicy(p.param_dtype, p.reduce_dtype, p.output_dtype, p.cast_forward_inputs, main)
    raise PolicyError(f"mp_policy must be a MixedPrecisionPolicy, found {policy!r}")


def offload_policy_of(policy: object) -> OffloadPolicy:
    """Ours, or torch's or HyperParallel's of the same fields; None: without offload.

    Raises:
        PolicyError: something else.
    """
    if policy is None:
        return OffloadPolicy()
    if type(policy).__name__ == "CPUOffloadPolicy" and hasattr(policy, "pin_memory"):  # ours, or theirs
        return CPUOffloadPolicy(policy.pin_memory)
    if type(policy).__name__ == "OffloadPolicy":
        return OffloadPolicy()
    if not isinstance(policy, OffloadPolicy):
        raise PolicyError(f"offload_policy must be an OffloadPolicy of hsdp_fn, found {policy!r}")
    return policy


def mesh_dims_of(dims: object) -> DataParallelMeshDims | None:
    """Ours, or torch's of the same fields.

    Raises:
        MeshError: something else.
    """
    if dims is None or isinstance(dims, DataParallelMeshDims):
        return dims
    if type(dims).__name__ == "DataParallelMeshDims":
        given: Any = dims
        return DataParallelMeshDims(given.shard, given.replicate)
    raise MeshError(f"dp_mesh_dims must be a DataParallelMeshDims of hsdp_fn, found {dims!r}")


def require_bool(name: str, value: object) -> None:
    """Raises PolicyError (a ValueError) unless it is one."""
    if not isinstance(value, bool):
        raise PolicyError(f"{name} must be a bool, found {value!r}")
