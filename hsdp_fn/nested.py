"""Walks over what a model takes and returns: tensors inside lists, tuples, named tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Leaf = TypeVar("Leaf")


def leaves_in(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """All objects of ``kind`` (a framework's tensor) in a nested value; those of other classes aren't looked into."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_in(item, kind)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_in(item, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_in(getattr(value, field.name), kind)


def map_leaves(value: T, kind: type[Leaf], function: Callable[[Leaf], Leaf]) -> T:
    """The same nested value, containers of the same types, with every object of ``kind`` replaced. Returns the very
    same object where nothing changes."""
    out: Any = value
    if isinstance(value, kind):
        out = function(value)
    elif isinstance(value, Mapping):
        items = {k: map_leaves(v, kind, function) for k, v in value.items()}
        if any(items[k] is not v for k, v in value.items()):
            out = _like_dict(value, items)
    elif isinstance(value, (list, tuple)):
        parts = [map_leaves(v, kind, function) for v in value]
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            out = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {k: map_leaves(v, kind, function) for k, v in fields.items()}
        if any(changed[k] is not v for k, v in fields.items()):
            out = dataclasses.replace(value, **changed)
    result: T = out
    return result


def _like_dict(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same class (defaultdict's factory and the like kept) with other values."""
    if type(value) is dict:
        return items
    out: Any = copy.copy(value)
    for key, item in items.items():
        out[key] = item
    return out
