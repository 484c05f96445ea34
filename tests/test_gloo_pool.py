"""The pool of gloo workers: what a test may rely on when it runs a function on all ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gloo_pool import GROUPS_LIMIT, GlooPool, RemoteError


@pytest.fixture
def pool() -> Iterator[GlooPool]:
    """A pool of the test's own, for tests that look at its processes."""
    pool = GlooPool()
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie, whose parent hasn't reaped it, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended_soon(pids: list[int]) -> bool:
    """Whether none of ``pids`` runs after at most five seconds."""
    deadline = time.monotonic() + 5.0
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def describe(rank: int, world: int, *args: Any) -> tuple[Any, ...]:
    return (rank, world, dist.get_rank(), dist.get_world_size(), *args)


def all_reduced(rank: int, world: int, width: int) -> torch.Tensor:
    value = torch.full((width,), float(rank + 1))
    dist.all_reduce(value)
    return value


def draw(rank: int, world: int) -> tuple[Any, ...]:
    """Draw from what a job could have left in disorder, then leave it in disorder."""
    drawn = (random.random(), torch.rand(1, dtype=torch.float64).item(), torch.ones(1).dtype, torch.is_grad_enabled())
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return (*drawn, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])


def pid(rank: int, world: int) -> int:
    return os.getpid()


class LayoutError(ValueError):
    """An error that can't be pickled, as its constructor takes other arguments than it passes on."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"{reason} on rank {rank}")


def fail_on(rank: int, world: int, failing: list[int]) -> str:
    if rank in failing:
        raise LayoutError(rank, "bad layout")
    return "fine"


def fail_before_all_reduce(rank: int, world: int) -> None:
    if rank == 1:
        raise LayoutError(rank, "bad layout")
    dist.all_reduce(torch.ones(1))


def hang_in_all_reduce(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def kill_self(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def crash(rank: int, world: int) -> None:
    os.abort()


def leave_group(rank: int, world: int) -> str:
    dist.destroy_process_group()
    return "left"


def return_lambda(rank: int, world: int) -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_rank_order_from_a_group_of_exactly_that_world(gloo: GlooPool, world: int) -> None:
    assert gloo.run(describe, "x", world=world) == [(rank, world, rank, world, "x") for rank in range(world)]


@pytest.mark.parametrize(("world", "total"), [(1, 1.0), (2, 3.0), (4, 10.0)])
def test_an_all_reduce_sums_over_all_ranks_and_tensors_come_back_by_value(
    gloo: GlooPool, world: int, total: float
) -> None:
    for value in gloo.run(all_reduced, 3, world=world):
        assert torch.equal(value, torch.full((3,), total))


def test_jobs_share_processes_and_take_milliseconds(gloo: GlooPool) -> None:
    pids = gloo.run(pid)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert gloo.run(pid) == pids
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02


def test_every_job_starts_from_the_same_seeds_and_defaults(gloo: GlooPool) -> None:
    first, second = gloo.run(draw), gloo.run(draw)
    assert first[0] == first[1]
    assert second == first
    assert first[0][2:] == (torch.float32, True, 1, "1")


def test_a_function_that_workers_cannot_import_is_refused(gloo: GlooPool) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        gloo.run(lambda rank, world: None)


def test_an_exception_on_one_rank_is_reported_with_its_traceback_and_the_next_job_works(gloo: GlooPool) -> None:
    with pytest.raises(RemoteError, match="1 of 2 ranks failed") as caught:
        gloo.run(fail_on, [1])
    assert (caught.value.rank, caught.value.type_name) == (1, "LayoutError")
    assert "rank 1: LayoutError: bad layout on rank 1" in str(caught.value)
    assert 'raise LayoutError(rank, "bad layout")' in str(caught.value)
    assert gloo.run(fail_on, []) == ["fine", "fine"]


def test_a_rank_left_blocked_by_the_failure_of_another_is_shown_after_it(
    pool: GlooPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gloo_pool.GRACE_S", 0.5)
    with pytest.raises(RemoteError, match="2 of 2 ranks failed") as caught:
        pool.run(fail_before_all_reduce)
    assert [failure.type_name for failure in caught.value.failures] == ["LayoutError", "NoAnswer"]
    assert "in fail_before_all_reduce" in caught.value.failures[1].traceback
    assert pool.pids == ()


def test_with_an_intact_group_all_failures_are_shown_and_the_set_is_kept(gloo: GlooPool) -> None:
    pids = gloo.run(pid)
    with pytest.raises(RemoteError, match="2 of 2 ranks failed") as caught:
        gloo.run(fail_on, [0, 1], group_intact=True)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}
    assert gloo.run(pid) == pids


def test_outcomes_tell_for_each_rank_what_it_returned_or_raised(gloo: GlooPool) -> None:
    first, second = gloo.outcomes(fail_on, [1], group_intact=True)
    assert (first.value, first.failure) == ("fine", None)
    assert second.failure is not None and second.failure.is_a(ValueError)
    assert not second.failure.is_a(TypeError)


def test_raises_asserts_the_type_and_the_text_of_the_error_on_every_rank(gloo: GlooPool) -> None:
    failures = gloo.raises(ValueError, fail_on, [0, 1], match="bad layout on rank [01]", group_intact=True)
    assert [failure.rank for failure in failures] == [0, 1]
    with pytest.raises(AssertionError, match="rank 0 raised nothing, it returned 'fine'"):
        gloo.raises(ValueError, fail_on, [1], group_intact=True)
    with pytest.raises(AssertionError, match=r"expected builtins\.TypeError on every rank"):
        gloo.raises(TypeError, fail_on, [0, 1], group_intact=True)
    with pytest.raises(AssertionError, match="isn't in the text"):
        gloo.raises(ValueError, fail_on, [0, 1], match="good layout", group_intact=True)


def test_a_value_that_cannot_be_pickled_is_a_failure_of_its_rank(gloo: GlooPool) -> None:
    with pytest.raises(RemoteError, match=r"return_lambda\.<locals>\.<lambda>"):
        gloo.run(return_lambda, world=1, group_intact=True)


def test_a_hang_ends_within_its_limit_with_the_stack_of_the_stuck_rank_and_the_next_job_works(gloo: GlooPool) -> None:
    gloo.run(pid)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 gave no answer within 3.0 s") as caught:
        gloo.run(hang_in_all_reduce, timeout=3.0)
    assert time.monotonic() - start < 6.0
    assert "in hang_in_all_reduce" in str(caught.value)
    assert gloo.run(describe) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_a_killed_worker_is_reported_and_the_next_job_works(gloo: GlooPool) -> None:
    with pytest.raises(RemoteError, match="rank 1: WorkerDied: the process ended with exit code -9"):
        gloo.run(kill_self, group_intact=True)
    assert gloo.run(describe) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_a_job_may_destroy_the_default_group_and_the_next_job_gets_a_fresh_one(gloo: GlooPool) -> None:
    assert gloo.run(leave_group, world=1) == ["left"]
    assert gloo.run(describe, world=1) == [(0, 1, 0, 1)]


def test_a_crash_is_reported_with_its_stack(gloo: GlooPool) -> None:
    with pytest.raises(RemoteError, match="exit code -6") as caught:
        gloo.run(crash, world=1)
    assert "Fatal Python error: Aborted" in str(caught.value)
    assert "in crash" in str(caught.value)


def test_close_leaves_no_process_and_no_directory(
    pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids = pool.run(pid, world=1)
    assert tuple(pids) == pool.pids and len(list(tmp_path.iterdir())) == 1
    pool.close()
    assert not any(map(alive, pids))
    assert pool.pids == () and list(tmp_path.iterdir()) == []


def test_workers_end_with_their_parent_also_in_the_middle_of_a_job(tmp_path: Path) -> None:
    script = """
        import sys
        sys.path[:] = {path!r}
        from tests import gloo_pool, test_gloo_pool

        pool = gloo_pool.GlooPool()
        print(*pool.run(test_gloo_pool.pid), flush=True)
        pool.run(test_gloo_pool.hang_in_all_reduce)
    """
    command = [sys.executable, "-c", textwrap.dedent(script).format(path=sys.path)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        time.sleep(0.3)
        parent.kill()
    assert ended_soon(pids)
    assert list(tmp_path.iterdir()) == []


def make_groups(rank, world):
    """How many process groups there are, before many more are made."""
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(GROUPS_LIMIT):
        dist.new_group(list(range(world)))
    return before


def test_processes_with_many_groups_are_replaced(pool: GlooPool) -> None:
    assert pool.run(make_groups) == [1, 1]
    assert pool.run(make_groups) == [1, 1]
