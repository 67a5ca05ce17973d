"""Artifact: fix-functionalisation, writes to a graph input that stay in place, such as those to a KV cache.

A model that writes ``cache[layer, 0, slots] = k`` is traced as a chain: a select, an ``index_put`` that copies
what was selected, a ``select_scatter`` that copies the whole cache, and at the end of the graph one ``copy_``
back. Inductor turns one ``index_put`` on the input itself back into a write, but not one through a view, nor a
chain of them: every layer then copies every layer's cache. In-place and out-variant
custom operators need no pass: Inductor writes them in place, through views too, under
``enable_auto_functionalized_v2``, which the sealing profile sets.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pwcc.compile.passes.base import GraphPass, PassContext
from pwcc.compile.torch_private.graph_values import memory_of, tensor_of, value_of

aten = torch.ops.aten

# a view operation -> the operation that puts such a view back into its base
_SCATTER_OF: dict[Any, Any] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}
_SCATTERS = {scatter: view for view, scatter in _SCATTER_OF.items()}
_DEFAULTS: dict[Any, tuple[Any, ...]] = {
    aten.select.int: (),
    aten.slice.Tensor: (0, None, None, 1),
}


@dataclass(frozen=True)
class _View:
    """One step from a base to a view of it: the operation and its arguments after the base."""

    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Write:
    """One version of the input: ``node`` is the input after ``leaf`` was written through ``views``.

    ``inside`` are the nodes that only pass the value on: they go when the write is in place.
    """

    node: fx.Node
    views: tuple[_View, ...]
    leaf: fx.Node
    inside: frozenset[fx.Node]


@dataclass(frozen=True)
class FixFunctionalization(GraphPass):
    """Turns a chain of functional writes that ends in a ``copy_`` to a graph input into writes in place.

    Writes are ``index_put``, ``slice_scatter`` and ``select_scatter``, each also through selects and slices.
    A chain is left as it is where an older version of the input is read after a newer one was made, where a
    version is returned, where another kind of operation makes one, or where what is written is computed from
    the input elementwise, as in a shift. Must run last: later passes would have
    to keep reads and writes in order.
    """

    name: ClassVar[str] = "fix_functionalization"
    requires: ClassVar[tuple[str, ...]] = ("noop",)
    last: ClassVar[bool] = True

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Rewrite every chain; a match is one write. See :class:`GraphPass`."""
        matches = 0
        for end in list(graph.nodes):
            if end.target is not aten.copy_.default or end.users or not isinstance(end.args[0], fx.Node):
                continue
            base = end.args[0]
            if base.op != "placeholder":
                continue
            writes = _writes(base, end.args[1])
            if writes and _in_order(graph, base, writes, end) and not _reads_itself(base, writes):
                for write in writes:
                    _write_in_place(graph, base, write)
                graph.erase_node(end)
                matches += len(writes)
        return matches


def _writes(base: fx.Node, last: object) -> list[_Write]:
    """Return the writes that lead from ``base`` to ``last``, in order; none if there is another operation."""
    found: list[_Write] = []
    at = last
    while at is not base:
        write = _write(at)
        if write is None:
            return []
        found.insert(0, write)
        at = write.node.args[0]
    return found


def _write(node: object) -> _Write | None:
    """Return the write that makes a version, with what it writes followed as far in as it goes."""
    if not isinstance(node, fx.Node) or node.target not in (*_SCATTERS, aten.index_put.default):
        return None
    version = node.args[0]
    views: list[_View] = []
    leaf, inside = node, {node}
    while leaf.target in _SCATTERS:
        view = _View(_SCATTERS[leaf.target], _filled(_SCATTERS[leaf.target], leaf.args[2:]))
        inner = leaf.args[1]
        if leaf.kwargs:
            return None
        views.append(view)
        narrowed = inner.args[0] if isinstance(inner, fx.Node) and inner.args else None
        if not isinstance(inner, fx.Node) or inner.target not in (*_SCATTERS, aten.index_put.default):
            break
        if len(inner.users) > 1 or _path(narrowed) != (version, tuple(views)):
            break
        leaf = inner
        inside.add(inner)
    if leaf.target in _SCATTERS and not _same_form(leaf.args[1], version):
        return None
    return _Write(node, tuple(views), leaf, frozenset(inside))


def _same_form(value: object, base: object) -> bool:
    one, other = tensor_of(value), tensor_of(base)
    return one is not None and other is not None and one.dtype == other.dtype and one.device == other.device


def _filled(target: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return a view's arguments with the defaults written out."""
    return (*args, *_DEFAULTS[target][len(args) :])


def _path(node: object) -> tuple[object, tuple[_View, ...]]:
    """Return what a node is a view of, and the steps to it."""
    views: list[_View] = []
    at: Any = node
    while isinstance(at, fx.Node):
        if at.target in _SCATTER_OF and not at.kwargs:
            views.insert(0, _View(at.target, _filled(at.target, at.args[1:])))
            at = at.args[0]
        elif at.target is operator.getitem and _is_unbind(at.args[0]):
            unbind: Any = at.args[0]
            dim = unbind.args[1] if len(unbind.args) > 1 else 0
            views.insert(0, _View(aten.select.int, (dim, at.args[1])))
            at = unbind.args[0]
        else:
            break
    return at, tuple(views)


def _is_unbind(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.unbind.int and not node.kwargs


def _in_order(graph: fx.Graph, base: fx.Node, writes: Sequence[_Write], end: fx.Node) -> bool:
    """Tell whether every version is read before the next one is made, and none is returned."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    until = [*(position[write.node] for write in writes), len(position)]
    internal = {node for write in writes for node in write.inside} | {end}
    return all(
        reader in internal or (reader.op != "output" and position[reader] < limit)
        for version, limit in zip([base, *(write.node for write in writes)], until, strict=True)
        for reader in _readers(version)
    )


def _reads_itself(base: fx.Node, writes: Sequence[_Write]) -> bool:
    """Tell whether a written value is computed from the input by what one kernel may do as it writes.

    Such a kernel would read what it has written already: ``x[1:] = x[:-1] + 1``.
    """
    versions = {base, *(write.node for write in writes)}
    waiting: list[fx.Node] = []
    for write in writes:
        fx.map_arg((write.leaf.args[1:], write.leaf.kwargs), waiting.append)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in versions:
            return True
        if not _has_own_memory(node):
            new = set(node.all_input_nodes) - seen
            seen |= new
            waiting.extend(new)
    return False


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "convolution"})


def _has_own_memory(node: fx.Node) -> bool:
    """Tell whether a result is in memory before what uses it runs: products, and operators not of ATen."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    name = node.target._opname
    fused = name.startswith("_scaled_dot_product")  # the library's attention kernels
    return node.target.namespace not in ("aten", "prims") or fused or name in _PRODUCTS


def _readers(version: fx.Node) -> Iterator[fx.Node]:
    """Yield what uses a version or a view of it, and is no view itself."""
    seen, waiting = {version}, [version]
    memories = {memory_of(version)}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _is_view(user) or memory_of(user) in memories - {None}:
                memories.add(memory_of(user))
                waiting.append(user)
            else:
                yield user


def _is_view(node: fx.Node) -> bool:
    """Tell whether a node gives a view of an argument, or one of a list of views."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _write_in_place(graph: fx.Graph, base: fx.Node, write: _Write) -> None:
    leaf = write.leaf
    with graph.inserting_before(write.node):
        target = base
        for view in write.views:
            args = (target, *view.args)
            target = graph.call_function(view.target, args)
            target.meta["val"] = value_of(view.target, args)
        if leaf.target is aten.index_put.default:
            made = graph.call_function(aten.index_put_.default, (target, *leaf.args[1:]), leaf.kwargs)
        else:
            made = graph.call_function(aten.copy_.default, (target, leaf.args[1]))
        made.meta["val"] = target.meta["val"]
    write.node.replace_all_uses_with(base)
