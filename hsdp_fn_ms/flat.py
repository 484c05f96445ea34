"""Copies between full tensors and flat shards.

MindSpore drops writes into views on CPU, so nothing is written into a buffer: every result is a concatenation. A rank's
slot in a flat shard holds its real rows contiguously, then zeros up to the slot's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mindspore import Tensor, mint

from hsdp_fn.layout import Flat, Member


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """What can be computed once about a `Flat` for one rank.

    Attributes:
        flat: the layout.
        shard_index: which piece this rank owns.
        local: shape of each member's rows in this rank's flat shard.
    """

    flat: Flat
    shard_index: int
    local: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, flat: Flat, shard_index: int) -> FlatPlan:
        """Plan for the rank that owns piece ``shard_index``."""
        return cls(flat, shard_index, tuple(m.local_shape(shard_index) for m in flat.members))


def shard_of(plan: FlatPlan, params: Sequence[Tensor]) -> Tensor:
    """This rank's rows of full ``params`` as a new flat shard."""
    pieces = []
    for member, param in zip(plan.flat.members, params, strict=True):
        start, stop = member.rows(plan.shard_index)
        pieces += _slot(member, _rows(param, member.dim, start, stop))
    return _joined(pieces, plan.flat.numel, params[0].dtype)


def pack(plan: FlatPlan, grads: Sequence[Tensor | None], dtype: Any) -> Tensor:
    """Full gradients to rank chunks in new memory; None and padding as zeros."""
    ranks = plan.flat.shard_size
    columns = []
    for member, grad in zip(plan.flat.members, grads, strict=True):
        if member.numel:
            columns.append(
                mint.zeros((ranks, member.numel), dtype=dtype)
                if grad is None
                else _slots(member, ranks, grad if grad.dtype == dtype else grad.astype(dtype))
            )
    if not columns:
        return mint.zeros((0,), dtype=dtype)
    return mint.cat(columns, 1).reshape(-1)


def unpack(plan: FlatPlan, gathered: Tensor, *, copies: bool) -> tuple[Tensor, ...]:
    """The all-gather's output to full parameters, contiguous and without padding.

    Args:
        copies: a parameter that is there in one run is copied too; else it is a view of ``gathered``.
    """
    ranks = plan.flat.shard_size
    pieces = gathered.reshape(ranks, -1)
    out = []
    for member in plan.flat.members:
        shape = member.spec.shape
        slots = mint.narrow(pieces, 1, member.offset, member.numel)
        if member.dim == 0:  # ranks that own fewer rows than others come last, so that all padding is at the end
            whole = mint.narrow(slots.reshape(-1), 0, 0, prod(shape)).reshape(shape)
            out.append(whole.copy() if copies else whole)
            continue
        parts = []
        for r in range(ranks):
            local = member.local_shape(r)
            if local[member.dim]:
                parts.append(mint.narrow(slots[r], 0, 0, prod(local)).reshape(local))
        out.append(mint.cat(parts, member.dim) if parts else mint.zeros(shape, dtype=gathered.dtype))
    return tuple(out)


def split(plan: FlatPlan, shard: Tensor) -> tuple[Tensor, ...]:
    """Views of this rank's rows."""
    return tuple(
        mint.narrow(shard, 0, member.offset, prod(shape)).reshape(shape)
        for member, shape in zip(plan.flat.members, plan.local, strict=True)
    )


def join(plan: FlatPlan, shard: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
    """``shard`` itself when all ``rows`` are its own views (or None), else a new flat shard with the new rows."""
    own = split(plan, shard)
    if all(row is None or prod(row.shape) == 0 or _same(row, mine) for row, mine in zip(rows, own, strict=True)):
        return shard
    pieces = []
    for member, row, mine in zip(plan.flat.members, rows, own, strict=True):
        pieces += _slot(member, mine if row is None else row)
    return _joined(pieces, plan.flat.numel, shard.dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors of one shape are the same memory."""
    return bool(a.is_contiguous()) and a.data_ptr() == b.data_ptr()


def _rows(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    if (start, stop) == (0, tensor.shape[dim]):
        return tensor
    return mint.narrow(tensor, dim, start, stop - start)


def _slot(member: Member, rows: Tensor) -> list[Tensor]:
    """A member's rows and their padding, 1-D."""
    count = prod(rows.shape)
    pieces = [rows.reshape(-1)] if count else []
    if count < member.numel:
        pieces.append(mint.zeros((member.numel - count,), dtype=rows.dtype))
    return pieces


def _slots(member: Member, ranks: int, full: Tensor) -> Tensor:
    """A full tensor as each rank's slot: ``[ranks, slot]``."""
    if member.dim == 0:
        return _joined(_padded(full.reshape(-1), ranks * member.numel), ranks * member.numel, full.dtype).reshape(
            ranks, -1
        )
    pieces = []
    for r in range(ranks):
        pieces += _slot(member, _rows(full, member.dim, *member.rows(r)))
    return _joined(pieces, ranks * member.numel, full.dtype).reshape(ranks, -1)


def _padded(flat: Tensor, numel: int) -> list[Tensor]:
    missing = numel - flat.shape[0]
    return [flat, mint.zeros((missing,), dtype=flat.dtype)] if missing else [flat]


def _joined(pieces: Sequence[Tensor], numel: int, dtype: Any) -> Tensor:
    """The pieces one after another, in new memory."""
    return mint.cat(list(pieces), 0) if numel else mint.zeros((0,), dtype=dtype)
