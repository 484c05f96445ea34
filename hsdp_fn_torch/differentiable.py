"""A gather that is a pure differentiable function: what the tests hold everything else against.

`differentiable_unshard` maps local rows to full parameters through functional collectives. Its backward is the
reduce-scatter, whose backward is the gather again; both are module-level ``autograd.Function`` with
``setup_context``, so ``torch.func.grad``, double backward and ``torch.compile(fullgraph=True)`` go through. It holds
all full parameters at once and overlaps nothing: for checks and for higher-order gradients, not for training speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hsdp_fn import HSDPState, LayoutError
from hsdp_fn.layout import Bucket, Flat, Member

from .backend import torch_backend


def differentiable_unshard(state: HSDPState, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full parameters as differentiable functions of this rank's rows.

    Communicates: one all-gather a bucket over the shard group; in backward one reduce-scatter over the shard group and
    one all-reduce over the replicate group, both in compute dtype; the gradient is the mean over all data-parallel
    ranks (or what the layout's `ReductionPolicy` says).

    Raises:
        LayoutError: rows are missing or of another shape or dtype; before any collective.

    Args:
        state: for its layout and backend; its values aren't read.
        rows: as `masters` gives them; any may require gradients or be a functorch tensor.

    Returns:
        Full parameters in compute dtype by name, aliases included.
    """
    backend = torch_backend(state)
    out: dict[str, Tensor] = {}
    for plan in state.layout.units:
        for bucket in plan.buckets:
            before, after = plan.reduction.factors(bucket.mean_over, "float32")
            mesh = bucket.mesh
            shard = backend.group(mesh, mesh.shard).group_name if mesh.shard_size > 1 else ""
            replicate = backend.group(mesh, mesh.replicate).group_name if mesh.replicate_size > 1 else ""
            how = (mesh.shard_size, shard, replicate, False)
            index = mesh.shard_index(backend.rank)
            for member in bucket.params.members:
                _check_rows(rows, member, index)
            flat = _flatten([rows[m.spec.name] for m in bucket.params.members], bucket.params, index)
            flat = flat.to(getattr(torch, bucket.compute_dtype))
            whole = _Gather.apply(_ScaleGrad.apply(flat, before * after), *how)  # type: ignore[no-untyped-call]
            for member, full in zip(bucket.params.members, _unflatten(whole, bucket), strict=True):
                out.update((name, full) for name in (member.spec.name, *member.spec.aliases))
    return out


class _ScaleGrad(torch.autograd.Function):
    """Identity whose gradient is scaled: what makes a sum over ranks the mean."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Gather(torch.autograd.Function):
    """Flat shard to all flat shards in a row; if ``summed``, of their sum over replicas (`_Reduce`, transposed)."""

    @staticmethod
    def forward(x: Tensor, ranks: int, shard: str, replicate: str, summed: bool) -> Tensor:
        if summed and replicate:
            x = _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", replicate))
        if ranks == 1:
            return x.clone()
        return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, shard))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.how = inputs[1:4]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Reduce.apply(grad, *ctx.how), None, None, None, None  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    """All ranks' rows of whole gradients to this rank's rows of their sum."""

    @staticmethod
    def forward(x: Tensor, ranks: int, shard: str, replicate: str) -> Tensor:
        if ranks > 1:
            x = _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, shard))
        if replicate:
            x = _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", replicate))
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.how = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Gather.apply(grad, *ctx.how, True), None, None, None  # type: ignore[no-untyped-call]


def _wait(x: Tensor) -> Tensor:
    out: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out


def _check_rows(rows: Mapping[str, Tensor], member: Member, shard_index: int) -> None:
    name, expected = member.spec.name, (member.local_shape(shard_index), getattr(torch, member.spec.dtype))
    if name not in rows:
        raise LayoutError(f"differentiable_unshard: no rows of {name!r}; give them as masters(state) does")
    found = (tuple(rows[name].shape), rows[name].dtype)
    if found != expected:
        raise LayoutError(f"differentiable_unshard: {name!r} has {found}; this rank's rows are {expected}")


def _flatten(rows: list[Tensor], flat: Flat, shard_index: int) -> Tensor:
    """Rows to a flat shard, padding as zeros, by differentiable operators."""
    parts = []
    for row, member in zip(rows, flat.members, strict=True):
        piece = row.reshape(-1)
        parts.append(torch.nn.functional.pad(piece, (0, member.numel - piece.numel())))
    return torch.cat(parts)


def _unflatten(whole: Tensor, bucket: Bucket) -> list[Tensor]:
    pieces = whole.view(bucket.params.shard_size, -1)
    return [_assemble(pieces, member, bucket.params.shard_size) for member in bucket.params.members]


def _assemble(pieces: Tensor, member: Member, ranks: int) -> Tensor:
    parts = []
    for r in range(ranks):
        shape = member.local_shape(r)
        numel = 1
        for n in shape:
            numel *= n
        parts.append(pieces[r, member.offset : member.offset + numel].reshape(shape))
    return torch.cat(parts, member.dim)
