"""Faults that users of FSDP have reported, as small cases with their right values: accumulation, uneven use, hooks,
several backwards. `test_cases_edges.py` has the rest.

Each stands for a kind of fault. "Reference" is an unsharded copy on the rank's own batch, its gradients averaged.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hsdp_fn_torch import HSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tests.live_bytes import LiveBytes
from tests.workers_facade import data, full
from tests.workers_torch import Traffic, close, equal, fsdp_mesh, hsdp_mesh, on_ranks

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Modules and parameters, and a forward that is given them as its first argument."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class AB(nn.Module):
    """Two identities; either may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            for layer in (self.a, self.b):
                layer.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor, use_a: bool = True, use_b: bool = True) -> Tensor:
        x = self.a(x) if use_a else x
        return self.b(x) if use_b else x


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def shard(model: nn.Module, world: int, **options: Any) -> Any:
    """Each child that has parameters, then the root."""
    for child in model.children():
        fully_shard(child, mesh=fsdp_mesh(world), **options)
    return fully_shard(model, mesh=fsdp_mesh(world), **options)


def averaged(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of an unsharded model, averaged over the ranks (its own become sums); None where none has one."""
    out: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        out[name] = p.grad
        if p.grad is not None:
            dist.all_reduce(p.grad)
            out[name] = p.grad / dist.get_world_size()
    return out


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


def assert_like_reference(
    make: Callable[[], nn.Module],
    place: Callable[[nn.Module], object],
    backward: Callable[[nn.Module, int], object],
    steps: int = 2,
) -> None:
    """``backward(model, step)`` gives the sharded model the reference's gradients, several steps running."""
    single = seeded(make)
    model = copy.deepcopy(single)
    place(model)
    for step in range(steps):
        for m in (single, model):
            m.zero_grad()
            backward(m, step)
        expected = averaged(single)
        assert any(g is not None and g.count_nonzero() for g in expected.values())
        close(gradients(model), expected)


# ------------------------------------------------------------------------------------------------------- accumulation


@on_ranks(2)
def test_a_first_gradient_in_the_last_microbatch_is_reduced_with_the_kept_ones(rank, world):
    """Kept gradients are in the reduce dtype, the new one still in the compute dtype."""
    model = fully_shard(AB(), mesh=fsdp_mesh(world), mp_policy=HALF)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4) * (rank + 1), use_b=False).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 4) * (rank + 2)).sum().backward()
        equal(gradients(model), {"a.weight": torch.full((4, 4), 8.0), "b.weight": torch.full((4, 4), 5.0)})
        model.zero_grad()


@pytest.mark.parametrize("zeros", [True, False])
@on_ranks(2)
def test_a_parameter_that_no_microbatch_uses(rank, world, zeros):
    """None, or zeros if unused parameters take part in the reduction; in reduced precision too."""
    model = fully_shard(AB(), mesh=fsdp_mesh(world), mp_policy=HALF)
    model.set_reduce_scatter_unused_params(zeros)
    for _ in range(2):
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(2, 4), use_b=False).sum().backward()
        unused = torch.zeros(4, 4) if zeros else None
        equal(gradients(model), {"a.weight": torch.full((4, 4), 4.0), "b.weight": unused})
        model.zero_grad()


@on_ranks(2)
def test_what_is_kept_without_sync_is_the_whole_gradient_until_the_next_sync(rank, world):
    """In the reduce dtype, however many ranks there are; and nothing is sent meanwhile."""
    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=fsdp_mesh(world), mp_policy=HALF)
    alive, shard_bytes = LiveBytes([model.weight.to_local()]), 32 * 64 * 4
    for _ in range(2):
        for sync, held in ((False, 2 * shard_bytes), (True, shard_bytes)):
            model.set_requires_gradient_sync(sync)
            with alive, Traffic() as traffic:
                model(torch.ones(1, 64)).sum().backward()
            assert [op for op, *_ in traffic.seen].count("reduce_scatter") == sync
            for _ in range(200):  # gloo's threads let go of the buffers of finished collectives a moment later
                if (over := alive.now - shard_bytes - held) < 64:
                    break
                time.sleep(0.01)
            assert 0 <= over < 64  # scalars
        equal(model.weight.grad.to_local(), torch.full((32, 64), 2.0))
        model.zero_grad()


@pytest.mark.parametrize("mode", ["every microbatch", "reduce-scattered sums", "nothing before the last"])
@on_ranks(2)
def test_small_contributions_survive_in_a_narrow_reduce_dtype(rank, world, mode):
    """Sums over microbatches are kept in the parameters' fp32, in every mode."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = fully_shard(
        Net(lambda m, x: m.p * x, p=nn.Parameter(torch.ones(2))), mesh=hsdp_mesh(2, 1), mp_policy=policy
    )
    values = [1.0] + [2.0**-9] * 8
    for i, value in enumerate(values):
        last = i == len(values) - 1
        if mode == "reduce-scattered sums":
            model.set_requires_all_reduce(last)
        elif mode == "nothing before the last":
            model.set_requires_gradient_sync(last)
        model(torch.full((2,), value)).sum().backward()
    equal(full(model.p.grad), torch.full((2,), 1.015625))


# --------------------------------------------------------------------------------------------------------- uneven use


@on_ranks(2)
def test_evaluation_of_unequal_length_on_parameters_gathered_before(rank, world):
    """Forward doesn't communicate then, so ranks may run it as often as each likes."""
    single = seeded(AB)
    model = shard(copy.deepcopy(single), world)
    units = [m for m in model.modules() if isinstance(m, HSDPModule)]
    for _ in range(2):
        model.set_reshard_after_forward(False)
        for unit in units:
            unit.unshard()
        with torch.no_grad(), Traffic() as traffic:
            for i in range(1 + rank):
                equal(model(torch.full((2, 4), float(i))), torch.full((2, 4), float(i)))
        assert traffic.seen == []
        for unit in units:
            unit.reshard()
        model.set_reshard_after_forward(True)
        for m in (single, model):
            m.zero_grad()
            m(torch.ones(2, 4) * (rank + 1)).sum().backward()
        equal(gradients(model), averaged(single))


@on_ranks(2)
def test_no_rows_for_a_module_on_one_rank(rank, world):
    """It stays in step with the others and adds nothing."""

    def make():
        return Net(lambda m, x: m.a(x).sum() + m.b(x[:0] if rank == 0 else x).sum(), a=AB().a, b=AB().b)

    def backward(model, step):
        model(torch.ones(2, 4) + rank + step).backward()

    assert_like_reference(make, lambda m: shard(m, world), backward)


# -------------------------------------------------------------------------------------------------------------- hooks


@on_ranks(2)
def test_an_output_view_that_the_caller_edits_in_place(rank, world):
    def make():
        return Net(lambda m, x: m.layer(x).view(-1), layer=nn.Linear(4, 4))

    def backward(model, step):
        y = model(data(rank, step, width=4))
        y.mul_(2)
        y.sum().backward()

    assert_like_reference(make, lambda m: fully_shard(m, mesh=fsdp_mesh(world), reshard_after_forward=True), backward)
    assert_like_reference(make, lambda m: shard(m, world, reshard_after_forward=True), backward)


@dataclass
class Data:
    x: Tensor
    note: str = "note"


class Named(NamedTuple):
    x: Tensor


class Holder:
    """A class that no walk over results knows."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Data, lambda out: out.x),
    "named tuple": (Named, lambda out: out.x),
    "nested": (lambda y: (None, "s", [y.detach(), {"k": y}]), lambda out: out[2][1]["k"]),
    "unknown class": (Holder, lambda out: out.y),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("nested", [True, False])
@on_ranks(2)
def test_outputs_in_containers(rank, world, kind, nested):
    wrap, unwrap = KINDS[kind]

    def make():
        child = Net(lambda m, x: wrap(m.layer(x)), layer=nn.Linear(4, 4))
        return Net(lambda m, x: m.last(unwrap(m.child(x))), child=child, last=nn.Linear(4, 4)) if nested else child

    def backward(model, step):
        out = model(data(rank, step, width=4))
        (out if nested else unwrap(out)).square().sum().backward()

    assert_like_reference(make, lambda m: shard(m, world, reshard_after_forward=True), backward)


@on_ranks(2)
def test_a_group_of_which_one_module_runs_later_on_chunks(rank, world):
    def make():
        def run(m, x, skip_out=False):
            h = m.norm(m.body(x))
            return h if skip_out else m.out(h)

        return Net(run, body=nn.Linear(4, 4), norm=nn.LayerNorm(4), out=nn.Linear(4, 4))

    def place(m):
        fully_shard([m.norm, m.out], mesh=fsdp_mesh(world))
        fully_shard(m, mesh=fsdp_mesh(world))

    def backward(m, step):
        h = m(data(rank, step, width=4), skip_out=True)
        detached = h.detach().requires_grad_()
        for part in detached.chunk(2):
            m.out(part).square().sum().backward()
        h.backward(detached.grad)

    assert_like_reference(make, place, backward, steps=3)


class Lossy(AB):
    """A loss that reads a weight without calling the module that has it."""

    def loss(self, h: Tensor) -> Tensor:
        return F.linear(h, self.b.weight).square().sum()


@on_ranks(2)
def test_a_weight_read_outside_of_forward_needs_unshard(rank, world):
    """Unless the root holds its parameters for backward, as it does by default."""
    single = seeded(Lossy)
    x = data(rank, 0, width=4)
    single.loss(single(x)).backward()
    expected = averaged(single)
    for reshard in (True, None):
        model = fully_shard(copy.deepcopy(single), mesh=fsdp_mesh(world), reshard_after_forward=reshard)
        for _ in range(2):
            model.zero_grad()
            h = model(x)
            if reshard:
                with pytest.raises(RuntimeError, match="DTensor"):
                    model.loss(h)
                model.unshard()
            model.loss(h).backward()
            close(gradients(model), expected)


@on_ranks(2)
def test_a_weight_read_in_a_registered_method(rank, world):
    def place(m):
        fully_shard(m, mesh=fsdp_mesh(world), reshard_after_forward=True)
        register_fsdp_forward_method(m, "loss")

    assert_like_reference(Lossy, place, lambda m, step: m.loss(m(data(rank, step, width=4))).backward())


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(16.0).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)

    def generate(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


@on_ranks(2)
def test_methods_that_bypass_the_call_must_be_registered(rank, world):
    plain = Generating()
    register_fsdp_forward_method(plain, "generate")
    assert "generate" not in plain.__dict__
    model = fully_shard(Generating(), mesh=fsdp_mesh(world))
    x = torch.ones(2, 4) * (rank + 1)
    with pytest.raises(RuntimeError, match="DTensor"):
        model.generate(x)
    with pytest.raises(ValueError, match="encode"):
        register_fsdp_forward_method(model, "encode")
    for _ in range(2):
        register_fsdp_forward_method(model, "generate")
        equal(model.generate(x), plain.generate(x))
    model.generate(x).sum().backward()
    equal(full(model.w.grad), torch.full((4, 4), 3.0))


@on_ranks(2)
def test_forward_called_directly_raises_or_is_right(rank, world):
    """It raises where parameters are sharded. Where a forward has left them whole, its gradients count."""
    model = fully_shard(Generating(), mesh=fsdp_mesh(world))
    x = torch.ones(2, 4) * (rank + 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="DTensor"):
            model.forward(x)
        (model(x).sum() + model.forward(x).sum()).backward()
        equal(full(model.w.grad), torch.full((4, 4), 6.0))
        model.zero_grad()


@on_ranks(2)
def test_forward_of_a_root_without_parameters_called_directly(rank, world):
    """Its children gather; if they had no common root before, each is one of its own, and a later call says so."""
    x = torch.ones(2, 4) * (rank + 1)
    fresh, used = shard(AB(), world), shard(AB(), world)
    used(x)
    for model in (fresh, used):
        model.forward(x).sum().backward()
        equal(gradients(model), {name: torch.full((4, 4), 3.0) for name in ("a.weight", "b.weight")})
    used(x)
    with pytest.raises(RuntimeError, match="'a' ran forward as a root of its own"):
        fresh(x)


@on_ranks(2)
def test_hooks_of_parameters_run_once_a_synced_backward(rank, world):
    """Set before or after sharding, on the gradient or after it was added; they see the reduced shard."""
    model, calls = nn.Linear(4, 4, bias=False), []

    def note(name):
        return lambda t: calls.append((name, t if "accumulated" not in name else t.grad))

    model.weight.register_hook(note("before, gradient"))
    model.weight.register_post_accumulate_grad_hook(note("before, accumulated"))
    fully_shard(model, mesh=fsdp_mesh(world))
    model.weight.register_hook(note("after, gradient"))
    model.weight.register_post_accumulate_grad_hook(note("after, accumulated"))
    names = ["before, gradient", "after, gradient", "before, accumulated", "after, accumulated"]
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()
        assert calls == []
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()
        assert [name for name, _ in calls] == names
        for _, seen in calls:
            equal(seen.to_local(), torch.full((2, 4), 3.0))
        calls.clear()
        model.zero_grad()


# ---------------------------------------------------------------------------------------------------- several backwards


@on_ranks(2)
def test_two_backwards_of_one_graph(rank, world):
    def backward(m, step):
        out = m(data(rank, step, width=4))
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].sum().backward()

    assert_like_reference(AB, lambda m: shard(m, world), backward)


@on_ranks(2)
def test_two_forwards_then_two_backwards(rank, world):
    def backward(m, step):
        first = m(data(rank, step, width=4)).sum()
        second = m(data(rank, 10 + step, width=4)).square().sum()
        first.backward()
        second.backward()

    assert_like_reference(AB, lambda m: shard(m, world), backward)


@on_ranks(2)
def test_one_of_two_outputs_in_turn(rank, world):
    """The other's parameters have no gradient."""

    def make():
        return Net(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))

    def backward(m, step):
        m(data(rank, step, width=4))[step % 2].sum().backward()

    assert_like_reference(make, lambda m: shard(m, world), backward, 3)
