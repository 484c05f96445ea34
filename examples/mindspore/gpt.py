"""A byte-level decoder-only transformer, written as plain MindSpore: nothing here knows how it will be sharded."""

import math
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn, ops

from hsdp_fn_ms import param_specs

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`.

    Args:
        dim: width of the residual stream; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads of each block.
        seq_len: longest sequence that the model accepts, in bytes.
        vocab: number of tokens; 256 is every byte.

    Raises:
        ValueError: a field below 1, or `dim` that `heads` doesn't divide.
    """

    dim: int = 48
    layers: int = 2
    heads: int = 4
    seq_len: int = 32
    vocab: int = 256

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "seq_len", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={self.dim}, heads={self.heads}")


class Block(nn.Cell):
    """Causal self-attention and a feed-forward, each behind a norm and beside a residual. `[batch, seq, dim]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm((config.dim,), epsilon=1e-5)
        self.qkv = nn.Dense(config.dim, 3 * config.dim, has_bias=False)
        self.out = nn.Dense(config.dim, config.dim, has_bias=False)
        self.norm2 = nn.LayerNorm((config.dim,), epsilon=1e-5)
        self.up = nn.Dense(config.dim, 4 * config.dim)
        self.down = nn.Dense(4 * config.dim, config.dim)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(ops.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        parts = self.qkv(x).reshape(batch, seq, 3, self.heads, dim // self.heads).transpose(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) / math.sqrt(dim // self.heads) + mask
        mixed = ops.matmul(ops.softmax(scores, -1), v)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(batch, seq, dim))


class GPT(nn.Cell):
    """Tokens `[batch, seq]` to logits `[batch, seq, vocab]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.dim)
        self.place = nn.Embedding(config.seq_len, config.dim)
        self.layers = nn.CellList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm((config.dim,), epsilon=1e-5)
        self.head = nn.Dense(config.dim, config.vocab, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        x = self.token(tokens) + self.place(Tensor(np.arange(seq, dtype=np.int32)))
        mask = Tensor(np.triu(np.full((seq, seq), -1e9, np.float32), 1))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def init_weights(model: GPT, seed: int) -> None:
    """The same weights on every process: matrices normal, biases zero, norms as they are."""
    rng = np.random.default_rng(seed)
    shapes = {spec.name: spec.shape for spec in param_specs(model)}
    params = {name: param for name, param in model.parameters_and_names()}
    for name, shape in shapes.items():
        if len(shape) == 2:
            params[name].set_data(Tensor(rng.normal(0, INIT_STD, shape).astype(np.float32)))
        elif name.endswith(".bias"):
            params[name].set_data(Tensor(np.zeros(shape, np.float32)))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte."""
    return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
