"""Graph: a traced program and its pieces as text for people; nothing reads it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.cache.ids import FactorDigest
from pwcc.compile.conditions import source_line
from pwcc.compile.encoding import qualified_name
from pwcc.compile.origins import ArgumentInput, WeightInput
from pwcc.compile.piece_graph import PieceGraph, SymbolInput
from pwcc.compile.steps import PieceStep, Program, Step
from pwcc.compile.trace import Trace


def program_text(trace: Trace, program: Program, names: Mapping[FactorDigest, str]) -> str:
    """Return a traced graph as Python-like text, under one heading per call that the program makes.

    Every node has its type, shape and stride, under the user's line that it comes from. ``names`` are those of
    the pieces by digest. What no step holds comes last: sizes, and calls that compiled inference drops.
    """
    nodes = {node.name: node for node in trace.graph_module.graph.nodes}
    lines = ["def forward("]
    for node in nodes.values():
        if node.op == "placeholder":
            lines.append(f"    {node.name}: {_type(node)},  # {_origin(trace, trace.origins.get(node))}")
    lines.append("):")
    shown: set[str] = set()
    for number, step in enumerate(program.steps, 1):
        lines += ["", f"    # {_heading(number, len(program.steps), step, names)}"]
        shown.update(step.nodes)
        lines += _nodes([nodes[name] for name in step.nodes if name in nodes])
    rest = [n for name, n in nodes.items() if name not in shown and n.op not in ("placeholder", "output")]
    if rest:
        lines += ["", "    # in no step: sizes, regions of autocast, and what compiled inference does not need"]
        lines += _nodes(rest)
    for node in nodes.values():
        if node.op == "output":
            lines += ["", f"    return {_argument(node.args[0])}"]
    return "\n".join(lines) + "\n"


def _heading(number: int, count: int, step: Step, names: Mapping[FactorDigest, str]) -> str:
    if isinstance(step, PieceStep):
        return f"piece {number} of {count} ({names.get(step.graph.digest, step.graph.digest[:12])})"
    kind = "splitting operation" if step.splitting else "a number" if step.number else "called eagerly"
    name = step.target.removeprefix("torch.ops.")
    shown = name if name == step.target else name.replace(".", "::", 1)
    return f"{shown} ({kind}, {number} of {count})"


def _origin(trace: Trace, origin: object) -> str:
    if isinstance(origin, WeightInput):
        return f"weight {', '.join(origin.names)}"
    if isinstance(origin, ArgumentInput):
        return f"argument {trace.calling.parameters[origin.parameter].name}"
    return "a size"


def _nodes(nodes: list[fx.Node]) -> Iterator[str]:
    before: str | None = None
    for node in nodes:
        line = source_line(node)
        if line is not None and line != before:
            yield f"    # {line}"
        before = line
        yield f"    {node.name}: {_type(node)} = {_call(node)}"


def _call(node: fx.Node) -> str:
    try:
        name = qualified_name(node)
    except UnsealableError:
        name = str(getattr(node.target, "__name__", node.target))
    args = [_argument(item) for item in node.args]
    kwargs = [f"{key}={_argument(item)}" for key, item in node.kwargs.items()]
    return f"{name}({', '.join([*args, *kwargs])})"


def _argument(item: Any) -> str:
    return str(item) if isinstance(item, fx.Node) else repr(item)


def _type(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


def piece_text(graph: PieceGraph, sources: Sequence[str | None] = ()) -> str:
    """Return a piece's graph as Python-like text; ``sources`` are the user's lines by node."""
    names: list[str] = []
    signature: list[str] = []
    for index, item in enumerate(graph.inputs):
        if isinstance(item, SymbolInput):
            names.append(item.symbol)
            signature.append(f"    {item.symbol}: int,")
        else:
            names.append(f"i{index}")
            shape = ", ".join(str(dim) for dim in item.shape)
            signature.append(
                f"    i{index}: {item.dtype}[{shape}],  # {item.device}, stride {list(item.stride)}"
            )
    lines = [f"# {graph.digest}", "def piece(", *signature, "):"]
    before: str | None = None
    for index, node in enumerate(graph.nodes):
        source = sources[index] if index < len(sources) else None
        if source is not None and source != before:
            lines.append(f"    # {source}")
        before = source
        names.append(f"v{index}")
        args = [_text(arg, names) for arg in _items(node.args)]
        kwargs = [f"{key}={_text(arg, names)}" for key, arg in _pairs(node.kwargs)]
        if node.op == "call_method":
            call = f"{args[0]}.{node.target}({', '.join([*args[1:], *kwargs])})"
        else:
            call = f"{node.target}({', '.join([*args, *kwargs])})"
        lines.append(f"    v{index} = {call}")
    lines.append(f"    return {', '.join(_text(output, names) for output in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _items(args: object) -> list[object]:
    return list(args) if isinstance(args, list) else list(args["tuple"]) if isinstance(args, dict) else []


def _pairs(kwargs: object) -> list[tuple[str, object]]:
    return [(str(key), value) for key, value in kwargs["dict"]] if isinstance(kwargs, dict) else []


def _text(value: object, names: list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_text(item, names) for item in value) + "]"
    if not isinstance(value, dict):
        return repr(value)
    ((tag, held),) = value.items()
    match tag:
        case "v":
            return names[held]
        case "tuple":
            return "(" + ", ".join(_text(item, names) for item in held) + ")"
        case "slice":
            return ":".join("" if part is None else _text(part, names) for part in held)
        case "ellipsis":
            return "..."
        case "dict":
            return "{" + ", ".join(f"{key!r}: {_text(item, names)}" for key, item in held) + "}"
        case _:
            return str(held)
