"""The language model of `tiered train`: a decoder-only transformer over bytes, in plain torch.

RMSNorm, rotary attention, SwiGLU. It knows nothing of shards or tiers: it is the kind
of module that a user brings along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256  # one token a byte
HIDDEN_MULTIPLE = 64


@dataclass(frozen=True)
class Shape:
    """The sizes that fix a model."""

    layers: int
    width: int
    heads: int
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.vocabulary) < 1:
            raise ValueError(f"every size of a model must be at least 1: {self}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of twice the heads ({self.heads})")

    @property
    def hidden(self) -> int:
        """Width of the feed-forward part: 8/3 of the model's, rounded up."""
        return math.ceil(self.width * 8 / 3 / HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE

    @property
    def parameter_count(self) -> int:
        block = self.width * (4 * self.width + 3 * self.hidden + 2)
        return self.layers * block + self.width * (2 * self.vocabulary + 1)


SHAPES = {
    "tiny": Shape(layers=4, width=128, heads=4),
    "demo": Shape(layers=11, width=960, heads=15),
    "1b": Shape(layers=36, width=1536, heads=12),
    "3b": Shape(layers=38, width=2560, heads=20),
}


class Linear(nn.Linear):
    """Without bias; computes in the type of its input, whatever type its weight is stored in."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    """The same for RMSNorm."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, eps=1e-5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Linear(shape.width, 3 * shape.width, dtype)
        self.out = Linear(shape.width, shape.width, dtype)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each: batch, heads, length, width of a head
        y = functional.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Linear(shape.width, shape.hidden, dtype)
        self.up = Linear(shape.width, shape.hidden, dtype)
        self.down = Linear(shape.hidden, shape.width, dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, dtype)
        self.attention = Attention(shape, dtype)
        self.feed_forward_norm = Norm(shape.width, dtype)
        self.feed_forward = FeedForward(shape, dtype)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class Transformer(nn.Module):
    """Tokens in, logits out; with targets, the mean cross-entropy in nats a token.

    `dtype` is the type of the weights; they compute in it too, unless `compute_dtype` is another.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(shape.vocabulary, shape.width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, dtype) for _ in range(shape.layers))
        self.norm = Norm(shape.width, dtype)
        self.head = Linear(shape.width, shape.vocabulary, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with GPT-2's deviation; zero for what adds to the residual stream, and for the head.

        So every block starts as the identity and the first loss is ln(vocabulary). A deep model whose blocks start
        otherwise leaps up in Adam's first, sign-like steps, which a run of a few steps never makes good.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "feed_forward.down.weight", "head.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        rotation = rotary_table(tokens.shape[-1], self.shape.width // self.shape.heads, x.device)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, *, seed: int = 0, temperature: float = 0.8) -> Tensor:
        """`prompt` (batch, length) and `count` sampled tokens more; the same tokens on every rank."""
        generator = torch.Generator().manual_seed(seed)
        tokens = prompt
        for _ in range(count):
            logits = self(tokens)[:, -1].float().cpu()
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
        return tokens


def rotary_table(length: int, head_width: int, device: torch.device) -> Tensor:
    """Unit complex numbers (length, head_width / 2): the turn of each pair at each position."""
    pairs = torch.arange(0, head_width, 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, 10_000.0 ** (-pairs / head_width))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs of the last dimension of `x` (..., length, head_width), in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
