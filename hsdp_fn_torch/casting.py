"""Tensors inside what a module takes and returns: found, replaced, and cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from hsdp_fn import MixedPrecisionPolicy
from hsdp_fn.nested import leaves_in, map_leaves

T = TypeVar("T")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nested value; objects of other classes aren't looked into."""
    return leaves_in(value, Tensor)


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """The same nested value, containers of the same types, with every tensor replaced. Returns the very same object
    where nothing changes."""
    return map_leaves(value, Tensor, function)


def cast_floating(value: T, dtype: str) -> T:
    """Every floating tensor in ``dtype``; integers, strings and the rest untouched."""
    wanted = getattr(torch, dtype)
    return map_tensors(value, lambda t: t.to(wanted) if t.is_floating_point() and t.dtype is not wanted else t)


def casting(policy: MixedPrecisionPolicy, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``call(*args, **kwargs)`` with the casts of inputs and outputs that a policy asks for."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
    out = call(*args, **kwargs)
    return out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)
