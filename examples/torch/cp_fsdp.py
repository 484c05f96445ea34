"""Context parallelism and sharded data parallelism: a small transformer on a 2 x 2 mesh.

    torchrun --nproc-per-node 4 examples/torch/cp_fsdp.py

    rank                0      1      2      3
    (dp_shard, cp)     0 0    0 1    1 0    1 1
    windows            A, B   A, B   C, D   C, D
    positions          0-63  64-127  0-63  64-127

- along ``cp`` the ranks read the same windows, each a slice of the positions. In every attention keys and values
  travel, all-gathered in forward, and their gradients, reduce-scattered in backward. Everything else works on each
  position alone and needs nothing from other ranks.
- along ``dp_shard`` the ranks read different windows.
- over both together, as over one axis of four, the parameters are split: all-gathered before a block runs, gradients
  reduce-scattered after its backward. For a parameter a rank of ``cp`` is one more rank with other tokens. So a larger
  ``cp`` saves memory of parameters and optimizer as well as of activations.

The scale of the gradients: each rank's loss is the mean over its own tokens. All have equally many, so the mean of the
four losses is the loss of the global batch; and the mean over its ranks is what `fully_shard` makes of the gradients.
Between the ranks of ``cp`` gradients are added, not averaged: keys and values of one rank take part in the losses of
several, and their gradient is the sum of what each of these losses says.

Later positions have more keys to look at, so the last rank of ``cp`` works longest. For long sequences one cuts them
into ``2 * cp`` slices and gives slices i and ``2 * cp - 1 - i`` to rank i ("zig-zag"); only positions and the mask
change. PyTorch's own `context_parallel` does that, and sends keys and values around a ring; it has no CPU
implementation.

At the end the run is compared with one process's run of the same model on the same global batches. The only
differences are of rounding: sums over ranks are added in another order.
"""

import sys
from collections.abc import Sequence
from typing import Any

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
from gpt import GPT, Attention, GPTConfig, loss_fn
from text import Batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from hsdp_fn import DataParallelMeshDims
from hsdp_fn_torch.facade import fully_shard

CONFIG = GPTConfig(dim=64, layers=2, heads=4, seq_len=128)
BATCH = 4  # windows of a step, over all ranks


class AllGather(torch.autograd.Function):
    """The slices of all ranks of a group, joined; the gradient of a slice is the sum of what the ranks have for it.

    Communicates: forward one all-gather, backward one reduce-scatter, over the group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """``x[..., n, ...]`` to ``[..., n * size, ...]`` along ``dim``."""
        ctx.dim, ctx.group = dim, group
        slices = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(slices, x.contiguous(), group)
        return torch.cat(slices.chunk(group.size()), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The sum over the ranks of their gradients of this rank's slice."""
        slices = grad.chunk(ctx.group.size(), ctx.dim)
        mine = grad.new_empty(slices[0].shape)
        dist.reduce_scatter_single(mine, torch.cat(slices), dist.ReduceOp.SUM, ctx.group)
        return mine, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence.

    Communicates: keys and values, in one all-gather over ``cp``; backward one reduce-scatter.

    Args:
        q, k, v: ``[B, heads, T / cp, head_dim]``, of this rank's positions: the ranks hold consecutive slices.

    Returns:
        ``[B, heads, T / cp, head_dim]``.
    """
    k, v = AllGather.apply(torch.stack((k, v)), 3, cp.get_group()).unbind()
    length = q.shape[2]
    first = cp.get_local_rank() * length  # position of this rank's first query
    queries, keys = torch.arange(first, first + length), torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=queries[:, None] >= keys)


class ContextAttention(Attention):
    """The attention of `gpt.py`, with the same parameters, on a slice of the positions."""

    def __init__(self, config: GPTConfig, cp: DeviceMesh) -> None:
        super().__init__(config)
        self.cp = cp
        # The rotary tables begin at this rank's first position; that is all that the rotation has to know.
        rotary, positions = self.rotary, slice_of(config.seq_len, cp)
        rotary.cos, rotary.sin = rotary.cos[positions], rotary.sin[positions]

    def forward(self, x: Tensor) -> Tensor:
        """``x[B, T / cp, dim]`` to the same. Communicates: see `attention`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = attention(self.rotary(q), self.rotary(k), v, self.cp)
        return self.out(mixed.transpose(1, 2).flatten(2))


def slice_of(length: int, cp: DeviceMesh) -> slice:
    """This rank's positions of ``length``, which ``cp`` must divide."""
    share = length // cp.size()
    return slice(cp.get_local_rank() * share, (cp.get_local_rank() + 1) * share)


def build(cp: DeviceMesh | None = None, config: GPTConfig = CONFIG) -> GPT:
    """The model, with the same weights on every process; for a slice of the positions where ``cp`` is given."""
    model = GPT(config)
    if cp is not None:
        for block in model.layers:
            block.attention = ContextAttention(config, cp)
    model.init_weights(torch.Generator().manual_seed(SEED))
    return model


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split the parameters over both axes: a unit a block, and the root's. Does not communicate."""
    both = DataParallelMeshDims(shard=("dp_shard", "cp"))
    for block in model.layers:
        fully_shard(block, mesh=mesh, dp_mesh_dims=both)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=both)  # embedding, last norm and head


def train(model: GPT, mesh: DeviceMesh, batches: Batches, steps: int) -> Run:
    """The training loop. All that it knows about the mesh is which windows it reads, and which positions of them.

    Communicates: as said at the top; the norm one number over all ranks; and a loss to print.
    """
    run = Run()
    optimizer = make_optimizer(model.parameters())
    dp, mine = mesh["dp_shard"], slice_of(batches.seq_len, mesh["cp"])
    for step in range(steps):
        x, y = batches.batch(step, 0, dp.get_local_rank(), dp.size())
        # The targets are cut as the inputs are: the last one is the first byte of the next rank's slice.
        loss = loss_fn(model(x[:, mine]), y[:, mine])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    batches = text_batches(CONFIG.seq_len, BATCH)
    model = shard(build(mesh["cp"]), mesh)
    run = train(model, mesh, batches, options.steps)
    code = 0
    if options.check and dist.get_rank() == 0:
        alone = train_alone(build(), lambda model, x, y: loss_fn(model(x), y), batches, options.steps)
        code = verdict(run, alone)
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
