"""Collectives made of sends and receives, for process groups whose own ones move more than they must (gloo's).

Every rank exchanges its slices with every other rank directly, straight between the buffers. That is the least traffic
there is, in ``ranks - 1`` messages a rank at once: for few ranks. Select them with `UnitComm.set_all_gather` and
`UnitComm.set_reduce_scatter`, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .comm import DefaultMemory

# So that a gather and a reduction between two ranks never take each other's messages.
_GATHER_TAG, _REDUCE_TAG = 0x6A11, 0x6A12


class Transfer:
    """Sends and receives in flight, and what remains to be done after them."""

    def __init__(self, works: list[Any], finish: Callable[[], None] | None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """Wait for all messages, then finish; the first failure is raised after the last wait. Again: nothing."""
        works, self._works = self._works, []
        finish, self._finish = self._finish, None
        failure: Exception | None = None
        for work in works:
            try:
                work.wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if finish is not None:
            with torch.no_grad():
                finish()


class PointToPointAllGather(DefaultMemory):
    """All-gather by direct messages into the output's slices. The same bits as the group's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Communicates: ``ranks - 1`` sends and receives of the input's size.

        Args:
            output_tensor: ``(ranks * n,)``, any dtype.
            input_tensor: ``(n,)``, possibly this rank's slice of the output.

        Returns:
            A `Transfer`; None unless ``async_op``.
        """
        rank, slices = group.rank(), output_tensor.view(group.size(), -1)
        received = ((peer, slices[peer]) for peer in _peers(group))
        works = _exchange(group, received, ((peer, input_tensor) for peer in _peers(group)), _GATHER_TAG)
        if slices[rank].data_ptr() != input_tensor.data_ptr():
            slices[rank].copy_(input_tensor)
        return _result(Transfer(works, None), async_op)


class PointToPointReduceScatter(DefaultMemory):
    """Reduce-scatter by direct messages: each rank receives its slice of every peer's input, and adds.

    The sum is ``((x0 + x1) + x2) + ...`` in rank order, rounded to the dtype after each addition: it depends neither
    on timing nor on how the buffer is cut, and is the same whichever rank computes it. gloo's own starts at another
    rank for different parts of the buffer, so results on more than two ranks may differ from it by rounding; on two
    ranks, and for sums that are exact, they are the same bits.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Any:
        """Communicates: ``ranks - 1`` sends and receives of the output's size. Takes new memory for ``ranks - 2`` more.

        Args:
            output_tensor: ``(n,)``, apart from the input's memory.
            input_tensor: ``(ranks * n,)``: one slice a rank.

        Returns:
            A `Transfer`, whose ``wait`` adds; None unless ``async_op``.

        Raises:
            NotImplementedError: the op isn't a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"only sums can be reduced point to point, found {op}")
        rank, size = group.rank(), group.size()
        slices = input_tensor.view(size, -1)
        first = 1 if rank == 0 else 0  # received in place; for rank 0, x1 + x0 is x0 + x1
        terms = {peer: slices[rank] if peer == rank else output_tensor for peer in (rank, first) if peer < size}
        for peer in range(size):
            if peer not in terms:
                terms[peer] = torch.empty_like(output_tensor)
        received = ((peer, terms[peer]) for peer in _peers(group))
        works = _exchange(group, received, ((peer, slices[peer]) for peer in _peers(group)), _REDUCE_TAG)

        def add() -> None:
            if size == 1:
                output_tensor.copy_(slices[0])
            for peer in range(size) if size > 1 else ():
                if peer != first:
                    output_tensor.add_(terms[peer])

        return _result(Transfer(works, add), async_op)


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of the group, each rank beginning with the next one."""
    return [(group.rank() + i) % group.size() for i in range(1, group.size())]


def _exchange(
    group: dist.ProcessGroup,
    receive: Iterable[tuple[int, Tensor]],
    send: Iterable[tuple[int, Tensor]],
    tag: int,
) -> list[Any]:
    ops = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer, tag=tag) for peer, tensor in receive]
    ops += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer, tag=tag) for peer, tensor in send]
    works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
    return works


def _result(transfer: Transfer, async_op: bool) -> Transfer | None:
    if async_op:
        return transfer
    transfer.wait()
    return None
