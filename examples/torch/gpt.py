"""A byte-level decoder-only transformer, written as plain PyTorch: nothing here knows how it will be sharded."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02
ROTARY_BASE = 10_000.0
FFN_ROUNDING = 32


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a `GPT`. Checked when it is made, so that a model never meets a shape it can't have.

    Args:
        dim: width of the residual stream; a multiple of `heads`, with an even width for each head.
        layers: number of blocks.
        heads: attention heads of each block.
        seq_len: longest sequence that the model accepts, in tokens (bytes).
        ffn_multiple: hidden width of the feed-forward over `dim`; the width is rounded up to a multiple of 32.
        tie_embeddings: the output head is the token embedding's own matrix (one parameter under two names).
        vocab: number of tokens; 256 is every byte.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a field out of range, or two fields that don't fit together.
    """

    dim: int = 192
    layers: int = 4
    heads: int = 6
    seq_len: int = 256
    ffn_multiple: float = 8 / 3
    tie_embeddings: bool = False
    vocab: int = 256

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "seq_len", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not isinstance(self.ffn_multiple, (int, float)) or isinstance(self.ffn_multiple, bool):
            raise TypeError(f"ffn_multiple must be a number, got {self.ffn_multiple!r}")
        if not (math.isfinite(self.ffn_multiple) and self.ffn_multiple > 0):
            raise ValueError(f"ffn_multiple must be finite and above 0, got {self.ffn_multiple}")
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be a bool, got {self.tie_embeddings!r}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={self.dim}, heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"dim / heads must be even, for rotary, got dim={self.dim}, heads={self.heads}: {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def ffn_dim(self) -> int:
        """Hidden width of the feed-forward: `ffn_multiple * dim`, rounded up to a multiple of 32."""
        exact = round(self.ffn_multiple * self.dim, 6)  # 8 / 3 * dim must not round up for its last bit
        return FFN_ROUNDING * math.ceil(exact / FFN_ROUNDING)


class Rotary(nn.Module):
    """Turns each pair of a head's coordinates by an angle proportional to the position.

    The tables are non-persistent buffers, `cos` and `sin`: fp32 `[seq_len, head_dim]`. They are made on the CPU even
    under `torch.device("meta")`, since no checkpoint and no initialiser would ever fill them; `reset` makes them again.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.head_dim = head_dim
        self.reset(torch.device("cpu"))

    def reset(self, device: torch.device) -> None:
        """Make both tables afresh, in fp32 on `device`, whatever became of the old ones."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        positions = torch.arange(self.seq_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, ROTARY_BASE ** (-pairs / self.head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn `x[..., T, head_dim]`, at positions 0 to T-1; computed in fp32, returned in x's dtype."""
        length = x.shape[-2]
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (wide * self.cos[:length] + turned * self.sin[:length]).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = Rotary(config.seq_len, config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """`x[B, T, dim]` to `[B, T, dim]`."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, with gate and up as the two halves of one matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x[B, T, dim]` to `[B, T, dim]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """`x[B, T, dim]` to `[B, T, dim]`."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class GPT(nn.Module):
    """Embedding, `config.layers` blocks, a last norm and an output head; no biases anywhere.

    Built on a real device the weights are PyTorch's defaults, and under `torch.device("meta")` they have no storage:
    in both cases `init_weights` sets them. The rotary tables are real from the start, on the CPU.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each position.

        Args:
            tokens: int64 `[B, T]`, with T at most `config.seq_len`.

        Returns:
            `[B, T, vocab]`, in the parameters' dtype.

        Raises:
            ValueError: T above `config.seq_len`.
        """
        if tokens.shape[1] > self.config.seq_len:
            raise ValueError(f"tokens must be at most seq_len={self.config.seq_len} long, got {tokens.shape[1]}")
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Set every parameter, in place: norms to 1, matrices to normal draws of std 0.02.

        The two projections that each block adds to the residual stream have std `0.02 / sqrt(2 * layers)`, so that
        the stream's width at the start doesn't grow with depth. The draws come from `generator` alone, in the order of
        `named_parameters`: two models of one config, initialised from one seed, are equal bit for bit.

        Args:
            generator: on the parameters' device (which must not be meta).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith(("attention.out.weight", "ffn.down.weight")) else INIT_STD
                parameter.normal_(0.0, std, generator=generator)

    def reset_buffers(self, device: torch.device) -> None:
        """Make the rotary tables afresh on `device`, in fp32.

        Needed after what moves or empties buffers wrongly: `to_empty` (leaves them unset), `to(torch.bfloat16)`
        (rounds them), or parameters that were put on an accelerator one by one (leaves the tables on the CPU).
        """
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset(device)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats for each token, computed in fp32.

    Args:
        logits: `[B, T, vocab]`, any floating dtype.
        targets: int64 `[B, T]`: the token that follows each position.

    Returns:
        An fp32 scalar.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: bytes,
    n: int,
    temperature: float,
    generator: torch.Generator,
    *,
    seq_len: int,
) -> bytes:
    """Continue `prompt` by `n` bytes, one call of `forward` for each.

    `forward` may be any wrapper of a model. Where it communicates, every rank must make the same call, with generators
    in the same state: the ranks then draw the same bytes and stay in step.

    Args:
        forward: int64 tokens `[1, T]` on `generator.device` to logits `[1, T, 256]`; T is never above `seq_len`.
        prompt: at least one byte; only its last `seq_len` bytes are seen.
        n: bytes to draw.
        temperature: divides the logits; 0 takes the likeliest byte each time and draws nothing from `generator`.
        generator: the source of the draws; its device is where the tokens are put.
        seq_len: the longest window that `forward` accepts.

    Returns:
        The `n` new bytes, without the prompt.

    Raises:
        ValueError: an empty prompt, a negative temperature, or `seq_len` below 1.
    """
    if not prompt:
        raise ValueError("prompt must have at least one byte, got b''")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    text = list(prompt)
    for _ in range(n):
        window = torch.tensor([text[-seq_len:]], dtype=torch.int64, device=generator.device)
        logits = forward(window)[0, -1].float()
        if temperature == 0:
            drawn = logits.argmax()
        else:
            drawn = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        text.append(int(drawn))
    return bytes(text[len(prompt) :])
