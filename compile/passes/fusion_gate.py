"""Artifact: passes that make SiLU, the product with an MLP's other half and FP8 quantisation one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import fx

from pwcc.compile.ops.fused.tiles import MAX_WIDTH
from pwcc.compile.passes.fusion_base import Fusion, Match
from pwcc.compile.passes.fusion_quant import Quantised
from pwcc.compile.passes.fusion_values import ADD, DIV, MUL, Values, close, dtype_of, rows_of, same_shape

_ATEN: Final = torch.ops.aten


@dataclass(frozen=True)
class SiluMulStaticQuant(Fusion):
    """``silu(gate) * up`` with a static scale to ``pwcc::silu_and_mul_static_fp8_quant``."""

    name: ClassVar[str] = "silu_and_mul_static_fp8"
    min_tokens: int = 64

    def match(self, values: Values, found: Quantised) -> Match | None:
        """Read a gated product below a static quantisation."""
        return None if found.floor is not None else _match(values, found)


@dataclass(frozen=True)
class SiluMulDynamicQuant(Fusion):
    """The same with one scale a token, to ``pwcc::silu_and_mul_dynamic_per_token_fp8_quant``."""

    name: ClassVar[str] = "silu_and_mul_dynamic_fp8"
    max_tokens: int | None = 8

    def match(self, values: Values, found: Quantised) -> Match | None:
        """Read a gated product below a quantisation per token."""
        return None if found.floor is None else _match(values, found)


def _match(values: Values, found: Quantised) -> Match | None:
    for one, other in values.pair(found.source, MUL):
        taken = {found.source, found.out, *found.taken}
        up, activated = values.unwidened(other), values.uncast(one, taken)
        gate = None if activated is None else _silu(values, activated, taken)
        if gate is None or up is None or rows_of(gate, MAX_WIDTH) is None:
            continue
        if dtype_of(up) is not dtype_of(gate) or not same_shape(gate, up):
            continue
        if found.floor is None:
            return Match("silu_and_mul_static_fp8_quant", (gate, up, found.scale), [found.out], taken)
        name = "silu_and_mul_dynamic_per_token_fp8_quant"
        return Match(name, (gate, up, found.floor), [found.out, found.scale], taken)
    return None


def _silu(values: Values, activated: fx.Node, taken: set[fx.Node]) -> fx.Node | None:
    """Return ``g`` of ``g / (1 + exp(-g))``, ``g * sigmoid(g)`` or ``silu(g)``, in float32."""
    whole = values.operands(activated, (_ATEN.silu.default,))
    if whole is not None:
        taken.add(activated)
        return values.of(whole[0])
    if dtype_of(activated) is not torch.float32:
        return None
    divided = values.operands(activated, DIV)
    if divided is not None and len(divided) == 2:
        gate, below = values.unwidened(divided[0]), values.of(divided[1])
        inner = None if gate is None or below is None else _one_plus_exp(values, below, gate)
        if inner is not None:
            taken |= {activated, *inner}
            return gate
    for one, other in values.pair(activated, MUL):
        gate, sigmoid = values.unwidened(one), values.of(other)
        inside = None if sigmoid is None else values.operands(sigmoid, (_ATEN.sigmoid.default,))
        if gate is not None and sigmoid is not None and inside and values.unwidened(inside[0]) is gate:
            taken |= {activated, sigmoid}
            return gate
    return None


def _one_plus_exp(values: Values, below: fx.Node, gate: fx.Node) -> set[fx.Node] | None:
    for one, other in values.pair(below, ADD):
        power = values.of(one) if close(other, 1.0) else None
        negated = None if power is None else values.operands(power, (_ATEN.exp.default,))
        inner = values.of(negated[0]) if negated else None
        origin = None if inner is None else values.operands(inner, (_ATEN.neg.default,))
        if power is not None and inner is not None and origin and values.unwidened(origin[0]) is gate:
            return {below, power, inner}
    return None
