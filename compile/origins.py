"""Key: where each input of a traced graph comes from: an argument, or a tensor that the model holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from pwcc.cache.errors import UnsealableError
from pwcc.compile.conditions import source_line
from pwcc.compile.runtime.calling import Weight
from pwcc.compile.runtime.held import named_tensors
from pwcc.compile.torch_private import writes


@dataclass(frozen=True)
class WeightInput:
    """A graph input that the model holds: all its names, the first is canonical."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class ArgumentInput:
    """A graph input that is a tensor argument: its position among the leaves of the arguments."""

    parameter: int


Origin = WeightInput | ArgumentInput


def held_names(model: nn.Module) -> dict[int, list[str]]:
    """Return every name of each tensor that a model holds, by the tensor's ``id``."""
    held: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        held.setdefault(id(tensor), []).append(name)
    return held


def origins_of(
    model: nn.Module, leaves: Sequence[object], placeholders: Sequence[fx.Node], inputs: Sequence[object]
) -> dict[fx.Node, Origin]:
    """Map each tensor placeholder of a graph to its origin.

    Args:
        model: the traced module.
        leaves: the arguments of the trace, flat.
        placeholders: of the graph, in order.
        inputs: what the graph would have been called with, one per placeholder.

    Raises:
        UnsealableError: a tensor that is neither an argument nor held by the model.
    """
    held = held_names(model)
    positions = {id(item): index for index, item in enumerate(leaves) if isinstance(item, torch.Tensor)}
    origins: dict[fx.Node, Origin] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            continue  # a size symbol; it is computed from the arguments
        if id(value) in positions:
            origins[node] = ArgumentInput(positions[id(value)])
        elif id(value) in held:
            origins[node] = WeightInput(tuple(held[id(value)]))
        else:
            raise _unknown(node)
    return origins


def _unknown(node: fx.Node) -> UnsealableError:
    where = next((line for user in node.users if (line := source_line(user))), None)
    if str(node.target).startswith("random_value_"):  # Dynamo's name for what Python's random gives
        return UnsealableError(
            "forward draws random numbers with Python's random",
            where=where,
            hint="draw them outside the compiled module and pass them in, or in a splitting operation",
        )
    return UnsealableError(
        f"the graph reads a tensor that is neither an argument nor held by the model: {node.target}",
        where=where,
        hint="register it on the model as a buffer",
    )


def weights_of(
    model: nn.Module,
    origins: Mapping[fx.Node, Origin],
    returned: Sequence[tuple[str, ...]],
    graph: fx.Graph,
) -> tuple[Weight, ...]:
    """Return the weights that a graph reads, in order, then those that are only ``returned``.

    Raises:
        UnsealableError: a weight that is a lazily conjugated or negated view.
    """
    held = dict(named_tensors(model))
    inputs = {node: origin.names for node, origin in origins.items() if isinstance(origin, WeightInput)}
    read = [_weight(names, held[names[0]]) for names in (*inputs.values(), *returned)]
    return tuple(_marked(read, graph, [node.meta["example_value"] for node in inputs]))


def _marked(weights: Sequence[Weight], graph: fx.Graph, fakes: Sequence[Any]) -> list[Weight]:
    """Mark the weights that the graph writes; ``fakes`` are those of its inputs, which come first."""
    read = dict(enumerate(fakes))
    written = writes.written(graph, read)
    shares = writes.sharing(read) if written else {}
    return [
        replace(weight, written=True, shares=shares[index]) if index in written else weight
        for index, weight in enumerate(weights)
    ]


def _weight(names: tuple[str, ...], tensor: torch.Tensor) -> Weight:
    if tensor.is_conj() or tensor.is_neg():
        raise UnsealableError(
            f"{names[0]!r} is a lazily conjugated or negated view, which compiled code cannot read",
            hint="replace it by its resolve_conj().resolve_neg()",
        )
    return Weight(names, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
