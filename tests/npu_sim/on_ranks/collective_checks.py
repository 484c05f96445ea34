"""Checks of ``torch.distributed`` with backend ``hccl`` on 2 or 4 ranks; run by `test_collectives.py`.

Every rank knows what every other one sends (`sent`), so it computes for itself what must come.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tests.npu_sim import checks

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("npu", RANK)
torch.npu.set_device(DEVICE)
dist.init_process_group("hccl", timeout=timedelta(seconds=60))

REDUCED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16)
MOVED = (*REDUCED, torch.uint8, torch.bool, torch.float64)
OPS: tuple[tuple[dist.ReduceOp.RedOpType, Callable[[list[Tensor]], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda xs: sum(xs[1:], start=xs[0])),
    (dist.ReduceOp.PRODUCT, lambda xs: math.prod(xs[1:], start=xs[0])),
    (dist.ReduceOp.MAX, lambda xs: torch.stack(xs).amax(0)),
    (dist.ReduceOp.MIN, lambda xs: torch.stack(xs).amin(0)),
)


def sent(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What a rank sends: small whole numbers, so that sums and products are exact in every dtype."""
    return ((torch.arange(count) * 7 + rank * 5 + salt) % 4 - 1).to(dtype)


def all_sent(count: int, dtype: torch.dtype, salt: int = 0) -> list[Tensor]:
    return [sent(rank, count, dtype, salt) for rank in range(RANKS)]


def equal(found: Tensor, expected: Tensor) -> None:
    assert found.device == DEVICE
    assert torch.equal(found.cpu(), expected), f"{found.dtype}: {found.tolist()} instead of {expected.tolist()}"


def check_all_gather_of_each_dtype() -> None:
    for dtype in MOVED:
        out = torch.empty(3 * RANKS, dtype=dtype, device=DEVICE)
        dist.all_gather_single(out, sent(RANK, 3, dtype).to(DEVICE))
        equal(out, torch.cat(all_sent(3, dtype)))


def check_all_gather_into_a_list() -> None:
    for dtype in MOVED:
        outs = [torch.empty(3, dtype=dtype, device=DEVICE) for _ in range(RANKS)]
        dist.all_gather(outs, sent(RANK, 3, dtype).to(DEVICE))
        for out, expected in zip(outs, all_sent(3, dtype), strict=True):
            equal(out, expected)


def check_all_gather_in_place() -> None:
    out = torch.full((2 * RANKS,), -7.0, device=DEVICE)
    mine = out[2 * RANK : 2 * RANK + 2]
    mine.copy_(sent(RANK, 2, torch.float32))
    dist.all_gather_single(out, mine)
    equal(out, torch.cat(all_sent(2, torch.float32)))


def check_all_reduce_of_each_dtype_and_op() -> None:
    for dtype in REDUCED:
        for op, reduction in OPS:
            x = sent(RANK, 5, dtype).to(DEVICE)
            dist.all_reduce(x, op=op)
            equal(x, reduction(all_sent(5, dtype)).to(dtype))


def check_reduce_scatter_of_each_dtype_and_op() -> None:
    for dtype in REDUCED:
        for op, reduction in OPS:
            out = torch.empty(3, dtype=dtype, device=DEVICE)
            dist.reduce_scatter_single(out, sent(RANK, 3 * RANKS, dtype).to(DEVICE), op=op)
            equal(out, reduction(all_sent(3 * RANKS, dtype))[3 * RANK : 3 * RANK + 3].to(dtype))


def check_the_mean_is_a_sum_and_a_division() -> None:
    x, y = sent(RANK, 4, torch.float32), torch.empty(1, device=DEVICE)
    mean = torch.stack(all_sent(4, torch.float32)).mean(0)
    z = x.to(DEVICE)
    dist.all_reduce(z, op=dist.ReduceOp.AVG)
    equal(z, mean)
    whole = sent(RANK, RANKS, torch.float32).to(DEVICE)
    dist.reduce_scatter_single(y, whole, op=dist.ReduceOp.AVG)
    equal(y, torch.stack(all_sent(RANKS, torch.float32)).mean(0)[RANK : RANK + 1])
    equal(whole, sent(RANK, RANKS, torch.float32))  # the input is left alone


def check_broadcast_and_scatter_from_each_root() -> None:
    for root in range(RANKS):
        x = sent(RANK, 3, torch.float32).to(DEVICE)
        dist.broadcast(x, src=root)
        equal(x, sent(root, 3, torch.float32))
        out = torch.empty(2, dtype=torch.int32, device=DEVICE)
        pieces = [sent(rank, 2, torch.int32, salt=root).to(DEVICE) for rank in range(RANKS)]
        dist.scatter(out, pieces if root == RANK else None, src=root)
        equal(out, sent(RANK, 2, torch.int32, salt=root))


def check_reduce_to_each_root() -> None:
    for root in range(RANKS):
        x = sent(RANK, 3, torch.float32).to(DEVICE)
        dist.reduce(x, dst=root)
        if root == RANK:
            equal(x, sum(all_sent(3, torch.float32)))


def check_all_to_all_of_equal_parts() -> None:
    for dtype in MOVED:
        out = torch.empty(2 * RANKS, dtype=dtype, device=DEVICE)
        dist.all_to_all_single(out, sent(RANK, 2 * RANKS, dtype).to(DEVICE))
        equal(out, torch.cat([x[2 * RANK : 2 * RANK + 2] for x in all_sent(2 * RANKS, dtype)]))


def check_all_to_all_of_unequal_parts() -> None:
    """Rank r sends ``(r + d) % RANKS`` elements to rank d; some parts are empty."""
    sizes = [[(source + to) % RANKS for to in range(RANKS)] for source in range(RANKS)]
    out = torch.empty(sum(row[RANK] for row in sizes), device=DEVICE)
    mine = sent(RANK, sum(sizes[RANK]), torch.float32).to(DEVICE)
    dist.all_to_all_single(out, mine, [row[RANK] for row in sizes], sizes[RANK])
    parts = [sent(source, sum(row), torch.float32).split(row)[RANK] for source, row in enumerate(sizes)]
    equal(out, torch.cat(parts))


def check_send_and_receive_around_a_ring() -> None:
    x, out = sent(RANK, 40_000, torch.float32).to(DEVICE), torch.empty(40_000, device=DEVICE)
    following, previous = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    if RANK % 2 == 0:
        dist.send(x, following)
        dist.recv(out, previous)
    else:
        dist.recv(out, previous)
        dist.send(x, following)
    equal(out, sent(previous, 40_000, torch.float32))


def check_batches_of_messages() -> None:
    outs = {peer: torch.empty(30_000, device=DEVICE) for peer in range(RANKS) if peer != RANK}
    ops = [dist.P2POp(dist.irecv, out, peer) for peer, out in outs.items()]
    ops += [dist.P2POp(dist.isend, sent(RANK, 30_000, torch.float32, salt=peer).to(DEVICE), peer) for peer in outs]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for peer, out in outs.items():
        equal(out, sent(peer, 30_000, torch.float32, salt=RANK))


def check_objects_are_gathered_and_broadcast() -> None:
    found: list[object] = [None] * RANKS
    dist.all_gather_object(found, {"rank": RANK, "text": "x" * (100 * RANK)})
    assert found == [{"rank": rank, "text": "x" * (100 * rank)} for rank in range(RANKS)]
    listed = [("from", RANK)]
    dist.broadcast_object_list(listed, src=1)
    assert listed == [("from", 1)]


def check_handles_order_the_current_stream() -> None:
    out = torch.empty(RANKS, device=DEVICE)
    work = dist.all_gather_single(out, torch.full((1,), float(RANK), device=DEVICE), async_op=True)
    assert work is not None
    work.wait()
    later = out + 1
    assert work.get_future().wait() is not None
    equal(later, torch.arange(RANKS) + 1.0)


def check_coalesced_collectives() -> None:
    outs = [torch.empty(2 * RANKS, device=DEVICE) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for salt, out in enumerate(outs):
            dist.all_gather_single(out, sent(RANK, 2, torch.float32, salt).to(DEVICE))
    manager.wait()
    for salt, out in enumerate(outs):
        equal(out, torch.cat(all_sent(2, torch.float32, salt)))


def check_barriers() -> None:
    for _ in range(3):
        dist.barrier()


def check_subgroups() -> None:
    groups = [dist.new_group([first, first + 1]) for first in range(0, RANKS, 2)]
    x = torch.full((1,), float(RANK), device=DEVICE)
    dist.all_reduce(x, group=groups[RANK // 2])
    equal(x, torch.tensor([float(RANK // 2 * 4 + 1)]))
    alone = dist.new_group([RANK], use_local_synchronization=True)
    dist.all_reduce(x, group=alone)
    equal(x, torch.tensor([float(RANK // 2 * 4 + 1)]))


def check_fp64_is_not_reduced() -> None:
    x = torch.ones(2, dtype=torch.float64, device=DEVICE)
    try:
        dist.all_reduce(x)
    except RuntimeError as error:  # of torch_npu; the simulated HCCL would refuse it too, see `hccl_checks.py`
        assert "Unsupported data type at::kDouble" in str(error), error
    else:
        raise AssertionError("it was reduced")


checks.main(globals())
dist.destroy_process_group()
