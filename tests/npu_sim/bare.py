"""The simulated C interface from Python, without torch: for checks of the simulator itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_size_t, c_uint32, c_void_p
from typing import Any

from .simulator import load

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
FP32, FP64, INT32 = 4, 10, 2  # HcclDataType
SUM = 0  # HcclReduceOp
HostFunction = ctypes.CFUNCTYPE(None, c_void_p)


class Refused(Exception):
    """A call returned an error.

    Attributes:
        code: ACL's or HCCL's number.
    """

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name} returned {code}: {text}")
        self.code = code


class Library:
    """``lib.aclrtFree(block)`` raises `Refused` unless the function returns 0."""

    def __init__(self) -> None:
        self.raw = load()
        self.raw.aclGetRecentErrMsg.restype = c_char_p
        self._functions: list[Any] = []  # callbacks that a stream has still to call

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.raw, name)

        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                raise Refused(name, code, self.raw.aclGetRecentErrMsg().decode())

        return call

    def allocate(self, size: int) -> c_void_p:
        block = c_void_p()
        self.aclrtMalloc(byref(block), c_size_t(size), 0)
        return block

    def stream(self) -> c_void_p:
        stream = c_void_p()
        self.aclrtCreateStreamWithConfig(byref(stream), 0, 0)
        return stream

    def event(self) -> c_void_p:
        event = c_void_p()
        self.aclrtCreateEventExWithFlag(byref(event), c_uint32(0))
        return event

    def launch(self, stream: c_void_p, function: Callable[[], object]) -> None:
        """Call ``function`` in the stream's thread, in its order."""
        entry = HostFunction(lambda _: function())
        self._functions.append(entry)
        self.aclrtLaunchHostFunc(stream, entry, None)

    def gate(self, stream: c_void_p) -> threading.Event:
        """Hold the stream here until the gate is set, ten seconds at most."""
        gate = threading.Event()
        self.launch(stream, lambda: gate.wait(10.0))
        return gate

    def communicator(self, ranks: int, rank: int, root_info: bytes) -> c_void_p:
        """Communicates with those who give the same info."""
        comm, info = c_void_p(), ctypes.create_string_buffer(root_info, 4108)
        self.HcclCommInitRootInfo(c_uint32(ranks), info, c_uint32(rank), byref(comm))
        return comm


def read(block: c_void_p, size: int) -> bytes:
    return ctypes.string_at(block, size)
