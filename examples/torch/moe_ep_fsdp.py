"""Mixture of experts: expert parallelism that borrows ranks from data parallelism, and sharding on two meshes at once.

    torchrun --nproc-per-node 4 examples/torch/moe_ep_fsdp.py

Every rank reads other tokens, so the router, attention, norms and embeddings see data parallelism over all four. The
experts are shared out over pairs of these ranks, so the same four ranks form a second mesh:

    rank             0      1      2      3
    ("dp",)          0      1      2      3        all tokens; everything but the experts is cut in four
    ("edp", "ep")   0 0    0 1    1 0    1 1       experts 0-3 on ranks 0 and 2, experts 4-7 on ranks 1 and 3

- along ``ep`` tokens travel: two all-to-alls a layer in forward, two in backward. The experts' weights are DTensors
  cut on dim 0 there.
- along ``edp`` the ranks hold the same experts. The library shards their weights once more between these ranks, gathers
  them before the block runs, and reduces their gradients after its backward.
- along ``dp`` it does the same with everything else.

One call of ``fully_shard`` for each block says all of this: the unit's mesh is ``dp``, and ``shard_placement_fn`` puts
the experts' weights on ``edp``. The unit then has one all-gather and one reduce-scatter for each of the two meshes.

The scale of the experts' gradients: each expert gets tokens of all four ranks. The all-to-all adds up those of a pair,
and the reduction over ``edp`` the two pairs. The loss is the mean over four ranks, so this sum has to be divided by 4,
the size of the unit's mesh; which is what the library does. FSDP2 divides by 2, the size of ``edp``, unless it is told
otherwise.

The run is compared with one in one process, of the same model, with all experts there and the whole of each batch.
Choosing experts isn't continuous: where a token's second and third best are nearly equal, rounding decides, the token
visits another expert, and from then on two runs part. In float32 they agree to 1e-6 until that happens, some time in
the first 60 steps; soon afterwards they differ by 1e-3. So this example trains in float64, where it doesn't happen.
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
    whole_parameters,
)
from gpt import GPTConfig, loss_fn
from moe import MoEConfig, MoETransformer, spread_experts
from text import Batches
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hsdp_fn_torch import FSDPMeshInfo, ShardPlacementResult, clip_grad_norm_, fully_shard

RANKS, EXPERT_PARALLEL = 4, 2
CONFIG = MoEConfig(GPTConfig(dim=64, layers=2, heads=4, seq_len=64), experts=8, top_k=2, hidden=64)
BATCH_SIZE = 16  # windows a step, over all ranks
BALANCE = 0.01  # weight of the load-balancing loss
DTYPE = torch.float64
TOLERANCE = 1e-6  # losses are computed, and all is compared, in float32; the parameters agree to 1e-10


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, and a little for experts that get more than their share. Either part is a mean over tokens."""
    logits, imbalance = model(x)
    return loss_fn(logits, y) + BALANCE * imbalance


def build(dtype: torch.dtype = DTYPE) -> MoETransformer:
    """The plain model, the same in every process."""
    return MoETransformer(CONFIG, SEED).to(dtype)


def shard(model: MoETransformer, expert_dim: int = 0) -> MoETransformer:
    """Cut the model up, in place: experts over ``ep`` and ``edp``, the rest over ``dp``. Communicates to make meshes.

    Args:
        expert_dim: which dim of the experts' weights ``edp`` cuts. 0 cuts between experts; where a rank has fewer of
            them than ``edp`` has ranks, 1 leaves no rank without a part.
    """
    dense = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    sparse = init_device_mesh("cpu", (RANKS // EXPERT_PARALLEL, EXPERT_PARALLEL), mesh_dim_names=("edp", "ep"))
    spread_experts(model, sparse["ep"], dense.get_group())
    on_edp = ShardPlacementResult(Shard(expert_dim), FSDPMeshInfo(sparse["edp"], shard_mesh_dim=0))
    for layer in model.layers:
        experts = set(layer.moe.experts.parameters())
        fully_shard(layer, mesh=dense, shard_placement_fn=lambda p, experts=experts: on_edp if p in experts else None)
    return fully_shard(model, mesh=dense)


def train(model: nn.Module, batches: Batches, steps: int) -> Run:
    """An ordinary training loop, on this rank's part of each batch.

    Communicates: all that the table in `moe.py` and the text above list; and sums for the gradient's norm and the loss.
    """
    run = Run()
    optimizer = make_optimizer([{"params": list(model.parameters()), "foreach": True}])  # of both meshes
    for step in range(steps):
        loss = loss_of(model, *batches.batch(step, 0, dist.get_rank(), RANKS))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)  # torch's own refuses gradients on several meshes
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(mean_over_ranks(loss))
        run.norms.append(norm.item())
        log(step, steps, run)
    run.parameters = whole_parameters(model)
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then train the same model in one process, and compare. Returns the exit code."""
    options = parse(__doc__, arguments)
    join(RANKS)
    batches = text_batches(CONFIG.gpt.seq_len, BATCH_SIZE)
    run = train(shard(build()), batches, options.steps)
    code = 0
    if options.check and dist.get_rank() == 0:
        alone = train_alone(build(), loss_of, batches, options.steps)
        code = verdict(run, alone, TOLERANCE)
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
