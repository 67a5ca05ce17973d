"""Key: cut a traced graph at its splitting operations into canonical pieces and eager calls.

What crosses a boundary is tensors only. Sizes are expressions of the program's symbols, and numbers that
are computed of sizes are computed again where they are used (see :mod:`pwcc.compile.sizes`). Autocast regions
hold wherever an operation lands (see :mod:`pwcc.compile.regions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.conditions import source_line
from pwcc.compile.effects import refuse_effects
from pwcc.compile.encoding import Encoder, leaves, nearest_line, qualified_name
from pwcc.compile.origins import ArgumentInput, WeightInput
from pwcc.compile.piece_graph import PieceGraph, PieceInput, SymbolInput, TensorInput
from pwcc.compile.piece_writer import PieceWriter
from pwcc.compile.rederive import derive_views_again, may_write
from pwcc.compile.regions import Regions, State, is_enter, is_exit
from pwcc.compile.runtime.calling import TOKENS
from pwcc.compile.segments import SplittingOps, is_tensor, operation_name, segments
from pwcc.compile.sizes import Sizes
from pwcc.compile.steps import EagerStep, PieceStep, Program, Ref, SizeOutput, Step
from pwcc.compile.torch_private.writes import schema_writes, storage, written_arguments
from pwcc.compile.trace import Trace

DEFAULT_SPLITTING_OPS = ("pwcc::attention", "pwcc::opaque")

# Calls that a traced graph may hold and that compiled inference, always without gradients, does not need.
_DROPPED = frozenset(
    {"_set_grad_enabled", "_log_api_usage_once", "_enter_inference_mode", "_exit_inference_mode"}
)
_BACKENDS = frozenset({"_backend_from_string", "_sdpa_kernel"})


def split(trace: Trace, splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS) -> Program:
    """Split a trace.

    Args:
        trace: what :func:`pwcc.compile.trace.trace` returned.
        splitting_ops: names as :class:`pwcc.compile.segments.SplittingOps` takes them.

    Raises:
        UnsealableError: an operation or constant without a portable form, by name and source line.
        TraceError: a size that the graph computes.
    """
    return _Splitter(trace, SplittingOps(splitting_ops)).run()


class _Splitter:
    """Encodes the segments of one trace as the steps of a program."""

    def __init__(self, trace: Trace, splitting: SplittingOps) -> None:
        self._trace = trace
        self._graph = trace.graph_module.graph
        self._splitting = splitting
        self._sizes = Sizes(trace.shape_env, trace.symbol_names)
        self._regions = Regions({}, ())
        self._steps: list[Step] = []
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
        found = segments([n for n in self._graph.nodes if self._is_computation(n)], self._splitting)
        for segment in found:
            derive_views_again(segment, self._sizes.is_number)
        self._regions = Regions.of(self._graph, _device_types(self._graph))
        results = next(node for node in self._graph.nodes if node.op == "output").args[0]
        splits = 0
        for index, segment in enumerate(found):
            if segment.eager:
                for node in segment.members:
                    self._eager_step(node)
                splits += sum(node in self._splitting for node in segment.members)
            else:
                later = {node for rest in found[index + 1 :] for node in rest.members}
                self._piece_step(segment.members, later, results)
        outputs = tuple(self._output(result) for result in results)
        return Program(tuple(self._steps), self._weights, outputs, splits)

    def _is_computation(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return False
        if node.op in ("get_attr", "call_module"):
            raise _not_an_operation(node)
        name = operation_name(node)
        if name in _BACKENDS:
            raise UnsealableError(
                "the graph chooses attention backends (sdpa_kernel), which only eager code follows",
                where=nearest_line(node),
                hint="choose them outside the compiled module, or split at the attention",
            )
        if node not in self._splitting:
            refuse_effects(node)
        return not (name in _DROPPED or is_enter(node) or is_exit(node) or self._sizes.is_number(node))

    # --- outputs and eager calls ---

    def _output(self, result: object) -> Ref | SizeOutput:
        if isinstance(result, (int, float)):
            return SizeOutput(result)
        if not isinstance(result, fx.Node):
            raise UnsealableError("the graph returns a value that is not computed by it")
        if self._sizes.is_number(result):
            return self._number_output(result)
        if result not in self._refs:
            kind = type(result.meta.get("example_value")).__name__
            raise UnsealableError(f"the graph returns a {kind}, not a tensor", where=source_line(result))
        return self._refs[result]

    def _number_output(self, result: fx.Node) -> Ref | SizeOutput:
        list(self._sizes.symbols(result.meta["example_value"], source_line(result)))
        if self._sizes.is_computed(result):
            return self._number(result)
        encoded = self._sizes.encode(result.meta["example_value"], self._trace.symbol_names)
        if isinstance(encoded, dict) and isinstance(text := encoded.get("s"), str):
            return SizeOutput(text)
        if isinstance(encoded, (int, float)):
            return SizeOutput(encoded)
        raise UnsealableError("the graph returns a torch.Size as one value", where=source_line(result))

    def _new_value(self, node: fx.Node) -> int:
        self._refs[node] = Ref("value", self._values)
        self._values += 1
        return self._values - 1

    def _number(self, node: fx.Node) -> Ref:
        """Return a number that steps of the program compute, once."""
        if node not in self._refs:
            self._require_sizes(node)
            self._add(node, number=True)
        return self._refs[node]

    def _require_sizes(self, node: fx.Node) -> None:
        list(self._sizes.symbols(node.meta["example_value"], source_line(node)))

    def _eager_step(self, node: fx.Node) -> None:
        self._add(node, splitting=node in self._splitting, regions=self._regions.around(node))

    def _add(
        self, node: fx.Node, *, splitting: bool = False, regions: State = (), number: bool = False
    ) -> None:
        def value(used: fx.Node) -> object:
            ref = self._number(used) if self._sizes.is_computed(used) else self._refs[used]
            return {"r": [ref.kind, ref.index]}

        self._require_known(node)
        encoder = Encoder(self._sizes, self._trace.symbol_names, value)
        args, kwargs = encoder.encode(node.args, node), encoder.encode(dict(node.kwargs), node)
        target = qualified_name(node)
        output = self._new_value(node) if node.users else None
        self._steps.append(EagerStep(target, args, kwargs, output, splitting, regions, number, (node.name,)))

    def _require_known(self, node: fx.Node) -> None:
        """Raise for a size among the arguments that the graph computes."""
        for leaf in leaves((node.args, node.kwargs)):
            value = leaf.meta.get("example_value") if isinstance(leaf, fx.Node) else leaf
            if not isinstance(value, torch.Tensor):
                list(self._sizes.symbols(value, source_line(node)))

    # --- pieces ---

    def _piece_step(self, segment: Sequence[fx.Node], later: set[fx.Node], results: Sequence[object]) -> None:
        members = self._with_numbers(segment)
        own = set(members)
        external = list(
            dict.fromkeys(
                used
                for node in members
                for used in node.all_input_nodes
                if used not in own and used in self._refs and not self._sizes.is_number(used)
            )
        )
        local = self._local_symbols(members, external)
        own_names = dict(zip(map(self._trace.symbol_names.__getitem__, local), local.values(), strict=True))
        sizes = tuple(self._symbol_input(name, own) for name, own in own_names.items())
        inputs: list[PieceInput] = [*sizes, *(self._tensor_input(node, local) for node in external)]
        values = {node: len(sizes) + i for i, node in enumerate(external)}
        writer = PieceWriter(self._sizes, local, values, len(inputs))
        for node in members:
            if not self._sizes.is_number(node):
                writer.enter(self._regions.at[node])
            writer.add(node)
        writer.enter(())
        leaving = [n for n in segment if n in results or any(user in later for user in n.users)]
        for node in leaving:
            if not is_tensor(node):
                raise _crossing(node)
        graph = PieceGraph(tuple(inputs), tuple(writer.nodes), tuple(writer.value(node) for node in leaving))
        self._steps.append(
            PieceStep(
                graph=graph,
                symbols=tuple(own_names),
                inputs=tuple(self._refs[node] for node in external),
                outputs=tuple(self._new_value(node) for node in leaving),
                lines=tuple(writer.lines),
                alias_groups=_alias_groups(external, len(sizes)),
                shared=_shared_outputs(leaving, later, results),
                nodes=tuple(node.name for node in members),
            )
        )

    def _with_numbers(self, segment: Sequence[fx.Node]) -> list[fx.Node]:
        """Return a segment's operations, before each the operations of the numbers that it needs."""
        members: dict[fx.Node, None] = {}

        def add(node: fx.Node) -> None:
            for used in node.all_input_nodes:
                if used not in members and self._sizes.is_computed(used):
                    self._require_sizes(used)
                    add(used)
            members[node] = None

        for node in segment:
            add(node)
        return list(members)

    def _local_symbols(self, members: Sequence[fx.Node], external: Sequence[fx.Node]) -> dict[Any, str]:
        """Name the symbols that a piece needs by first appearance: in its inputs, then in its arguments.

        Torch's symbols that are one symbol of the program get one name.
        """
        found: dict[Any, str] = {}
        own: dict[str, str] = {}

        def see(value: object, where: str | None) -> None:
            for symbol in self._sizes.symbols(value, where):
                found[symbol] = own.setdefault(self._trace.symbol_names[symbol], f"s{len(own)}")

        for node in external:
            fake = node.meta["example_value"]
            for size in (*fake.shape, *fake.stride(), fake.storage_offset()):
                see(size, source_line(node))
        for node in members:
            for leaf in leaves((node.args, node.kwargs)):
                if not isinstance(leaf, fx.Node):
                    see(leaf, source_line(node))
                elif self._sizes.is_number(leaf) and not self._sizes.is_computed(leaf):
                    see(leaf.meta["example_value"], source_line(node))
        return found

    def _symbol_input(self, program_name: str, name: str) -> SymbolInput:
        if program_name == TOKENS:
            return SymbolInput(name)
        symbol = next(item for item in self._trace.calling.symbols if item.name == program_name)
        return SymbolInput(name, symbol.low, symbol.high)

    def _tensor_input(self, node: fx.Node, local: Mapping[Any, str]) -> TensorInput:
        fake = node.meta["example_value"]
        return TensorInput(
            dtype=str(fake.dtype).removeprefix("torch."),
            device=fake.device.type,
            shape=tuple(self._sizes.text(size, local, node) for size in fake.shape),
            stride=tuple(self._sizes.text(step, local, node) for step in fake.stride()),
            offset=self._sizes.text(fake.storage_offset(), local, node),
        )


def _device_types(graph: fx.Graph) -> set[str]:
    values = [node.meta.get("example_value") for node in graph.nodes]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _not_an_operation(node: fx.Node) -> UnsealableError:
    user = next((user for user in node.users if user.op == "call_function"), None)
    name = operation_name(user) if user is not None else str(node.target)
    where = source_line(node) or next((line for user in node.users if (line := source_line(user))), None)
    if isinstance(node.meta.get("example_value"), torch.Tensor):
        return UnsealableError(
            f"the graph holds a constant tensor ({node.target})",
            where=where,
            hint="register it on the model as a buffer",
        )
    return UnsealableError(
        f"the graph holds {name}, a higher-order operation that cannot be sealed",
        where=where,
        hint="write it with plain tensor operations, or put it into an operation of its own and split there",
    )


def _crossing(node: fx.Node) -> UnsealableError:
    kind = type(node.meta.get("example_value")).__name__
    return UnsealableError(
        f"a {kind}, the result of {operation_name(node)}, crosses from one piece to the next",
        where=source_line(node),
        hint="compute it again on the other side of the splitting operation",
    )


def _alias_groups(external: Sequence[fx.Node], first: int) -> tuple[tuple[int, ...], ...]:
    """Group inputs that are views of one storage; fake tensors share storages as the real ones do."""
    groups: dict[object, list[int]] = {}
    for index, node in enumerate(external):
        storage = node.meta["example_value"].untyped_storage()._cdata
        groups.setdefault(storage, []).append(first + index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _shared_outputs(
    leaving: Sequence[fx.Node], later: set[fx.Node], results: Sequence[object]
) -> tuple[tuple[int, ...], ...]:
    """Group a piece's outputs of one storage where that is seen: written later, or returned more than once."""
    groups: dict[int, list[int]] = {}
    for index, node in enumerate(leaving):
        groups.setdefault(storage(node.meta["example_value"]), []).append(index)
    if len(groups) == len(leaving):
        return ()
    returned = {node: None for node in results if isinstance(node, fx.Node) and is_tensor(node)}
    seen = Counter(storage(node.meta["example_value"]) for node in returned)
    written = {
        storage(used.meta["example_value"])
        for node in later
        if may_write(node)
        for used in (node.all_input_nodes if schema_writes(node.target) is None else written_arguments(node))
        if is_tensor(used)
    }
    return tuple(
        tuple(group)
        for memory, group in groups.items()
        if len(group) > 1 and (memory in written or seen[memory] > 1)
    )
