"""What `recoverable` costs where nothing fails: CPU time of its beginning and end beside that of the step inside.

The two are timed by themselves, since their sum is smaller than the noise of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hsdp_fn_torch as ht

from .contenders import FACADE, Fully, Ours
from .measure import SIZES as MEASURED
from .measure import Batch, GPTConfig, Size, batch_of, loss_fn, model_of

SIZES = {
    "overhead": MEASURED["overhead"],
    "main job": Size("main job", GPTConfig(dim=128, layers=4, heads=4, seq_len=128), batch=4, steps=30),
    "wide": MEASURED["wide"],
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Median CPU milliseconds of all threads of one process: what a step takes, and the attempt around it."""

    step: float
    attempt: float

    def __str__(self) -> str:
        return f"{self.attempt:.2f} ms around {self.step:.0f} ms ({self.attempt / self.step:.2%})"


def costs(size: Size) -> dict[str, Cost]:
    """By API. Communicates: runs on all ranks of the default group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [f"layers.{i}" for i in range(size.config.layers)]
    facade: Any = Fully(FACADE, model_of(size), units, mesh, loss_fn)
    functional = Ours(model_of(size), units, mesh, loss_fn)

    def of_the_facade(batch: Batch) -> tuple[float, float]:
        return _timed(ht.recoverable(facade._model), lambda _: facade.gradients(batch))

    def of_a_state(batch: Batch) -> tuple[float, float]:
        attempt: Any = ht.recoverable(functional.state)

        def inside(attempt: Any) -> None:
            functional.state = attempt.state
            functional.gradients(batch)
            attempt.state = functional.state

        clock = _timed(attempt, inside)
        functional.state = attempt.state
        return clock

    found: dict[str, list[tuple[float, float]]] = {"functional": [], "facade": []}
    for step in range(size.steps):
        batch = batch_of(size, step, dist.get_rank())
        found["functional"].append(of_a_state(batch))
        found["facade"].append(of_the_facade(batch))
        functional.update()
        facade.update()
    return {
        name: Cost(1e3 * median(s for s, _ in pairs), 1e3 * median(a for _, a in pairs))
        for name, pairs in found.items()
    }


def _timed(attempt: Any, inside: Callable[[Any], Any]) -> tuple[float, float]:
    """CPU seconds of the step, and of the attempt around it."""
    dist.barrier()
    start = time.process_time()
    attempt.__enter__()
    begun = time.process_time()
    inside(attempt)
    ended = time.process_time()
    dist.barrier()  # waiting for a slower rank is the step's
    again = time.process_time()
    attempt.__exit__(None, None, None)
    return ended - begun, (begun - start) + (time.process_time() - again)
