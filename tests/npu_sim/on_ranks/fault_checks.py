"""Collectives that are refused or fail while they run, seen from torch on two ranks; run by `test_collectives.py`.

TASK_QUEUE_ENABLE is 0: with its queue on, torch_npu sometimes loses the error of a refused call, and then does nothing
any more of what it is asked for, in silence.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.npu_sim import checks, simulator

RANK = int(os.environ["RANK"])
torch.npu.set_device(RANK)
dist.init_process_group("hccl")
dist.all_reduce(torch.ones(2, device="npu"))
torch.npu.synchronize()


def check_a_refused_collective_is_an_exception_and_the_next_one_works() -> None:
    simulator.arm("hccl@1")
    try:
        dist.all_reduce(torch.ones(2, device="npu"))
    except RuntimeError as error:
        assert "NPU_SIM_FAULTS" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    x = torch.ones(2, device="npu")
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


def check_a_collective_that_fails_on_one_rank_is_an_exception_on_all() -> None:
    simulator.arm("async@1/1")
    dist.all_reduce(torch.ones(2, device="npu"))
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        assert ("NPU_SIM_FAULTS" if RANK == 1 else "rank 1 gave up") in str(error), error
    else:
        raise AssertionError("nothing was raised")


checks.main(globals())
time.sleep(30)  # torch_npu's watchdog ends the process before
