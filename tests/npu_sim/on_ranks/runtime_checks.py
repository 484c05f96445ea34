"""Checks of the simulated runtime at its C interface, without torch; run by `test_runtime.py`."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_void_p

from tests.npu_sim import checks
from tests.npu_sim.bare import DEVICE_TO_HOST, HOST_TO_DEVICE, Library, Refused, read

lib = Library()
lib.aclrtSetDevice(0)

INVALID_HANDLE, INVALID_PARAMETER, OUT_OF_MEMORY, NO_TIME = 107017, 107000, 207001, 107006


def refused(code: int, function: str, *arguments: object) -> str:
    """The text of a refusal with this code."""
    try:
        getattr(lib, function)(*arguments)
    except Refused as error:
        assert error.code == code, error
        return str(error)
    raise AssertionError(f"{function} was not refused")


# --------------------------------------------------------------------------------------------------------------- memory


def check_memory_that_nobody_has_written_is_nan() -> None:
    assert read(lib.allocate(64), 64) == b"\xff" * 64


def check_freed_memory_holds_a_pattern_of_its_own() -> None:
    block = lib.allocate(64)
    ctypes.memset(block, 1, 64)
    lib.aclrtFree(block)
    assert read(block, 64) == b"\x7f" * 64


def check_memory_is_not_freed_twice() -> None:
    block = lib.allocate(64)
    lib.aclrtFree(block)
    assert "freed before" in refused(INVALID_PARAMETER, "aclrtFree", block)


def check_a_copy_must_stay_inside_its_block() -> None:
    block, host = lib.allocate(64), ctypes.create_string_buffer(128)
    text = refused(INVALID_PARAMETER, "aclrtMemcpy", block, c_size_t(128), host, c_size_t(128), HOST_TO_DEVICE)
    assert "128 bytes at offset 0 of a block of 64" in text


def check_a_copy_must_not_read_freed_memory() -> None:
    block, host = lib.allocate(64), ctypes.create_string_buffer(64)
    lib.aclrtFree(block)
    text = refused(INVALID_PARAMETER, "aclrtMemcpy", host, c_size_t(64), block, c_size_t(64), DEVICE_TO_HOST)
    assert "isn't device memory, or not any more" in text


def check_a_device_has_no_more_memory_than_the_options_say() -> None:
    free, total = c_size_t(), c_size_t()
    lib.aclrtGetMemInfo(0, byref(free), byref(total))
    assert total.value == 16 << 20
    text = refused(OUT_OF_MEMORY, "aclrtMalloc", byref(c_void_p()), c_size_t(17 << 20), 0)
    assert "out of memory on device 0" in text


def check_the_armed_allocation_fails_and_no_other() -> None:
    lib.raw.npu_sim_arm(b"oom@2x2")
    lib.allocate(64)
    refused(OUT_OF_MEMORY, "aclrtMalloc", byref(c_void_p()), c_size_t(64), 0)
    refused(OUT_OF_MEMORY, "aclrtMalloc", byref(c_void_p()), c_size_t(64), 0)
    lib.allocate(64)


def check_a_fault_for_another_rank_does_not_strike() -> None:
    lib.raw.npu_sim_arm(b"oom@1/1")
    lib.allocate(64)


# -------------------------------------------------------------------------------------------------------------- streams


def check_tasks_of_a_stream_run_in_order() -> None:
    stream, seen = lib.stream(), []
    for i in range(50):
        lib.launch(stream, lambda i=i: seen.append(i))
    lib.aclrtSynchronizeStream(stream)
    assert seen == list(range(50))


def check_launches_return_before_the_work_is_done() -> None:
    stream = lib.stream()
    gate = lib.gate(stream)
    assert not done(stream)
    gate.set()
    lib.aclrtSynchronizeStream(stream)
    assert done(stream)


def done(stream: c_void_p) -> bool:
    status = c_int()
    lib.aclrtStreamQuery(stream, byref(status))
    return status.value == 0


def check_a_synchronization_can_have_a_limit() -> None:
    stream = lib.stream()
    gate = lib.gate(stream)
    assert "isn't done within 20 ms" in refused(507046, "aclrtSynchronizeStreamWithTimeout", stream, 20)
    gate.set()
    lib.aclrtSynchronizeStream(stream)


def check_all_streams_of_the_device_are_synchronized_and_no_others() -> None:
    lib.aclrtSetDevice(1)
    elsewhere = lib.stream()
    gate = lib.gate(elsewhere)
    lib.aclrtSetDevice(0)
    streams = [lib.stream() for _ in range(3)]
    for stream in streams:
        lib.launch(stream, lambda: time.sleep(0.02))
    lib.aclrtSynchronizeDevice()
    assert all(map(done, streams)) and not done(elsewhere)
    gate.set()


def check_a_failed_task_is_reported_and_the_rest_is_skipped() -> None:
    stream, other, event, seen = lib.stream(), lib.stream(), lib.event(), []
    fail(stream, b"1 / 0")
    lib.launch(stream, lambda: seen.append("skipped"))
    lib.aclrtRecordEvent(event, stream)
    lib.aclrtStreamWaitEvent(other, event)
    assert "the kernel of divide failed: 1 / 0" in refused(507035, "aclrtSynchronizeStream", stream)
    assert "1 / 0" in refused(507035, "aclrtSynchronizeStream", other), "a failure follows events"
    assert seen == []
    lib.aclrtDestroyStream(stream)  # else all later synchronizations of the device would report it again
    lib.aclrtDestroyStream(other)


def fail(stream: c_void_p, text: bytes) -> None:
    """Launch a kernel that fails."""

    @ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
    def kernel(argument: int, message: int, size: int) -> int:
        ctypes.memmove(message, text + b"\0", len(text) + 1)
        return 1

    lib._functions.append(kernel)
    lib.npu_sim_launch(c_char_p(b"divide"), kernel, None, stream)


# --------------------------------------------------------------------------------------------------------------- events


def read_behind_a_gate(wait: bool) -> list[int]:
    """What a second stream reads of a number before and after the first one may set it."""
    first, second, event = lib.stream(), lib.stream(), lib.event()
    box, seen = [0], []
    gate = lib.gate(first)
    lib.launch(first, lambda: box.__setitem__(0, 1))
    lib.aclrtRecordEvent(event, first)
    if wait:
        lib.aclrtStreamWaitEvent(second, event)
    lib.launch(second, lambda: seen.append(box[0]))
    time.sleep(0.05)
    gate.set()
    lib.aclrtSynchronizeStream(second)
    return seen


def check_a_wait_orders_two_streams() -> None:
    assert read_behind_a_gate(wait=True) == [1]


def check_without_the_wait_the_value_is_wrong() -> None:
    assert read_behind_a_gate(wait=False) == [0]


def check_a_wait_is_for_the_latest_recording_and_not_for_later_ones() -> None:
    first, second, event = lib.stream(), lib.stream(), lib.event()
    lib.aclrtRecordEvent(event, first)
    lib.aclrtStreamWaitEvent(second, event)
    gate = lib.gate(first)
    lib.aclrtRecordEvent(event, first)
    lib.aclrtSynchronizeStream(second)  # would last ten seconds, and the gate with it
    assert not done(first)
    gate.set()
    lib.aclrtSynchronizeEvent(event)


def check_an_earlier_recording_on_a_slow_stream_still_holds_its_waiter() -> None:
    slow, fast, waiter, event = lib.stream(), lib.stream(), lib.stream(), lib.event()
    gate = lib.gate(slow)
    lib.aclrtRecordEvent(event, slow)
    lib.aclrtStreamWaitEvent(waiter, event)
    lib.aclrtRecordEvent(event, fast)
    lib.aclrtSynchronizeEvent(event)  # the second generation is reached before the first
    assert not done(waiter)
    gate.set()
    lib.aclrtSynchronizeStream(waiter)


def check_an_event_that_was_never_recorded_holds_nobody() -> None:
    stream, event = lib.stream(), lib.event()
    lib.aclrtStreamWaitEvent(stream, event)
    lib.aclrtSynchronizeStream(stream)
    lib.aclrtSynchronizeEvent(event)


def check_a_query_tells_whether_the_event_is_reached() -> None:
    stream, event, status = lib.stream(), lib.event(), c_int()
    gate = lib.gate(stream)
    lib.aclrtRecordEvent(event, stream)
    lib.aclrtQueryEventStatus(event, byref(status))
    assert status.value == 0  # not ready
    gate.set()
    lib.aclrtSynchronizeEvent(event)
    lib.aclrtQueryEventStatus(event, byref(status))
    assert status.value == 1


def check_the_time_between_two_events_is_measured() -> None:
    stream, start, end, ms = lib.stream(), lib.event(), lib.event(), c_float()
    refused(NO_TIME, "aclrtEventElapsedTime", byref(ms), start, end)
    lib.aclrtRecordEvent(start, stream)
    lib.launch(stream, lambda: time.sleep(0.05))
    lib.aclrtRecordEvent(end, stream)
    lib.aclrtSynchronizeStream(stream)
    lib.aclrtEventElapsedTime(byref(ms), start, end)
    assert ms.value >= 50


def check_a_destroyed_stream_or_event_is_refused() -> None:
    stream, event = lib.stream(), lib.event()
    lib.aclrtDestroyEvent(event)
    refused(INVALID_HANDLE, "aclrtRecordEvent", event, stream)
    lib.aclrtDestroyStream(stream)
    refused(INVALID_HANDLE, "aclrtSynchronizeStream", stream)


checks.main(globals())
