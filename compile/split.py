"""Key: cut a traced graph at its splitting operations into canonical pieces and eager calls.

What crosses a boundary is tensors only: sizes are expressions of the program's symbols, so neither a
``torch.Size`` nor a computed size is ever handed from piece to piece; ``getitem`` stays with its
producer; consecutive splitting operations share one eager segment; a piece that only allocates joins
the piece before it, or runs eagerly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.conditions import run_time_value, source_line
from pwcc.compile.piece_graph import (
    ALLOCATIONS,
    Dim,
    PieceGraph,
    PieceInput,
    PieceNode,
    SymbolInput,
    TensorInput,
)
from pwcc.compile.runtime.arguments import encode_constant
from pwcc.compile.runtime.targets import target_name
from pwcc.compile.torch_private import symbols
from pwcc.compile.trace import ArgumentInput, Trace, WeightInput

DEFAULT_SPLITTING_OPS = ("pwcc::attention",)

# Calls that a traced graph may hold and that compiled inference, always without gradients, does not need.
_DROPPED = frozenset(
    {"_set_grad_enabled", "_log_api_usage_once", "_enter_inference_mode", "_exit_inference_mode"}
)
# A sealed piece has no random state to draw from: its replay would repeat, or differ from, eager's numbers.
_RANDOM = frozenset(
    """
    rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal
    normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ poisson
    """.split()  # noqa: SIM905 (a table)
)


@dataclass(frozen=True)
class Ref:
    """A program value: ``weight``, ``argument`` or ``value`` (made by an earlier step), and its index."""

    kind: str
    index: int


@dataclass(frozen=True)
class PieceStep:
    """Call a piece: which graph, the program symbols for its own, tensors in, values out.

    ``alias_groups`` are positions among the graph's inputs of tensors that share memory.
    """

    graph: PieceGraph
    symbols: tuple[str, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    lines: tuple[str | None, ...] = field(compare=False)
    alias_groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class EagerStep:
    """Call one operation outside every piece; arguments are encoded over program values."""

    target: str
    args: object
    kwargs: object
    output: int | None
    splitting: bool


Step = PieceStep | EagerStep


@dataclass(frozen=True)
class Program:
    """A straight-line program over pieces and eager calls, with its weights and arguments by position."""

    steps: tuple[Step, ...]
    weights: tuple[tuple[str, ...], ...]
    outputs: tuple[Ref, ...]
    splits: int

    @property
    def segments(self) -> int:
        """Compiled pieces plus runs of eager calls between them: 2 x layers + 1 for a decoder."""
        eager = [isinstance(step, EagerStep) for step in self.steps]
        return len(self.pieces) + sum(
            now and not before for before, now in zip([False, *eager], eager, strict=False)
        )

    @property
    def pieces(self) -> tuple[PieceStep, ...]:
        """The piece calls in order."""
        return tuple(step for step in self.steps if isinstance(step, PieceStep))

    @property
    def unique(self) -> tuple[PieceGraph, ...]:
        """The structurally different pieces, in order of first use."""
        return tuple({piece.graph.digest: piece.graph for piece in self.pieces}.values())


def split(trace: Trace, splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS) -> Program:
    """Split a trace.

    Args:
        trace: what :func:`pwcc.compile.trace.trace` returned.
        splitting_ops: ``ns::name`` (any overload) or ``ns::name.overload``; an operation that has several
            is matched by the second form only where the code itself names the overload.

    Raises:
        UnsealableError: an operation or constant without a portable form, by name and source line.
        TraceError: a size that the graph computes.
    """
    return _Splitter(trace, splitting_ops).run()


class _Splitter:
    """Assigns every node to a segment, then encodes the segments. Made for one trace."""

    def __init__(self, trace: Trace, splitting_ops: Sequence[str]) -> None:
        self._trace = trace
        self._names = frozenset(splitting_ops)
        self._segment: dict[fx.Node, int] = {}
        self._refs: dict[fx.Node, Ref] = {}
        self._values = 0
        weights = [n for n, origin in trace.origins.items() if isinstance(origin, WeightInput)]
        tensors = [i for i, p in enumerate(trace.calling.parameters) if p.kind == "tensor"]
        self._weights = tuple(weight.names for weight in trace.calling.weights)
        for index, node in enumerate(weights):
            self._refs[node] = Ref("weight", index)
        for node, origin in trace.origins.items():
            if isinstance(origin, ArgumentInput):
                self._refs[node] = Ref("argument", tensors.index(origin.parameter))

    def run(self) -> Program:
        nodes = [node for node in self._trace.graph_module.graph.nodes if self._is_computation(node)]
        segments = self._merge_allocations(self._assign(nodes))
        output = next(node for node in self._trace.graph_module.graph.nodes if node.op == "output")
        results = [node for node in output.args[0] if isinstance(node, fx.Node)]
        if len(results) != len(output.args[0]):
            raise UnsealableError("the graph returns a value that is not computed by it")
        steps: list[Step] = []
        splits = 0
        for index, (eager, members) in enumerate(segments):
            if eager:
                steps.extend(self._eager_step(node) for node in members)
                splits += sum(self._is_splitting(node) for node in members)
            elif members:
                later = {node for _, rest in segments[index + 1 :] for node in rest}
                steps.append(self._piece_step(members, later, results))
        for node in results:
            if node not in self._refs:
                raise UnsealableError(
                    f"the graph returns a {_kind(node)}, not a tensor", where=source_line(node)
                )
        return Program(tuple(steps), self._weights, tuple(self._refs[node] for node in results), splits)

    # --- segments ---

    def _is_computation(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return False
        if node.op in ("get_attr", "call_module"):
            raise UnsealableError(
                f"the graph holds {node.op} {node.target!r} (a higher-order operation or a constant tensor)",
                where=source_line(node),
            )
        name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", "")).split(
            "."
        )[0]
        if name in _RANDOM and not self._is_splitting(node):
            raise UnsealableError(
                f"the graph draws random numbers ({name})",
                where=source_line(node),
                hint="draw them outside the compiled module and pass them in",
            )
        if name in _DROPPED:
            return False
        return not _is_size(node)

    def _is_splitting(self, node: fx.Node) -> bool:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = f"{target.namespace}::{target._opname}"
            return name in self._names or f"{name}.{target._overloadname}" in self._names
        if isinstance(target, torch._ops.OpOverloadPacket):
            name, overloads = target._qualified_op_name, target.overloads()  # type: ignore[no-untyped-call]
            return name in self._names or (len(overloads) == 1 and f"{name}.{overloads[0]}" in self._names)
        return False

    def _assign(self, nodes: Sequence[fx.Node]) -> list[tuple[bool, list[fx.Node]]]:
        segments: list[tuple[bool, list[fx.Node]]] = []
        home: dict[fx.Node, int] = {}
        for node in nodes:
            producer = node.args[0] if node.target is operator.getitem else None
            if isinstance(producer, fx.Node) and producer in home and _kind(producer) != "Tensor":
                home[node] = home[producer]
                segments[home[node]][1].append(node)
                continue
            eager = self._is_splitting(node)
            if not segments or segments[-1][0] != eager:
                segments.append((eager, []))
            segments[-1][1].append(node)
            home[node] = len(segments) - 1
        return segments

    def _merge_allocations(
        self, segments: list[tuple[bool, list[fx.Node]]]
    ) -> list[tuple[bool, list[fx.Node]]]:
        """Move a compute segment that only allocates into the compute segment before it."""
        merged: list[tuple[bool, list[fx.Node]]] = []
        for eager, members in segments:
            if eager or not all(_is_allocation(node) for node in members):
                merged.append((eager, members))
                continue
            before = next((i for i in range(len(merged) - 1, -1, -1) if not merged[i][0]), None)
            made_since = {node for _, rest in merged[(before or 0) + 1 :] for node in rest}
            needs = {used for node in members for used in node.all_input_nodes}
            if before is not None and not needs & made_since:
                merged[before][1].extend(members)
            else:
                merged.append((True, members))
        joined: list[tuple[bool, list[fx.Node]]] = []
        for eager, members in merged:
            if joined and joined[-1][0] == eager:
                joined[-1][1].extend(members)
            else:
                joined.append((eager, members))
        return joined

    # --- encoding ---

    def _new_value(self, node: fx.Node) -> int:
        self._refs[node] = Ref("value", self._values)
        self._values += 1
        return self._values - 1

    def _eager_step(self, node: fx.Node) -> EagerStep:
        names = dict(self._trace.symbol_names.items())

        def value(used: fx.Node) -> object:
            ref = self._refs[used]
            return {"r": [ref.kind, ref.index]}

        encoder = _Encoder(self._trace, names, value)
        args, kwargs = encoder.encode(node.args, node), encoder.encode(dict(node.kwargs), node)
        target = _target(node)
        output = self._new_value(node) if node.users else None
        return EagerStep(target, args, kwargs, output, self._is_splitting(node))

    def _piece_step(
        self, members: Sequence[fx.Node], later: set[fx.Node], results: Sequence[fx.Node]
    ) -> PieceStep:
        own = set(members)
        external = list(
            dict.fromkeys(
                used
                for node in members
                for used in node.all_input_nodes
                if used not in own and used in self._refs and not _is_size(used)
            )
        )
        local = self._local_symbols(members, external)
        own_names = dict(zip(map(self._trace.symbol_names.__getitem__, local), local.values(), strict=True))
        sizes = tuple(SymbolInput(name) for name in own_names.values())
        inputs: list[PieceInput] = [*sizes, *(self._tensor_input(node, local) for node in external)]
        numbers: dict[fx.Node, int] = {node: len(sizes) + i for i, node in enumerate(external)}
        encoder = _Encoder(self._trace, local, lambda used: {"v": numbers[used]})
        nodes: list[PieceNode] = []
        for node in members:
            method = node.op == "call_method"
            target = str(node.target) if method else _target(node)
            op = "call_method" if method else "call_function"
            nodes.append(
                PieceNode(
                    op, target, encoder.encode(list(node.args), node), encoder.encode(dict(node.kwargs), node)
                )
            )
            numbers[node] = len(inputs) + len(nodes) - 1
        leaving = [n for n in members if n in results or any(user in later for user in n.users)]
        for node in leaving:
            if _kind(node) != "Tensor":
                raise _crossing(node, members)
        graph = PieceGraph(tuple(inputs), tuple(nodes), tuple({"v": numbers[node]} for node in leaving))
        return PieceStep(
            graph=graph,
            symbols=tuple(own_names),
            inputs=tuple(self._refs[node] for node in external),
            outputs=tuple(self._new_value(node) for node in leaving),
            lines=tuple(source_line(node) for node in members),
            alias_groups=_alias_groups(external, len(sizes)),
        )

    def _local_symbols(self, members: Sequence[fx.Node], external: Sequence[fx.Node]) -> dict[Any, str]:
        """Name the symbols that a piece needs by first appearance: in its inputs, then in its arguments.

        Torch's symbols that are one symbol of the program get one name.
        """
        where: str | None = None
        found: dict[Any, str] = {}
        own: dict[str, str] = {}

        def see(value: object) -> None:
            if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
                for symbol in symbols.free_symbols(symbols.expression(value, self._trace.shape_env)):
                    if symbol not in self._trace.symbol_names:
                        raise run_time_value(symbol, where)
                    name = self._trace.symbol_names[symbol]
                    found[symbol] = own.setdefault(name, f"s{len(own)}")

        for node in external:
            where = source_line(node)
            fake = node.meta["example_value"]
            for size in (*fake.shape, *fake.stride(), fake.storage_offset()):
                see(size)
        for node in members:
            where = source_line(node)
            for leaf in _leaves((node.args, node.kwargs)):
                if isinstance(leaf, fx.Node) and _is_size(leaf):
                    value = leaf.meta["example_value"]
                    for size in value if isinstance(value, tuple) else (value,):
                        see(size)
                else:
                    see(leaf)
        return found

    def _tensor_input(self, node: fx.Node, local: Mapping[Any, str]) -> TensorInput:
        fake = node.meta["example_value"]
        env = self._trace.shape_env

        def text(value: object) -> Dim:
            return symbols.to_text(symbols.expression(value, env), local)

        return TensorInput(
            dtype=str(fake.dtype).removeprefix("torch."),
            device=fake.device.type,
            shape=tuple(text(size) for size in fake.shape),
            stride=tuple(text(step) for step in fake.stride()),
            offset=text(fake.storage_offset()),
        )


class _Encoder:
    """Encodes node arguments; sizes become expressions, nodes become what ``value`` says."""

    def __init__(self, trace: Trace, names: Mapping[Any, str], value: Any) -> None:
        self._env = trace.shape_env
        self._names = names
        self._value = value

    def encode(self, item: object, node: fx.Node) -> object:
        match item:
            case fx.Node():
                return self._size(item.meta["example_value"]) if _is_size(item) else self._value(item)
            case torch.SymInt():
                return self._size(item)
            case torch.Size() | tuple():
                return {"tuple": [self.encode(element, node) for element in item]}
            case list():
                return [self.encode(element, node) for element in item]
            case dict():
                return {"dict": [[str(key), self.encode(element, node)] for key, element in item.items()]}
            case slice():
                return {"slice": [self.encode(part, node) for part in (item.start, item.stop, item.step)]}
        try:
            return encode_constant(item)
        except TypeError as error:
            raise UnsealableError(
                f"an argument of {node.target} has no portable form: {error}", where=source_line(node)
            ) from None

    def _size(self, value: object) -> object:
        if isinstance(value, tuple):
            return {"tuple": [self._size(element) for element in value]}
        if isinstance(value, (int, float, bool)):
            return value
        text = symbols.to_text(symbols.expression(value, self._env), self._names)
        return text if isinstance(text, int) else {"s": text}


def _crossing(node: fx.Node, members: Sequence[fx.Node]) -> UnsealableError:
    after = members[members.index(node) :]
    where = next((line for member in after if (line := source_line(member))), None)
    name = getattr(node.target, "__name__", str(node.target))
    if name.startswith("_enter_"):
        return UnsealableError(
            f"a region ({name.removeprefix('_enter_')}) begins in one piece and ends in another",
            where=where,
            hint="end it before the splitting operation and begin it again after, or put it around one side",
        )
    return UnsealableError(
        f"a {_kind(node)}, the result of {name}, crosses from one piece to the next",
        where=where,
        hint="compute it again on the other side of the splitting operation",
    )


def _leaves(value: object) -> Iterable[object]:
    match value:
        case tuple() | list():
            for item in value:
                yield from _leaves(item)
        case dict():
            for item in value.values():
                yield from _leaves(item)
        case slice():
            yield from _leaves((value.start, value.stop, value.step))
        case _:
            yield value


def _alias_groups(external: Sequence[fx.Node], first: int) -> tuple[tuple[int, ...], ...]:
    """Group inputs that are views of one storage; fake tensors share storages as the real ones do."""
    groups: dict[object, list[int]] = {}
    for index, node in enumerate(external):
        storage = node.meta["example_value"].untyped_storage()._cdata
        groups.setdefault(storage, []).append(first + index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _is_size(node: fx.Node) -> bool:
    """Tell whether a node's value is an integer size or a torch.Size, which are never passed on as values."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Size):
        return True
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(item, (int, torch.SymInt)) for item in value)
    return isinstance(value, torch.SymInt) or (isinstance(value, int) and not isinstance(value, bool))


def _kind(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _is_allocation(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return str(name).split(".")[0] in ALLOCATIONS


def _target(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"torch.Tensor.{node.target}"
    name = target_name(node.target)  # type: ignore[arg-type]
    if name is None:
        raise UnsealableError(
            f"the operation {node.target!r} has no qualified name by which another process finds it",
            where=source_line(node),
        )
    return name
