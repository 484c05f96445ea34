"""Checks that what this project uses of torch_npu exists in the wheel, with the arguments that it gives; run by
`test_api.py`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hsdp_fn_torch import npu
from tests.npu_sim import checks

ROOT = Path(__file__).resolve().parents[3]

#: What is asked of ``torch.get_device_module("npu")``, with the arguments that are given.
USED: dict[str, tuple[Any, ...]] = {
    "is_available": (),
    "device_count": (),
    "current_device": (),
    "set_device": (0,),
    "current_stream": (),
    "stream": (None,),
    "max_memory_allocated": (None,),
    "reset_peak_memory_stats": (None,),
}


def sources() -> str:
    folders = ("hsdp_fn_torch", "examples/torch", "benchmarks")
    return "\n".join(path.read_text() for folder in folders for path in sorted(Path(ROOT, folder).glob("*.py")))


def check_functions_exist_and_take_what_they_are_given() -> None:
    module = torch.get_device_module("npu")
    for name, arguments in USED.items():
        inspect.signature(getattr(module, name)).bind(*arguments)
        assert re.search(rf"\.{name}\(", sources()), f"nothing uses {name} any more"
    inspect.signature(module.mstx.annotate).bind("text")
    inspect.signature(module.Stream.wait_stream).bind(None, None)
    inspect.signature(module.Stream.wait_event).bind(None, None)


def check_nothing_else_is_used() -> None:
    """``torch.npu.NAME`` and ``module.NAME`` after `get_device_module`, wherever they stand."""
    found = set(re.findall(r"torch\.npu\.(\w+)", sources()))
    for line in re.findall(r"get_device_module\([^)]*\)+\.(\w+)", sources()):
        found.add(line)
    found |= set(re.findall(r"(?<!\w)(?:module|self\._module)\.(\w+)\(", device_modules()))
    assert found <= {*USED, "mstx"}, sorted(found - {*USED, "mstx"})


def device_modules() -> str:
    """The sources of those files that keep a device's module in a variable."""
    kept = re.compile(r"module(?:: Any)? = .*get_device_module")
    return "\n".join(
        text
        for folder in ("hsdp_fn_torch", "examples/torch")
        for path in sorted(Path(ROOT, folder).glob("*.py"))
        if kept.search(text := path.read_text())
    )


def check_the_generic_interface_is_npus() -> None:
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("npu")
    assert isinstance(torch.Event("npu"), torch.Event)
    event = torch.Event(torch.device("npu", 0))
    event.record()
    torch.accelerator.current_stream().synchronize()
    event.synchronize()


def check_hccl_is_a_backend_of_its_own() -> None:
    dist.init_process_group("cpu:gloo,npu:hccl")
    group = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("npu")).name() == "hccl"
    assert npu.status() == (npu.Found.READY, "")


def check_ranges_of_the_ascend_profiler() -> None:
    """No profiler listens; they must come and go without an error."""
    from hsdp_fn_torch import trace

    npu.mark_ranges()
    try:
        with trace.span("pre_forward", None):
            pass
    finally:
        npu.mark_ranges(False)


checks.main(globals())
