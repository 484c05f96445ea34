"""NPU_SIM_STRICT_MEMORY: ``src/strict_allocator.cpp`` in place of torch_npu's caching allocator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Stream(ctypes.Structure):
    """``c10::Stream``, all that the wheel's ``NPUStream`` holds."""

    _fields_ = (("device_type", ctypes.c_int8), ("device_index", ctypes.c_int8), ("stream_id", ctypes.c_int64))


_kept: list[object] = []  # what the wheel calls as long as the process lives


def install(main: ctypes.CDLL) -> None:
    """Take all device memory from the strict allocator; before the first allocation."""
    main.npu_sim_use.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    # C++ passes an NPUStream by its address, since it has a destructor.
    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Stream))
    def record_stream(block: int, address: Any) -> None:
        stream = address.contents
        handle = torch.npu.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        main.npu_sim_use(block, handle.npu_stream)

    allocator = torch.npu.memory.NPUPluggableAllocator(main._name, "npu_sim_allocate", "npu_sim_free")
    allocator.allocator().set_record_stream_fn(ctypes.cast(record_stream, ctypes.c_void_p).value)
    torch.npu.memory.change_current_allocator(allocator)
    _kept.extend([record_stream, allocator])
    torch.npu.memory.memory_stats_as_nested_dict = _no_statistics


def _no_statistics(device: object = None) -> dict[str, Any]:
    """The wheel would return what nobody has written, and more of it than there is room for."""
    raise NotImplementedError("npu_sim: with NPU_SIM_STRICT_MEMORY there are no memory statistics")
