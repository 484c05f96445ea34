"""The example of expert parallelism: its layer against a loop over all experts, and its run against one process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.workers_torch import on_ranks

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "torch"


def load(name: str) -> ModuleType:
    """Import an example by its own name, as the examples import one another; their folder hides nothing afterwards."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


moe, composed, example = load("moe"), load("composed"), load("moe_ep_fsdp")
DIM, EXPERTS, TOKENS = 12, 8, 10
CONFIG = moe.MoEConfig(moe.GPTConfig(dim=DIM, heads=2), experts=EXPERTS, top_k=2, hidden=5)
BALANCE = 0.5
KINDS = ("all_gather", "reduce_scatter")
# By case, the experts that the tokens of each of the four ranks may choose. Experts 0 to 3 are on ranks 0 and 2.
CHOICES = {
    "all": [range(8)] * 4,
    "three of eight": [(1, 4, 5)] * 4,
    "only the other rank's": [(4, 5, 6), (0, 1, 2), (6, 7), (0, 3)],
    "all to one rank": [(0, 1), (1, 2), (2, 3), (0, 3)],
}


def layer_of(seed: int = 0) -> nn.Module:
    """An MoE layer with weights so large that all terms matter. Its router reads the first coordinates."""
    layer = moe.MoE(CONFIG).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, 0.5, generator=generator)
        layer.router.score.weight *= 0.2
        layer.router.score.weight[:, :EXPERTS] += torch.eye(EXPERTS)
    return layer


def tokens_of(rank: int, choices: str) -> tuple[Tensor, Tensor]:
    """A rank's tokens, pushed towards the experts they may choose, and what weighs the outputs in the loss."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, weights = torch.randn(2, 2, TOKENS // 2, DIM, generator=generator, dtype=torch.float64)
    allowed = list(CHOICES[choices][rank])
    if len(allowed) < EXPERTS:
        x[..., allowed] += 8
    return x, weights


def loop(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle: every expert on every token, mostly times zero. Outputs, load-balancing loss, who goes where."""
    probabilities = (x @ layer.router.score.weight.T).softmax(dim=-1)
    chosen = probabilities >= probabilities.topk(2, dim=-1).values[..., -1:]
    weights = probabilities * chosen / (probabilities * chosen).sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        gate, up = (x @ layer.experts.gate_up[e]).chunk(2, dim=-1)
        out = out + weights[..., e : e + 1] * (F.silu(gate) * up @ layer.experts.down[e])
    share = chosen.flatten(0, -2).double().mean(0) / 2
    return out, EXPERTS * (share * probabilities.flatten(0, -2).mean(0)).sum(), chosen


def meshes() -> tuple[DeviceMesh, dist.ProcessGroup]:
    """The example's sparse mesh, and all ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), dist.group.WORLD


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reduce_by_hand(model: nn.Module, edp: dist.ProcessGroup) -> None:
    """Data parallelism without the library: the mean over four ranks. An expert's gradient has half of the sum."""
    for p in model.parameters():
        assert p.grad is not None
        local = p.grad.to_local() if isinstance(p, DTensor) else p.grad
        dist.all_reduce(local, group=edp if isinstance(p, DTensor) else None)
        local /= 4


def close(found: Tensor, expected: Tensor, what: object = "") -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13, msg=lambda text: f"{what}: {text}")


# ---------------------------------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("choices", CHOICES)
def test_the_layer_in_one_process_is_a_loop_over_experts(choices):
    layer, oracle = layer_of(), layer_of()
    x, weights = tokens_of(1, choices)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, imbalance = layer(mine)
    expected, expected_imbalance, _ = loop(oracle, other)
    close(out, expected)
    close(imbalance, expected_imbalance)
    ((out * weights).sum() + BALANCE * imbalance).backward()
    ((expected * weights).sum() + BALANCE * expected_imbalance).backward()
    close(mine.grad, other.grad)
    for (name, p), q in zip(layer.named_parameters(), oracle.parameters(), strict=True):
        close(p.grad, q.grad, name)


@pytest.mark.parametrize("choices", CHOICES)
@on_ranks(4)
def test_dispatch_and_combine_are_a_loop_over_all_experts_and_all_tokens(rank, world, choices):
    sparse, everyone = meshes()
    layer, oracle = layer_of(), layer_of()
    moe.spread_experts(layer, sparse["ep"], everyone)
    assert layer.experts.gate_up.to_local().shape == (4, DIM, 10)
    x, weights = tokens_of(rank, choices)
    x.requires_grad_()
    out, imbalance = layer(x)
    ((out * weights).sum() + BALANCE * imbalance).backward()
    reduce_by_hand(layer, sparse["edp"].get_group())

    parts = [tokens_of(r, choices) for r in range(world)]
    all_x = torch.stack([part for part, _ in parts]).requires_grad_()
    all_weights = torch.stack([part for _, part in parts])
    expected, expected_imbalance, chosen = loop(oracle, all_x)
    ((expected * all_weights).sum() / world + BALANCE * expected_imbalance).backward()

    close(out, expected[rank])
    mean = imbalance.detach() / world
    dist.all_reduce(mean)
    close(mean, expected_imbalance)
    close(x.grad / world, all_x.grad[rank])  # of this rank's loss, and of the mean over ranks
    for (name, p), q in zip(layer.named_parameters(), oracle.parameters(), strict=True):
        assert q.grad.count_nonzero(), "nothing would be compared with nothing"
        close(whole(p.grad), q.grad, name)
    used = chosen.flatten(1, 2).any(1)  # [rank, expert]
    assert all(set(used[r].nonzero().flatten().tolist()) <= set(CHOICES[choices][r]) for r in range(world))
    assert used.any(0).sum() == len(set().union(*CHOICES[choices])), "all of these experts, and no other, are used"
    assert not whole(layer.experts.down.grad)[~used.any(0)].any()


@on_ranks(4)
def test_a_rank_may_send_nothing_and_receive_nothing(rank, world):
    """Rows that go to the first rank of each pair only; gradients come back to where the rows came from."""
    group = meshes()[0]["ep"].get_group()
    first = rank % 2 == 0
    rows = (torch.arange(6.0).view(3, 2) + 10 * rank).requires_grad_()
    received = moe.AllToAll.apply(rows, [3, 0], [3, 3] if first else [0, 0], group)
    assert received.shape == (6 if first else 0, 2)
    if first:
        close(received.detach(), torch.cat((rows, rows + 10)).detach())
    (received * torch.arange(1.0, 13.0).view(6, 2)[: len(received)]).sum().backward()
    close(rows.grad, torch.arange(1.0, 7.0).view(3, 2) + (0 if first else 6))


def test_the_balancing_loss_is_one_when_balanced_and_grows_to_the_number_of_experts():
    layer = layer_of()
    counts, even = torch.full((EXPERTS,), 3), torch.full((5, EXPERTS), 1 / EXPERTS)
    assert layer._imbalance(counts, even).item() == pytest.approx(1.0)
    one = F.one_hot(torch.zeros(5, dtype=torch.int64), EXPERTS)
    assert layer._imbalance(one[0] * 24, one.float()).item() == pytest.approx(EXPERTS)
    assert layer._imbalance(counts, one.float()).item() == pytest.approx(1.0)


@pytest.mark.parametrize("field", [{"top_k": 0}, {"top_k": 9}, {"hidden": 0}])
def test_a_shape_that_cannot_be_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        moe.MoEConfig(moe.GPTConfig(), **field)


@on_ranks(4)
def test_experts_that_do_not_divide_over_the_ranks_are_refused(rank, world):
    layer = moe.MoE(moe.MoEConfig(CONFIG.gpt, experts=7))
    with pytest.raises(ValueError, match="7 experts don't divide over 2"):
        moe.spread_experts(layer, meshes()[0]["ep"], dist.group.WORLD)
    assert layer.ep_group is None and not isinstance(layer.experts.down, DTensor)


# -------------------------------------------------------------------------------------------------------- the example


def random_batch(rank: int, world: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (world, 2, 17), generator=torch.Generator().manual_seed(5))
    mine = tokens[rank] if rank >= 0 else tokens.flatten(0, 1)
    return mine[:, :-1], mine[:, 1:]


@pytest.mark.parametrize("how", ["by hand", "expert_dim=0", "expert_dim=1"])
@on_ranks(4)
def test_the_gradient_is_that_of_one_process(rank, world, how):
    model, alone = example.build(), example.build()
    if how == "by hand":
        sparse, everyone = meshes()
        moe.spread_experts(model, sparse["ep"], everyone)
    else:
        example.shard(model, int(how[-1]))
    example.loss_of(model, *random_batch(rank, world)).backward()
    if how == "by hand":
        reduce_by_hand(model, sparse["edp"].get_group())
    example.loss_of(alone, *random_batch(-1, world)).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (whole(p.grad) - q.grad).norm() <= 1e-6 * q.grad.norm(), name
        assert q.grad.norm() > 1e-5, name


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-6)])
@on_ranks(4)
def test_a_few_steps_are_those_of_one_process(rank, world, dtype, tolerance):
    batches = composed.text_batches(example.CONFIG.gpt.seq_len, example.BATCH_SIZE)
    model, alone = (example.build(getattr(torch, dtype)) for _ in range(2))
    run = example.train(example.shard(model), batches, 3)
    reference = composed.train_alone(alone, example.loss_of, batches, 3)
    difference = composed.compare(run, reference)
    assert difference.within(tolerance)  # float32: 1e-6, but with other kernels a token might change its experts
    assert dtype == "float32" or difference.parameter <= 1e-10
    halved = composed.train_alone(example.build(), lambda m, x, y: example.loss_of(m, x[:8], y[:8]), batches, 3)
    assert composed.compare(run, halved).parameter > 1e-3, "the comparison notices what two ranks leave out"


@on_ranks(4)
def test_a_block_has_one_collective_for_each_of_its_meshes(rank, world):
    model = example.shard(example.build())
    loss = example.loss_of(model, *random_batch(rank, world))
    loss.backward()
    issued = [(c.unit, c.op, c.group_size) for c in model.hsdp_state.ledger]
    for unit in ("layers.0", "layers.1"):
        gathers, scatters = ([at for u, op, at in issued if (u, op) == (unit, kind)] for kind in KINDS)
        assert sorted(gathers) == [2, 2, 4, 4], "in forward and in backward, over edp and over dp"
        assert sorted(scatters) == [2, 4]
    assert {op for _, op, _ in issued} == set(KINDS)
    for layer in model.layers:
        assert layer.moe.experts.down.shape == (8, 64, 64)
        assert layer.moe.experts.down.to_local().numel() * 4 == layer.moe.experts.down.numel()


def test_the_script_trains_and_finds_only_rounding():
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command = [*launch, str(EXAMPLES / "moe_ep_fsdp.py"), "--steps", "6"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] - 0.3
