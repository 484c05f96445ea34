"""What `graph` compiles: gather, split, differentiate, pack, reduce and scale, as functions that ``mindspore.jit`` can
parse.

The inner functions below aren't run by Python but read as source, in a small part of the language: no ``try``, no
lists that grow, no objects but tensors, tuples and what is captured, loops over known ranges (unrolled). Each ``_make``
function runs in Python and captures plain numbers for them. Where both differ, MindSpore raises while compiling, but
two things are silent there: a gradient of a tuple that is an argument of the graph is ``()``, so gradients are taken of
tuples made inside; and independent operators run in any order, so `ops.depend` chains the collectives, else ranks could
issue them in different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hsdp_fn import GradientError
from hsdp_fn.dtypes import COMPUTE_FLOATS, ITEMSIZE
from hsdp_fn.layout import Bucket, Member, UnitLayout

_FLOATS = tuple(getattr(ms, name) for name in COMPUTE_FLOATS)
_VJP = ops.GradOperation(get_all=True, sens_param=True)
Function = Callable[..., Any]
#: Errors that the programs raise themselves, while they are compiled: what to raise for them, and how they begin.
REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (GradientError, "out_grads must"),
    (TypeError, "the function must return a loss"),
)


def all_gather(group: str, ranks: int, index: int, *, native: bool) -> Function:
    """``[n]`` to ``[ranks * n]``: MindSpore's operator where the device has it for this group (``native``), else an
    all-reduce of zeros around the own shard."""
    if native:
        return ops.AllGather(group)
    total = ops.AllReduce(ops.ReduceOp.SUM, group)

    def gathered(shard):
        whole = shard
        if index > 0:
            whole = ops.cat((ops.zeros((index * shard.shape[0],), shard.dtype), whole), 0)
        if index < ranks - 1:
            whole = ops.cat((whole, ops.zeros(((ranks - 1 - index) * shard.shape[0],), shard.dtype)), 0)
        return total(whole)

    return gathered


def reduce_scatter(group: str, ranks: int, index: int, *, native: bool) -> Function:
    """``[ranks * n]`` to this rank's ``[n]`` of the sum: MindSpore's operator, or an all-reduce and the own chunk."""
    if native:
        return ops.ReduceScatter(ops.ReduceOp.SUM, group)
    total = ops.AllReduce(ops.ReduceOp.SUM, group)

    def reduced(packed):
        count = packed.shape[0] // ranks
        return total(packed)[index * count : (index + 1) * count]

    return reduced


def all_reduce(group: str) -> Function:
    """The sum of a 1-D tensor, as a new one."""
    return ops.AllReduce(ops.ReduceOp.SUM, group)


def gatherer(bucket: Bucket, gather: Function | None) -> Function:
    """``(master, last) -> (full parameters of the bucket, last)``, in compute dtype; ``last`` is the newest
    collective's output."""
    dtype, ranks = getattr(ms, bucket.compute_dtype), bucket.params.shard_size
    members = tuple(_cut(member, ranks) for member in bucket.params.members)

    def gathered(master, last):
        whole = ops.cast(master, dtype)
        if gather is not None:
            whole = gather(ops.depend(whole, last))
            last = whole
        pieces = ops.reshape(whole, (ranks, -1))
        full = ()
        for offset, numel, dim, shape, locals_ in members:
            slots = mint.narrow(pieces, 1, offset, numel)
            if dim == 0:  # ranks that own fewer rows than others come last, so that all padding is at the end
                full = (*full, ops.reshape(mint.narrow(ops.reshape(slots, (-1,)), 0, 0, _count(shape)), shape))
            else:
                parts = ()
                for r in range(len(locals_)):
                    parts = (*parts, ops.reshape(mint.narrow(slots[r], 0, 0, _count(locals_[r])), locals_[r]))
                full = (*full, ops.cat(parts, dim))
        return full, last

    return gathered


def _count(shape):
    """Number of elements; in the graph."""
    total = 1
    for n in shape:
        total = total * n
    return total


def _cut(member: Member, ranks: int) -> tuple[int, int, int, tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Where a member is: offset and size of its slot, split dim, shape, and each rank's rows (those that have some)."""
    rows = tuple(member.local_shape(r) for r in range(ranks))
    return member.offset, member.numel, member.dim, member.spec.shape, tuple(s for s in rows if s[member.dim])


def reducer(bucket: Bucket, plan: UnitLayout, scatter: Function | None, everywhere: Function | None) -> Function:
    """``(full gradients of the bucket's trainable parameters, last) -> (finished gradient shard, last)``."""
    assert bucket.grads is not None
    ranks, wire, final = bucket.grads.shard_size, getattr(ms, bucket.reduce_dtype), getattr(ms, bucket.grad_dtype)
    members = tuple((*_cut(m, ranks)[1:4], tuple(m.rows(r) for r in range(ranks))) for m in bucket.grads.members)
    before, after = plan.reduction.factors(bucket.mean_over, bucket.reduce_dtype)
    narrowing = ITEMSIZE[bucket.compute_dtype] > ITEMSIZE[bucket.reduce_dtype]
    widening = ITEMSIZE[bucket.grad_dtype] > ITEMSIZE[bucket.reduce_dtype]
    # A Python number would be rounded to float32.
    scale = Tensor(after, ms.float64) if widening and bucket.grad_dtype == "float64" else after

    def packed_slots(grad, numel, dim, rows):
        """``[ranks, slot]`` of one gradient."""
        if dim == 0:
            missing = ranks * numel - grad.size
            flat = ops.reshape(grad, (-1,))
            if missing > 0:
                flat = ops.cat((flat, ops.zeros((missing,), wire)), 0)
            return ops.reshape(flat, (ranks, numel))
        slots = ()
        for start, stop in rows:
            used = 0
            if stop > start:
                piece = ops.reshape(mint.narrow(grad, dim, start, stop - start), (-1,))
                used = piece.shape[0]
                slots = (*slots, piece)
            if used < numel:
                slots = (*slots, ops.zeros((numel - used,), wire))
        return ops.reshape(ops.cat(slots, 0), (ranks, numel))

    def reduced(grads, last):
        columns = ()
        for i in range(len(members)):
            numel, dim, shape, rows = members[i]
            grad = ops.reshape(grads[i], shape)
            if narrowing and before != 1.0:  # before a cast that may overflow
                grad = grad * before
            columns = (*columns, packed_slots(ops.cast(grad, wire), numel, dim, rows))
        total = ops.reshape(ops.cat(columns, 1), (-1,))
        if not narrowing and before != 1.0:
            total = total * before
        if scatter is not None:
            total = scatter(ops.depend(total, last))
            last = total
        if everywhere is not None:
            total = everywhere(ops.depend(total, last))
            last = total
        if widening:  # scale in the wider of the two
            total = ops.cast(total, final)
        if after != 1.0:
            total = total * scale
        return ops.cast(total, final), last

    return reduced


def caller(function: Function, plan: UnitLayout) -> Function:
    """``(full parameters in the order of the buckets, inputs) -> outputs``, with the unit's mixed precision."""
    names = tuple((m.spec.name, *m.spec.aliases) for bucket in plan.buckets for m in bucket.params.members)
    policy = plan.mp_policy
    taken = getattr(ms, policy.param_dtype) if policy.param_dtype and policy.cast_forward_inputs else None
    given = getattr(ms, policy.output_dtype) if policy.output_dtype else None

    def called(full, inputs):
        params = {}
        for i in range(len(names)):
            for name in names[i]:
                params[name] = full[i]
        cast = ()
        for tensor in inputs:
            if taken is not None and tensor.dtype in _FLOATS:
                tensor = ops.cast(tensor, taken)
            cast = (*cast, tensor)
        out = function(params, *cast)
        if given is None:
            return out
        if not isinstance(out, tuple):
            return ops.cast(out, given) if out.dtype in _FLOATS else out
        result = ()
        for tensor in out:
            result = (*result, ops.cast(tensor, given) if tensor.dtype in _FLOATS else tensor)
        return result

    return called


def forward_program(gathers: Sequence[Function], call: Function) -> Function:
    """``(*masters, *inputs) -> outputs``."""
    gathered = _all_gathered(gathers)
    buckets = len(gathers)

    def forward(*args):
        full, last = gathered(args)
        return _after(call(full, args[buckets:]), last)

    return forward


def backward_program(
    gathers: Sequence[Function],
    call: Function,
    reduces: Sequence[Function],
    trainable: Sequence[Sequence[bool]],
    floating: Sequence[bool],
    single: bool,
) -> Function:
    """``(*masters, *inputs, *out_grads) -> (gradients of floating inputs, finished gradient shards)``.

    Args:
        reduces: of the buckets that have gradients; ``trainable``: of each bucket's parameters.
        floating: which inputs have gradients.
        single: ``call`` returns a tensor, not a tuple.
    """
    gathered, leaves_of, parts_of = _all_gathered(gathers), *_leaves(trainable, floating)
    finished = _all_reduced(reduces, trainable)
    buckets, inputs_end = len(gathers), len(gathers) + len(floating)

    def backward(*args):
        full, last = gathered(args)
        inputs = args[buckets:inputs_end]
        out_grads = args[inputs_end:]
        given = out_grads[0] if single else out_grads
        _require_match(call(full, inputs), given)

        def function(leaves):
            params, tensors = parts_of(leaves, full, inputs)
            return call(params, tensors)

        (grads,) = _VJP(function)(ms.mutable(leaves_of(full, inputs)), given)
        return finished(grads, last)

    return backward


def loss_program(
    gathers: Sequence[Function],
    call: Function,
    reduces: Sequence[Function],
    trainable: Sequence[Sequence[bool]],
    floating: Sequence[bool],
) -> Function:
    """``(*masters, *inputs) -> (gradients of floating inputs, finished gradient shards, loss)``; see
    `backward_program`."""
    gathered, leaves_of, parts_of = _all_gathered(gathers), *_leaves(trainable, floating)
    finished = _all_reduced(reduces, trainable)
    buckets = len(gathers)

    def with_loss(*args):
        full, last = gathered(args)
        inputs = args[buckets:]

        def function(leaves):
            params, tensors = parts_of(leaves, full, inputs)
            loss = call(params, tensors)
            if not isinstance(loss, Tensor) or loss.size != 1 or loss.dtype not in _FLOATS:
                raise TypeError("the function must return a loss, one floating tensor of one element")
            return loss

        loss, grads = ms.value_and_grad(function, 0)(ms.mutable(leaves_of(full, inputs)))
        of_inputs, flats = finished(grads, last)
        return of_inputs, flats, loss

    return with_loss


def _all_gathered(gathers: Sequence[Function]) -> Function:
    """``args -> (full parameters in the order of the buckets, last)``; the first arguments are masters."""
    gathers, buckets = tuple(gathers), len(gathers)

    def gathered(args):
        last = args[0]
        full = ()
        for i in range(buckets):
            some, last = gathers[i](args[i], last)
            full = full + some
        return full, last

    return gathered


def _all_reduced(reduces: Sequence[Function], trainable: Sequence[Sequence[bool]]) -> Function:
    """``(gradients of the leaves, last) -> (gradients of inputs, finished gradient shards)``."""
    counts = tuple(n for n in map(sum, trainable) if n)
    reduces, params = tuple(reduces), sum(counts)

    def finished(grads, last):
        flats = ()
        at = 0
        for i in range(len(counts)):
            flat, last = reduces[i](grads[at : at + counts[i]], last)
            flats = (*flats, flat)
            at = at + counts[i]
        return _after(grads[params:], last), _after(flats, last)

    return finished


def _leaves(trainable: Sequence[Sequence[bool]], floating: Sequence[bool]) -> tuple[Function, Function]:
    """Functions for what is differentiated, trainable parameters and then floating inputs, as one tuple: one that
    takes it out of all parameters and inputs, and one that puts it back, ``(leaves, full, inputs) -> (full, inputs)``.
    """
    params, tensors = tuple(flag for flags in trainable for flag in flags), tuple(floating)

    def leaves_of(full, inputs):
        leaves = ()
        for i in range(len(params)):
            if params[i]:
                leaves = (*leaves, full[i])
        for i in range(len(tensors)):
            if tensors[i]:
                leaves = (*leaves, inputs[i])
        return leaves

    def parts_of(leaves, full, inputs):
        at = 0
        new_full = ()
        for i in range(len(params)):
            if params[i]:
                new_full = (*new_full, leaves[at])
                at = at + 1
            else:
                new_full = (*new_full, full[i])
        new_inputs = ()
        for i in range(len(tensors)):
            if tensors[i]:
                new_inputs = (*new_inputs, leaves[at])
                at = at + 1
            else:
                new_inputs = (*new_inputs, inputs[i])
        return new_full, new_inputs

    return leaves_of, parts_of


def _after(value, last):
    """A tensor, or a tuple of them, that is there after the collective ``last``, so that no optimization may leave that
    out (MindSpore 2.10 on CPU doesn't try to); in the graph."""
    if isinstance(value, tuple):
        out = ()
        for tensor in value:
            out = (*out, ops.depend(tensor, last))
        return out
    return ops.depend(value, last)


def _require_match(out, given):
    """Raise `ValueError` if a gradient doesn't fit its output; in the graph, while it is compiled."""
    if isinstance(out, tuple) != isinstance(given, tuple):
        raise ValueError("out_grads must be a tuple where the function returns one, and else a tensor")
    if isinstance(out, tuple):
        if len(out) != len(given):
            raise ValueError("out_grads must have one tensor for each output")
        for i in range(len(out)):
            if out[i].shape != given[i].shape or out[i].dtype != given[i].dtype:
                raise ValueError("out_grads must have the shapes and dtypes of the outputs")
    elif out.shape != given.shape or out.dtype != given.dtype:
        raise ValueError("out_grads must have the shape and dtype of the output")
