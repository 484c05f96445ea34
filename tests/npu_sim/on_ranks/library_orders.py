"""Takes away one wait of this library at a time, and looks whether values become wrong; run by `test_library.py`.

The waits are in `library_table.py`: ``_without_NAME`` removes one, ``_scenario_NAME`` trains (or whatever it is that
needs the wait) and tells whether the values are right.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import hsdp_fn
import hsdp_fn_torch as ours
from hsdp_fn import CPUOffloadPolicy, Sync
from hsdp_fn_torch import comm, differentiable, p2p, tree
from tests.npu_sim import checks
from tests.npu_sim.aten import launch
from tests.npu_sim.on_ranks.library_table import WAITS, Wait
from tests.npu_sim.on_ranks.library_training import (
    FLAT,
    RANK,
    RANKS,
    UNITS,
    Run,
    alone,
    anywhere,
    batch,
    facade,
    functional,
    is_same,
    loss_of,
    net,
    on,
    sharded,
    train,
    units_of,
    value_and_grad,
    whole,
)

#: How often a scenario is run without the wait; it must be wrong once on any rank.
TRIES = 2
Backend = ours.TorchBackend
HOOKS = torch.npu.Stream()
OFFLOAD = CPUOffloadPolicy()
NUMBERS = itertools.count()


# ------------------------------------------------------------------------------------------------------------- removing


class Unawaited:
    """A collective's handle for which nobody waits."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, timeout: object = None) -> None:
        pass


def _without_handles(collective: str) -> AbstractContextManager[Any]:
    issue = getattr(Backend, collective)

    def unawaited(self: Any, mesh: Any, buffer: Tensor) -> tuple[Tensor, Any]:
        out, work = issue(self, mesh, buffer)
        return out, Unawaited(work)

    return patch.object(Backend, collective, unawaited)


def _without_once() -> AbstractContextManager[Any]:
    return patch.object(comm._Once, "wait", lambda self, timeout=None: None)


def _without_transfers() -> AbstractContextManager[Any]:
    begin = p2p.Transfer.__init__
    return patch.object(
        p2p.Transfer, "__init__", lambda self, works, finish: begin(self, [Unawaited(w) for w in works], finish)
    )


def _without_waits_of(caller: str) -> AbstractContextManager[Any]:
    wait = Backend._await

    def unless(self: Any, handle: Any) -> None:
        callers = (sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_name)
        if caller not in callers:
            wait(self, handle)

    return patch.object(Backend, "_await", unless)


def _without_wait_tensor() -> AbstractContextManager[Any]:
    return patch.object(differentiable, "_wait", lambda x: x)


def _without_events_of(copy: str) -> AbstractContextManager[Any]:
    plain = getattr(Backend, copy)

    def unrecorded(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        known = len(self._copies)
        found = plain(self, *args, **kwargs)
        del self._copies[known:]
        return found

    return patch.object(Backend, copy, unrecorded)


def _without_settle(caller: str) -> AbstractContextManager[Any]:
    settle = Backend.settle

    def unless(self: Any) -> None:
        above = sys._getframe(1)
        above = above.f_back if above.f_code.co_name == "_settle_copies" else above
        if above.f_code.co_name != caller:
            settle(self)

    return patch.object(Backend, "settle", unless)


def _without_landing_in(method: str) -> AbstractContextManager[Any]:
    land = Backend._land

    def unless(self: Any) -> None:
        if sys._getframe(1).f_code.co_name != method:
            land(self)

    return patch.object(Backend, "_land", unless)


def _without_optimizer_event() -> AbstractContextManager[Any]:
    return patch.object(tree.Tree, "_await_optimizer", lambda self: None)


def _without_hook(when: str) -> AbstractContextManager[Any]:
    wait_stream = torch.npu.Stream.wait_stream

    def unless(self: Any, other: Any) -> None:
        if (self if when == "begins" else other) != HOOKS:
            wait_stream(self, other)

    return patch.object(torch.npu.Stream, "wait_stream", unless)


def _without_sync_stream() -> AbstractContextManager[Any]:
    return patch.object(ours, "hsdp_sync_stream", lambda: None)


# ------------------------------------------------------------------------------------------------------------ scenarios


@cache
def expected() -> Run:
    return alone()


def by_functions(run: Run) -> bool:
    """A functional run keeps no gradients."""
    return is_same(run, Run(expected().losses, {}, expected().params))


def _scenario_training() -> bool:
    return is_same(facade("npu"), expected())


def _scenario_replicated() -> bool:
    model = net().to("npu")
    for module in units_of(model):
        ours.replicate(module, mesh=FLAT["npu"])
    return is_same(train(model, "npu"), expected())


def _scenario_messages() -> bool:
    def prepare(model: Any) -> None:
        for module in units_of(model):
            module.set_custom_all_gather(ours.PointToPointAllGather())
            module.set_custom_reduce_scatter(ours.PointToPointReduceScatter())

    return is_same(facade("npu", prepare=prepare), expected())


def _scenario_votes() -> bool:
    backend = Backend(FLAT["npu"])
    return all([backend.votes(True) == RANKS for _ in range(5)])  # each is a collective: no stop at the first


def _scenario_differentiable() -> bool:
    model = net().to("npu")
    state = ours.shard_module(model, FLAT["npu"], [])
    found = ours.differentiable_unshard(state, hsdp_fn.masters(state))
    return agree(found, dict(net().named_parameters()))


def _scenario_offloaded() -> bool:
    return is_same(facade("npu", offload_policy=OFFLOAD), expected())


def _scenario_offloaded_functions() -> bool:
    return by_functions(functional("npu", offload_policy=OFFLOAD, early=Sync.SHARD))


def _scenario_looked_at() -> bool:
    """Parameters on the host are changed as soon as a forward has returned."""
    model, tokens = sharded("npu", offload_policy=OFFLOAD), batch(0, 0)
    rows = [p.to_local().detach() for p in model.parameters()]
    with torch.no_grad():
        out = model(tokens.to("npu"))
        overwrite(rows)
        return torch.allclose(out.cpu(), net()(tokens), atol=1e-6)


def _scenario_looked_at_with_a_graph() -> bool:
    model, tokens = sharded("npu", offload_policy=OFFLOAD), batch(0, 0)
    rows = [p.to_local().detach() for p in model.parameters()]
    pause(0.3)
    out = model(tokens.to("npu"))
    overwrite(rows)
    return torch.allclose(out.detach().cpu(), net()(tokens).detach(), atol=1e-6)


def _scenario_unsharded(later: bool = False) -> bool:
    model = sharded("npu", offload_policy=OFFLOAD)
    rows = [p.to_local().detach() for p in model.parameters()]
    with torch.no_grad():
        model(batch(0, 0).to("npu"))
    pause(0.3)
    handles = [module.unshard(async_op=later) for module in units_of(model)]
    for handle in handles if later else ():
        handle.wait()
    overwrite(rows)
    found = {name: p.detach() for name, p in torch.nn.Module.named_parameters(model)}
    return agree(found, dict(net().named_parameters()))


def _scenario_unsharded_later() -> bool:
    return _scenario_unsharded(True)


def offloaded_state() -> tuple[Any, hsdp_fn.HSDPState, list[Tensor]]:
    """A model, its state on the host, and views of its masters."""
    model = net().to("npu")
    state = ours.shard_module(model, FLAT["npu"], UNITS, offload_policy=OFFLOAD)
    return model, state, [p.detach() for p in ours.shard_parameters(state).values()]


def _scenario_gathered_at_once() -> bool:
    _, state, rows = offloaded_state()
    pause(0.3)
    state = hsdp_fn.unshard(state)
    overwrite(rows)
    return agree(hsdp_fn.full_params(state), dict(net().named_parameters()))


def _scenario_gathered() -> bool:
    _, state, rows = offloaded_state()
    state = hsdp_fn.wait(hsdp_fn.unshard(state, async_op=True))
    overwrite(rows)
    return agree(hsdp_fn.full_params(state), dict(net().named_parameters()))


def _scenario_evaluated() -> bool:
    model, state, rows = offloaded_state()
    tokens = batch(0, 0)
    pause(0.3)
    out, _ = ours.evaluate(lambda p, tokens: ours.functional_call(model, p, tokens))(state, tokens.to("npu"))
    overwrite(rows)
    return torch.allclose(out.cpu(), net()(tokens).detach(), atol=1e-6)


def _scenario_stepped() -> bool:
    """Masters are changed before the gradients are taken out."""
    model, state, rows = offloaded_state()
    pause(0.3)
    _, state = value_and_grad(model)(state, batch(0, 0).to("npu"))
    overwrite(rows)
    hsdp_fn.masters(state)
    _, found = hsdp_fn.grads(state)
    return agree(found, gradients_of_a_step())


@cache
def gradients_of_a_step() -> dict[str, Tensor]:
    model, state, _ = offloaded_state()
    _, state = value_and_grad(model)(state, batch(0, 0).to("npu"))
    return hsdp_fn.grads(state)[1]


def _scenario_reduced() -> bool:
    _, state, _ = offloaded_state()
    whole_ones = {p.name: torch.full(p.shape, RANK + 1.0, device="npu") for p in state.layout.params()}
    _, rows = hsdp_fn.grads(hsdp_fn.reduce_grads(state, whole_ones))
    return all(bool((row == (RANKS + 1) / 2).all()) for row in rows.values())


def _scenario_added_on_the_host() -> bool:
    return by_functions(functional("npu", offload_policy=OFFLOAD))


def _scenario_taken() -> bool:
    """Gradients on the host are read as soon as they are taken out of the state."""
    _, state, _ = offloaded_state()
    value = next(NUMBERS) + 1.0  # another each time, since the memory may have held the last one
    gradients = {p.name: torch.full(p.shape, value, device="npu") for p in state.layout.params()}
    pause(0.3)
    _, rows = hsdp_fn.grads(hsdp_fn.reduce_grads(state, gradients, async_op=True))
    return all(bool((row == value).all()) for row in rows.values())


def _scenario_cloned() -> bool:
    state = behind_its_copies()
    copy = hsdp_fn.clone(state)
    torch.npu.synchronize()
    (_, found), (_, wanted) = hsdp_fn.grads(copy), hsdp_fn.grads(state)
    return agree(found, wanted)


def behind_its_copies() -> hsdp_fn.HSDPState:
    """A state whose gradients are still on their way to the host. They are others each time, since the memory may have
    held those of the last."""
    model, state, _ = offloaded_state()
    model.embed.register_full_backward_hook(lambda *_: pause(0.05))
    _, state = value_and_grad(model)(state, batch(next(NUMBERS), 0).to("npu"))
    return state


def _scenario_optimizer_on_a_stream() -> bool:
    stream, kept = torch.npu.Stream(), []

    def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
        kept.append([p.grad for p in model.parameters()])
        stream.wait_stream(torch.npu.current_stream())
        with on(stream):
            optimizer.step()
            model.set_post_optim_event(stream.record_event())

    model = sharded("npu")
    run = train(model, "npu", update=update)
    torch.npu.current_stream().wait_stream(stream)
    run.params = {name: whole(p, "npu") for name, p in model.named_parameters()}
    return is_same(run, expected())


def _scenario_hooked() -> bool:
    """Gradients are halved before the hooks and doubled in them, which takes a while."""

    def hook(gradient: Tensor) -> None:
        pause(0.02)
        gradient.mul_(2)

    def prepare(model: Any) -> None:
        for module in units_of(model):
            module.set_gradient_divide_factor(2 * RANKS)
            module.set_all_reduce_hook(hook, stream=HOOKS)
            module.register_full_backward_hook(lambda *_: pause(0.01))

    return is_same(facade("npu", prepare=prepare), expected())


def _scenario_read_on_another_stream() -> bool:
    model, side = sharded("npu"), torch.npu.Stream()
    tokens = batch(0, 0).to("npu")
    loss_of(model(tokens), tokens).backward()
    ours.hsdp_sync_stream()
    with on(side):
        early = [p.grad.to_local().clone() for p in model.parameters()]
    torch.npu.synchronize()
    return all(torch.equal(a.cpu(), p.grad.to_local().cpu()) for a, p in zip(early, model.parameters(), strict=True))


def _scenario_dropped() -> bool:
    """Forward and backward raise on all ranks, with gathers and reductions in flight."""
    model = sharded("npu")
    for stop in (model.layers[0].register_forward_hook, model.layers[1].register_full_backward_hook):
        hook = stop(_raise)
        tokens = batch(0, 0).to("npu")
        with suppress(ArithmeticError):
            loss_of(model(tokens), tokens).backward()
        hook.remove()
        model.reset_iter_state()
    return is_same(train(model, "npu"), expected())


def _scenario_refused() -> bool:
    """A unit of several collectives, of which the second can't be issued on any rank."""
    model = sharded("npu", comm_fusion=False)
    issue, calls = Backend.all_gather, []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        return issue(*args) if len(calls) != 2 else _raise()

    with patch.object(Backend, "all_gather", refuse), suppress(ArithmeticError):
        model(batch(0, 0).to("npu"))
    model.reset_iter_state()
    return is_same(train(model, "npu"), expected())


def _scenario_drained() -> bool:
    """Rank 1 fails alone."""
    model = sharded("npu")
    tokens = batch(0, 0).to("npu")
    hook = model.layers[1].register_forward_hook(_raise) if RANK == 1 else None
    with suppress(ArithmeticError, hsdp_fn.PeerFailed), ours.recoverable(model):
        loss_of(model(tokens), tokens).backward()
    if hook is not None:
        hook.remove()
    return is_same(train(model, "npu"), expected())


def pause(seconds: float) -> None:
    """Hold up the current stream."""
    launch("pause", torch.device("npu", RANK), lambda: time.sleep(seconds))


def _raise(*args: object) -> None:
    raise ArithmeticError


def overwrite(rows: Any) -> None:
    for row in rows:
        row.fill_(100.0)


def agree(found: Any, wanted: Any) -> bool:
    values = {name: value.detach().cpu() for name, value in found.items()}
    return all(torch.allclose(values[name], value.detach().cpu(), atol=1e-6) for name, value in wanted.items())


def _scenario_x1() -> bool:
    _, state, rows = offloaded_state()
    pause(0.05)
    state = hsdp_fn.unshard(state)
    overwrite(rows)
    return agree(hsdp_fn.full_params(state), dict(net().named_parameters()))


def _scenario_x2() -> bool:
    model, state, rows = offloaded_state()
    tokens = batch(0, 0)
    run = ours.evaluate(lambda p, tokens: ours.functional_call(model, p, tokens))
    pause(0.05)
    out, state = run(state, tokens.to("npu"))
    overwrite(rows)
    return torch.allclose(out.cpu(), net()(tokens).detach(), atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- checks


def is_right(scenario: Callable[[], bool]) -> bool:
    """Whether it was right on all ranks, which then are at rest."""
    right = scenario()
    torch.npu.synchronize()
    return not anywhere(not right)


def check(wait: Wait) -> None:
    scenario = globals()[f"_scenario_{wait.scenario}"]
    assert is_right(scenario), "wrong with all waits"
    remove, *arguments = wait.without
    with globals()[f"_without_{remove}"](*arguments):
        right = [is_right(scenario) for _ in range(TRIES)]
    print(f"without {wait.removed}: wrong in {right.count(False)} of {TRIES} runs of {wait.scenario}", flush=True)
    if wait.spare:
        assert all(right), "it is needed"
    else:
        assert not all(right), "nobody misses it"


checks.main({f"check_{name}": partial(check, wait) for name, wait in WAITS.items()})
dist.destroy_process_group()
