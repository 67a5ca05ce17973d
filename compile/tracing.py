"""Key: the traces that together serve every size from 1 to the maximum."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pwcc.cache.errors import SpecializationError, TraceError
from pwcc.cache.ids import FactorDigest
from pwcc.compile.conditions import first_violation
from pwcc.compile.inputs import make_inputs
from pwcc.compile.rebuild import Variant
from pwcc.compile.report import CompilePlan, PlannedPiece
from pwcc.compile.request import Request
from pwcc.compile.signature import parameter_names
from pwcc.compile.split import Program, split
from pwcc.compile.stitch import stitch_source
from pwcc.compile.trace import TOKENS, SizeMode, Trace, narrowed, trace
from pwcc.compile.weights import allocate

# The trace's example: not 0 or 1, which specialise, and no size that a model is likely to compare with.
EXAMPLE_TOKENS = 7


@dataclass(frozen=True)
class Traced:
    """One trace's program with the variants that it will be compiled for."""

    trace: Trace
    program: Program
    variants: tuple[Variant, ...]
    low: int
    high: int


def trace_all(model: nn.Module, request: Request) -> list[Traced]:
    """Trace a model so that every size from 1 to the maximum is served; see the size modes.

    One unbacked trace serves all. Code that asks for the value of a size is traced backed, which holds
    from 2 on, and once more for size 1.
    """
    model = _materialised(model, request.target.device)
    splitting = request.options.splitting_ops
    static = tuple(Variant(size, size, static=True) for size in request.sizes)
    high = request.max_tokens
    if high == 1:
        return [trace_one(model, request)]
    try:
        whole = _trace(model, request, SizeMode.UNBACKED, 1, high)
        _refuse_narrowed(whole, 1, high)
        return [Traced(whole, split(whole, splitting), (Variant(1, high), *static), 1, high)]
    except TraceError as error:
        if not error.data_dependent:
            raise
    if high == 2:
        return [trace_one(model, request), trace_one(model, request, size=2)]
    backed = _trace(model, request, SizeMode.BACKED, 2, high)
    _refuse_narrowed(backed, 2, high)
    larger = tuple(variant for variant in static if variant.low >= 2)
    return [
        trace_one(model, request),
        Traced(backed, split(backed, splitting), (Variant(2, high), *larger), 2, high),
    ]


def trace_one(model: nn.Module, request: Request, *, size: int = 1) -> Traced:
    """Trace a model for one size on its own, for a range whose trace excludes that size."""
    one = _trace(model, request, SizeMode.STATIC, size, size)
    variant = Variant(size, size, static=True)
    return Traced(one, split(one, request.options.splitting_ops), (variant,), size, size)


def _trace(model: nn.Module, request: Request, mode: SizeMode, low: int, high: int) -> Trace:
    tokens = low if mode is SizeMode.STATIC else min(EXAMPLE_TOKENS, high)
    tensors = make_inputs(request.specs, tokens, device=request.target.device)
    by_name = dict(zip((spec.name for spec in request.specs), tensors, strict=True))
    names = parameter_names(model)
    last = max((names.index(spec.name) for spec in request.specs), default=-1)
    while last + 1 < len(names) and _has_plain_default(model, names[last + 1]):
        last += 1
    inputs = [by_name[name] if name in by_name else _default(model, name) for name in names[: last + 1]]
    dims = {names.index(spec.name): spec.token_dims for spec in request.specs if spec.token_dims}
    return trace(model, inputs, dims, mode=mode, low=low, high=high)


def _default(model: nn.Module, name: str) -> object:
    parameter = inspect.signature(model.forward).parameters[name]
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _has_plain_default(model: nn.Module, name: str) -> bool:
    """Tell whether a parameter after the last tensor can be recorded, so that a call may name its default."""
    default = inspect.signature(model.forward).parameters[name].default
    return default is None or type(default) in (bool, int, float, str)


def _refuse_narrowed(found: Trace, low: int, high: int) -> None:
    conditions = narrowed(found.calling)
    if not conditions:
        return
    first = conditions[0]
    shown = re.sub(rf"\b{TOKENS}\b", "n", first.text)
    size = first_violation(first.text, {TOKENS: range(low, high + 1)})
    raise SpecializationError(
        f"the code holds only where {shown} for n tokens, "
        f"but sizes {low} to {high} were asked for"
        + (f"; size {size} is the first that does not fit" if isinstance(size, int) else ""),
        where=found.lines.get(first.text, first.where),
        hint="make the code independent of the size there, or lower --max-tokens to the range that holds",
    )


def _materialised(model: nn.Module, device: torch.device) -> nn.Module:
    """Give parameters on the meta device memory on the target; values are never read by a trace."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    allocate(model, device)
    return model


def make_plan(model: nn.Module, request: Request, traced: Sequence[Traced]) -> CompilePlan:
    """Describe traced programs."""
    names = piece_names(traced)
    uses: dict[FactorDigest, int] = {}
    for item in traced:
        for piece in item.program.pieces:
            uses[piece.graph.digest] = uses.get(piece.graph.digest, 0) + 1
    graphs = {graph.digest: graph for item in traced for graph in item.program.unique}
    parameters = {id(p): p for p in model.parameters()}.values()
    return CompilePlan(
        model=request.identity,
        device=request.target.name or request.target.device.type,
        splitting_ops=request.options.splitting_ops,
        splits=sum(item.program.splits for item in traced),
        pieces=tuple(names[piece.graph.digest] for item in traced for piece in item.program.pieces),
        unique=tuple(
            PlannedPiece(names[digest], digest, uses[digest], graph.ops) for digest, graph in graphs.items()
        ),
        variants=tuple(str(variant) for item in traced for variant in item.variants),
        size_mode="+".join(item.trace.mode.value for item in traced),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


def piece_names(traced: Sequence[Traced]) -> dict[FactorDigest, str]:
    """Name unique pieces ``p0, p1, ...`` in order of first use over all programs."""
    digests = dict.fromkeys(graph.digest for item in traced for graph in item.program.unique)
    return {digest: f"p{index}" for index, digest in enumerate(digests)}


def stitch_of(item: Traced) -> str:
    """Return the text of a program's ``stitch.py``."""
    calling = item.trace.calling
    tensors = sum(parameter.kind == "tensor" for parameter in calling.parameters)
    return stitch_source(item.program, [symbol.name for symbol in calling.symbols], tensors)
