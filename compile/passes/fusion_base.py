"""Key: what every fusion pass is: find quantised values, read what they are made of, put an operator there.

A fusion takes place only where nothing else needs what would no longer be computed: a norm whose
unquantised output is used too stays as it is. The sum that a residual becomes is an output of the
operator, so it may be used by all.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

from pwcc.compile.ops import fused
from pwcc.compile.ops.fused.formulas import FP8
from pwcc.compile.passes import fusion_quant, fusion_values
from pwcc.compile.passes.base import GraphPass, PassContext
from pwcc.compile.passes.fusion_quant import Quantised, quantised
from pwcc.compile.passes.fusion_values import Values, dtype_of, is_cast


@dataclass(frozen=True)
class Match:
    """An operator of ``pwcc`` in place of ``taken``; its outputs, in order, replace the values ``outputs``."""

    operator: str
    args: tuple[object, ...]
    outputs: Sequence[fx.Node]
    taken: set[fx.Node]


@dataclass(frozen=True)
class Fusion(GraphPass):
    """A pass that replaces quantised values; only for variants whose token counts lie within the limits.

    ``min_tokens`` and ``max_tokens`` are compared with both ends of what a variant serves, so that a dynamic
    variant is changed only if all its sizes lie within. None is no limit. The defaults of each pass are the
    sizes at which ``benchmarks/bench_fusions.py`` saw it win. On a CPU the operators are plain torch code,
    slower than Inductor's; ``cpu`` is for tests.
    """

    requires: ClassVar[tuple[str, ...]] = ("noop",)
    min_tokens: int = 1
    max_tokens: int | None = None
    cpu: bool = False

    def __post_init__(self) -> None:
        highest = self.min_tokens if self.max_tokens is None else self.max_tokens
        if type(self.min_tokens) is not int or type(highest) is not int or type(self.cpu) is not bool:
            raise TypeError(
                "expected whole numbers for min_tokens and max_tokens, true or false for cpu, got "
                f"{self.min_tokens!r}, {self.max_tokens!r}, {self.cpu!r}"
            )
        if not 1 <= self.min_tokens <= highest:
            raise ValueError(
                f"expected 1 <= min_tokens <= max_tokens, got {self.min_tokens}, {self.max_tokens}"
            )

    @abstractmethod
    def match(self, values: Values, found: Quantised) -> Match | None:
        """Return what a quantised value and what it is made of become, or None."""

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Replace all matches; return how many there were."""
        if context.low < self.min_tokens or not (self.max_tokens is None or context.high <= self.max_tokens):
            return 0
        if context.device.type == "cuda":
            from pwcc.compile.torch_private import fused_lowering

            fused_lowering.install()
        elif not self.cpu:
            return 0
        count = 0
        places = [node for node in graph.nodes if is_cast(node) and dtype_of(node) is FP8]
        values = Values(graph)
        for node in places:
            found = quantised(values, node)
            match = None if found is None else self.match(values, found)
            if match is not None and _replace(graph, values, match):
                count += 1
                values = Values(graph)
        return count

    @classmethod
    def files(cls) -> Sequence[Path]:
        """Return the files of the reading, of the operators and of their lowering."""
        private = Path(__file__).parent.parent / "torch_private"
        seams = [private / "fused_lowering.py", private / "graph_values.py"]
        operators = sorted(Path(fused.__file__).parent.glob("*.py"))
        return [Path(fusion_values.__file__), Path(fusion_quant.__file__), *operators, *seams]


def _replace(graph: fx.Graph, values: Values, match: Match) -> bool:
    """Put the operator in place; False, with the graph as it was, where that cannot be done."""
    if not values.inside(match.taken, match.outputs):
        return False
    inputs = [item for item in match.args if isinstance(item, fx.Node)]
    before = min(match.outputs, key=values.order.__getitem__)
    if any(values.order[item] >= values.order[before] for item in inputs):
        return False
    if len({values.epoch[node] for value in match.taken for node in values.same(value)}) != 1:
        return False  # the operator would read in one place what was read in several, with a write between
    if len({item.meta["val"].device for item in inputs}) != 1:
        return False  # a scale on the host
    overload: Any = getattr(torch.ops.pwcc, match.operator).default
    with graph.inserting_before(before):
        args: Any = match.args
        made = graph.call_function(overload, args)
        made.meta["val"] = overload(
            *(item.meta["val"] if isinstance(item, fx.Node) else item for item in match.args)
        )
        parts = [made]
        if len(match.outputs) > 1:
            parts = [graph.call_function(operator.getitem, (made, i)) for i in range(len(match.outputs))]
            for index, part in enumerate(parts):
                part.meta["val"] = made.meta["val"][index]
    for output, part in zip(match.outputs, parts, strict=True):
        for node in values.same(output):
            node.replace_all_uses_with(part)
    for node in sorted((n for value in match.taken for n in values.same(value)), key=values.order.__getitem__)[
        ::-1
    ]:
        if not node.users:
            graph.erase_node(node)
    return True
