"""Key: bodies of operations that only mark a region, such as a checkpoint, put in place of the call.

Without gradients a checkpoint computes what its body computes. Higher-order operations that do more
(``torch.cond``, ``scan``, ``map``, ``flex_attention``) stay, and are refused by name when the graph is split.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from pwcc.cache.errors import UnsealableError

# By name, with the number of arguments between the body and its operands.
_MARKERS = {"tag_activation_checkpoint": 0, "wrap": 0, "wrap_activation_checkpoint": 0, "invoke_subgraph": 1}


def inline_bodies(graph_module: fx.GraphModule) -> None:
    """Replace every call of a marking operation by its body's operations, in place and at any depth.

    Raises:
        UnsealableError: a body that takes another number of operands than the call gives.
    """
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        extra = _MARKERS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
        body = _body(graph_module, node.args[0]) if extra is not None and node.args else None
        if body is None or extra is None:
            continue
        inline_bodies(body)
        _inline(graph, node, body, node.args[1 + extra :])
        changed = True
    if changed:
        for node in reversed(list(graph.nodes)):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)
        graph_module.recompile()


def _body(graph_module: fx.GraphModule, argument: object) -> fx.GraphModule | None:
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    found = getattr(graph_module, str(argument.target), None)
    return found if isinstance(found, fx.GraphModule) else None


def _inline(graph: fx.Graph, node: fx.Node, body: fx.GraphModule, operands: Sequence[object]) -> None:
    parameters = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    if len(parameters) != len(operands):
        raise UnsealableError(f"{node.target} has {len(operands)} operands for {len(parameters)} inputs")
    with graph.inserting_before(node):
        copied = graph.graph_copy(body.graph, dict(zip(parameters, operands, strict=True)))  # type: ignore[arg-type]
    results = list(copied) if isinstance(copied, (tuple, list)) else [copied]
    for user in list(node.users):
        index = user.args[1] if user.target is operator.getitem else None
        result = results[index] if isinstance(index, int) else None
        if isinstance(result, fx.Node):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
