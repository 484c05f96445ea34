"""Backwards that stop at their very end, or whose iteration another one has stopped: nothing is lost, nothing counted
twice, and nobody is left in silence.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hsdp_fn import PhaseError, Sync
from hsdp_fn_torch import TorchBackend
from tests.workers_facade import OURS, Boom, chain, data, full, mean_square, shard_blocks, tripwire
from tests.workers_recovery import local, require_equal, set_sync
from tests.workers_torch import fsdp_mesh, mesh_for, on_ranks


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


class Waits:
    """Raises `Boom` at one wait for a collective, counted from `armed` on."""

    def __init__(self, monkeypatch):
        self.count, self.at, original = 0, -1, TorchBackend.wait

        def wait(backend, handle):
            self.count += 1
            if self.count - 1 == self.at:
                raise Boom(f"wait {self.at}")
            return original(backend, handle)

        monkeypatch.setattr(TorchBackend, "wait", wait)

    def armed(self, at):
        self.count, self.at = 0, at


@pytest.mark.parametrize("earlier", list(Sync))
@on_ranks(2, 4)
def test_every_wait_of_a_backward_the_last_ones_too(rank, world, earlier):
    """With a microbatch before it, which is held back or has its gradients already."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        waits = Waits(monkeypatch)
        model = shard_blocks(OURS, chain(depth=1), mesh_for(world))

        def microbatch(at, sync=Sync.FULL, wait=-1):
            set_sync(model, sync)
            loss = mean_square(model, data(rank, at))
            waits.armed(wait)
            loss.backward()

        microbatch(0, earlier)
        microbatch(1)
        count, expected = waits.count, grads_of(model)
        for at in range(count):
            for strict in (False, True):
                model.set_strict_iterations(strict)
                model.zero_grad()
                microbatch(0, earlier)
                shown = [p.grad for p in model.parameters()]
                before = grads_of(model)
                with pytest.raises(Boom):
                    microbatch(1, wait=at)
                waits.armed(-1)
                if strict:
                    with pytest.raises(RuntimeError, match=r"call reset_iter_state\(\) before anything else"):
                        microbatch(1)
                    model.reset_iter_state()
                    if earlier is Sync.NONE or (earlier is Sync.SHARD and world == 4):  # only HSDP holds those back
                        microbatch(0, earlier)
                else:
                    with pytest.warns(UserWarning, match="the last backward stopped"):
                        assert [p.grad for p in model.parameters()] == shown
                    require_equal(grads_of(model), before, f"wait {at}")
                microbatch(1)
                require_equal(grads_of(model), expected, f"wait {at} of {count}, strict={strict}")


@pytest.mark.parametrize("hold", [Sync.NONE, Sync.SHARD])
@on_ranks(4)
def test_a_parameters_hook_that_raises_leaves_earlier_microbatches(rank, world, hold):
    model = shard_blocks(OURS, chain(depth=1), mesh_for(world))

    def microbatch(at, sync):
        set_sync(model, sync)
        mean_square(model, data(rank, at)).backward()

    microbatch(0, hold)
    microbatch(1, Sync.FULL)
    expected = grads_of(model)
    model.zero_grad()
    microbatch(0, hold)

    def boom(_):
        raise Boom("hook")

    handle = model.last.bias.register_hook(boom)
    with pytest.raises(Boom):
        microbatch(1, Sync.FULL)
    handle.remove()
    with pytest.warns(UserWarning, match="the last backward stopped"):
        assert all(p.grad is None for p in model.parameters())
    microbatch(1, Sync.FULL)
    require_equal(grads_of(model), expected, "again")


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_another_graph_of_an_iteration_that_stopped_is_refused(rank, world, strict):
    model = shard_blocks(OURS, chain(depth=1), fsdp_mesh(world))
    mean_square(model, data(rank, 2)).backward()
    expected = grads_of(model)
    model.zero_grad()
    model.set_strict_iterations(strict)
    first = mean_square(model, data(rank, 0))
    with tripwire(model.layers[0], "backward"):
        second = mean_square(model, data(rank, 1))
        with pytest.raises(Boom):
            second.backward()
    with pytest.raises(PhaseError, match="another backward of this iteration stopped in the middle"):
        first.backward()
    if strict:
        model.reset_iter_state()
        mean_square(model, data(rank, 2)).backward()
    else:
        with pytest.warns(UserWarning, match="the last backward stopped"):
            mean_square(model, data(rank, 2)).backward()
    require_equal(grads_of(model), expected, "afterwards")


@on_ranks(2)
def test_a_backward_inside_of_a_backward_isnt_taken_for_one_that_stopped(rank, world):
    """Reentrant checkpoints, and a whole backward of another model in a hook."""
    model, other = (shard_blocks(OURS, chain(depth=2), fsdp_mesh(world)) for _ in range(2))

    def meddle(grad):
        with torch.enable_grad():
            mean_square(other, data(rank, 1)).backward()
            mean_square(other, data(rank, 2)).backward()
        return grad

    out = model(data(rank, 0))
    out.register_hook(meddle)
    out.square().mean().backward()
    twin = shard_blocks(OURS, chain(depth=2), fsdp_mesh(world))
    mean_square(twin, data(rank, 0)).backward()
    require_equal(grads_of(model), grads_of(twin), "the outer one")
    twin.zero_grad()
    mean_square(twin, data(rank, 1)).backward()
    mean_square(twin, data(rank, 2)).backward()
    require_equal(grads_of(other), grads_of(twin), "the inner ones")


@on_ranks(2)
def test_with_zeros_for_unused_parameters_finishing_takes_all_units(rank, world):
    """Another rank may hold something of any unit, so each takes part in all of them."""
    model = shard_blocks(OURS, chain(depth=1), fsdp_mesh(world))
    model.set_reduce_scatter_unused_params(True)
    mean_square(model, data(rank, 0)).backward()
    before = [full(p.grad) for p in model.parameters()]
    model.finish_accumulation()
    require_equal([full(p.grad) for p in model.parameters()], before, "nothing was held")
    model.zero_grad()
    model.finish_accumulation()
    assert all(torch.equal(full(p.grad), torch.zeros_like(full(p.grad))) for p in model.parameters())
