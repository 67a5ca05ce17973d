"""Artifact: passes that make RMSNorm, a residual's addition before it and FP8 quantisation one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import fx

from pwcc.compile.ops.fused.tiles import MAX_WIDTH
from pwcc.compile.passes.fusion_base import Fusion, Match
from pwcc.compile.passes.fusion_quant import Quantised
from pwcc.compile.passes.fusion_values import (
    ADD,
    FLOATS,
    MUL,
    Values,
    dtype_of,
    is_cast,
    number,
    over_last,
    rows_of,
    same_shape,
    shape_of,
)

_ATEN: Final = torch.ops.aten


@dataclass(frozen=True)
class RMSNormStaticQuant(Fusion):
    """RMSNorm and a static scale to ``pwcc::rms_norm_static_fp8_quant``; with a residual, ``fused_add_...``."""

    name: ClassVar[str] = "rms_norm_static_fp8"

    def match(self, values: Values, found: Quantised) -> Match | None:
        """Read a norm below a static quantisation."""
        return None if found.floor is not None else _match(values, found)


@dataclass(frozen=True)
class RMSNormDynamicQuant(Fusion):
    """The same with one scale a token: ``pwcc::rms_norm_dynamic_per_token_fp8_quant``, ``fused_add_...``."""

    name: ClassVar[str] = "rms_norm_dynamic_fp8"

    def match(self, values: Values, found: Quantised) -> Match | None:
        """Read a norm below a quantisation per token."""
        return None if found.floor is None else _match(values, found)


@dataclass(frozen=True)
class _Norm:
    """``x * rsqrt(mean(x * x) + eps) * weight``; ``taken`` are the values between ``x`` and the product."""

    x: fx.Node
    weight: fx.Node
    eps: float
    taken: frozenset[fx.Node]


def _match(values: Values, found: Quantised) -> Match | None:
    norm = _norm(values, found.source)
    if norm is None:
        return None
    outputs = [found.out] if found.floor is None else [found.out, found.scale]
    taken = {*found.taken, *norm.taken, found.out}
    kind = "static" if found.floor is None else "dynamic_per_token"
    tail = (found.scale, norm.eps) if found.floor is None else (norm.eps, found.floor)
    added = _residual(values, norm.x)
    if added is None:
        return Match(f"rms_norm_{kind}_fp8_quant", (norm.x, norm.weight, *tail), outputs, taken)
    name = f"fused_add_rms_norm_{kind}_fp8_quant"
    args = (added.x, added.residual, norm.weight, *tail)
    return Match(name, args, [*outputs, added.total], {*taken, norm.x, added.total})


def _norm(values: Values, product: fx.Node) -> _Norm | None:
    for one, other in values.pair(product, MUL):
        taken: set[fx.Node] = {product}
        weight, scaled = values.unwidened(one), values.uncast(other, taken)
        if weight is None or scaled is None or not _is_weight(weight):
            continue
        read = _scaled(values, scaled, taken)
        if read is None:
            continue
        x, eps = read
        if rows_of(x, MAX_WIDTH) is not None and shape_of(weight) == shape_of(x)[-1:]:
            return _Norm(x, weight, eps, frozenset(taken))
    return None


def _is_weight(node: fx.Node) -> bool:
    """A weight that had to be computed would need a kernel of its own, which Inductor's fusion does not."""
    shape = shape_of(node)
    plain = len(shape) == 1 and type(shape[0]) is int and dtype_of(node) in FLOATS
    return plain and node.op in ("placeholder", "get_attr")


def _scaled(values: Values, scaled: fx.Node, taken: set[fx.Node]) -> tuple[fx.Node, float] | None:
    """Read ``x * rsqrt(mean(x * x) + eps)`` in float32; return ``x`` and ``eps``."""
    if dtype_of(scaled) is not torch.float32:
        return None
    for one, other in values.pair(scaled, MUL):
        x, root = values.unwidened(one), values.of(other)
        inner = None if root is None else values.operands(root, (_ATEN.rsqrt.default,))
        if x is None or root is None or inner is None:
            continue
        below = values.of(inner[0])
        for mean, offset in () if below is None else values.pair(below, ADD):
            eps = number(offset)
            square = values.of(mean) if eps is not None else None
            if eps is None or square is None or below is None:
                continue
            reduced = values.operands(square, (_ATEN.mean.dim,))
            powered = values.of(reduced[0]) if reduced else None
            if reduced is None or powered is None or not over_last(powered, reduced):
                continue
            if dtype_of(powered) is torch.float32 and _is_square_of(values, powered, x):
                taken |= {scaled, root, below, square, powered}
                return x, eps
    return None


def _is_square_of(values: Values, powered: fx.Node, x: fx.Node) -> bool:
    power = values.operands(powered, (_ATEN.pow.Tensor_Scalar,))
    if power is not None:
        return number(power[1]) == 2.0 and values.unwidened(power[0]) is x
    factors = values.operands(powered, MUL)
    return factors is not None and all(values.unwidened(factor) is x for factor in factors)


@dataclass(frozen=True)
class _Sum:
    """``x + residual``, and the value that is it in their own dtype."""

    x: fx.Node
    residual: fx.Node
    total: fx.Node


def _residual(values: Values, x: fx.Node) -> _Sum | None:
    """Read what is normalised as a sum of two tensors alike; it may be added in float32 and cast for others."""
    operands = values.operands(x, (_ATEN.add.Tensor,))
    if operands is None or len(operands) != 2:
        return None
    whole = [values.of(item) for item in operands]
    narrow = [values.unwidened(item) for item in operands]
    total = x if narrow == whole else _cast_of(values, x, narrow[0])
    one, other = narrow
    if one is None or other is None or total is None:
        return None
    if any(dtype_of(part) is not dtype_of(total) or not same_shape(part, total) for part in narrow if part):
        return None
    return _Sum(one, other, total)


def _cast_of(values: Values, x: fx.Node, like: fx.Node | None) -> fx.Node | None:
    """Return the cast of a float32 value to the dtype of another."""
    casts = [user for node in values.same(x) for user in node.users if is_cast(user)]
    wanted = None if like is None else dtype_of(like)
    return next((values.of(cast) for cast in casts if dtype_of(cast) is wanted), None)
