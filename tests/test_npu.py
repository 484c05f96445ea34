"""What is known of NPUs without one: how far a process gets, what HCCL can't reduce, ranges of another profiler.

torch_npu isn't installed where these tests run; `tests/npu_sim` runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hsdp_fn_torch as ht
from hsdp_fn import BackendError, MixedPrecisionPolicy
from hsdp_fn_torch import npu, trace
from hsdp_fn_torch.backend import TorchBackend, _kind_of
from tests.workers_facade import chain
from tests.workers_torch import mesh_for, on_ranks


def pretend(monkeypatch, *, installed=True, error=None, devices=0):
    """As if torch_npu were there."""
    real_spec, real_import = importlib.util.find_spec, importlib.import_module

    def find_spec(name, *args):
        return real_spec(name, *args) if name != "torch_npu" else (object() if installed else None)

    def import_module(name, *args):
        if name != "torch_npu":
            return real_import(name, *args)
        if error is not None:
            raise error
        return SimpleNamespace()

    module = SimpleNamespace(is_available=lambda: devices > 0)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)


@pytest.mark.parametrize(
    ("there", "found", "says"),
    [
        ({"installed": False}, npu.Found.NO_PACKAGE, r"isn't installed; pip install 'hsdp-fn\[npu\]'"),
        (
            {"error": ImportError("libhccl.so: cannot open shared object file\nmore")},
            npu.Found.NO_LIBRARIES,
            r"can't be imported \(libhccl.so: cannot open shared object file\); install CANN",
        ),
        ({"error": RuntimeError("acl init failed")}, npu.Found.NO_LIBRARIES, r"\(acl init failed\)"),
        ({"error": OSError("")}, npu.Found.NO_LIBRARIES, r"\(OSError\)"),
        ({"devices": 0}, npu.Found.NO_DEVICE, r"finds no device; see that npu-smi"),
    ],
)
def test_how_far_a_process_gets(monkeypatch, there, found, says):
    pretend(monkeypatch, **there)
    assert npu.status().found is found
    with pytest.raises(BackendError, match=f"^this needs an NPU: .*{says}"):
        npu.require("this")


def test_a_process_with_devices_is_ready(monkeypatch):
    pretend(monkeypatch, devices=2)
    assert npu.status() == (npu.Found.READY, "")
    npu.require("this")


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, False)])
@on_ranks(2)
def test_what_hccl_cant_reduce_is_refused_before_anything(rank, world, dtype, refused):
    mesh = mesh_for(world)
    backend = TorchBackend(mesh)
    backend._kind = "hccl"
    model = chain(depth=1).to(dtype)
    layout = ht.plan_module(model, mesh)
    if not refused:
        backend.check(layout)
        return
    with pytest.raises(BackendError, match=r"hccl can't reduce float64 gradients, asked for by \['.*weight'.*float32"):
        backend.check(layout)
    backend.check(ht.plan_module(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)))


def test_a_group_with_a_backend_for_each_device_is_known_by_its_devices(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert [_kind_of(None, torch.device(kind)) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "gloo")
    assert _kind_of(None, torch.device("cpu")) == "gloo"


class Work:
    """A device's handle: `wait` doesn't block, `is_completed` tells."""

    def __init__(self, after):
        self.left, self.waited = after, []

    def is_completed(self):
        self.left -= 1
        return self.left < 0

    def wait(self, *timeout):
        self.waited.append(timeout)


@on_ranks(2)
def test_a_limit_is_kept_where_waiting_doesnt_block(rank, world):
    backend = TorchBackend(mesh_for(world))
    backend.device = torch.device("meta")  # any that isn't the CPU
    quick, slow, unlimited = Work(3), Work(10**9), Work(10**9)
    with backend.limited(0.2):
        backend.wait(quick)
        with pytest.raises(TimeoutError, match=r"longer than 0.2 s; a peer may be gone") as caught:
            backend.wait(slow)
    assert caught.value._hsdp_collective
    backend.wait(unlimited)
    assert (quick.waited, slow.waited, unlimited.waited) == ([()], [], [()])


def test_ranges_go_to_the_profiler_that_was_asked_for(monkeypatch):
    seen = []

    @contextmanager
    def annotate(text):
        seen.append(f"+{text}")
        yield
        seen.append(f"-{text}")

    pretend(monkeypatch, devices=1)
    torch.get_device_module().mstx = SimpleNamespace(annotate=annotate)
    unit = SimpleNamespace(title="layers.0")
    try:
        npu.mark_ranges()
        with trace.span("pre_forward", unit), trace.span("post_forward", None):
            pass
    finally:
        npu.mark_ranges(False)
    with trace.span("pre_forward", unit):
        pass
    wanted = ["+hsdp_fn::pre_forward (layers.0)", "+hsdp_fn::post_forward"]
    assert seen == [*wanted, *(f"-{text[1:]}" for text in reversed(wanted))]


def test_ranges_need_an_npu(monkeypatch):
    pretend(monkeypatch, installed=False)
    with pytest.raises(BackendError, match=r"^mark_ranges needs an NPU"):
        npu.mark_ranges()
    assert trace.ranges is None
