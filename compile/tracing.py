"""Key: the traces that together serve every size from 1 to the maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pwcc.cache.errors import SpecializationError, TraceError, UnsealableError
from pwcc.cache.ids import FactorDigest
from pwcc.compile.coverage import (
    Run,
    admitted,
    example_tokens,
    narrowed_error,
    require_other_sizes,
    restricted,
    runs,
)
from pwcc.compile.input_forms import InputSpec, other_bounds
from pwcc.compile.input_values import leaf_positions, make_call
from pwcc.compile.ranges import dynamic_variants, serves
from pwcc.compile.rebuild import Variant
from pwcc.compile.report import CompilePlan, PlannedPiece
from pwcc.compile.request import Request
from pwcc.compile.signature import definition
from pwcc.compile.split import split
from pwcc.compile.steps import Program
from pwcc.compile.stitch import stitch_source
from pwcc.compile.trace import Size, SizeMode, Trace, trace
from pwcc.compile.weights import allocate

MAX_TRACES = 8
"""How many traces may serve one entry beside those of ``--sizes``: each compiles all its pieces anew."""


@dataclass(frozen=True)
class Traced:
    """One trace's program with the variants that it will be compiled for."""

    trace: Trace
    program: Program
    variants: tuple[Variant, ...]
    low: int
    high: int

    def holds_at(self, size: int) -> bool:
        """Tell whether the trace holds for a token count of its range."""
        return bool(admitted(self.trace.calling, size, size))


def trace_all(model: nn.Module, request: Request) -> list[Traced]:
    """Trace a model so that every size from 1 to the maximum is served; see the size modes.

    One unbacked trace serves all where it can. Code that asks for the value of a size is traced backed, which
    holds from 2 on. Sizes that a trace excludes are traced on their own: a run of them as a range, one size
    or those of ``--sizes`` each as what it is. The narrowest program that holds a size answers it, and comes
    first.

    Raises:
        SpecializationError: the sizes would take more than :data:`MAX_TRACES` traces, or some cannot be
            traced; names the first condition that cut the range, and its line.
        TraceError, UnsealableError: see :func:`pwcc.compile.trace.trace` and :func:`pwcc.compile.split.split`.
    """
    return _Cover(_materialised(model, request.target.device), request).all()


class _Cover:
    """Traces ranges of sizes until all that were asked for are served."""

    def __init__(self, model: nn.Module, request: Request) -> None:
        self._model = model
        self._request = request
        self._found: list[Traced] = []
        self._cut: SpecializationError | None = None

    def all(self) -> list[Traced]:
        waiting: list[Run] = [(1, self._request.max_tokens)]
        while waiting:
            low, high = waiting.pop(0)
            try:
                waiting += self._serve(low, high, len(waiting))
            except (TraceError, SpecializationError, UnsealableError) as error:
                if self._cut is None:
                    raise
                raise self._cut from error
        return sorted(self._found, key=lambda item: (item.high - item.low, item.low))

    def _serve(self, low: int, high: int, waiting: int) -> list[Run]:
        """Trace a range, keep the program of the sizes that the trace holds for, and return the rest."""
        if low == high:
            if self._is_asked(low):
                self._found.append(trace_one(self._model, self._request, size=low))
            return []
        modes = (SizeMode.UNBACKED,) if max(low, 2) == high else (SizeMode.UNBACKED, SizeMode.BACKED)
        try:
            found, program = _trace_first(self._model, self._request, modes, low, high)
        except TraceError as error:
            if not error.data_dependent or len(modes) > 1:
                raise
            return [(1, 1), (2, 2)]
        require_other_sizes(found)
        rest: list[Run] = []
        if found.mode is SizeMode.BACKED and low == 1:
            rest.append((1, 1))
            low = 2
        sizes = admitted(found.calling, low, high)
        if len(sizes) < high - low + 1:
            self._cut = self._cut or narrowed_error(found, low, high)
            rest += self._excluded(set(sizes), low, high)
            if not sizes or len(self._found) + waiting + self._dynamic(rest) >= MAX_TRACES:
                raise self._cut
        low, high = sizes[0], sizes[-1]
        asked = (size for size in self._request.sizes if size in set(sizes))
        static = (Variant(size, size, static=True) for size in asked)
        variants = (*dynamic_variants(self._request.options.ranges, low, high), *static)
        if variants:
            self._found.append(Traced(restricted(found, low, high), program, variants, low, high))
        return rest

    def _excluded(self, sizes: set[int], low: int, high: int) -> list[Run]:
        """Return what a trace leaves of a range, as far as asked for: runs, or sizes that were given."""
        static = set(self._request.sizes)
        found: list[Run] = []
        for first, last in runs(size for size in range(low, high + 1) if size not in sizes):
            run = range(first, last + 1)
            if static.issuperset(run):
                found += [(size, size) for size in run]
            elif any(self._is_asked(size) for size in run):
                found.append((first, last))
        return found

    def _dynamic(self, rest: Sequence[Run]) -> int:
        """Return how many of the ranges to trace nobody gave as sizes."""
        static = set(self._request.sizes)
        return sum(low != high or low not in static for low, high in rest)

    def _is_asked(self, size: int) -> bool:
        return serves(self._request.options.ranges, self._request.sizes, size)


def trace_one(model: nn.Module, request: Request, *, size: int = 1) -> Traced:
    """Trace a model for one size on its own, for a range whose trace excludes that size."""
    one, program = _trace_first(model, request, (SizeMode.STATIC,), size, size)
    require_other_sizes(one)
    return Traced(one, program, (Variant(size, size, static=True),), size, size)


def _trace_first(
    model: nn.Module, request: Request, modes: Sequence[SizeMode], low: int, high: int
) -> tuple[Trace, Program]:
    """Trace and split in the first mode that does, other sizes unbacked before backed."""
    others = other_bounds(request.specs)
    kinds = (SizeMode.UNBACKED, SizeMode.BACKED) if others else (SizeMode.UNBACKED,)
    attempts = [(mode, kind) for kind in kinds for mode in modes]
    for index, (mode, kind) in enumerate(attempts):
        try:
            found = _trace(
                model, request, mode, {name: Size(kind, *b) for name, b in others.items()}, low, high
            )
            return found, _split(found, request)
        except TraceError as error:
            if not error.data_dependent or index == len(attempts) - 1:
                raise
    raise AssertionError("no mode to trace in")


def _split(found: Trace, request: Request) -> Program:
    try:
        return split(found, request.options.splitting_ops)
    except UnsealableError as error:
        error.graph = found.graph_module.print_readable(print_output=False)
        raise


def _trace(
    model: nn.Module, request: Request, mode: SizeMode, others: Mapping[str, Size], low: int, high: int
) -> Trace:
    for name, size in others.items():
        if size.traced_low > size.low:
            raise SpecializationError(
                f"the code asks for the value of the size {name!r}, so one trace holds from 2 on, but "
                f"{size.low} was asked for",
                where=definition(model.forward),
                hint=f"declare 2<={name} where it is used",
            )
    low = max(low, 2) if mode is SizeMode.BACKED else low
    call = make_call(model, request.specs, example_tokens(low, high), device=request.target.device)
    dims = {
        leaf: spec.dynamic_dims
        for leaf, spec in leaf_positions(model, request.specs).items()
        if isinstance(spec, InputSpec) and spec.dynamic_dims
    }
    return trace(model, call.args, dims, mode=mode, low=low, high=high, keywords=call.kwargs, others=others)


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
