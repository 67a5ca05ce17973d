"""Serve the Artifact noun: ``pwcc::attention``, the splitting op at which a model's graph is cut.

Importing this module registers the op once.
"""

from __future__ import annotations

from torch import Tensor

from pwcc.compile.ops.dense import AttentionParams, dense_causal_attention
from pwcc.compile.ops.forward_context import current_forward_context
from pwcc.compile.ops.registration import Operator, register

ATTENTION_OP = "pwcc::attention"
"""Qualified name, as the splitter matches it."""

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer, float scale, "
    "int? window=None, float? softcap=None, Tensor? sinks=None, int? chunk=None, Tensor? bias=None) -> ()"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> None:
    """Attend causally over flat tokens and write ``out``; what ``torch.ops.pwcc.attention`` runs.

    ``q`` and ``out``: ``[tokens, heads, head_dim]``; ``k`` and ``v``: ``[tokens, kv_heads, head_dim]``;
    ``sinks``: ``[heads]`` logits that only enlarge the softmax's denominator. ``window`` is how many keys a
    query sees, itself included; ``chunk`` cuts the sequence into runs of that many tokens that do not see each
    other. ``softcap`` bounds the scaled logits by ``softcap * tanh(x / softcap)``; ``bias``,
    ``[heads or 1, tokens or 1, tokens or 1]``, is added to them: for sequences without history only.
    ``layer`` picks the KV cache. Inside ``forward_context`` its kernel does the work; outside, the tokens
    count as one sequence without history.
    """
    params = AttentionParams(layer, scale, window, softcap, sinks, chunk, bias)
    context = current_forward_context()
    if context is None:
        dense_causal_attention(q, k, v, out, params)
    else:
        context.kernel(context, q, k, v, out, params)


def _attention_meta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> None:
    # Compares static sizes only: a comparison of token counts would put a guard on the trace.
    if not q.dim() == k.dim() == v.dim() == out.dim() == 3:
        raise ValueError(
            f"pwcc::attention expects [tokens, heads, head_dim] tensors, got ranks "
            f"q={q.dim()} k={k.dim()} v={v.dim()} out={out.dim()}"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if q.shape[1:] != out.shape[1:] or k.shape[1:] != v.shape[1:] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"pwcc::attention expects q like out, k like v and one head_dim, got q={list(q.shape[1:])} "
            f"out={list(out.shape[1:])} k={list(k.shape[1:])} v={list(v.shape[1:])}"
        )
    if heads % kv_heads:
        raise ValueError(f"pwcc::attention expects heads divisible by kv_heads, got {heads} and {kv_heads}")
    if not q.dtype == k.dtype == v.dtype == out.dtype:
        raise ValueError(f"pwcc::attention expects one dtype, got {q.dtype} {k.dtype} {v.dtype} {out.dtype}")
    if sinks is not None and list(sinks.shape) != [heads]:
        raise ValueError(f"pwcc::attention expects sinks of shape [{heads}], got {list(sinks.shape)}")
    if bias is not None and (bias.dim() != 3 or bias.shape[0] not in (1, heads)):
        raise ValueError(
            f"pwcc::attention expects a bias [{heads} or 1, tokens, tokens], got rank {bias.dim()}"
        )


_library = globals().get("_library") or register(
    {"attention": Operator(SCHEMA, attention, attention, _attention_meta)}
)
