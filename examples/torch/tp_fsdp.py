"""Tensor parallelism inside, sharded data parallelism outside: a small transformer on a 2 x 2 mesh.

    torchrun --nproc-per-node 4 examples/torch/tp_fsdp.py

    rank          0      1      2      3
    (dp, tp)     0 0    0 1    1 0    1 1

- along ``tp`` the ranks read the same windows. Each has half of every matrix, and between the matrices half of the
  positions. Activations travel: all-gathered before the first matrices of attention and of feed-forward,
  reduce-scattered after the last (in backward the reverse).
- along ``dp`` the ranks read different windows, and split what their ``tp`` place has of the parameters. Parameters
  travel, all-gathered before a block runs; and gradients, reduce-scattered after its backward.

First comes `parallelize_module` on ``mesh["tp"]``, which makes every parameter a DTensor on that axis; then
`fully_shard` on ``mesh["dp"]``. From then on a parameter is a DTensor on both axes: ``full_tensor()`` is the whole of
it, the norm of the gradient is that of the whole gradient, and an optimizer sees nothing unusual.

``tp`` is the inner axis, of neighbouring ranks: the computation waits for its messages, while those of ``dp`` run
beside it.

At the end the run is compared with one process's run of the same model on the same global batches. The only
differences are of rounding: sums over ranks are added in another order.
"""

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from composed import (
    MAX_NORM,
    SEED,
    Run,
    join,
    log,
    make_optimizer,
    mean_over_ranks,
    parse,
    text_batches,
    train_alone,
    verdict,
    whole,
    whole_parameters,
)
from gpt import GPT, GPTConfig, Rotary, loss_fn
from text import Batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from hsdp_fn_torch.facade import fully_shard

CONFIG = GPTConfig(dim=64, layers=2, heads=4, seq_len=64)
BATCH = 8  # windows of a step, over all ranks


class Attention(nn.Module):
    """The attention of `gpt.py` with three matrices in place of one: a slice of the rows of each is a set of heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q, self.k, self.v = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(3))
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = Rotary(config.seq_len, config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``x[B, T, dim]`` to ``[B, T, dim]``. The heads are as many as the matrices give: this rank's."""
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """That of `gpt.py` with gate and up apart."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x[B, T, dim]`` to ``[B, T, dim]``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def build(config: GPTConfig = CONFIG) -> GPT:
    """The plain model, the same on every process."""
    model = GPT(config)
    for block in model.layers:
        block.attention, block.ffn = Attention(config), FeedForward(config)
    model.init_weights(torch.Generator().manual_seed(SEED))
    return model


def parallelize(model: GPT, tp: DeviceMesh) -> GPT:
    """Split every matrix over ``tp``. Communicates: each parameter, scattered from the first rank of ``tp``.

    A column-wise matrix has a slice of its outputs on each rank, a row-wise one a slice of its inputs; so a pair of
    them needs no communication in between, only at its two ends. Between the pairs the residual stream is split over
    the positions (``Shard(1)``), so that norms and additions aren't repeated on every rank ("sequence parallelism").
    """
    positions, everywhere = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=positions, desired_input_layouts=everywhere)  # all-gather
    summed = RowwiseParallel(output_layouts=positions)  # reduce-scatter
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": summed,
            "ffn_norm": SequenceParallel(),
            "ffn": gathered,
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": summed,
        }
        parallelize_module(block, tp, plan)
    plan = {
        "embed": RowwiseParallel(input_layouts=everywhere, output_layouts=positions),  # a slice of the vocabulary
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=positions, output_layouts=everywhere),
    }
    return parallelize_module(model, tp, plan)


def shard(model: GPT, dp: DeviceMesh) -> GPT:
    """Split what each tensor-parallel rank has over ``dp``: a unit a block, and the root's. Does not communicate."""
    for block in model.layers:
        fully_shard(block, mesh=dp)
    return fully_shard(model, mesh=dp)  # embedding, last norm and head


def train(model: GPT, dp: DeviceMesh, batches: Batches, steps: int) -> Run:
    """The training loop. Nothing in it knows about the mesh, apart from which rows of the batch are read.

    Communicates: as said at the top; the norm one number over each axis; and a loss to print.
    """
    run = Run()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        x, y = batches.batch(step, 0, dp.get_local_rank(), dp.size())  # the same on the ranks of a tp group
        loss = loss_fn(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # all gradients are on one mesh
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(mean_over_ranks(loss))
        run.norms.append(whole(norm).item())
        log(step, steps, run)
    run.parameters = whole_parameters(model)
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and compare. Returns the exit code."""
    options = parse(__doc__, arguments)
    join(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = text_batches(CONFIG.seq_len, BATCH)
    model = shard(parallelize(build(), mesh["tp"]), mesh["dp"])
    run = train(model, mesh["dp"], batches, options.steps)
    code = 0
    if options.check and dist.get_rank() == 0:
        alone = train_alone(build(), lambda model, x, y: loss_fn(model(x), y), batches, options.steps)
        code = verdict(run, alone)
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
