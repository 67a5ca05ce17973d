"""Artifact: what is read as quantisation to 8 bits: a value over a scale, static or per row, clamped at 448."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from pwcc.compile.ops.fused.formulas import FP8, FP8_MAX
from pwcc.compile.passes.fusion_values import (
    DIV,
    MUL,
    Values,
    close,
    dtype_of,
    is_cast,
    number,
    over_last,
    shape_of,
)

_ATEN: Final = torch.ops.aten


@dataclass(frozen=True)
class Quantised:
    """A value of 8 bits, ``out``, made of ``source`` and ``scale``.

    ``floor`` is None for a static scale, one float32; else ``scale`` is one a row, made of ``source`` too,
    and never below ``floor``. ``taken`` are all values between ``source`` and ``out``, without either.
    """

    out: fx.Node
    source: fx.Node
    scale: fx.Node
    floor: float | None
    taken: frozenset[fx.Node] = field(repr=False)


def quantised(values: Values, out: fx.Node) -> Quantised | None:
    """Read ``clamp(source / scale, -448, 448).to(float8_e4m3fn)``; None if ``out`` is anything else."""
    if not is_cast(out) or dtype_of(out) is not FP8 or values.of(out) is not out:
        return None
    taken: set[fx.Node] = set()
    scaled = _clamped(values, out.args[0], taken)
    if scaled is None:
        return None
    taken.add(scaled)
    found = values.operands(scaled, DIV)
    if found is not None and len(found) == 2:
        return _with_scale(values, out, found[0], found[1], taken)
    for source, factor in values.pair(scaled, MUL):
        if isinstance(factor, fx.Node):
            inner = values.operands(factor, (_ATEN.reciprocal.default,))
            if inner is not None:
                read = _with_scale(values, out, source, inner[0], {*taken, factor})
                if read is not None:
                    return read
    return None


def _clamped(values: Values, value: object, taken: set[fx.Node]) -> fx.Node | None:
    """Return what a clamp from -448 to 448 is of; ``taken`` gets the clamp and the casts around it."""
    bounds: set[float] = set()
    node = values.uncast(value, taken)
    while node is not None and len(bounds) < 2:
        target, args = node.target, values.operands(node, _CLAMPS)
        if args is None:
            return None
        if target is _ATEN.clamp.default:
            ends = (*args[1:], None)[:2]
            found = {(-1.0, number(ends[0])), (1.0, number(ends[1]))}
        else:
            found = {(_CLAMPS[target], number(args[1]) if len(args) == 2 else None)}
        if any(bound is None or bound != sign * FP8_MAX for sign, bound in found):
            return None
        bounds |= {sign for sign, _ in found}
        taken.add(node)
        node = values.uncast(args[0], taken)
    return node if len(bounds) == 2 else None


_CLAMPS: Final[dict[object, float]] = {
    _ATEN.clamp_min.default: -1.0,
    _ATEN.clamp_max.default: 1.0,
    _ATEN.clamp.default: 0.0,
}


def _with_scale(
    values: Values, out: fx.Node, source: object, scale: object, taken: set[fx.Node]
) -> Quantised | None:
    root, given = values.uncast(source, taken), values.of(scale)
    if root is None or given is None or dtype_of(given) is not torch.float32:
        return None
    if _is_one(given):
        # one scale and its reciprocal may serve several places: they are not part of this one
        return Quantised(out, root, given, None, frozenset(taken - {*_reciprocals(taken)}))
    made: set[fx.Node] = {given}
    floor = _row_scale(values, given, root, made)
    return None if floor is None else Quantised(out, root, given, floor, frozenset(taken | made))


def _reciprocals(nodes: set[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.target is _ATEN.reciprocal.default]


def _is_one(node: fx.Node) -> bool:
    shape = shape_of(node)
    return not shape or (len(shape) == 1 and type(shape[0]) is int and shape[0] == 1)


def _row_scale(values: Values, scale: fx.Node, source: fx.Node, taken: set[fx.Node]) -> float | None:
    """Return the floor of ``max(max|source| / 448, floor)``, the clamp on either side of the division."""
    outer, below = _floored(values, scale, taken)
    if below is None:
        return None
    divided = values.operands(below, (*DIV, *MUL))
    if divided is None or len(divided) != 2:
        return None
    if not close(divided[1], FP8_MAX if below.target in DIV else 1 / FP8_MAX):
        return None
    taken.add(below)
    highest = values.uncast(divided[0], taken)
    if highest is None:
        return None
    inner, amax = _floored(values, highest, taken)
    if amax is None or (inner and outer):
        return None
    reduced = values.operands(amax, (_ATEN.amax.default,))
    magnitude = values.of(reduced[0]) if reduced else None
    if reduced is None or magnitude is None or not over_last(magnitude, reduced):
        return None
    inside = values.operands(magnitude, (_ATEN.abs.default,))
    if inside is None or values.uncast(inside[0], taken) is not source:
        return None
    taken |= {amax, magnitude}
    return outer or inner / FP8_MAX


def _floored(values: Values, value: fx.Node, taken: set[fx.Node]) -> tuple[float, fx.Node | None]:
    """Return the lower bound of a clamp and what it is of; 0 and the value itself where there is none."""
    args = values.operands(value, (_ATEN.clamp_min.default, _ATEN.clamp.default))
    if args is None:
        return 0.0, value
    bound = number(args[1]) if len(args) == 2 else None
    if bound is None or not bound > 0:
        return 0.0, None
    taken.add(value)
    return bound, values.uncast(args[0], taken)
