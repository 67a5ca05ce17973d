"""A small decoder of one's own: what `pwcc compile --model examples/tiny_decoder.py:factory` takes.

It differs from the built-in reference on purpose: attention and MLP in parallel, LayerNorm with bias, GELU,
sinusoidal positions. Only two things matter to pwcc: attention goes through `torch.ops.pwcc.attention` into a
fresh `out`, and the first dimension of every input is the number of tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pwcc.compile.ops.attention  # noqa: F401  registers torch.ops.pwcc.attention


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, layer: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, hidden // heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim)
        self.proj = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[tokens, hidden]` to `[tokens, hidden]`."""
        normed = self.norm(x)
        qkv = self.qkv(normed).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        torch.ops.pwcc.attention(q, k, v, out, self.layer, self.head_dim**-0.5)
        mlp: Tensor = self.down(F.gelu(self.up(normed)))
        attended: Tensor = self.proj(out.view(-1, self.heads * self.head_dim))
        return x + attended + mlp


class TinyDecoder(nn.Module):
    """Token and sinusoidal position embedding, blocks, head."""

    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(layer, hidden, heads, kv_heads) for layer in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` for int64 ids and positions, both `[tokens]`."""
        index = torch.arange(0, self.hidden, 2, device=positions.device, dtype=torch.float32)
        angles = positions.float()[:, None] * 10000.0 ** (-index / self.hidden)
        embedded: Tensor = self.embed(input_ids)
        x = embedded + torch.cat((angles.sin(), angles.cos()), -1).to(embedded.dtype)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def factory(
    layers: int = 4, hidden: int = 128, heads: int = 4, kv_heads: int = 2, vocab: int = 512
) -> TinyDecoder:
    """Build the decoder; `--arg layers=2` and so on reach these parameters."""
    return TinyDecoder(layers, hidden, heads, kv_heads, vocab)


def example_inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return `(input_ids, positions)` for this many tokens; pwcc reads dtypes, shapes and ranges off them."""
    return torch.arange(num_tokens) * 7 % 512, torch.arange(num_tokens)
