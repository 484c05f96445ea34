"""Ascend NPUs: whether this process can use them, and what differs there.

torch_npu is optional, patches ``torch.distributed`` when it is imported, and can't be imported without the CANN
libraries; so nothing here imports it unless it is asked to. With torch_npu installed and no CANN even ``import torch``
fails, before this package has a say: set ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.

What HCCL can't do, or does otherwise, and what is done about it:

- No AVG of its own (it sums, then divides), and PREMUL_SUM multiplies the caller's input in place. Reductions are sums
  everywhere in this package, and scaling is done apart.
- `REDUCED` are all dtypes that it reduces. Others are refused when a layout is checked.
- Each process group has one stream. Collectives of one group run one after the other, on whatever stream they were
  issued from; a reduce-scatter beside an all-gather needs a group of its own
  (`HSDPModule.set_separate_reduce_scatter_group`).
- Also a synchronous collective runs on that stream; waiting for its handle orders the current stream after it, not the
  host. Buffers are kept by the state until then, so that none needs ``record_stream``.
"""

from __future__ import annotations

import importlib
import importlib.util
from enum import Enum
from typing import NamedTuple

import torch

from hsdp_fn import BackendError

from . import trace

#: Dtypes that HCCL reduces.
REDUCED = frozenset({"int8", "int16", "int32", "int64", "float16", "float32", "bfloat16"})


class Found(Enum):
    """How far this process gets with NPUs."""

    NO_PACKAGE = "torch_npu isn't installed"
    NO_LIBRARIES = "torch_npu is installed, but can't be imported"
    NO_DEVICE = "torch_npu is there, but finds no device"
    READY = "ready"


class Status(NamedTuple):
    """What `status` has found; ``reason`` is the error of an import that failed, else empty."""

    found: Found
    reason: str = ""


_ADVICE = {
    Found.NO_PACKAGE: "pip install 'hsdp-fn[npu]'",
    Found.NO_LIBRARIES: "install CANN and run its set_env.sh in this shell (source .../ascend-toolkit/set_env.sh)",
    Found.NO_DEVICE: "see that npu-smi lists devices, that this process may open them, and that "
    "ASCEND_RT_VISIBLE_DEVICES names some",
}


def status() -> Status:
    """Whether NPUs can be used here. Imports torch_npu where it is installed. Does not communicate."""
    if importlib.util.find_spec("torch_npu") is None:
        return Status(Found.NO_PACKAGE)
    try:
        importlib.import_module("torch_npu")
        available = torch.get_device_module("npu").is_available()
    except (ImportError, OSError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        return Status(Found.NO_LIBRARIES, lines[0] if lines else type(error).__name__)
    return Status(Found.READY if available else Found.NO_DEVICE)


def require(what: str) -> None:
    """Make torch_npu ready for use.

    Raises:
        BackendError: it can't be; says how far it got, and what to do.
    """
    found, reason = status()
    if found is not Found.READY:
        raise BackendError(f"{what} needs an NPU: {found.value}{f' ({reason})' if reason else ''}; {_ADVICE[found]}")


def mark_ranges(enable: bool = True) -> None:
    """Whether the events of a unit's life (``hsdp_fn::pre_forward (layers.3)``) are ranges in the host's timeline of
    the Ascend profiler, msprof. They always are in torch's and torch_npu's own profilers.

    Raises:
        BackendError: there is no NPU.
    """
    if enable:
        require("mark_ranges")
    trace.ranges = torch.get_device_module("npu").mstx.annotate if enable else None
