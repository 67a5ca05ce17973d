"""Artifact: no-op elimination, which others build on: reshapes, slices and scatters that change nothing.

A pattern that is written for ``norm -> quantise`` must not miss ``norm -> view -> view back -> quantise``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pwcc.compile.passes.base import GraphPass, PassContext
from pwcc.compile.torch_private.graph_values import (
    is_row_major,
    memory_of,
    same_tensor_form,
    tensor_of,
)

aten = torch.ops.aten

# The elements are those of the first argument in the same order; with an equal shape it is that argument.
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
# With an equal shape the result is the first argument: a slice that long starts at 0 and skips nothing.
_NARROWINGS = frozenset({aten.slice.Tensor, aten.expand.default, aten.alias.default})
# With a source as large as the target, the result is the second argument.
_SCATTERS = frozenset({aten.slice_scatter.default})


@dataclass(frozen=True)
class NoopElimination(GraphPass):
    """Removes what keeps shape and layout, and shortens a reshape of a reshape to one reshape.

    Sizes are compared by what the trace knows of them: -1, equal symbols and equal expressions count, a size
    that merely may be equal does not. What a graph returns keeps its identity: an output that is a view of
    an input, or of another output, stays a view of its own; memory that was the graph's own does not become
    an input's or another output's; memory that something in the graph writes keeps its readers.
    """

    name: ClassVar[str] = "noop"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Rewrite in one sweep, in graph order, so that chains collapse; see :class:`GraphPass`."""
        ends = _Ends(graph)
        matches = 0
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            source = _same_as(node)
            if source is not None and ends.may_replace(node, source):
                ends.merge(node, source)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                matches += 1
            elif _shorten(node):
                matches += 1
        return matches


def _same_as(node: fx.Node) -> fx.Node | None:
    """Return the node whose value this node has, in the same layout, or None."""
    if node.target in _RESHAPES:
        candidates = _before_reshapes(node)
    elif node.target in _NARROWINGS:
        candidates = [node.args[0]]
    elif node.target in _SCATTERS:
        candidates = [node.args[1]]
    else:
        return None
    own = tensor_of(node)
    for candidate in candidates:
        value = tensor_of(candidate)
        if own is not None and value is not None and same_tensor_form(own, value):
            assert isinstance(candidate, fx.Node)
            return candidate
    return None


def _before_reshapes(node: fx.Node) -> list[object]:
    """Return what a chain of reshapes ends with ``node`` started from, farthest first."""
    chain: list[object] = []
    at: object = node
    while isinstance(at, fx.Node) and at.target in _RESHAPES:
        at = at.args[0]
        chain.insert(0, at)
    return chain


def _shorten(node: fx.Node) -> bool:
    """Let a reshape read what the reshape before it reads, where that is contiguous: both are views then."""
    inner = node.args[0] if node.args else None
    if node.target not in _RESHAPES or not isinstance(inner, fx.Node) or inner.target not in _RESHAPES:
        return False
    source = inner.args[0]
    value, own = tensor_of(source), tensor_of(node)
    if value is None or own is None or not is_row_major(value) or not is_row_major(own):
        return False
    if memory_of(source) != memory_of(node) or not isinstance(source, fx.Node):
        return False  # a reshape that copied
    node.update_arg(0, source)
    return True


class _Ends:
    """Where values enter, leave and are written: nodes, and the memory behind them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._inputs = frozenset(node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
        self._outputs = frozenset(
            node for end in graph.nodes if end.op == "output" for node in end.all_input_nodes
        )
        self._shared = {memory_of(node) for node in self._inputs | self._outputs}
        self._returned = {memory_of(node) for node in self._outputs}
        self._written = {memory_of(argument) for node in graph.nodes for argument in _written(node)}
        self._became: dict[int | None, int | None] = {}

    def may_replace(self, node: fx.Node, source: fx.Node) -> bool:
        """Tell whether ``source`` may stand wherever ``node`` does."""
        if node in self._outputs and (source in self._inputs or source in self._outputs):
            return False  # what is returned would be the input itself, or one tensor twice
        own, other = self._memory(node), self._memory(source)
        if own == other:
            return True  # a view: whoever shares memory with one shares it with the other
        if own in self._written or other in self._written:
            return False
        return not (own in self._returned and other in self._shared)

    def merge(self, node: fx.Node, source: fx.Node) -> None:
        """Note that views of ``node`` are views of ``source`` now; their fake values do not say so yet."""
        own, other = self._memory(node), self._memory(source)
        if own == other:
            return
        self._became[own] = other
        for group in (self._shared, self._returned, self._written):
            if own in group:
                group.add(other)

    def _memory(self, node: fx.Node) -> int | None:
        found = memory_of(node)
        while found in self._became:
            found = self._became[found]
        return found


def _written(node: fx.Node) -> Sequence[object]:
    """Return the arguments that an in-place operation writes."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found: list[object] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found
