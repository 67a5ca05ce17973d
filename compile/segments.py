"""Key: which operations of a traced graph form one piece, and which run between the pieces.

``getitem`` stays with its producer; consecutive splitting operations share one eager segment; a segment
that only allocates joins the piece before it, or runs eagerly. The order of operations is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from pwcc.compile.piece_graph import ALLOCATIONS


@dataclass
class Segment:
    """A run of operations, compiled as one piece or called one by one."""

    eager: bool
    members: list[fx.Node] = field(default_factory=list)


class SplittingOps:
    """The operations at which a graph is cut: ``ns::name`` (any overload) or ``ns::name.overload``.

    An operation that has several overloads is matched by the second form only where the code itself names
    the overload. ``aten::name`` also matches torch's own function or method of that name.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def __contains__(self, node: fx.Node) -> bool:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = f"{target.namespace}::{target._opname}"
            return name in self._names or f"{name}.{target._overloadname}" in self._names
        if isinstance(target, torch._ops.OpOverloadPacket):
            name, overloads = target._qualified_op_name, target.overloads()  # type: ignore[no-untyped-call]
            return name in self._names or (len(overloads) == 1 and f"{name}.{overloads[0]}" in self._names)
        return node.op in ("call_function", "call_method") and f"aten::{operation_name(node)}" in self._names


def segments(nodes: Sequence[fx.Node], splitting: SplittingOps) -> list[Segment]:
    """Assign operations, given in order, to segments in order."""
    return _merge_allocations(_assign(nodes, splitting))


def operation_name(node: fx.Node) -> str:
    """Return the plain name of a node's function, operator or method."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target)
    return str(name).split(".")[0]


def is_tensor(node: fx.Node) -> bool:
    """Tell whether a node's value is one tensor."""
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _assign(nodes: Sequence[fx.Node], splitting: SplittingOps) -> list[Segment]:
    found: list[Segment] = []
    home: dict[fx.Node, Segment] = {}
    for node in nodes:
        producer = node.args[0] if node.target is operator.getitem else None
        if isinstance(producer, fx.Node) and producer in home and not is_tensor(producer):
            home[node] = home[producer]
            home[node].members.append(node)
            continue
        eager = node in splitting
        if not found or found[-1].eager != eager:
            found.append(Segment(eager))
        found[-1].members.append(node)
        home[node] = found[-1]
    return found


def _merge_allocations(found: Sequence[Segment]) -> list[Segment]:
    """Move a compute segment that only allocates into the compute segment before it."""
    merged: list[Segment] = []
    for segment in found:
        if segment.eager or not all(operation_name(node) in ALLOCATIONS for node in segment.members):
            merged.append(segment)
            continue
        before = next((i for i in range(len(merged) - 1, -1, -1) if not merged[i].eager), None)
        made_since = {node for rest in merged[(before or 0) + 1 :] for node in rest.members}
        needs = {used for node in segment.members for used in node.all_input_nodes}
        if before is not None and not needs & made_since:
            merged[before].members.extend(segment.members)
        else:
            merged.append(Segment(True, segment.members))
    joined: list[Segment] = []
    for segment in merged:
        if joined and joined[-1].eager == segment.eager:
            joined[-1].members.extend(segment.members)
        else:
            joined.append(Segment(segment.eager, list(segment.members)))
    return joined
