"""Serve the Artifact noun: attention whose output is 8 bits wide, for the optional pass ``attention_fp8``.

The operator is made by that pass, never by a model. It runs the attention kernel of the forward context; one
that has a function ``quantised`` is asked to write the 8 bits itself, for others a tensor of the model's dtype
lies between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import current_forward_context
from pwcc.compile.ops.fused.formulas import FP8, quantised
from pwcc.compile.ops.registration import Operator, register

NAME = "attention_static_fp8_quant"
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor out_scale, int layer, float scale, "
    "int? window=None, float? softcap=None, Tensor? sinks=None, int? chunk=None, Tensor? bias=None) -> ()"
)


def attention_static_fp8_quant(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    out_scale: Tensor,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> None:
    """Attend as ``pwcc::attention`` does, and write ``clamp(result / out_scale, -448, 448)``, rounded.

    ``out``: ``float8_e4m3fn``, shaped as for ``pwcc::attention``; ``out_scale``: one float32. The result is
    rounded to ``q``'s dtype before it is quantised, unless the kernel's ``quantised`` does otherwise: it is
    called as the kernel is, with ``out_scale`` at the end.
    """
    params = AttentionParams(layer, scale, window, softcap, sinks, chunk, bias)
    context = current_forward_context()
    own: Any = None if context is None else getattr(context.kernel, "quantised", None)
    if own is not None:
        own(context, q, k, v, out, params, out_scale)
        return
    wide = torch.empty(out.shape, dtype=q.dtype, device=q.device)
    torch.ops.pwcc.attention(q, k, v, wide, layer, scale, window, softcap, sinks, chunk, bias)
    out.copy_(quantised(wide.float(), out_scale))


def _meta(q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_scale: Tensor, *rest: Any) -> None:
    if out.dtype is not FP8 or out_scale.dtype is not torch.float32:
        raise ValueError(
            f"pwcc::{NAME} expects out of {FP8} and a float32 scale, got {out.dtype} and {out_scale.dtype}"
        )


_library = globals().get("_library") or register(
    {NAME: Operator(SCHEMA, attention_static_fp8_quant, attention_static_fp8_quant, _meta)}
)
