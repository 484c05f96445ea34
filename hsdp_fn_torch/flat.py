"""Copies between full tensors and flat shards: one fused operator a bucket where the layout allows it.

A rank's slot in a flat shard holds its real rows contiguously, then zeros up to the slot's size. Shards of dim 0 are
runs of the full tensor, so packing and unpacking them are single strided copies over all members; other dims are copied
rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hsdp_fn.layout import Flat, Member

Allocate = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """Everything about a `Flat` that can be computed once for one rank.

    Attributes:
        flat: the layout.
        shard_index: which piece this rank owns.
        sizes: elements of each member's slot.
        rows_on_dim0: every member is split on dim 0.
        full: ``(shape, stride, offset)`` of each full parameter in the unpacked buffer.
        local: ``(shape, stride, offset)`` of each member's rows in this rank's flat shard.
    """

    flat: Flat
    shard_index: int
    sizes: list[int]
    rows_on_dim0: bool
    full: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    local: list[tuple[tuple[int, ...], tuple[int, ...], int]]

    @classmethod
    def of(cls, flat: Flat, shard_index: int) -> FlatPlan:
        """Plan for the rank that owns piece ``shard_index``."""
        full = [(m.spec.shape, _strides(m.spec.shape), m.offset * flat.shard_size) for m in flat.members]
        local = [(shape, _strides(shape), m.offset) for m in flat.members for shape in (m.local_shape(shard_index),)]
        return cls(
            flat, shard_index, [m.numel for m in flat.members], all(m.dim == 0 for m in flat.members), full, local
        )


def shard_of(plan: FlatPlan, params: Sequence[Tensor], out: Tensor) -> None:
    """Write this rank's rows of full ``params`` into the zeroed flat shard ``out``."""
    for member, param, (shape, stride, offset) in zip(plan.flat.members, params, plan.local, strict=True):
        start, stop = member.rows(plan.shard_index)
        out.as_strided(shape, stride, offset).copy_(param.narrow(member.dim, start, stop - start))


def unpack(plan: FlatPlan, gathered: Tensor, allocate: Allocate, *, copy: bool = False) -> tuple[Tensor, ...]:
    """The all-gather's output to full parameters, contiguous and without padding.

    They are views of one buffer: ``gathered`` itself where it already has them in place (one rank owns everything, or
    one parameter is split on dim 0, so that all padding is at the end), else a new one; with ``copy`` always a new one.
    """
    ranks = plan.flat.shard_size
    if not copy and (ranks == 1 or (plan.rows_on_dim0 and len(plan.sizes) == 1)):
        buffer, start = gathered, gathered.storage_offset()
    else:
        buffer = allocate(gathered.numel(), gathered.dtype)
        start = buffer.storage_offset()
        pieces = gathered.view(ranks, -1)
        if plan.rows_on_dim0:
            targets = [
                buffer.as_strided((ranks, n), (n, 1), start + offset)
                for n, (_, _, offset) in zip(plan.sizes, plan.full, strict=True)
            ]
            torch.split_with_sizes_copy(pieces, plan.sizes, 1, out=targets)
        else:
            for member, (shape, stride, offset) in zip(plan.flat.members, plan.full, strict=True):
                _unpack_member(member, ranks, pieces, buffer.as_strided(shape, stride, start + offset))
    return tuple([buffer.as_strided(shape, stride, start + offset) for shape, stride, offset in plan.full])


def pack(plan: FlatPlan, grads: Sequence[Tensor | None], out: Tensor) -> None:
    """Full gradients to rank chunks in ``out`` (every element is written; None and padding as zeros)."""
    ranks = plan.flat.shard_size
    chunks = out.view(ranks, -1)
    given = [g for g in grads if g is not None]
    if plan.rows_on_dim0 and len(given) == len(grads) and all(plan.sizes):  # `_chunk_cat` takes no empty tensor
        torch._chunk_cat(given, 0, ranks, out=chunks)
        return
    out.zero_()
    for member, grad in zip(plan.flat.members, grads, strict=True):
        if grad is None:
            continue
        for r in range(ranks):
            start, stop = member.rows(r)
            shape = member.local_shape(r)
            slot = chunks[r, member.offset : member.offset + prod(shape)]
            slot.view(shape).copy_(grad.narrow(member.dim, start, stop - start))


def split(plan: FlatPlan, shard: Tensor) -> tuple[Tensor, ...]:
    """Views of this rank's rows."""
    return tuple([shard.as_strided(*place) for place in plan.local])


def join(
    plan: FlatPlan, shard: Tensor, rows: Sequence[Tensor | None], clone: Callable[[Tensor], Tensor] = torch.clone
) -> Tensor:
    """``shard`` itself when all ``rows`` are its own views (or None), else a copy with the new rows."""
    base, item = shard.data_ptr(), shard.element_size()
    foreign = [
        (row, place)
        for row, place in zip(rows, plan.local, strict=True)
        if row is not None
        and row.numel()
        and not (row.data_ptr() == base + place[2] * item and tuple(row.stride()) == place[1])
    ]
    if not foreign:
        return shard
    out = clone(shard)
    for row, place in foreign:
        out.as_strided(*place).copy_(row)
    return out


def _unpack_member(member: Member, ranks: int, pieces: Tensor, target: Tensor) -> None:
    for r in range(ranks):
        start, stop = member.rows(r)
        shape = member.local_shape(r)
        rows = pieces[r, member.offset : member.offset + prod(shape)].view(shape)
        target.narrow(member.dim, start, stop - start).copy_(rows)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    out, n = [], 1
    for size in reversed(shape):
        out.append(n)
        n *= max(size, 1)
    return tuple(reversed(out))
