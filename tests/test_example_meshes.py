"""The examples on meshes of several axes: they train as one process does, and their check notices when they don't."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.workers_torch import equal, on_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "torch"


def load(name: str) -> ModuleType:
    """Import an example the way it is run: the others of its folder are found by their bare names."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


composed, cp_fsdp, tp_fsdp, gpt, text = (load(name) for name in ("composed", "cp_fsdp", "tp_fsdp", "gpt", "text"))

SMALL = gpt.GPTConfig(dim=32, layers=2, heads=2, seq_len=16)
STEPS = 4
# Above what rounding does in four steps (some 1e-6), below what any mistake does.
TOLERANCE = 1e-5


def batches():
    """A text in which a few bytes are frequent, so that losses fall at once."""
    data = np.random.default_rng(0).geometric(0.1, 4096).clip(max=255).astype(np.uint8)
    return text.Batches(data, SMALL.seq_len, 4, seed=0)


def alone(build):
    return composed.train_alone(build(config=SMALL), lambda model, x, y: gpt.loss_fn(model(x), y), batches(), STEPS)


def tp_run():
    """Four steps of the example's training; the model, and what it left."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tp_fsdp.shard(tp_fsdp.parallelize(tp_fsdp.build(SMALL), mesh["tp"]), mesh["dp"])
    return model, tp_fsdp.train(model, mesh["dp"], batches(), STEPS)


def cp_run():
    """The same for context parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    model = cp_fsdp.shard(cp_fsdp.build(mesh["cp"], SMALL), mesh)
    return model, cp_fsdp.train(model, mesh, batches(), STEPS)


def shares(model) -> set[tuple[int, int]]:
    """Dimensions of the parameters, each with the number of ranks that it is split over."""
    return {(p.ndim, p.numel() // p.to_local().numel()) for p in model.parameters()}


@on_ranks(4)
def test_tensor_parallelism_trains_as_one_process_does(rank, world):
    model, run = tp_run()
    assert shares(model) == {(2, 4), (1, 2)}  # norms are whole along tp
    difference = composed.compare(run, alone(tp_fsdp.build))
    assert difference.within(TOLERANCE), difference
    assert run.losses[-1] < run.losses[0]


@on_ranks(4)
def test_context_parallelism_trains_as_one_process_does(rank, world):
    model, run = cp_run()
    assert shares(model) == {(2, 4), (1, 4)}
    difference = composed.compare(run, alone(cp_fsdp.build))
    assert difference.within(TOLERANCE), difference
    assert run.losses[-1] < run.losses[0]


def theirs_over_both(module, mesh, dp_mesh_dims):
    """FSDP2 refuses plain parameters with ``dp_mesh_dims``; the same over a mesh that was flattened by hand."""
    return torch.distributed.fsdp.fully_shard(module, mesh=mesh[dp_mesh_dims.shard_names]._flatten("both"))


@pytest.mark.parametrize("name", ["tp_fsdp", "cp_fsdp"])
@on_ranks(4)
def test_the_examples_have_the_bits_of_fsdp2(rank, world, name):
    example, run, theirs = {
        "tp_fsdp": (tp_fsdp, tp_run, torch.distributed.fsdp.fully_shard),
        "cp_fsdp": (cp_fsdp, cp_run, theirs_over_both),
    }[name]
    ours = run()[1]
    with mock.patch.object(example, "fully_shard", theirs):
        reference = run()[1]
    assert (ours.losses, ours.norms) == (reference.losses, reference.norms)
    equal(ours.parameters, reference.parameters)


def heads(length: int, seed: int) -> Tensor:
    return torch.randn(2, 3, length, 4, generator=torch.Generator().manual_seed(seed))


@on_ranks(2, 4)
def test_attention_over_slices_is_that_over_the_sequence(rank, world):
    """Forward, and the gradients of all three inputs: those of keys and values come from several ranks."""
    cp = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    length = 3 * world
    whole = [heads(length, seed).requires_grad_() for seed in range(3)]
    weights = heads(length, 3)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    (expected * weights).sum().backward()

    mine = slice(3 * rank, 3 * rank + 3)
    parts = [x.detach()[:, :, mine].clone().requires_grad_() for x in whole]
    found = cp_fsdp.attention(*parts, cp)
    (found * weights[:, :, mine]).sum().backward()
    torch.testing.assert_close(found, expected[:, :, mine], rtol=1e-5, atol=1e-6)
    for part, x in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, x.grad[:, :, mine], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_attention_doesnt_see_later_positions(rank, world):
    cp = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v = (heads(3, 10 * rank + seed) for seed in range(3))
    before = cp_fsdp.attention(q, k, v, cp)
    if rank == 1:
        k, v = torch.full_like(k, 7.0), torch.full_like(v, 7.0)
    after = cp_fsdp.attention(q, k, v, cp)
    assert torch.equal(before, after) == (rank == 0)


# ----------------------------------------------------------------------------------------------------------- as scripts


def as_script(example: ModuleType, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of ``main``, in a process that has its group already."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        mock.patch.object(example, "join"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        code = example.main(arguments)
    return code, out.getvalue().splitlines()


@pytest.mark.parametrize("name", ["tp_fsdp", "cp_fsdp"])
@on_ranks(4)
def test_a_script_prints_losses_and_the_difference(rank, world, name):
    code, lines = as_script(load(name), "--steps", "2")
    assert code == 0
    if rank:
        assert lines == []
    else:
        assert [line.split()[:3] for line in lines[:2]] == [["step", "0", "loss"], ["step", "1", "loss"]]
        assert lines[2].startswith("largest relative difference") and lines[2].endswith("only rounding")
    assert as_script(load(name), "--steps", "1", "--no-check") == (0, lines[:1])


def mean_of_slices(ctx, grad: Tensor):
    """A likely mistake in the backward of the all-gather: the mean over ``cp`` in place of the sum."""
    mine, *rest = RIGHT_BACKWARD(ctx, grad)
    return mine / ctx.group.size(), *rest


RIGHT_BACKWARD = cp_fsdp.AllGather.backward


@on_ranks(4)
def test_a_wrong_gradient_is_exit_code_1(rank, world):
    with mock.patch.object(cp_fsdp.AllGather, "backward", mean_of_slices):
        code, lines = as_script(cp_fsdp, "--steps", "2")
    assert code == (1 if rank == 0 else 0)
    assert rank or lines[-1].endswith("TOO LARGE")


@on_ranks(4)
def test_another_share_of_the_batch_is_exit_code_1(rank, world):
    def first_rows(self, step, micro, rank, world):
        return read(self, step, micro, 0, world)

    read = text.Batches.batch
    with mock.patch.object(text.Batches, "batch", first_rows):
        code, _ = as_script(tp_fsdp, "--steps", "2")
    assert code == (1 if rank == 0 else 0)


# ------------------------------------------------------------------------------------------------------- the comparison


def record(losses=(2.0, 1.0), norms=(1.0, 1.0), **parameters: Tensor):
    return composed.Run(list(losses), list(norms), parameters)


def test_the_largest_relative_differences_are_found() -> None:
    run = record((2.0, 1.5), (1.0, 0.75), a=torch.tensor([3.0, 5.0]), b=torch.ones(2))
    reference = record((2.0, 1.0), (1.0, 1.0), a=torch.tensor([3.0, 4.0]), b=torch.ones(2))
    found = composed.compare(run, reference)
    assert (found.loss, found.norm) == (0.5, 0.25)
    assert found.parameter == pytest.approx(1 / 5)
    assert composed.compare(run, run) == composed.Difference(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("difference", "within"),
    [
        ((1e-5, 1e-4, 1e-4), True),
        ((2e-5, 0.0, 0.0), False),
        ((0.0, 2e-4, 0.0), False),
        ((0.0, 0.0, 2e-4), False),
        ((math.nan, 0.0, 0.0), False),
        ((0.0, math.nan, 0.0), False),
        ((0.0, 0.0, math.nan), False),
    ],
)
def test_each_difference_can_be_too_large(difference: tuple[float, float, float], within: bool) -> None:
    assert composed.Difference(*difference).within(1e-4) is within


def test_a_nan_is_not_overlooked_among_others() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    run, reference = record((1.0, math.nan, 1.0), a=bad, b=good), record((1.0, 1.0, 1.0), a=good, b=good)
    found = composed.compare(run, reference)
    assert math.isnan(found.loss) and math.isnan(found.parameter)


def test_runs_of_other_steps_or_parameters_are_not_compared() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="runs of 1 and 2 steps"):
        composed.compare(record((1.0,), (1.0,), a=one), record(a=one))
    with pytest.raises(ValueError, match=r"one run only: \['b'\]"):
        composed.compare(record(a=one), record(a=one, b=one))


@pytest.mark.parametrize("started", ["2", None])
def test_another_number_of_processes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, started: str) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if started:
        monkeypatch.setenv("WORLD_SIZE", started)
    monkeypatch.setattr(sys, "argv", ["cp_fsdp.py"])
    with pytest.raises(SystemExit) as caught:
        composed.join(4)
    assert caught.value.code == "cp_fsdp.py is for 4 processes: torchrun --nproc-per-node 4 cp_fsdp.py"
