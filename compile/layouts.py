"""Artifact: the memory layout of a piece's outputs, which other pieces and operations were traced with.

Inductor lays an output out as its own rewriting of the graph says, which may differ from what the same
operations give eagerly: a sum of a transposed and a contiguous tensor, say. Whoever reads that output was
compiled for eager's strides, so the piece is compiled once more with the layout asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.torch_private import layout_lowering

Order = tuple[int, ...]
"""Dimensions from the slowest to the fastest in memory."""


class OtherLayout(Exception):
    """Outputs lie otherwise than eager's: those in ``wrong``. ``orders`` are eager's, by position.

    They hold more outputs than the wrong ones, because Inductor lays others out anew when one is asked for.
    """

    def __init__(self, wrong: Collection[int], orders: Mapping[int, Order]) -> None:
        super().__init__(f"outputs {sorted(wrong)} lie otherwise than eager's")
        self.wrong = frozenset(wrong)
        self.orders = dict(orders)


def check_layouts(got: Sequence[object], wanted: Sequence[object], inputs: Sequence[object]) -> None:
    """Compare a compiled piece's outputs with eager's; strides of dimensions of one element do not count.

    Raises:
        OtherLayout: some have other strides; with eager's order for them, and for all outputs that are dense
            and share no memory with each other or an input.
        UnsealableError: such an output is not dense, so that no order of its dimensions gives its strides.
    """
    tensors = {index: one for index, one in enumerate(wanted) if isinstance(one, torch.Tensor)}
    wrong: list[int] = []
    for index, other in tensors.items():
        one = got[index]
        if not isinstance(one, torch.Tensor) or _alike(one, other):
            continue
        if _order(other) is None:
            raise UnsealableError(
                f"output {index} of the piece has strides {list(one.stride())}, "
                f"where eager's has {list(other.stride())}, which is no dense layout",
                hint="call .contiguous() on that tensor before the splitting operation",
            )
        wrong.append(index)
    if not wrong:
        return
    shown = [*tensors.values(), *(value for value in inputs if isinstance(value, torch.Tensor))]
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in shown)
    orders = {
        index: order
        for index, tensor in tensors.items()
        if (order := _order(tensor)) is not None
        and (index in wrong or owners[tensor.untyped_storage().data_ptr()] == 1)
    }
    raise OtherLayout(wrong, orders)


def _order(tensor: torch.Tensor) -> Order | None:
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size < 2 or mine == eager for size, mine, eager in strides)


def ask_for(graph_module: fx.GraphModule, orders: Mapping[int, Order]) -> None:
    """Make outputs of a piece's graph lie as ``orders`` say; Inductor copies only what it must."""
    if not orders:
        return
    layout_lowering.install()
    graph = graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for index, order in orders.items():
            results[index] = graph.call_function(torch.ops.pwcc.laid_out.default, (results[index], order))
    output.args = (tuple(results),)
    graph_module.recompile()
