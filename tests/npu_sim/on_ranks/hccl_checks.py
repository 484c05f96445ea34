"""Checks of the simulated HCCL at its C interface on two ranks, without torch; run by `test_hccl.py`."""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p

from tests.npu_sim import checks
from tests.npu_sim.bare import FP32, FP64, SUM, Library, Refused, read

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NOT_SUPPORTED, BAD_PARAMETER, INTERNAL, TIMEOUT, REMOTE = 5, 1, 4, 9, 21

lib = Library()
lib.aclrtSetDevice(RANK)
made = 0


def communicator() -> c_void_p:
    """A new one for each check: a failed one is of no further use."""
    global made
    made += 1
    return lib.communicator(RANKS, RANK, f"/npu-sim-{os.environ['NPU_SIM_RUN_ID']}-{made}".encode())


def floats(*values: float) -> c_void_p:
    block = lib.allocate(4 * len(values))
    ctypes.memmove(block, (ctypes.c_float * len(values))(*values), 4 * len(values))
    return block


def values(block: c_void_p, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_buffer_copy(read(block, 4 * count)))


def gather(comm: c_void_p, stream: c_void_p, count: int = 1) -> c_void_p:
    out = lib.allocate(4 * count * RANKS)
    lib.HcclAllGather(floats(*[float(RANK)] * count), out, c_uint64(count), FP32, comm, stream)
    return out


def refusal(call: object, *arguments: object) -> Refused:
    try:
        call(*arguments)
    except Refused as error:
        return error
    raise AssertionError("it was not refused")


def async_error(comm: c_void_p) -> int:
    error = c_int()
    lib.HcclGetCommAsyncError(comm, byref(error))
    return error.value


def check_a_communicator_knows_its_ranks() -> None:
    comm, ranks, rank, name = communicator(), c_uint32(), c_uint32(), ctypes.create_string_buffer(128)
    lib.HcclGetRankSize(comm, byref(ranks))
    lib.HcclGetRankId(comm, byref(rank))
    lib.HcclGetCommName(comm, name)
    assert (ranks.value, rank.value) == (RANKS, RANK)
    assert os.environ["NPU_SIM_RUN_ID"].encode() in name.value


def check_a_collective_runs_in_the_order_of_its_stream() -> None:
    comm, stream = communicator(), lib.stream()
    out = lib.allocate(4 * RANKS)
    mine = floats(-1.0)
    gate = lib.gate(stream)
    lib.launch(stream, lambda: ctypes.memmove(mine, (ctypes.c_float * 1)(float(RANK)), 4))
    lib.HcclAllGather(mine, out, c_uint64(1), FP32, comm, stream)
    gate.set()
    lib.aclrtSynchronizeStream(stream)
    assert values(out, RANKS) == [0.0, 1.0]


def check_more_than_one_slot_of_data_is_sent_in_chunks() -> None:
    count = 300_001  # 1.2 MB a rank, slots of 1 MiB
    comm, stream = communicator(), lib.stream()
    out = gather(comm, stream, count)
    lib.aclrtSynchronizeStream(stream)
    assert values(out, 2 * count) == [0.0] * count + [1.0] * count


def check_no_data_at_all_is_fine() -> None:
    comm, stream = communicator(), lib.stream()
    lib.HcclAllReduce(None, None, c_uint64(0), FP32, SUM, comm, stream)
    lib.aclrtSynchronizeStream(stream)


def check_fp64_is_gathered_but_not_reduced() -> None:
    comm, stream = communicator(), lib.stream()
    block = lib.allocate(8 * RANKS)
    lib.HcclAllGather(lib.allocate(8), block, c_uint64(1), FP64, comm, stream)
    lib.aclrtSynchronizeStream(stream)
    error = refusal(lib.HcclAllReduce, block, block, c_uint64(1), FP64, SUM, comm, stream)
    assert error.code == NOT_SUPPORTED
    assert "HCCL reduces int8" in str(error)


def check_freed_memory_is_not_sent() -> None:
    comm, stream = communicator(), lib.stream()
    block = lib.allocate(4)
    lib.aclrtFree(block)
    error = refusal(lib.HcclAllReduce, block, block, c_uint64(1), FP32, SUM, comm, stream)
    assert error.code == BAD_PARAMETER


def check_different_collectives_are_told_apart() -> None:
    comm, stream, block = communicator(), lib.stream(), floats(1.0, 1.0)
    if RANK == 0:
        gather(comm, stream)
    else:
        lib.HcclAllReduce(block, block, c_uint64(2), FP32, SUM, comm, stream)
    error = refusal(lib.aclrtSynchronizeStream, stream)
    assert "different collectives" in str(error)
    assert "all_gather of 1 fp32" in str(error) and "all_reduce of 2 fp32 (sum)" in str(error)
    assert async_error(comm) == INTERNAL


def check_different_sizes_are_told_apart() -> None:
    comm, stream = communicator(), lib.stream()
    gather(comm, stream, count=1 + RANK)
    assert "all_gather of 2 fp32" in str(refusal(lib.aclrtSynchronizeStream, stream))


def check_a_rank_that_does_not_come_is_waited_for_so_long() -> None:
    comm, stream = communicator(), lib.stream()
    if RANK == 0:
        gather(comm, stream)
        error = refusal(lib.aclrtSynchronizeStream, stream)
        assert "rank 0 waited 2 s (NPU_SIM_TIMEOUT_S) for ranks 1" in str(error), error
        assert async_error(comm) == TIMEOUT
    else:
        time.sleep(2)  # and for the next check rank 0 comes no later than it is waited for


def check_a_collective_that_fails_on_one_rank_fails_on_all() -> None:
    comm, stream = communicator(), lib.stream()
    lib.raw.npu_sim_arm(b"async@2/1")
    gather(comm, stream)
    lib.aclrtSynchronizeStream(stream)
    assert async_error(comm) == 0
    gather(comm, stream)
    error = refusal(lib.aclrtSynchronizeStream, stream)
    assert ("as NPU_SIM_FAULTS asked for" if RANK == 1 else "rank 1 gave up") in str(error)
    assert async_error(comm) == REMOTE


def check_the_armed_call_is_refused_and_the_next_one_works() -> None:
    comm, stream = communicator(), lib.stream()
    lib.raw.npu_sim_arm(b"hccl@1")
    assert refusal(gather, comm, stream).code == INTERNAL
    gather(comm, stream)
    lib.aclrtSynchronizeStream(stream)


def check_a_destroyed_communicator_is_refused() -> None:
    comm = communicator()
    lib.HcclCommDestroy(comm)
    refusal(gather, comm, lib.stream())


def check_large_messages_pass_each_other_within_a_group() -> None:
    count = 100_000  # more than a box holds, so a send alone would wait for its receiver
    comm, stream, peer = communicator(), lib.stream(), c_uint32(1 - RANK)
    out, mine = lib.allocate(4 * count), floats(*[float(RANK)] * count)
    lib.HcclGroupStart()
    lib.HcclSend(mine, c_uint64(count), FP32, peer, comm, stream)
    lib.HcclRecv(out, c_uint64(count), FP32, peer, comm, stream)
    lib.HcclGroupEnd()
    lib.aclrtSynchronizeStream(stream)
    assert values(out, count) == [float(1 - RANK)] * count


def check_a_message_must_have_the_size_that_is_awaited() -> None:
    comm, stream, block = communicator(), lib.stream(), floats(1.0, 2.0)
    if RANK == 0:
        lib.HcclSend(block, c_uint64(1), FP32, c_uint32(1), comm, stream)
        lib.aclrtSynchronizeStream(stream)
    else:
        lib.HcclRecv(block, c_uint64(2), FP32, c_uint32(0), comm, stream)
        assert "rank 0 sends 4 bytes where 8 are received" in str(refusal(lib.aclrtSynchronizeStream, stream))


def check_a_peer_that_dies_is_noticed() -> None:
    comm, stream = communicator(), lib.stream()
    if RANK == 1:
        print(checks.passed("a_peer_that_dies_is_noticed"), flush=True)
        os._exit(0)
    gather(comm, stream)
    error = refusal(lib.aclrtSynchronizeStream, stream)
    assert "rank 1 (process" in str(error) and "has died" in str(error), error


checks.main(globals())
