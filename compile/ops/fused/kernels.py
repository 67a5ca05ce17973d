"""Artifact: the Triton kernels of the fused FP8 operators; Inductor writes them into pieces that use them.

Imported where a piece is compiled, or where an operator runs eagerly on CUDA; a serving host launches the
cubins that were sealed. The formulas are those of ``formulas.py``. Rows may lie apart (a stride in elements);
elements of a row are adjacent, and outputs are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_fp8(
    x,
    residual,
    weight,
    scale,
    out,
    scales,
    residual_out,
    x_stride,
    residual_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    FLOOR: tl.constexpr,
    ADD: tl.constexpr,
    DYNAMIC: tl.constexpr,
):
    """Normalise and quantise one row a program; grid ``(rows,)``, ``BLOCK`` a power of two >= ``HIDDEN``.

    With ``ADD``, ``x + residual`` is stored to ``residual_out``, which may be ``residual`` itself; without,
    both may be anything. With ``DYNAMIC``, ``scales`` (float32 ``[rows]``) is written; without, ``scale``
    (one float32) is read.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual_out.dtype.element_ty)
        tl.store(residual_out + row * HIDDEN + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    variance = tl.sum(value * value, 0) / HIDDEN
    value = value * tl.rsqrt(variance + EPS) * factors
    if DYNAMIC:
        # magnitudes compare like their bits, where NaN is the largest; and integers reduce in hardware
        bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0)
        factor = tl.cast(bits, tl.float32, bitcast=True) / 448.0
        factor = tl.maximum(factor, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scales + row, factor)
    else:
        factor = tl.load(scale)
    value = tl.clamp(value * (1.0 / factor), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * HIDDEN + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul_fp8(
    gate,
    up,
    scale,
    out,
    scales,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FLOOR: tl.constexpr,
    DYNAMIC: tl.constexpr,
):
    """Gate and quantise one tile of a row; grid ``(rows, tiles)``, one tile a row with ``DYNAMIC``.

    ``scale``, ``scales`` and ``DYNAMIC`` as for :func:`rms_norm_fp8`.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value = value / (1.0 + tl.exp(-value)) * other
    if DYNAMIC:
        bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0)
        factor = tl.cast(bits, tl.float32, bitcast=True) / 448.0
        factor = tl.maximum(factor, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scales + row, factor)
    else:
        factor = tl.load(scale)
    value = tl.clamp(value * (1.0 / factor), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=inside)
