"""Artifact: the memory layout of a piece's outputs, which other pieces and operations were traced with.

Inductor lays an output out as its own rewriting of the graph says, which may differ from what the same
operations give eagerly: a sum of a transposed and a contiguous tensor, say. Whoever reads that output was
compiled for eager's strides, so the piece is compiled once more with the layout asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError

Order = tuple[int, ...]
"""Dimensions from the slowest to the fastest in memory."""


class OtherLayout(Exception):
    """Outputs lie otherwise than eager's; ``orders`` are eager's, by position."""

    def __init__(self, orders: Mapping[int, Order]) -> None:
        super().__init__(f"outputs {sorted(orders)} lie otherwise than eager's")
        self.orders = orders


def other_layouts(got: Sequence[object], wanted: Sequence[object]) -> dict[int, Order]:
    """Return eager's order of dimensions for every output whose strides differ from eager's.

    Strides of dimensions with at most one element do not count.

    Raises:
        UnsealableError: such an output is not dense, so that no order of its dimensions gives its strides.
    """
    found: dict[int, Order] = {}
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or _alike(one, other):
            continue
        strides = other.stride()
        order = tuple(sorted(range(other.dim()), key=lambda dim: (-strides[dim], dim)))
        if not other.permute(order).is_contiguous():
            raise UnsealableError(
                f"output {index} of the piece has strides {list(one.stride())}, "
                f"where eager's has {list(strides)}, which is no dense layout",
                hint="call .contiguous() on that tensor before the splitting operation",
            )
        found[index] = order
    return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size < 2 or mine == eager for size, mine, eager in strides)


def ask_for(graph_module: fx.GraphModule, orders: Mapping[int, Order]) -> None:
    """Make outputs of a piece's graph lie as ``orders`` say, by copies that Inductor fuses."""
    graph = graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for index, order in orders.items():
            moved = graph.call_method("permute", (results[index], order))
            dense = graph.call_method("clone", (moved,), {"memory_format": torch.contiguous_format})
            back = tuple(sorted(range(len(order)), key=order.__getitem__))
            results[index] = graph.call_method("permute", (dense, back))
    output.args = (tuple(results),)
    graph_module.recompile()
