"""Artifact: attention and static FP8 quantisation of its output as one operator, in pieces that hold both.

Only a graph that is not split at attention does. Off by default: it pays where the server's attention kernel
writes 8 bits itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

from pwcc.compile.ops import attention_quant
from pwcc.compile.ops.fused import formulas
from pwcc.compile.ops.fused.formulas import FP8
from pwcc.compile.passes import fusion_quant, fusion_values
from pwcc.compile.passes.base import GraphPass, PassContext
from pwcc.compile.passes.fusion_quant import quantised
from pwcc.compile.passes.fusion_values import Values, dtype_of, is_cast
from pwcc.compile.torch_private.graph_values import tensor_of, value_of

_RESHAPES = frozenset({torch.ops.aten.reshape.default, torch.ops.aten.view.default})
_EMPTY = torch.ops.aten.empty.memory_format


@dataclass(frozen=True)
class _Match:
    call: fx.Node
    empty: fx.Node
    result: fx.Node
    reshapes: tuple[fx.Node, ...]
    out: fx.Node
    scale: fx.Node


@dataclass(frozen=True)
class AttentionStaticQuant(GraphPass):
    """Replaces ``pwcc::attention`` into a fresh ``out`` and its quantisation, if nothing else reads it."""

    name: ClassVar[str] = "attention_fp8"
    requires: ClassVar[tuple[str, ...]] = ("noop",)

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Replace all matches; return how many there were."""
        count = 0
        for node in [n for n in graph.nodes if is_cast(n) and dtype_of(n) is FP8]:
            match = _match(Values(graph), node)
            if match is not None:
                _replace(graph, match)
                count += 1
        return count

    @classmethod
    def files(cls) -> Sequence[Path]:
        """Return the files of the operator and of the reading of quantisation."""
        modules = (attention_quant, formulas, fusion_quant, fusion_values)
        return [Path(str(module.__file__)) for module in modules]


def _match(values: Values, node: fx.Node) -> _Match | None:
    found = quantised(values, node)
    if found is None or found.floor is not None:
        return None
    reshapes: list[fx.Node] = []
    at: Any = found.source
    while isinstance(at, fx.Node) and at.target in _RESHAPES:
        reshapes.insert(0, at)
        at = at.args[0]
    if not isinstance(at, fx.Node) or at.target is not operator.getitem:
        return None
    call: Any = at.args[0]
    if not _is_attention(call) or at.args[1] != 1:
        return None
    (empty,) = call.kwargs["_all_bases"]
    if empty.target is not _EMPTY or len(empty.users) > 1:
        return None
    if not values.inside({at, *reshapes, found.source, *found.taken, node}, (node,)):
        return None
    if values.order[found.scale] > values.order[call]:
        return None
    return _Match(call, empty, at, tuple(reshapes), node, found.scale)


def _is_attention(node: object) -> bool:
    """Tell whether a node is attention that writes a tensor of its own, not a view of one."""
    return (
        isinstance(node, fx.Node)
        and node.target is torch.ops.higher_order.auto_functionalized_v2
        and node.args[0] is torch.ops.pwcc.attention.default
        and [name for name in node.kwargs if name.startswith("_out_")] == ["_out_base_index"]
        and len(node.kwargs["_all_bases"]) == 1  # type: ignore[arg-type]
    )


def _replace(graph: fx.Graph, match: _Match) -> None:
    given = dict(match.call.kwargs)
    wide = tensor_of(match.empty)
    assert wide is not None
    with graph.inserting_before(match.call):
        empty = graph.call_function(_EMPTY, match.empty.args, {**match.empty.kwargs, "dtype": FP8})
        with wide.fake_mode:  # type: ignore[attr-defined]
            empty.meta["val"] = torch.empty_like(wide, dtype=FP8)
            written = torch.empty_like(wide, dtype=FP8)
        overload = torch.ops.pwcc.attention_static_fp8_quant.default
        call = graph.call_function(
            torch.ops.higher_order.auto_functionalized_v2,
            (overload,),
            {**given, "out_scale": match.scale, "_all_bases": [empty]},
        )
        call.meta["val"] = (None, written)
        made = graph.call_function(operator.getitem, (call, 1))
        made.meta["val"] = written
    with graph.inserting_before(match.out):
        for reshape in match.reshapes:
            args = (made, *reshape.args[1:])
            made = graph.call_function(reshape.target, args)  # type: ignore[arg-type]
            made.meta["val"] = value_of(reshape.target, args)  # type: ignore[arg-type]
    match.out.replace_all_uses_with(made)
    for node in (match.out, *reversed(match.reshapes)):
        if not node.users:
            graph.erase_node(node)
