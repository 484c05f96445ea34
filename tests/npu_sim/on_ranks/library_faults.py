"""Errors on one rank or on all, and what docs/recovery.md promises about them; run by `test_library.py` on two ranks.

Checks whose names begin with ``last`` leave no communicator that works, so each needs a launch of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hsdp_fn
import hsdp_fn_torch as ours
from tests.npu_sim import checks, simulator
from tests.npu_sim.on_ranks.library_training import (
    FLAT,
    RANK,
    UNITS,
    anywhere,
    batch,
    loss_of,
    net,
    sharded,
    value_and_grad,
)

Gradients = dict[str, Tensor]
#: Calls of an attempt, counted from 1.
ALLOCATIONS = (1, 4, 9, 17, 30, 50)
COLLECTIVES = (1, 2, 4, 6, 8, 9)
#: How many calls fail: of one allocation that is refused, several, since it is tried again.
TIMES = {"oom": 1000, "hccl": 1}


def forward_and_backward(model: Any) -> None:
    tokens = batch(0, 0).to("npu")
    loss_of(model(tokens), tokens).backward()


def gradients(model: Any) -> Gradients:
    found = {name: p.grad.to_local().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def equal(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def clean() -> Gradients:
    model = sharded("npu")
    forward_and_backward(model)
    return gradients(model)


@contextmanager
def struck_by(fault: str) -> Iterator[None]:
    """Errors until one has been raised. There is memory again for what follows."""
    simulator.arm(fault)
    try:
        yield
    finally:
        simulator.arm("")


def attempts(attempt: Callable[[str], None], fault: str, places: tuple[int, ...]) -> int:
    """Let ``fault`` strike rank 1 at each of these places of an attempt. How many attempts it ended; none of them
    may have left anything, and in all of them the peer must know."""
    ended = 0
    for place in places:
        began, raised = time.monotonic(), None
        try:
            attempt(f"{fault}@{place}x{TIMES[fault]}/1")
        except Exception as error:
            raised = error
        assert time.monotonic() - began < 30, "it took too long"
        if not anywhere(raised is not None):
            continue
        ended += 1
        if RANK == 1:
            assert raised is not None and not isinstance(raised, hsdp_fn.PeerFailed), raised
        else:
            assert isinstance(raised, hsdp_fn.PeerFailed) and list(raised.ranks) == [1], raised
    return ended


def of_module(fault: str, places: tuple[int, ...]) -> int:
    expected, model = clean(), trained_once()

    def attempt(fault: str = "") -> None:
        with ours.recoverable(model), struck_by(fault):
            forward_and_backward(model)

    ended = 0
    for place in places:
        ended += attempts(attempt, fault, (place,))
        if model.embed.weight.grad is None:
            assert not gradients(model), f"{fault} {place}: it has left gradients"
            attempt()
        assert equal(gradients(model), expected), f"{fault} {place}: the retry has other gradients"
    return ended


def of_state(fault: str, places: tuple[int, ...]) -> int:
    model = net().to("npu")
    state = ours.shard_module(model, FLAT["npu"], UNITS)
    step, tokens = value_and_grad(model), batch(0, 0).to("npu")
    (_, _), after = step(hsdp_fn.clone(state), tokens)
    _, expected = hsdp_fn.grads(after)
    held = [state]

    def attempt(fault: str = "") -> None:
        with ours.recoverable(held[0]) as attempt, struck_by(fault):
            _, attempt.state = step(attempt.state, tokens)
        held[0] = attempt.state

    ended = 0
    for place in places:
        struck = attempts(attempt, fault, (place,))
        ended += struck
        if struck:
            attempt()
        held[0], found = hsdp_fn.grads(held[0])
        assert all(torch.equal(found[name], row) for name, row in expected.items()), f"{fault} {place}"
    return ended


def check_out_of_memory_on_one_rank_by_module() -> None:
    assert of_module("oom", ALLOCATIONS) >= 5


def check_out_of_memory_on_one_rank_by_functions() -> None:
    assert of_state("oom", ALLOCATIONS) >= 5


def check_a_collective_refused_on_one_rank_by_module() -> None:
    assert of_module("hccl", COLLECTIVES) == len(COLLECTIVES)


def check_a_collective_refused_on_one_rank_by_functions() -> None:
    assert of_state("hccl", COLLECTIVES) == len(COLLECTIVES)


@contextmanager
def armed(model: Any, fault: str, where: str) -> Iterator[None]:
    """Inside, the fault strikes all ranks at the same place of a layer."""

    def arm(*_: object) -> None:
        simulator.arm(fault)

    inner = model.layers[1].up
    hook = inner.register_forward_pre_hook(arm) if where == "forward" else inner.register_full_backward_hook(arm)
    try:
        yield
    finally:
        hook.remove()
        simulator.arm("")


def check_errors_on_all_ranks_and_a_reset() -> None:
    expected, model = clean(), sharded("npu")
    for fault in ("oom@1x1000", "hccl@1"):
        for where in ("forward", "backward"):
            try:
                with armed(model, fault, where):
                    forward_and_backward(model)
            except RuntimeError:
                pass
            else:
                raise AssertionError(f"{fault} in {where}: nothing was raised")
            model.reset_iter_state()
            assert not gradients(model), f"{fault} in {where}: it has left gradients"
            forward_and_backward(model)
            assert equal(gradients(model), expected), f"{fault} in {where}"


def trained_once() -> Any:
    model = sharded("npu")
    with ours.recoverable(model):
        forward_and_backward(model)
    assert equal(gradients(model), clean())
    return model


def raised_by(attempt: Callable[[], object], limit_s: float) -> BaseException:
    began = time.monotonic()
    try:
        attempt()
    except BaseException as error:
        assert time.monotonic() - began < limit_s, "it took too long"
        return error
    raise AssertionError("nothing was raised")


def check_last_a_collective_that_fails_while_it_runs() -> None:
    """Waits for handles don't tell the host; the vote does, on all ranks."""
    model = trained_once()

    def attempt() -> None:
        with ours.recoverable(model):
            forward_and_backward(model)

    simulator.arm("async@3/1")
    error = raised_by(attempt, 20)
    assert ("NPU_SIM_FAULTS" if RANK == 1 else "rank 1 gave up") in str(error), error
    assert "Restart from a checkpoint" in error.__notes__[0]
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(raised_by(attempt, 20), RuntimeError), "it goes on"


def check_last_a_collective_that_fails_without_an_attempt() -> None:
    """Wrong gradients don't get into parameters without an error that follows."""
    model = trained_once()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    simulator.arm("async@3/1")

    def step() -> None:
        forward_and_backward(model)
        optimizer.step()
        torch.npu.synchronize()

    assert isinstance(raised_by(step, 20), RuntimeError)


def interrupted_on_one_rank(limit_s: float | None) -> float:
    """Rank 1 can't free its peer, says so, and lives on. How long it takes until the peer has an error."""
    model = trained_once()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def attempt() -> None:
        with ours.recoverable(model, timeout=limit_s):
            forward_and_backward(model)

    if RANK == 1:
        model.layers[1].register_forward_hook(interrupt)
    began = time.monotonic()
    error = raised_by(attempt, 30)
    took = time.monotonic() - began
    if RANK == 1:
        assert isinstance(error, KeyboardInterrupt) and "it was interrupted" in error.__notes__[0]
        time.sleep(12)
    else:
        assert isinstance(error, RuntimeError if limit_s is None else TimeoutError), error
    assert all(p.grad is None for p in model.parameters())
    return took


def check_last_an_interrupted_rank() -> None:
    assert interrupted_on_one_rank(None) < 9


def check_last_a_limit() -> None:
    """It is for one collective, and some are in flight."""
    assert interrupted_on_one_rank(1.0) < 9


checks.main(globals())
sys.stdout.flush()
if not any(name.startswith("last") for name in sys.argv[1:]):
    dist.destroy_process_group()
os._exit(0)
