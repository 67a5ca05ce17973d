"""Artifact: what the fused FP8 operators compute, in torch operations; the CPU's implementation.

All arithmetic is float32 and only two things are rounded: the new residual, to the dtype of ``x``, before
it is normalised, and the result, to ``float8_e4m3fn``, to nearest, ties to even::

    norm(v)     = v * rsqrt(mean(v * v) + eps) * weight
    silu(g, u)  = g / (1 + exp(-g)) * u
    static      : q = clamp(y * (1 / scale), -448, 448)
    per token   : scale = max(max|y| / 448, floor), then as above

A model that rounds the normalised value to its own dtype first, or divides by the scale, may differ in the
last place of the 8-bit result. NaN stays NaN, and in a row with a dynamic scale makes the whole row NaN. An
infinity of the normalised value saturates. A row of zeros has the scale ``floor``.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite value of ``float8_e4m3fn``; it has no infinity."""


def quantised(value: Tensor, scale: Tensor) -> Tensor:
    """Return float32 values over ``scale``, saturated, in 8 bits."""
    return (value * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def token_scale(value: Tensor, floor: float) -> Tensor:
    """Return one float32 scale a row, ``[..., 1]``, so that the largest magnitude becomes 448."""
    return (value.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=floor)


def rms_normed(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalised rows in float32."""
    value = value.float()
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()


def added(x: Tensor, residual: Tensor) -> Tensor:
    """Return the new residual, rounded to the dtype of ``x``."""
    return (x.float() + residual.float()).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` in float32."""
    gate = gate.float()
    return gate / (1 + torch.exp(-gate)) * up.float()


def rms_norm_static_fp8_quant(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Normalise rows ``[..., hidden]`` and quantise them with one scale for all."""
    return quantised(rms_normed(x, weight, eps), scale)


def fused_add_rms_norm_static_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, normalise and quantise; return the 8-bit rows and the new residual."""
    total = added(x, residual)
    return quantised(rms_normed(total, weight, eps), scale), total


def rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, weight: Tensor, eps: float, floor: float
) -> tuple[Tensor, Tensor]:
    """Normalise rows and quantise each with a scale of its own; return the 8-bit rows and the scales."""
    value = rms_normed(x, weight, eps)
    scale = token_scale(value, floor)
    return quantised(value, scale), scale


def fused_add_rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalise and quantise each row; return the 8-bit rows, the scales and the new residual."""
    total = added(x, residual)
    rows, scale = rms_norm_dynamic_per_token_fp8_quant(total, weight, eps, floor)
    return rows, scale, total


def silu_and_mul_static_fp8_quant(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[..., width]``, quantised with one scale for all."""
    return quantised(gated(gate, up), scale)


def silu_and_mul_dynamic_per_token_fp8_quant(gate: Tensor, up: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return ``silu(gate) * up`` with every row quantised by a scale of its own, and the scales."""
    value = gated(gate, up)
    scale = token_scale(value, floor)
    return quantised(value, scale), scale
