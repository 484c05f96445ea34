"""What is left after a failure, here and with FSDP2, in one run: ``python benchmarks/recovery.py``.

Two gloo processes run into a failure, do what the contender offers against it, and take one more step without one. They
are started afresh for each contender, and for each scenario in which torch may hang. The contenders:

- ``functional``: a state and `value_and_grad`. On all ranks at once: `reset_iter`. Alone: `recoverable`.
- ``facade``: `hsdp_fn_torch`'s `fully_shard`. On all ranks at once: `reset_iter_state`. Alone: `recoverable`.
- ``torch``: torch's `fully_shard` with `reset_iter_state`. It has nothing against failures of one rank alone.

A cell says ``right`` if whatever the failed call had shown (``.grad``, or the state) was as before it, and the step
after it has the gradients of a run without a failure, bit for bit; ``WRONG`` and how; ``error``: what was raised
instead; ``hang``: only the timeout of the process group ended it; ``dies``: the process did. Where torch is wrong, the
scenario is run again with `zero_grad` after `reset_iter_state`.

Afterwards failures are injected at every collective and every wait for one, and in forward and backward of every
module, on rank 0, on rank 1, and on both; and before and after every launch and every wait of steps on the numpy
reference backend (`reference_faults`). Then it is measured what `recoverable` costs where nothing fails.

The last line counts the checks of this library (torch's don't count); exit code 0 only if all are right.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks import attempt_cost, reference_faults
from benchmarks.failures import CONTENDERS, Contender, count_collectives
from benchmarks.scenarios import RANKS, RIGHT, SCENARIOS, inject
from hsdp_fn_torch.backend import TorchBackend

LIMIT_S = 100  # of a pair of processes
TIMEOUT_S = 60.0  # of a process group
HANG_S = 4.0  # of a process group that is expected to hang


@dataclass(frozen=True, slots=True)
class Job:
    """What a pair of processes is to do, one after the other, each with a new contender.

    Attributes:
        contender: one of `CONTENDERS`.
        tasks: names of scenarios, and whether gradients are to be cleared in them; or how far apart to inject failures;
            or the name of a size, to measure what an attempt costs.
        timeout: of the process group, in seconds.
        limit: seconds for all of it.
        hybrid: of the contender that failures are injected into.
    """

    contender: str
    tasks: tuple[tuple[str, bool] | int | str, ...]
    timeout: float = TIMEOUT_S
    limit: float = LIMIT_S
    hybrid: bool = False


def _work(rank: int, job: Job, folder: str, pipes: Sequence[tuple[Connection, Connection]]) -> None:
    """A process of a pair: what it finds goes into its connection; then it stays until it is told to end."""
    signal.alarm(int(LIMIT_S))  # whatever happens, to the parent too, it isn't left behind
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's last words
    for other, (theirs, mine) in enumerate(pipes):  # a pipe ends when the last process closes it
        theirs.close()
        if other != rank:
            mine.close()
    answers = pipes[rank][1]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    if job.contender == "torch":
        count_collectives(dist, "all_gather_single", "reduce_scatter_single")
    else:
        count_collectives(TorchBackend, "all_gather", "reduce_scatter", "all_reduce", "wait")
    for task in job.tasks:
        answers.send(_answer(CONTENDERS[job.contender], task, job.hybrid))
    answers.recv()  # a process that ends would free those that wait for it
    os._exit(0)


def _answer(kind: type[Contender], task: tuple[str, bool] | int | str, hybrid: bool) -> Any:
    try:
        if isinstance(task, str):
            return attempt_cost.costs(attempt_cost.SIZES[task])
        if isinstance(task, int):
            return inject(kind(hybrid=hybrid), task)
        scenario = SCENARIOS[task[0]]
        return scenario.run(kind(hybrid=scenario.hybrid, check=scenario.check), clear=task[1])
    except Exception as error:
        lines = str(error).strip().splitlines()
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return "hang"
        return f"error: {type(error).__name__}: {lines[0][:80] if lines else ''}"


def run(job: Job) -> list[list[Any]]:
    """What the ranks of a new pair of processes answer, by task; ``dies`` or ``hang`` for one that doesn't."""
    context = multiprocessing.get_context("fork")  # this process has no threads, and has used no autograd
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in RANKS]
        processes = [context.Process(target=_work, args=(rank, job, folder, pipes), daemon=True) for rank in RANKS]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return _answers([ours for ours, _ in pipes], processes, job)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: Sequence[Connection], processes: Sequence[Any], job: Job) -> list[list[Any]]:
    answers: list[list[Any]] = [[] for _ in pipes]
    rank_of, end = {pipe: rank for rank, pipe in enumerate(pipes)}, time.monotonic() + job.limit
    while rank_of and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(rank_of), left):
            rank = rank_of[pipe]  # type: ignore[index]
            try:
                answers[rank].append(pipe.recv())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join()
                answers[rank].append(f"dies: {signal.Signals(-processes[rank].exitcode).name}")
            if len(answers[rank]) == len(job.tasks) or str(answers[rank][-1]).startswith("dies"):
                del rank_of[pipe]  # type: ignore[arg-type]
    for given in answers:
        given += ["hang"] * (len(job.tasks) - len(given))
    return [list(both) for both in zip(*answers, strict=True)]


def worst(answers: Sequence[str]) -> str:
    """One cell for both ranks."""
    order = ("dies", "hang", "WRONG", "error", RIGHT)
    return min(answers, key=lambda a: next((i for i, word in enumerate(order) if a.startswith(word)), len(order)))


def scenario_cells(contender: str, quick: bool) -> dict[str, str]:
    """By scenario what this contender does."""
    if contender != "torch":
        tasks = tuple((name, False) for name in SCENARIOS)
        return {name: worst(both) for (name, _), both in zip(tasks, run(Job(contender, tasks)), strict=True)}
    tasks = tuple((n, clear) for n, s in SCENARIOS.items() if not s.hangs for clear in {False, s.clear})
    found = dict(zip(tasks, map(worst, run(Job(contender, tasks))), strict=True))
    for name, scenario in SCENARIOS.items():
        if scenario.hangs:
            job = Job(contender, ((name, False),), timeout=HANG_S, limit=5 * HANG_S)
            found[name, False] = "(not in a quick run)" if quick else worst(run(job)[0])
        elif found[name, False].startswith("WRONG") and scenario.clear:
            found[name, False] += f"; after zero_grad {found[name, True].removeprefix('WRONG: ')}"
    return {name: found[name, False] for name in SCENARIOS}


def main(argv: list[str] | None = None) -> int:
    """Run everything and print it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer injected failures, and torch where it can't hang")
    args = parser.parse_args(argv)
    importlib.import_module("torch._dynamo")  # DTensor does at first use, which would be in each process anew
    started, right, count = time.monotonic(), 0, 0
    problems: list[str] = []
    print(f"torch {torch.__version__}, gloo, 2 processes\n", flush=True)

    table = {name: scenario_cells(name, args.quick) for name in CONTENDERS}
    print(f"{'':37}{'functional':12}{'facade':12}torch's fully_shard")
    for name in SCENARIOS:
        cells = [table[contender][name] for contender in CONTENDERS]
        print(f"{name:37}{cells[0]:12}{cells[1]:12}{cells[2]}")
        count += 2
        right += cells[:2].count(RIGHT)

    print("\ninjected failures, right / all  (on rank 0, on rank 1, on both)", flush=True)
    for hybrid in (False,) if args.quick else (False, True):
        for contender in ("functional", "facade"):
            ((found, _),) = run(Job(contender, (3 if args.quick else 1,), hybrid=hybrid))
            label = f"{contender}, {'2 x 1 ranks' if hybrid else '2 ranks'}"
            if isinstance(found, str):
                count += 1
                problems.append(f"{label}: {found}")
                continue
            right += sum(t.right for t in found.values())
            count += sum(t.count for t in found.values())
            problems += [f"{label}: {p}" for t in found.values() for p in t.problems]
            print(f"{label:37}" + "   ".join(f"{kind} {t.right}/{t.count}" for kind, t in found.items()), flush=True)
    found = reference_faults.sweep(11 if args.quick else 1)
    right += sum(good for good, _, _ in found.values())
    count += sum(all_ for _, all_, _ in found.values())
    problems += [p for _, _, wrong in found.values() for p in wrong]
    tallies = "   ".join(f"{mesh} {good}/{all_}" for mesh, (good, all_, _) in found.items())
    print(f"{'reference backend, 4 ranks':37}{tallies}")
    if not args.quick:
        print("\nCPU time of an attempt around a step, nothing fails")
        found_costs = run(Job("facade", tuple(attempt_cost.SIZES)))
        for size, (measured, _) in zip(attempt_cost.SIZES.values(), found_costs, strict=True):
            layers = f"{size.config.layers} layers of width {size.config.dim}"
            costs = measured.items() if isinstance(measured, dict) else [("both", measured)]
            print(f"{layers:37}" + "   ".join(f"{api} {cost}" for api, cost in costs), flush=True)
    for problem in problems:
        print(f"NOT RIGHT: {problem}")
    print(f"\n{time.monotonic() - started:.0f} s\nrecovery: {right}/{count}")
    return 0 if right == count else 1


if __name__ == "__main__":
    sys.exit(main())
