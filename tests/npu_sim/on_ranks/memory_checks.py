"""Checks of NPU_SIM_STRICT_MEMORY in one process; run by `test_device.py`."""

from __future__ import annotations

import ctypes

import torch

from tests.npu_sim import checks
from tests.npu_sim.on_ranks.device_gate import gate

torch.npu.set_device(0)
FREED = 3.3961513649220713e38  # 0x7F7F7F7F as fp32


def read_late(keep: bool) -> float:
    """What another stream reads of a block that was freed, and whose place was taken, before it came to that."""
    side, x = torch.npu.Stream(), torch.full((1000,), 2.0, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        held = gate()
        y = x.clone()
    if keep:
        x.record_stream(side)
    del x
    torch.zeros(1000, device="npu")  # could have got the same block
    torch.npu.current_stream().synchronize()
    held.set()
    torch.npu.synchronize()
    return y[0].item()


def check_a_stream_that_was_not_recorded_reads_freed_memory() -> None:
    assert read_late(keep=False) == FREED


def check_a_recorded_stream_keeps_the_memory() -> None:
    assert read_late(keep=True) == 2.0


def check_memory_that_was_not_written_is_nan_even_where_a_block_was_freed_before() -> None:
    x = torch.ones(1000, device="npu")
    del x
    assert torch.empty(1000, device="npu").isnan().all()


def check_a_freed_storage_reads_as_freed() -> None:
    x = torch.ones(1000, device="npu")
    alias = x.untyped_storage().data_ptr()
    x.untyped_storage().resize_(0)
    torch.zeros(1, device="npu")
    torch.npu.synchronize()
    assert ctypes.string_at(alias, 8) == b"\x7f" * 8


checks.main(globals())
