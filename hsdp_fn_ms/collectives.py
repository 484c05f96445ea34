"""The three collectives in two forms: MindSpore's tensor collectives (Ascend), and what CPU's ``mccl`` can do instead.

On CPU there is no kernel for an all-gather into one tensor, nor for any reduce-scatter. There an all-gather is one into
a list and a concatenation, a reduce-scatter an all-reduce of a copy of which this rank's chunk is kept. Each form
returns a handle whose `Flight.wait` ends the collective; the output holds nothing before.

This module was run with ``mccl`` on CPU. The form for Ascend has never been run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mindspore.mint.distributed as dist
from mindspore import Tensor, mint, ops

from .probe import settle


class Flight:
    """A collective that has been issued.

    Args:
        handle: MindSpore's.
        output: of the collective.
        value: what to copy into it when the handle has been awaited; None where the collective writes there itself. Of
            memory of its own: on CPU ``copy_`` from a view at offset 0 fails, and says so late.
        late: errors come with the host's next synchronization only (on CPU).
    """

    __slots__ = ("_failure", "_handle", "_late", "_output", "_value")

    def __init__(self, handle: Any, output: Tensor, value: Callable[[], Tensor] | None, *, late: bool) -> None:
        self._handle, self._output, self._value, self._late = handle, output, value, late
        self._failure: Exception | None = None

    def wait(self) -> None:
        """Order the caller after it. Waiting again does nothing. Raises what the collective raised, each time."""
        if self._failure is not None:
            raise self._failure
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.wait()
            if self._late:
                settle()
            if self._value is not None:
                self._output.copy_(self._value())
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._value = None


class Collectives(Protocol):
    """What a backend issues: sums and gathers of 1-D tensors over a group."""

    title: str

    def all_gather(self, shard: Tensor, ranks: int, group: str) -> tuple[Tensor, Flight]:
        """Communicates: ``[n]`` to ``[ranks * n]``."""
        ...

    def reduce_scatter(self, packed: Tensor, ranks: int, index: int, group: str) -> tuple[Tensor, Flight]:
        """Communicates: ``[ranks * n]`` to this rank's ``[n]`` of the sum. Leaves ``packed`` as it is."""
        ...

    def all_reduce(self, buffer: Tensor, group: str) -> tuple[Tensor, Flight]:
        """Communicates: the sum, in place."""
        ...


class TensorCollectives:
    """MindSpore's own, each asynchronous. For Ascend; never run there."""

    title = "all_gather_into_tensor, reduce_scatter_tensor, all_reduce"

    def all_gather(self, shard: Tensor, ranks: int, group: str) -> tuple[Tensor, Flight]:
        """See `Collectives.all_gather`."""
        out = mint.empty((shard.shape[0] * ranks,), dtype=shard.dtype)
        handle = dist.all_gather_into_tensor(out, shard, group=group, async_op=True)
        return out, Flight(handle, out, None, late=False)

    def reduce_scatter(self, packed: Tensor, ranks: int, index: int, group: str) -> tuple[Tensor, Flight]:
        """See `Collectives.reduce_scatter`."""
        out = mint.empty((packed.shape[0] // ranks,), dtype=packed.dtype)
        handle = dist.reduce_scatter_tensor(out, packed, op=ops.ReduceOp.SUM, group=group, async_op=True)
        return out, Flight(handle, out, None, late=False)

    def all_reduce(self, buffer: Tensor, group: str) -> tuple[Tensor, Flight]:
        """See `Collectives.all_reduce`."""
        handle = dist.all_reduce(buffer, op=ops.ReduceOp.SUM, group=group, async_op=True)
        return buffer, Flight(handle, buffer, None, late=False)


class Compositions:
    """The same out of what ``mccl`` has on CPU: a reduce-scatter sends and receives as much as an all-reduce.

    What was issued before runs first, so that a late error of an operator is raised before the collective is issued,
    and not taken for the collective's own.
    """

    title = "all_gather of a list and cat, all_reduce of a copy and the own chunk, all_reduce"

    def all_gather(self, shard: Tensor, ranks: int, group: str) -> tuple[Tensor, Flight]:
        """See `Collectives.all_gather`."""
        settle()
        pieces = [mint.empty(shard.shape, dtype=shard.dtype) for _ in range(ranks)]
        out = mint.empty((shard.shape[0] * ranks,), dtype=shard.dtype)
        handle = dist.all_gather(pieces, shard, group=group, async_op=True)
        return out, Flight(handle, out, lambda: mint.cat(pieces, 0), late=True)

    def reduce_scatter(self, packed: Tensor, ranks: int, index: int, group: str) -> tuple[Tensor, Flight]:
        """See `Collectives.reduce_scatter`."""
        settle()
        count = packed.shape[0] // ranks
        total = packed.copy()
        out = mint.empty((count,), dtype=packed.dtype)
        handle = dist.all_reduce(total, op=ops.ReduceOp.SUM, group=group, async_op=True)
        return out, Flight(handle, out, lambda: mint.narrow(total, 0, index * count, count).copy(), late=True)

    def all_reduce(self, buffer: Tensor, group: str) -> tuple[Tensor, Flight]:
        """See `Collectives.all_reduce`."""
        settle()
        handle = dist.all_reduce(buffer, op=ops.ReduceOp.SUM, group=group, async_op=True)
        return buffer, Flight(handle, buffer, None, late=True)
