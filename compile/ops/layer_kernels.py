"""Artifact: the Triton kernels of pwcc's layer operators; imported to compile a piece, or eagerly on CUDA.

They round as the plain forms in ``layers.py`` do: sums to the tensor's dtype before they are normalised, the
normalised value before it is weighted, the gate before it is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Normalise one row a program; grid ``(rows,)``, ``BLOCK`` a power of two >= ``HIDDEN``.

    Rows of ``x`` and ``residual`` lie a stride apart, in elements; ``out`` and ``total`` are contiguous. With
    ``ADD``, ``x + residual`` is normalised and stored to ``total``; without, both may be anything.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * HIDDEN + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + EPS)
    normed = (wide * scale).to(out.dtype.element_ty)
    weighted = normed.to(tl.float32) * factors.to(tl.float32)
    tl.store(out + row * HIDDEN + columns, weighted.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul(
    x,
    out,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate one tile of a row ``[gate, up]`` of ``2 * WIDTH`` columns; grid ``(rows, tiles)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + columns, (gated.to(tl.float32) * up).to(out.dtype.element_ty), mask=inside)
