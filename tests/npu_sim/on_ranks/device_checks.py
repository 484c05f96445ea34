"""Checks of device ``npu`` in one process with two devices; run by `test_device.py`."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.npu_sim import checks, simulator
from tests.npu_sim.on_ranks.device_gate import gate

torch.npu.set_device(0)
NPU = torch.device("npu", 0)


def raises(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


# --------------------------------------------------------------------------------------------------------- asynchronous


def check_ops_return_before_they_are_done() -> None:
    x = torch.zeros(3, device=NPU)
    held = gate()
    y = x + 1
    assert not torch.npu.current_stream().query()
    held.set()
    assert y.tolist() == [1.0, 1.0, 1.0]


def read_on_side_stream(wait: bool) -> float:
    """What another stream reads of a tensor that the current one writes late."""
    x, side = torch.zeros(1, device=NPU), torch.npu.Stream()
    torch.npu.synchronize()
    held = gate()
    x.fill_(1.0)
    if wait:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x.clone()
    time.sleep(0.05)
    held.set()
    torch.npu.synchronize()
    return y.item()


def check_a_stream_that_waits_reads_the_new_value() -> None:
    assert read_on_side_stream(wait=True) == 1.0


def check_a_stream_that_does_not_wait_reads_the_old_one() -> None:
    assert read_on_side_stream(wait=False) == 0.0


def check_events_of_the_generic_interface_work() -> None:
    event = torch.Event(NPU)
    held = gate()
    event.record()
    assert not event.query()
    held.set()
    event.synchronize()
    assert event.query()


def check_host_to_device_copies_take_the_value_of_now_unless_pinned() -> None:
    plain, pinned = torch.zeros(4), torch.zeros(4).pin_memory()
    assert pinned.is_pinned() and not plain.is_pinned()
    held = gate()
    a, b = plain.to(NPU, non_blocking=True), pinned.to(NPU, non_blocking=True)
    plain.fill_(1.0)
    pinned.fill_(1.0)  # a bug in a program: the device reads it later
    held.set()
    assert a.tolist() == [0.0] * 4
    assert b.tolist() == [1.0] * 4


def check_device_to_host_copies_into_pinned_memory_must_be_awaited() -> None:
    x, pinned = torch.ones(4, device=NPU), torch.zeros(4).pin_memory()
    held = gate()
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == [0.0] * 4
    held.set()
    torch.npu.synchronize()
    assert pinned.tolist() == [1.0] * 4


def check_threads_have_streams_of_their_own() -> None:
    side = torch.npu.Stream()
    seen = []
    with torch.npu.stream(side):
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_stream() == side))
        thread.start()
        thread.join()
    assert seen == [False]


# -------------------------------------------------------------------------------------------------------------- devices


def check_results_are_on_the_tensors_device_and_not_on_the_current_one() -> None:
    x = torch.ones(3, device="npu:1")
    y = (x + 1) * torch.tensor(2.0, device="npu:1")
    assert torch.npu.current_device() == 0
    assert y.device == torch.device("npu:1")
    assert y.tolist() == [4.0] * 3


def check_kernels_run_on_the_tensors_device() -> None:
    x = torch.zeros(1, device="npu:1")
    held = gate(torch.device("npu:1"))
    x.add_(1)
    torch.npu.synchronize(0)  # has nothing to wait for
    assert not torch.npu.current_stream(1).query()
    held.set()
    torch.npu.synchronize(1)
    assert torch.npu.current_stream(1).query()


def check_copies_between_devices_are_ordered_on_both() -> None:
    x = torch.zeros(1, device="npu:0")
    held = gate()
    x.add_(1)
    y = x.to("npu:1") + 1
    x.add_(10)
    held.set()
    assert (x.item(), y.item()) == (11.0, 2.0)


def check_tensors_of_two_devices_are_not_mixed() -> None:
    text = raises(RuntimeError, lambda: torch.ones(3, device="npu:0") + torch.ones(3, device="npu:1"))
    assert "npu:0, npu:1" in text


def check_tensors_of_host_and_device_are_not_mixed() -> None:
    assert "cpu, npu:0" in raises(RuntimeError, lambda: torch.ones(3, device=NPU) + torch.ones(3))
    assert (torch.ones(3, device=NPU) + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number is no tensor


def check_autograd_follows_the_tensors_device() -> None:
    w = torch.ones(2, 2, device="npu:1", requires_grad=True)
    (w @ w).sum().backward()
    assert w.grad is not None and w.grad.device == w.device
    assert w.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]


# ------------------------------------------------------------------------------------------------------------------ ops


def check_an_out_of_another_shape_is_resized() -> None:
    out = torch.empty(0, device=NPU)
    torch.add(torch.ones(3, device=NPU), 1, out=out)
    assert out.tolist() == [2.0] * 3


def check_shapes_that_depend_on_the_data() -> None:
    x = torch.tensor([3.0, -1.0, 2.0], device=NPU)
    assert x[x > 0].tolist() == [3.0, 2.0]
    assert torch.nonzero(x > 0).tolist() == [[0], [2]]
    out = torch.empty(7, 1, dtype=torch.long, device=NPU)
    torch.nonzero(x > 0, out=out)
    assert out.tolist() == [[0], [2]]


def check_wrong_arguments_raise_here_and_not_later() -> None:
    x = torch.ones(2, 3, device=NPU)
    assert "cannot be multiplied" in raises(RuntimeError, lambda: x @ x)
    raises(RuntimeError, lambda: x.add_(torch.ones(5, device=NPU)))
    torch.npu.synchronize()


def check_views_and_strides_are_those_of_the_cpu() -> None:
    host = torch.arange(24.0).reshape(2, 3, 4)
    x = host.to(NPU)
    assert x.transpose(0, 2).add(1).stride() == host.transpose(0, 2).add(1).stride()
    x[:, 1].mul_(2)
    host[:, 1].mul_(2)
    assert torch.equal(x.cpu(), host)
    assert torch.equal(x.permute(2, 0, 1).contiguous().cpu(), host.permute(2, 0, 1).contiguous())


def check_casts() -> None:
    x = torch.tensor([1.5, -2.5], device=NPU)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool):
        assert torch.equal(x.to(dtype).cpu(), x.cpu().to(dtype))


def check_foreach_ops() -> None:
    xs = [torch.full((n,), float(n), device=NPU) for n in (1, 2)]
    torch._foreach_mul_(xs, 2.0)
    ys = torch._foreach_add(xs, xs)
    torch._foreach_copy_(xs, ys)
    assert [x.tolist() for x in xs] == [[4.0], [8.0, 8.0]]
    norms, expected = torch._foreach_norm(xs), torch._foreach_norm([x.cpu() for x in xs])
    assert [norm.item() for norm in norms] == [norm.item() for norm in expected]


def check_fsdp_copies() -> None:
    flat = torch.arange(6.0, device=NPU).reshape(2, 3)
    parts = [torch.empty(2, 1, device=NPU), torch.empty(2, 2, device=NPU)]
    torch.split_with_sizes_copy(flat, [1, 2], dim=1, out=parts)
    assert [p.tolist() for p in parts] == [[[0.0], [3.0]], [[1.0, 2.0], [4.0, 5.0]]]
    out = torch.empty(2, 4, device=NPU)
    sources = [torch.arange(3.0, device=NPU), torch.arange(4.0, device=NPU)]
    torch._chunk_cat(sources, 0, 2, out=out)
    host = torch._chunk_cat([s.cpu() for s in sources], 0, 2)
    assert torch.equal(out.cpu(), host)


def check_storages_are_freed_and_taken_again() -> None:
    x = torch.arange(4.0, device=NPU)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    x.copy_(torch.ones(4))
    assert x.tolist() == [1.0] * 4


def check_what_is_not_simulated_raises_with_its_name() -> None:
    x = torch.ones(2, 4, device=NPU)
    assert "npu::npu_rms_norm isn't simulated" in raises(
        NotImplementedError, lambda: torch.ops.npu.npu_rms_norm(x, torch.ones(4, device=NPU))
    )


# --------------------------------------------------------------------------------------------------------------- random


def check_seeds_and_states_of_the_devices_generator_work() -> None:
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    a, b = torch.randn(8, device=NPU), torch.rand(8, device=NPU)
    assert not torch.equal(a.cpu(), torch.randn(8, device=NPU).cpu())
    torch.npu.set_rng_state(state)
    assert torch.equal(a.cpu(), torch.randn(8, device=NPU).cpu())
    assert torch.equal(b.cpu(), torch.rand(8, device=NPU).cpu())


def check_random_ops_draw_from_their_distribution() -> None:
    x = torch.empty(20_000, device=NPU)
    assert abs(x.normal_(2.0, 0.5).mean().item() - 2.0) < 0.02
    assert abs(x.uniform_(-1.0, 1.0).mean().item()) < 0.03
    assert abs(F.dropout(torch.ones_like(x), 0.25).mean().item() - 1.0) < 0.03
    assert sorted(torch.randperm(50, device=NPU).tolist()) == list(range(50))
    assert torch.randint(7, (100,), device=NPU).min().item() >= 0


def check_dropout_is_differentiable() -> None:
    x = torch.ones(1000, device=NPU, requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad.cpu(), y.detach().cpu())


# ------------------------------------------------------------------------------------------------------------- failures


def check_no_memory_is_an_exception_of_torch() -> None:
    raises(torch.OutOfMemoryError, lambda: torch.empty(8 << 30, dtype=torch.uint8, device=NPU))


def check_an_armed_allocation_failure_is_an_exception_too() -> None:
    simulator.arm("oom@1x9")  # the caching allocator tries again
    raises(torch.OutOfMemoryError, lambda: torch.empty(64 << 20, dtype=torch.uint8, device=NPU))
    simulator.arm("")
    torch.empty(64 << 20, dtype=torch.uint8, device=NPU)


# ---------------------------------------------------------------------------------------------------------- a whole net


class Block(nn.Module):
    """A transformer block with an embedding and a head, of ops that models use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16)])
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return (x + self.mlp(self.norms[1](x))) @ self.embed.weight.T


def check_a_transformer_block_has_the_gradients_of_the_cpu() -> None:
    torch.manual_seed(0)
    host = Block()
    device = copy.deepcopy(host).to(NPU)
    tokens = torch.randint(11, (3, 7))
    for model, x in ((host, tokens), (device, tokens.to(NPU))):
        F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).backward()
    for (name, a), b in zip(host.named_parameters(), device.parameters(), strict=True):
        named = {"msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-5, atol=1e-6, **named)


def check_optimizers_step_as_on_the_cpu() -> None:
    for make in (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        host, device = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, device=NPU))
        for parameter in (host, device):
            optimizer = make([parameter])
            for _ in range(3):
                optimizer.zero_grad()
                parameter.pow(2).sum().backward()
                nn.utils.clip_grad_norm_([parameter], 1.0)
                optimizer.step()
        torch.testing.assert_close(device.detach().cpu(), host.detach())


checks.main(globals())
