"""Artifact: the memory layout of a piece's outputs, which other pieces and operations were traced with.

Inductor lays an output out as its own rewriting of the graph says, which may differ from what the same
operations give eagerly: a sum of a transposed and a contiguous tensor, say. It also returns an input
itself where its rewriting leaves nothing to do, as in ``x + 0``, whose memory is new in eager. Whoever reads or
writes that output was compiled for eager's, so the piece is compiled once more with what is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.torch_private import layout_lowering


class Ask(NamedTuple):
    """How an output is to lie: its dimensions from the slowest to the fastest, in memory of its own or not."""

    order: tuple[int, ...]
    own: bool = False


class OtherLayout(Exception):
    """Outputs lie otherwise than eager's; ``asks``, by position, are for eager's layout.

    They hold more outputs than the wrong ones, because Inductor lays others out anew when one is asked for.
    """

    def __init__(self, wrong: Collection[int], asks: Mapping[int, Ask]) -> None:
        super().__init__(f"outputs {sorted(wrong)} lie otherwise than eager's")
        self.wrong = frozenset(wrong)
        self.asks = dict(asks)


class Run(NamedTuple):
    """What a piece was given and what it returned, for one call."""

    inputs: Sequence[object]
    outputs: Sequence[object]


def check_layouts(compiled: Run, eager: Run) -> None:
    """Compare a compiled piece's outputs with eager's; strides of dimensions of one element do not count.

    Raises:
        OtherLayout: some have other strides, or memory of an input or another output that is new in eager;
            with what to ask for them, and for all outputs that are dense and share no memory.
        UnsealableError: such an output is not dense, so that no order of its dimensions gives its strides.
    """
    tensors = {index: one for index, one in enumerate(eager.outputs) if isinstance(one, torch.Tensor)}
    mine, eagers = _sharing(compiled), _sharing(eager)
    wrong: list[int] = []
    taken: list[int] = []
    for index, other in tensors.items():
        one = compiled.outputs[index]
        if not isinstance(one, torch.Tensor):
            continue
        if any(place < index for place in mine[index] - eagers[index]):
            taken.append(index)
        elif _alike(one, other):
            continue
        if _order(other) is None:
            raise UnsealableError(
                f"output {index} of the piece has strides {list(one.stride())}"
                f"{' in memory of another tensor' if index in taken else ''}, "
                f"where eager's has {list(other.stride())}, which is no dense layout",
                hint="call .contiguous() on that tensor before the splitting operation",
            )
        wrong.append(index)
    if wrong:
        asks = {
            index: Ask(order, own=index in taken)
            for index, tensor in tensors.items()
            if (order := _order(tensor)) is not None and (index in wrong or not eagers[index])
        }
        raise OtherLayout(wrong, asks)


def _sharing(run: Run) -> dict[int, set[int]]:
    """Return, for every output, the places of inputs (negative) and other outputs that have its memory."""
    owners: dict[int, set[int]] = {}
    places = {-1 - place: one for place, one in enumerate(run.inputs)} | dict(enumerate(run.outputs))
    for place, one in places.items():
        if isinstance(one, torch.Tensor) and one.numel():
            owners.setdefault(one.untyped_storage().data_ptr(), set()).add(place)
    found: dict[int, set[int]] = {index: set() for index in range(len(run.outputs))}
    for group in owners.values():
        found.update({place: group - {place} for place in group})
    return found


def check_sharing(got: Sequence[object], wanted: Sequence[object], groups: Sequence[Sequence[int]]) -> None:
    """Compare the memory of outputs that must share it, by position, with eager's.

    A copy that gives one output its layout parts it from its views, which are to see what is written later.

    Raises:
        UnsealableError: outputs share memory in eager only.
    """
    for group in groups:
        if _shares(wanted, group) and not _shares(got, group):
            raise UnsealableError(
                f"outputs {list(group)} of the piece share memory in eager and do not where laid out as there",
                hint="make the views after the splitting operation, of one tensor, or return copies",
            )


def _shares(values: Sequence[object], group: Sequence[int]) -> bool:
    tensors = [one for index in group if isinstance(one := values[index], torch.Tensor) and one.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < 2


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size < 2 or mine == eager for size, mine, eager in strides)


def ask_for(graph_module: fx.GraphModule, asks: Mapping[int, Ask]) -> None:
    """Make outputs of a piece's graph lie as ``asks`` say; Inductor copies only what it must."""
    if not asks:
        return
    layout_lowering.install()
    graph = graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for index, ask in asks.items():
            results[index] = graph.call_function(torch.ops.pwcc.laid_out.default, (results[index], *ask))
    output.args = (tuple(results),)
    graph_module.recompile()
