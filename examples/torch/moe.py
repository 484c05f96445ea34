"""A mixture-of-experts transformer: router, dropless dispatch over an expert-parallel group, stacked experts.

Written as plain PyTorch. With no groups set it is an ordinary model with all experts in one process. `spread_experts`
gives each rank of an expert-parallel axis its own experts; the layer then communicates, in this order:

| in forward | what travels | over |
|---|---|---|
| counts | how many tokens go to each expert: integers | expert-parallel group |
| dispatch | each token, once for each expert that it has chosen | expert-parallel group |
| combine | the experts' outputs, back to where the tokens came from | expert-parallel group |
| load | how many tokens each expert has received from all ranks: integers | data-parallel group, all ranks |

Backward repeats dispatch and combine in the opposite direction. Nothing has a capacity, so no token is ever dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import INIT_STD, Attention, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The shape of an `MoETransformer`.

    Args:
        gpt: attention, depth and vocabulary; its feed-forward isn't used.
        experts: experts of each layer, over all ranks.
        top_k: how many of them each token visits.
        hidden: hidden width of one expert.

    Raises:
        ValueError: ``top_k`` isn't between 1 and ``experts``, or ``hidden`` is below 1.
    """

    gpt: GPTConfig
    experts: int = 8
    top_k: int = 2
    hidden: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must lie in 1..experts, got top_k={self.top_k}, experts={self.experts}")
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")


class AllToAll(torch.autograd.Function):
    """Send each rank of a group its slice of the rows. The gradient of a row that was sent is sent back.

    Communicates: one all-to-all of rows in forward, and one with the splits exchanged in backward. All ranks of the
    group must differentiate it if one does; a rank with nothing to send or receive takes part with empty tensors.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        """``send[r]`` rows go to rank r of the group, in order; ``receive[r]`` rows come from it."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradients of what was received go back to the senders."""
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """One all-to-all over ``group`` with uneven splits; ``rows[sum(send), ...]`` to ``[sum(receive), ...]``."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token: the likeliest of a softmax, with their weights scaled to sum 1."""

    def __init__(self, config: GPTConfig, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.score = nn.Linear(config.dim, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x[N, dim]`` to weights ``[N, top_k]``, chosen experts ``[N, top_k]``, probabilities ``[N, experts]``."""
        scores = self.score(x)
        probabilities = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype), chosen, probabilities


class Experts(nn.Module):
    """SwiGLU experts, stacked: one tensor for each matrix, whose dim 0 is the expert.

    The parameters hold all experts; after `spread_experts` they are DTensors cut on dim 0, and a rank runs its own.
    """

    def __init__(self, dim: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Run ``counts[e]`` rows of ``x[N, dim]`` through each expert of this rank, in order.

        An expert without rows multiplies an empty matrix. So its weights stay in the graph and get gradients of zeros,
        and all ranks have the same parameters to reduce.
        """
        gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate_up, self.down))
        outputs = []
        for rows, w_in, w_out in zip(x.split(counts), gate_up.unbind(), down.unbind(), strict=True):
            gate, up = (rows @ w_in).chunk(2, dim=-1)
            outputs.append((F.silu(gate) * up) @ w_out)
        return torch.cat(outputs)


class MoE(nn.Module):
    """A feed-forward layer of many experts, of which each token visits ``top_k``.

    Attributes:
        ep_group: the ranks that share the experts out among themselves, each with an equal block of them; None for all
            experts here.
        dp_group: all ranks that see tokens of the batch, for the load-balancing loss; None for this process alone.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.count = config.experts
        self.router = Router(config.gpt, config.experts, config.top_k)
        self.experts = Experts(config.gpt.dim, config.experts, config.hidden)
        self.ep_group: dist.ProcessGroup | None = None
        self.dp_group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x[..., dim]`` to the weighted sum of the chosen experts' outputs, and the load-balancing loss, a scalar.

        Communicates: see the table of the file.
        """
        tokens = x.flatten(0, -2)
        weights, chosen, probabilities = self.router(tokens)
        counts = chosen.flatten().bincount(minlength=self.count)
        order = chosen.flatten().argsort(stable=True)  # of (token, choice) pairs, so that each expert's are neighbours
        outputs = self._run(tokens[order // self.router.top_k], counts)
        pairs = outputs[order.argsort()].unflatten(0, chosen.shape)  # [N, top_k, dim]
        mixed = (pairs * weights.unsqueeze(-1)).sum(dim=1)
        return mixed.view_as(x), self._imbalance(counts, probabilities)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each row through its expert, wherever that is. ``rows`` are sorted by expert, ``counts[e]`` for each."""
        if self.ep_group is None:
            return self.experts(rows, counts.tolist())
        ranks, group = self.ep_group.size(), self.ep_group
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        coming = coming.view(ranks, -1)  # [from rank, expert of this rank]
        send, receive = counts.view(ranks, -1).sum(1).tolist(), coming.sum(1).tolist()
        received = AllToAll.apply(rows, send, receive, group)
        # They lie by sender, then by expert; the experts want them the other way round.
        expert = torch.arange(coming.shape[1], device=rows.device).repeat(ranks).repeat_interleave(coming.flatten())
        order = expert.argsort(stable=True)
        outputs = self.experts(received[order], coming.sum(0).tolist())
        return AllToAll.apply(outputs[order.argsort()], receive, send, group)

    def _imbalance(self, counts: Tensor, probabilities: Tensor) -> Tensor:
        """``experts * sum_e f_e p_e``: f the share of choices that fell on e, p its mean probability; 1 if balanced.

        The loss of a batch isn't the mean of its parts' losses, since it is a product of two means. It becomes so if f
        is that of the whole batch in each of them: f has no gradient, and what is left is linear in p. So f is summed
        over all ranks, and the mean of the ranks' losses, which data parallelism minimises, is exactly that of one
        process with the whole batch.
        """
        if self.dp_group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.dp_group)
        share = counts.to(probabilities.dtype) / counts.sum()
        return self.count * (share * probabilities.mean(dim=0)).sum()


class MoEBlock(nn.Module):
    """One pre-norm layer: attention, then experts, each added to the residual stream."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.gpt.dim)
        self.attention = Attention(config.gpt)
        self.moe_norm = nn.RMSNorm(config.gpt.dim)
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x[B, T, dim]`` to ``[B, T, dim]`` and the layer's load-balancing loss."""
        x = x + self.attention(self.attention_norm(x))
        mixed, imbalance = self.moe(self.moe_norm(x))
        return x + mixed, imbalance


class MoETransformer(nn.Module):
    """Embedding, blocks, a last norm and an output head. The weights come from ``seed`` alone."""

    def __init__(self, config: MoEConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.gpt.vocab, config.gpt.dim)
        self.layers = nn.ModuleList(MoEBlock(config) for _ in range(config.gpt.layers))
        self.norm = nn.RMSNorm(config.gpt.dim)
        self.head = nn.Linear(config.gpt.dim, config.gpt.vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:  # norms are 1 already
                nn.init.normal_(parameter, 0.0, INIT_STD, generator=generator)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Int64 ``tokens[B, T]`` to logits ``[B, T, vocab]`` and the mean of the layers' load-balancing losses."""
        x, losses = self.embed(tokens), []
        for layer in self.layers:
            x, imbalance = layer(x)
            losses.append(imbalance)
        return self.head(self.norm(x)), torch.stack(losses).mean()


def spread_experts(model: nn.Module, ep_mesh: DeviceMesh, dp_group: dist.ProcessGroup) -> None:
    """Leave each rank of ``ep_mesh`` an equal block of every layer's experts, as DTensors cut on dim 0.

    Communicates nothing: all ranks must have the same weights. Every rank then has ``experts / ranks`` of the experts
    in memory, and ``full_tensor`` gives all of them.

    Args:
        ep_mesh: one axis; the groups of this size each hold all experts once.
        dp_group: all ranks that see tokens.

    Raises:
        ValueError: the experts don't divide over the ranks.
    """
    for layer in (m for m in model.modules() if isinstance(m, MoE)):
        if layer.count % ep_mesh.size():
            raise ValueError(f"{layer.count} experts don't divide over {ep_mesh.size()} expert-parallel ranks")
        layer.ep_group, layer.dp_group = ep_mesh.get_group(), dp_group
        for name, weight in list(layer.experts.named_parameters()):
            mine = distribute_tensor(weight.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
            setattr(layer.experts, name, nn.Parameter(mine))
