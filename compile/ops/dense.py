"""Serve the Artifact noun: attention over dense keys and values, the arithmetic every kernel here shares."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

_BACKENDS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class AttentionParams(NamedTuple):
    """What a model says about one attention besides its tensors; see ``pwcc::attention``."""

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether stock kernels (SDPA) compute it: nothing but a scale."""
        return all(extra is None for extra in self[2:])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, params: AttentionParams) -> Tensor:
    """Attend with an explicit mask, in float32, and return ``q``'s dtype.

    ``q``: ``[..., heads, queries, head_dim]``; ``k``, ``v``: ``[..., kv_heads, keys, head_dim]``, where query
    head ``h`` reads key head ``h // (heads // kv_heads)``; ``visible``: bool, broadcast against
    ``[..., queries, keys]`` (window and chunk are the mask's business). A query that sees no key
    yields zeros with sinks and NaN without.
    """
    heads, kv_heads = q.shape[-3], k.shape[-3]
    queries = grouped(q.float(), kv_heads)
    logits = queries @ k.float().unsqueeze(-3).transpose(-1, -2) * params.scale
    if params.softcap is not None:
        logits = torch.tanh(logits / params.softcap) * params.softcap
    if params.bias is not None:
        logits = logits + grouped(params.bias.float().expand(heads, -1, -1), kv_heads)
    logits = logits.masked_fill(~visible[..., None, None, :, :], float("-inf"))
    if params.sinks is None:
        weights = logits.softmax(-1)
    else:
        column = params.sinks.float().view(kv_heads, heads // kv_heads, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    result: Tensor = weights @ v.float().unsqueeze(-3)
    return result.flatten(-4, -3).to(q.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call ``scaled_dot_product_attention`` without cuDNN's kernels on a GPU.

    cuDNN makes and keeps a plan for every new shape: a server's lengths are all different, and the driver's
    memory was seen to grow by 5 MiB every hundred batches.
    """
    if q.device.type == "cpu":
        return scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(_BACKENDS):
        return scaled_dot_product_attention(q, k, v, **options)


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """View ``[..., heads, queries, head_dim]`` as ``[..., kv_heads, group, queries, head_dim]``."""
    return q.reshape(*q.shape[:-3], kv_heads, q.shape[-3] // kv_heads, *q.shape[-2:])


def causal_visibility(query_positions: Tensor, keys: int, params: AttentionParams) -> Tensor:
    """Return bool ``[..., queries, keys]``: may the query at this position see key 0, 1, ...

    A query sees the keys up to its own position, with a window only the last ones of them, and with chunks
    those of its own chunk.
    """
    key_positions = torch.arange(keys, device=query_positions.device)
    last = query_positions.unsqueeze(-1)
    visible = key_positions <= last
    if params.window is not None:
        visible = visible & (key_positions > last - params.window)
    if params.chunk is not None:
        visible = visible & (key_positions >= last - last % params.chunk)
    return visible


def dense_causal_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams) -> None:
    """Attend over the given tokens as one sequence without history; shapes as in ``pwcc::attention``.

    Used where no server set a forward context: checks, warm-up and tracing on real tensors. No host sync.
    """
    queries, keys, values = (t.transpose(0, 1) for t in (q, k, v))
    if params.plain:
        result = attend(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            is_causal=True,
            scale=params.scale,
            enable_gqa=queries.shape[0] != keys.shape[0],
        )[0]
    else:
        tokens = q.shape[0]
        visible = causal_visibility(torch.arange(tokens, device=q.device), tokens, params)
        result = masked_attention(queries, keys, values, visible, params)
    out.copy_(result.transpose(0, 1))
