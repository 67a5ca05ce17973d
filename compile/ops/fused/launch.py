"""Artifact: the fused FP8 operators run eagerly on CUDA, through Triton; sealed pieces do not come here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pwcc.compile.ops.fused import formulas
from pwcc.compile.ops.fused.formulas import FP8
from pwcc.compile.ops.fused.tiles import MAX_WIDTH, Tile, pointwise_tile, row_tile


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    floor: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the norm kernel; return 8-bit rows, scales if ``scale`` is None, the new residual if there is one.

    ``x``: ``[..., hidden]`` with at most 16,384 columns. ``residual_out`` receives ``x + residual``; it is
    contiguous and may be ``residual``. ``out``, contiguous, may be of a wider dtype, to see what is rounded.
    """
    from pwcc.compile.ops.fused.kernels import rms_norm_fp8

    hidden = x.shape[-1]
    rows = _rows(x)
    beside = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=FP8, device=x.device) if out is None else out
    scales = None if scale is not None else x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if residual is not None and residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = row_tile(hidden)
    _run(
        rms_norm_fp8,
        rows,
        tile,
        (
            rows,
            beside,
            weight.contiguous(),
            _first(scale, scales),
            out,
            _first(scales, out),
            _first(residual_out, out),
        ),
        (rows.stride(0), beside.stride(0)),
        HIDDEN=hidden,
        BLOCK=tile.block,
        EPS=eps,
        FLOOR=floor,
        ADD=residual is not None,
        DYNAMIC=scale is None,
    )
    return out, scales, residual_out


def silu_and_mul(
    gate: Tensor, up: Tensor, *, scale: Tensor | None = None, floor: float = 0.0, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Launch the gating kernel; return 8-bit rows, and scales if ``scale`` is None. ``out`` as above."""
    from pwcc.compile.ops.fused.kernels import silu_and_mul_fp8

    width = gate.shape[-1]
    one, other = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=FP8, device=gate.device) if out is None else out
    scales = None if scale is not None else gate.new_empty((*gate.shape[:-1], 1), dtype=torch.float32)
    tile = row_tile(width) if scale is None else pointwise_tile(width)
    _run(
        silu_and_mul_fp8,
        one,
        tile,
        (one, other, _first(scale, scales), out, _first(scales, out)),
        (one.stride(0), other.stride(0)),
        WIDTH=width,
        BLOCK=tile.block,
        FLOOR=floor,
        DYNAMIC=scale is None,
    )
    return out, scales


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor as rows of adjacent elements, copied where it is anything else."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _first(*tensors: Tensor | None) -> Tensor:
    """Return the first tensor that is there: an argument that a kernel's form does not use may be anything."""
    return next(tensor for tensor in tensors if tensor is not None)


def _run(
    kernel: Any,
    rows: Tensor,
    tile: Tile,
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    **constants: object,
) -> None:
    if rows.shape[0]:
        kernel[rows.shape[0], tile.count](*tensors, *strides, **constants, num_warps=tile.warps)


# --- the operators; each has the formula's signature ------------------------------------------------


def rms_norm_static_fp8_quant(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    """As the formula of that name."""
    if x.shape[-1] > MAX_WIDTH:
        return formulas.rms_norm_static_fp8_quant(x, weight, scale, eps)
    return rms_norm(x, weight, eps, scale=scale)[0]


def fused_add_rms_norm_static_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As the formula of that name."""
    if x.shape[-1] > MAX_WIDTH:
        return formulas.fused_add_rms_norm_static_fp8_quant(x, residual, weight, scale, eps)
    out, _, total = rms_norm(x, weight, eps, scale=scale, residual=residual)
    return out, _first(total)


def rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, weight: Tensor, eps: float, floor: float
) -> tuple[Tensor, Tensor]:
    """As the formula of that name."""
    if x.shape[-1] > MAX_WIDTH:
        return formulas.rms_norm_dynamic_per_token_fp8_quant(x, weight, eps, floor)
    out, scales, _ = rms_norm(x, weight, eps, floor=floor)
    return out, _first(scales)


def fused_add_rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As the formula of that name."""
    if x.shape[-1] > MAX_WIDTH:
        return formulas.fused_add_rms_norm_dynamic_per_token_fp8_quant(x, residual, weight, eps, floor)
    out, scales, total = rms_norm(x, weight, eps, residual=residual, floor=floor)
    return out, _first(scales), _first(total)


def silu_and_mul_static_fp8_quant(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """As the formula of that name."""
    return silu_and_mul(gate, up, scale=scale)[0]


def silu_and_mul_dynamic_per_token_fp8_quant(gate: Tensor, up: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """As the formula of that name."""
    if gate.shape[-1] > MAX_WIDTH:
        return formulas.silu_and_mul_dynamic_per_token_fp8_quant(gate, up, floor)
    out, scales = silu_and_mul(gate, up, floor=floor)
    return out, _first(scales)
