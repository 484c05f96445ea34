"""Values of sharded cells by fully qualified name: whole or this rank's rows, in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from hsdp_fn import HSDPState
from hsdp_fn.arguments import require_bool
from hsdp_fn.layout import Bucket, Member, UnitLayout

from .backend import ms_backend
from .binding import named_cells
from .group import Group, group_of
from .roots import root_tree


class Incompatible(NamedTuple):
    """What `load_into` hasn't matched."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Place(NamedTuple):
    """Where a parameter of a group is in the group's own layout."""

    group: Group
    bucket: Bucket
    member: Member


def get_model_state_dict(cell: nn.Cell, *, full_state_dict: bool = True) -> dict[str, Tensor]:
    """Values by fully qualified name, parameters under each of their names, buffers too.

    Args:
        cell: the root.
        full_state_dict: whole values, on every rank. Communicates: one all-gather a unit. False: of sharded parameters
            this rank's rows; does not communicate.
    """
    require_bool("full_state_dict", full_state_dict)
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"get_model_state_dict takes a cell, found {type(cell).__name__}")
    found = {name: Tensor(value).copy() for name, value in _named(cell)}
    if full_state_dict and _places(cell):
        tree = root_tree(cell, "get_model_state_dict")
        with ms._no_grad():
            for member, value in whole_masters(tree.up_to_date()):
                found |= {name: value.copy() for name in (member.spec.name, *member.spec.aliases) if name in found}
    return found


def whole_masters(state: HSDPState) -> Iterator[tuple[Member, Tensor]]:
    """Every parameter's whole value, in the dtype of its master, valid until the next one is asked for. Communicates:
    for each sharded bucket one all-gather over its shard group (not in the ledger)."""
    backend = ms_backend(state)
    for unit, plan in zip(state.units, state.layout.units, strict=True):
        for bucket, flat in zip(plan.buckets, unit.master, strict=True):
            if bucket.mesh.shard_size > 1 and bucket.params.numel:
                flat, flight = backend.all_gather(bucket.mesh, flat)
                backend.wait(flight)
            values = backend.unpack(bucket.mesh, bucket.params, flat)
            yield from zip(bucket.params.members, values, strict=True)


def set_model_state_dict(cell: nn.Cell, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> Incompatible:
    """`load_into`, by PyTorch's name."""
    return load_into(cell, state_dict, strict=strict)


def load_into(cell: nn.Cell, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> Incompatible:
    """Copy values into a cell's parameters and buffers; the objects stay. Does not communicate. Nothing changes where
    it raises.

    Args:
        state_dict: by fully qualified name; of a sharded parameter the whole value, of which this rank takes its rows,
            or these rows. (Where both have the same shape, they are the same.) Other dtypes are cast.
        strict: whether missing and unexpected names are errors.

    Raises:
        RuntimeError: names that don't fit (``strict``), and shapes; all of them. In a forward or backward.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict takes a mapping of names to tensors, found {type(state_dict).__name__}")
    tree = cell.__dict__.get("_hsdp_tree")
    if tree is not None and tree.running:
        raise RuntimeError("load_state_dict inside a forward or backward; call it afterwards")
    places, targets = _places(cell), dict(_named(cell))
    problems, ready = [], []
    done: dict[int, str] = {}
    for name, target in targets.items():
        if name not in state_dict:
            continue
        value = state_dict[name]
        if (first := done.setdefault(id(target), name)) != name:  # tied
            if isinstance(value, Tensor) and not np.array_equal(value.asnumpy(), state_dict[first].asnumpy()):
                problems.append(f"{name!r} and {first!r} are one parameter, but have different values")
            continue
        if not isinstance(value, Tensor):
            problems.append(f"{name!r} is a {type(value).__name__}, expected a tensor")
            continue
        value = Tensor(value)
        place = places.get(id(target))
        if place is not None and tuple(value.shape) == place.member.spec.shape:
            value = _rows(place, value)
        if tuple(value.shape) != tuple(target.shape):
            whole = tuple(target.shape) if place is None else place.member.spec.shape
            problems.append(f"{name!r} has shape {tuple(state_dict[name].shape)}, expected {whole}")
            continue
        ready.append((target, value.astype(target.dtype)))
    aliases = {id(t) for n, t in targets.items() if n in state_dict}
    missing = [n for n, t in targets.items() if id(t) not in aliases]
    unexpected = [n for n in state_dict if n not in targets]
    if strict and missing:
        problems.append(f"missing: {missing}")
    if strict and unexpected:
        problems.append(f"unexpected: {unexpected}")
    if problems:
        raise RuntimeError(f"can't load into {type(cell).__name__}: " + "; ".join(problems))
    with ms._no_grad():
        for target, value in ready:
            if target.size:
                target.copy_(value.copy())  # not `set_data`, after which MindSpore 2.10's Adam makes other steps on CPU
    return Incompatible(missing, unexpected)


def _rows(place: _Place, whole: Tensor) -> Tensor:
    backend, bucket = place.group.backend, place.bucket
    if not bucket.mesh.shard:
        return whole
    start, stop = place.member.rows(bucket.mesh.shard_index(backend.rank))
    index: list[Any] = [slice(None)] * whole.ndim
    index[place.member.dim] = slice(start, stop)
    return (
        whole[tuple(index)]
        if stop > start
        else ops.zeros(tuple(place.member.local_shape(bucket.mesh.shard_index(backend.rank))), whole.dtype)
    )


def _places(cell: nn.Cell) -> dict[int, _Place]:
    """Where each sharded parameter at or below the cell is, by identity."""
    found: dict[int, _Place] = {}
    for _, below in named_cells(cell):
        if "_hsdp_group" in below.__dict__ and (group := group_of(below)).layout is not None:
            plan: UnitLayout = group.layout.units[0]
            for bucket in plan.buckets:
                for member in bucket.params.members:
                    found[id(group.params[member.index])] = _Place(group, bucket, member)
    return found


def _named(cell: nn.Cell) -> list[tuple[str, Any]]:
    """Parameters and buffers with every name."""
    out: list[tuple[str, Any]] = []
    for prefix, below in named_cells(cell):
        for table in (below._params, getattr(below, "_buffers", {})):
            for local, value in table.items():
                if value is not None:
                    out.append((f"{prefix}.{local}" if prefix else local, value))
    return out
