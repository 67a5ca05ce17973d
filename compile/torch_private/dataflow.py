"""Traced graphs: whether two of them compute the same values, in whatever order their operations stand.

Run on torch 2.13.0+cpu. Nothing private beyond ``torch.fx``: operations are told apart by name, as Dynamo
writes them; one that is not recognised as pure keeps its place.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch import fx

_WRITES: Final = frozenset((operator.setitem, operator.delitem, setattr))
_RANDOM: Final = ("rand", "dropout", "bernoulli", "multinomial", "normal", "exponential", "geometric")
_MODES: Final = ("autocast", "grad_enabled", "inference_mode", "_set_", "functional_call")
_OPERATORS: Final = [f"i{name}" for name in dir(operator) if hasattr(operator, f"i{name}")]
_IN_PLACE: Final = frozenset(("__setitem__", *_OPERATORS, *(f"__{name}__" for name in _OPERATORS)))
_MANY: Final = 4096  # elements up to which constants are compared by value


def same_dataflow(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Tell whether two traces of one function do the same, except for the order of pure operations.

    An operation that writes, draws random numbers or changes a mode must come at the same place among its
    like, and every other one between the same two of them. Doubt counts as a difference.
    """
    table: dict[Hashable, int] = {}
    return _meaning(one, table) == _meaning(other, table)


def _meaning(module: fx.GraphModule, table: dict[Hashable, int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (epoch, value) of every operation, sorted, and the operations that keep their place."""
    numbers: dict[fx.Node, int] = {}
    fixed: list[int] = []
    pure: list[tuple[int, int]] = []
    for node in module.graph.nodes:
        target: Hashable = node.target
        if node.op == "get_attr":
            target = _constant(module, str(node.target), table)
        parts = tuple(_frozen(part, numbers) for part in (node.args, node.kwargs))
        moving = node.op == "placeholder" or _is_pure(node)
        number = table.setdefault((node.op, target, parts, len(fixed) if moving else -1), len(table))
        numbers[node] = number
        if moving:
            pure.append((len(fixed), number))
        else:
            fixed.append(number)
    return sorted(pure), fixed


def _constant(module: fx.GraphModule, name: str, table: dict[Hashable, int]) -> Hashable:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        pure, fixed = _meaning(value, table)
        return (tuple(pure), tuple(fixed))
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and value.numel() <= _MANY:
        return (str(value.dtype), str(value.device), tuple(value.shape), repr(value.tolist()))
    return name


def _is_pure(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    target = node.target
    if target in _WRITES:
        return False
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return not schema.is_mutable and not _drawing(str(target))
    if not isinstance(target, str) and isinstance(target, torch._ops.OpOverloadPacket):
        names: list[str] = target.overloads()  # type: ignore[no-untyped-call]
        return all(not getattr(target, name)._schema.is_mutable for name in names)
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return not in_place and not _drawing(name)


def _drawing(name: str) -> bool:
    return any(part in name for part in (*_RANDOM, *_MODES))


def _frozen(value: object, numbers: Mapping[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return ("node", numbers[value])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(item, numbers) for item in value))
    if isinstance(value, dict):
        return ("dict", *((repr(key), _frozen(item, numbers)) for key, item in sorted(value.items(), key=repr)))
    if isinstance(value, slice):
        return ("slice", *(_frozen(part, numbers) for part in (value.start, value.stop, value.step)))
    return (type(value).__qualname__, repr(value))
