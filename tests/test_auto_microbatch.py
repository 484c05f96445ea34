"""The example that finds its microbatch size: ranks agree on it, and the run is that of the small size."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hsdp_fn import PeerFailed
from tests.workers_torch import equal, on_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "torch"
AMPLE = sys.maxsize


def load(name: str) -> ModuleType:
    """Import an example the way it is run: the others of its folder are found by their bare names."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


example, gpt, text = (load(name) for name in ("auto_microbatch", "gpt", "text"))

SMALL = gpt.GPTConfig(dim=16, layers=2, heads=2, seq_len=128)
HELD = 4 * sum(p.numel() for p in gpt.GPT(SMALL).parameters())
ROW = SMALL.layers * SMALL.seq_len * SMALL.dim * 4
STEPS = 2
APIS = ["facade", "functional"]


def run(api: str, size: int, limit: int, steps: int = STEPS):
    """The example's `run` with a small model: what it returns, and what it has printed."""
    corpus = text.Batches(torch.arange(2048).remainder(251).to(torch.uint8).numpy(), SMALL.seq_len, 16, seed=0)
    with (
        mock.patch.object(example, "CONFIG", SMALL),
        mock.patch.object(example, "text_batches", lambda *_: corpus),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        return *example.run(api, steps, size, limit), out.getvalue()


def trainer(api: str, limit: int):
    model, budget = gpt.GPT(SMALL), example.Budget(limit)
    model.init_weights(torch.Generator().manual_seed(0))
    budget.watch(model)
    return example.TRAINERS[api](model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))), budget


def rows(rank: int, count: int = 8):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 256, (count, SMALL.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_one_rank_with_less_memory_halves_for_all(rank, world, api):
    losses, size, parameters, out = run(api, 8, HELD + 2 * ROW if rank == 1 else AMPLE)
    small_losses, small_size, small_parameters, quiet = run(api, 2, AMPLE)
    assert size == small_size == 2
    assert losses == small_losses and len(losses) == STEPS
    equal(parameters, small_parameters)
    # Eight rows don't fit, and of the next four, which do, the second four don't beside the gradients of the first.
    assert out.count(": PeerFailed") == (2 if rank == 0 else 0)
    assert out.count(": OutOfMemoryError: tried") == 2
    assert ("8 rows" in out) and ("4 rows" in out) and ("2 rows" not in out)
    assert "tried" not in quiet


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_a_failure_in_a_later_microbatch_drops_those_before(rank, world, api):
    """The second microbatch runs out on rank 1, beside the gradients of the first."""
    x, y = rows(rank)
    it, budget = trainer(api, AMPLE)
    expected = example.take_step(it, budget, x, y, 2)
    it.update()
    after = it.parameters()

    it, budget = trainer(api, AMPLE)
    budget.limit = 4 * ROW if rank == 1 else AMPLE
    error = RuntimeError if rank == 1 else PeerFailed
    with pytest.raises(error) as caught:
        example.take_step(it, budget, x, y, 4)
    assert example.ran_out(caught.value)
    assert example.hsdp.memory_bytes(it.state)["acc_full"] > 0  # the first one was taken
    it.drop_step()
    assert example.hsdp.memory_bytes(it.state)["acc_full"] == 0
    budget.limit = AMPLE
    assert torch.equal(example.take_step(it, budget, x, y, 2), expected)
    it.update()
    equal(it.parameters(), after)


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_where_no_row_fits_training_ends(rank, world, api):
    limit = ROW - 1 if rank == 1 else AMPLE
    with pytest.raises(RuntimeError, match="tried to allocate"):
        run(api, 2, limit)


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_another_failure_of_a_peer_isnt_taken_for_want_of_memory(rank, world, api):
    def fail(self, count: int) -> None:
        if rank == 1:
            raise ValueError("a bad batch")

    with (
        mock.patch.object(example.Budget, "take", fail),
        pytest.raises(ValueError if rank == 1 else PeerFailed, match="a bad batch"),
    ):
        run(api, 4, AMPLE)


def test_which_failures_are_want_of_memory() -> None:
    assert example.ran_out(torch.OutOfMemoryError("no memory"))
    assert example.ran_out(PeerFailed({1: "OutOfMemoryError: no memory", 3: "OutOfMemoryError: no memory"}))
    assert not example.ran_out(PeerFailed({1: "OutOfMemoryError: no memory", 3: "ValueError: a bad batch"}))
    assert not example.ran_out(ValueError("a bad batch"))


@on_ranks(2)
def test_other_parameters_are_exit_code_1(rank, world):
    take, calls = example.run, []

    def other(api, steps, size, limit):
        calls.append(size)
        losses, size, parameters = take(api, steps, size, limit)
        return losses, size, {name: p + (len(calls) == 2) for name, p in parameters.items()}

    with (
        mock.patch.object(example, "run", other),
        mock.patch.object(example, "join"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        code = example.main(["--steps", "1"])
    assert code == 1
    assert calls == [example.ROWS, 1]
    assert rank or out.getvalue().splitlines()[-1] == "losses and parameters DIFFER"


@pytest.mark.parametrize("api", APIS)
def test_the_script(api: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(EXAMPLES / "auto_microbatch.py"), "--steps", "2", "--api", api]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "losses and parameters are equal, bit for bit"
    assert done.stdout.count("PeerFailed: ") == 1
    assert done.stdout.count(": OutOfMemoryError: tried") == 5 + 1, "five of ranks themselves, one told by a peer"
    assert sum(line.endswith("in microbatches of 1") for line in lines) == 4
