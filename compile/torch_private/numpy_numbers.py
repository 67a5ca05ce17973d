"""Dynamo: NumPy functions of constants, such as ``np.sqrt(64)``, which a trace computes again in its graph.

Run on torch 2.13.0+cpu. Private names used: ``numpy_to_tensor_wrapper``, ``numpy_operator_wrapper`` and
``numpy_method_wrapper`` of ``torch._dynamo.utils``. Where they do not exist such calls stay in the graph and
are refused there by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import utils

_FUNCTION, _OPERATOR, _METHOD = (
    getattr(utils, f"numpy_{kind}_wrapper", ()) for kind in ("to_tensor", "operator", "method")
)
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""What makes a tensor of a NumPy number's own type, in eager too."""


def fold_numbers(module: fx.GraphModule) -> None:
    """Replace every NumPy function of constants in a traced graph by the number that it gives.

    What Dynamo calls there has no name by which another process finds it. A number whose place another type
    would come out of than in eager stays, to be refused: there it is a Python number, in the graph a tensor.
    """
    graph, numbers = module.graph, dict[fx.Node, Any]()
    for node in graph.nodes:
        value = _value(node, numbers)
        if value is not None:
            numbers[node] = value
    for node, value in reversed(numbers.items()):
        if all(user in numbers or _same_type(user, node) for user in node.users):
            for user in [user for user in node.users if user not in numbers and not _takes_tensor(user)]:
                # a Python number, as in eager: a tensor would be one of the CPU beside those of a GPU
                given = fx.map_arg((user.args, user.kwargs), _put(node, value.item()))
                user.args, user.kwargs = given
            if node.users:
                with graph.inserting_before(node):
                    form: Any = {"dtype": _dtype(value), "device": torch.device("cpu")}
                    number = graph.call_function(torch.full, ((), value.item()), form)
                number.meta = node.meta
                node.replace_all_uses_with(number)
            graph.erase_node(node)


def _value(node: fx.Node, numbers: dict[fx.Node, Any]) -> Any:
    """Return what NumPy itself gives for a function of constants and of ``numbers``; None unless one number.

    Arrays without dimensions are none: they are written in place, and other rules of types hold for them.
    """
    if node.op != "call_function" or any(given not in numbers for given in node.all_input_nodes):
        return None
    if not isinstance(node.target, (_FUNCTION, _OPERATOR)):
        return None
    import numpy as np

    target: Any = node.target
    run: Any = target.op if isinstance(target, _OPERATOR) else getattr(np, target.f.__name__, None)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: numbers[given])
    try:
        with np.errstate(all="ignore"):
            value = run(*args, **kwargs)
    except Exception:  # noqa: BLE001 (whatever NumPy does not take is no number)
        return None
    example = node.meta.get("example_value")
    if not isinstance(value, np.generic) or not isinstance(example, Tensor) or example.dim():
        return None
    return value if _dtype(value) == example.dtype else None


def _dtype(value: Any) -> torch.dtype | None:
    try:
        return torch.as_tensor(value).dtype
    except TypeError:  # a type that torch lacks
        return None


def _put(place: fx.Node, number: Any) -> Callable[[fx.Node], Any]:
    return lambda given: number if given is place else given


def _takes_tensor(user: fx.Node) -> bool:
    return user.target in _FROM_DATA or isinstance(user.target, (_FUNCTION, _OPERATOR, _METHOD))


def _same_type(user: fx.Node, number: fx.Node) -> bool:
    """Tell whether ``user`` gives the same type for a tensor without dimensions and for a Python number."""
    if _takes_tensor(user):
        return True
    rank = _rank(number.meta["example_value"])
    others = (given.meta.get("example_value") for given in user.all_input_nodes if given is not number)
    return any(isinstance(other, Tensor) and other.dim() and _rank(other) >= rank for other in others)


def _rank(tensor: Tensor) -> int:
    """Return the place of a tensor's type among bool, whole, floating-point and complex numbers."""
    if tensor.dtype is torch.bool:
        return 0
    return 3 if tensor.is_complex() else 2 if tensor.is_floating_point() else 1
