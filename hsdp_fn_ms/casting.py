"""Walks over what a cell takes and returns: tensors inside lists, tuples, named tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import mindspore as ms
from mindspore import Tensor

from hsdp_fn.dtypes import COMPUTE_FLOATS

T = TypeVar("T")
_FLOATS = {getattr(ms, name) for name in COMPUTE_FLOATS}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nested value; objects of other classes aren't looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """The same nested value, containers of the same types, with every tensor replaced. Returns the very same object
    where nothing changes."""
    out: Any = value
    if isinstance(value, Tensor):
        out = function(value)
    elif isinstance(value, Mapping):
        items = {k: map_tensors(v, function) for k, v in value.items()}
        if any(items[k] is not v for k, v in value.items()):
            out = items if type(value) is dict else _like_dict(value, items)
    elif isinstance(value, (list, tuple)):
        parts = [map_tensors(v, function) for v in value]
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            out = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {k: map_tensors(v, function) for k, v in fields.items()}
        if any(changed[k] is not v for k, v in fields.items()):
            out = dataclasses.replace(value, **changed)
    result: T = out
    return result


def is_floating(tensor: Tensor) -> bool:
    """Whether mixed precision casts this tensor."""
    return tensor.dtype in _FLOATS


def cast_floating(value: T, dtype: str) -> T:
    """Every floating tensor in ``dtype``; integers, strings and the rest untouched."""
    wanted = getattr(ms, dtype)
    return map_tensors(value, lambda t: t.astype(wanted) if is_floating(t) and t.dtype != wanted else t)


def _like_dict(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same class with other values."""
    out: Any = copy.copy(value)
    for key, item in items.items():
        out[key] = item
    return out
