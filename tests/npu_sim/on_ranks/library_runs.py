"""Many short training runs, whose delays differ in each; run by `test_library.py` with several settings of torch_npu.

A stream's delays are one sequence from the start of the process on, so that no two runs have the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import hsdp_fn_torch as ours
from hsdp_fn import CPUOffloadPolicy, PrefetchPolicy, Sync
from tests.npu_sim import checks
from tests.npu_sim.on_ranks.library_training import RANK, Run, alone, facade, functional, hold, same, units_of

#: How many runs a launch makes.
COUNT = int(os.environ["LIBRARY_RUNS"])


def _far_ahead(model: Any) -> None:
    model.set_modules_to_forward_prefetch(list(model.layers))
    model.set_modules_to_backward_prefetch(list(reversed(model.layers)))


def _messages(model: Any) -> None:
    for module in units_of(model):
        module.set_custom_all_gather(ours.PointToPointAllGather())
        module.set_custom_reduce_scatter(ours.PointToPointReduceScatter())


def _facade(before: Any = None, **options: Any) -> Run:
    return facade("npu", trained={"steps": 1} | ({"before": before} if before else {}), **options)


#: Of these, each run takes the next one.
WAYS: list[Callable[[], Run]] = [
    _facade,
    lambda: functional("npu", steps=1),
    lambda: _facade(offload_policy=CPUOffloadPolicy()),
    lambda: _facade(prepare=lambda model: model.set_separate_reduce_scatter_group()),
    lambda: functional("npu", steps=1, offload_policy=CPUOffloadPolicy(), early=Sync.SHARD),
    lambda: _facade(hold, prepare=_far_ahead),
    lambda: functional("npu", steps=1, prefetch=PrefetchPolicy(2, 2), early=Sync.NONE),
    lambda: _facade(prepare=_messages),
    lambda: _facade(reshard_after_forward=False),
]


def check_runs() -> None:
    whole = alone(1)
    without_gradients = replace(whole, grads={})  # as functional runs are
    for number in range(COUNT):
        run = WAYS[number % len(WAYS)]()
        try:
            same(run, whole if run.grads else without_gradients)
        except AssertionError as error:
            raise AssertionError(f"run {number} of {COUNT}, way {number % len(WAYS)}: {error}") from error
    torch.npu.synchronize()
    print(f"rank {RANK}: {COUNT} runs", flush=True)


checks.main(globals())
dist.destroy_process_group()
