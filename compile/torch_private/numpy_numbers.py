"""Dynamo: NumPy functions of constants, such as ``np.sqrt(64)``, which a trace computes again in its graph.

Run on torch 2.13.0+cpu. Private names used: ``numpy_to_tensor_wrapper`` and ``numpy_operator_wrapper`` of
``torch._dynamo.utils``. Where they do not exist such calls stay in the graph and are refused there by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import utils

_NAMES = ("numpy_to_tensor_wrapper", "numpy_operator_wrapper")
_WRAPPERS: tuple[Any, ...] = tuple(getattr(utils, name) for name in _NAMES if hasattr(utils, name))


def fold_numbers(module: fx.GraphModule) -> None:
    """Replace every NumPy function of constants in a traced graph by the number that it gives.

    What Dynamo calls there has no name by which another process finds it.
    """
    graph, numbers = module.graph, dict[fx.Node, Tensor]()
    for node in list(graph.nodes):
        value = _value(node, numbers)
        if value is None:
            continue
        with graph.inserting_before(node):
            form: Any = {"dtype": value.dtype, "device": value.device}
            number = graph.call_function(torch.full, ((), value.item()), form)
        number.meta = node.meta
        node.replace_all_uses_with(number)
        graph.erase_node(node)
        numbers[number] = value
    for number in reversed(numbers):
        if not number.users:
            graph.erase_node(number)


def _value(node: fx.Node, numbers: dict[fx.Node, Tensor]) -> Tensor | None:
    """Return what a NumPy function of constants and of ``numbers`` gives, if it is one number."""
    if node.op != "call_function" or not isinstance(node.target, _WRAPPERS):
        return None
    if any(given not in numbers for given in node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: numbers[given])
    value = node.target(*args, **kwargs)
    return value if isinstance(value, Tensor) and not value.dim() else None
