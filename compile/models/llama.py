"""Serve the Artifact noun: the reference decoder, an example of how a server's model should look.

Flat tokens in, logits out; every attention goes through ``pwcc::attention`` into a fresh ``out``; positions
are an input. With L equal layers the graph splits at L attentions into L + 1 pieces of 3 structures: first,
middle (L - 1 times) and last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pwcc.compile.ops.attention  # noqa: F401  registers torch.ops.pwcc.attention
from pwcc.compile.weights import fill_random


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape and constants of a Llama-style decoder; ``head_dim`` defaults to ``hidden // heads``."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    ffn: int = 352
    vocab: int = 512
    eps: float = 1e-5
    theta: float = 10000.0
    tied: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab) < 1:
            raise ValueError(f"LlamaConfig expects positive sizes, got {self}")
        if self.heads % self.kv_heads:
            raise ValueError(f"expected heads divisible by kv_heads, got {self.heads} and {self.kv_heads}")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"expected hidden divisible by heads, got {self.hidden} and {self.heads}")
        if self.head_size % 2:
            raise ValueError(f"rotary embedding expects an even head_dim, got {self.head_size}")

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads


PRESETS: dict[str, LlamaConfig] = {
    "llama-tiny": LlamaConfig(),
    "llama-1b": LlamaConfig(
        layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, theta=500000.0, tied=True
    ),  # the shape of Llama-3.2-1B, without its rope scaling
    "llama-8b": LlamaConfig(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, theta=500000.0
    ),  # the shape of Llama-3-8B
}

PRESET_DTYPES: dict[str, torch.dtype] = {
    "llama-tiny": torch.float32,
    "llama-1b": torch.bfloat16,
    "llama-8b": torch.bfloat16,
}


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, with the residual addition before it."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum itself, both ``[tokens, hidden]`` in ``x``'s dtype."""
        if residual is not None:
            x = x + residual
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight, x


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 ``[tokens, 1, head_dim / 2]``, for ``positions`` ``[tokens]``.

    The frequencies are recomputed from ``theta``, a plain number, rather than kept as a buffer: they fuse
    into this one kernel, a model on the meta device has no buffer to restore, and another theta is another
    graph constant. Called once per forward, so later pieces read the tables (512 bytes a token at 128).
    """
    index = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * theta ** (-index / head_dim)
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of ``x`` ``[tokens, heads, head_dim]`` in float32."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection for queries, keys and values."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_size
        self.scale = self.head_dim**-0.5
        self.qkv_proj = nn.Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to ``[tokens, hidden]``."""
        qkv = self.qkv_proj(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = torch.empty_like(q)
        torch.ops.pwcc.attention(q, k, v, out, self.layer, self.scale)
        result: Tensor = self.o_proj(out.view(-1, self.heads * self.head_dim))
        return result


class MLP(nn.Module):
    """SwiGLU with the gate and up projections fused."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to ``[tokens, hidden]``."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        result: Tensor = self.down_proj(F.silu(gate) * up)
        return result


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP; the residual travels beside the hidden states."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config, layer)
        self.post_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output before its residual addition, and the residual."""
        x, total = self.input_norm(x, residual)
        x = self.attention(x, cos, sin)
        x, total = self.post_norm(x, total)
        return self.mlp(x), total


class Llama(nn.Module):
    """The decoder. ``theta``, eps, scale and head counts are plain attributes: constants of the graph."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.theta = config.theta
        self.head_dim = config.head_size
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits ``[tokens, vocab]`` for int64 ``input_ids`` and ``positions``, both ``[tokens]``."""
        cos, sin = rotary_tables(positions, self.head_dim, self.theta)
        x = self.embed(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        x, _ = self.norm(x, residual)
        logits: Tensor = self.lm_head(x)
        return logits

    def init_weights(self, seed: int = 0) -> None:
        """Fill every weight in place, deterministically per (name, device type), so activations stay O(1)."""
        fill_random(self, seed=seed)
