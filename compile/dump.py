"""Artifact: write what a compile made as readable files, for people; nothing reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pwcc.cache.sealed import CppKernel, SealedPiece
from pwcc.cache.store import Store
from pwcc.compile.piece_compiler import PieceResult
from pwcc.compile.piece_graph import PieceGraph, SymbolInput
from pwcc.compile.split import Program
from pwcc.compile.trace import Trace


def dump_program(directory: Path, number: int, trace: Trace, program: Program, stitch: str) -> None:
    """Write one trace's graph, its unique pieces and its stitch program below ``directory``."""
    folder = directory / f"program{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.py").write_text(trace.graph_module.print_readable(print_output=False))
    (folder / "stitch.py").write_text(stitch)
    for index, graph in enumerate(program.unique):
        (folder / f"piece{index}.py").write_text(readable(graph))


def dump_pieces(directory: Path, results: Mapping[str, PieceResult], store: Store) -> None:
    """Write every sealed piece's record, program and kernels below ``directory/sealed``."""
    for name, result in results.items():
        folder = directory / "sealed" / name
        folder.mkdir(parents=True, exist_ok=True)
        data = store.read_blob(result.sealed)
        (folder / "piece.json").write_bytes(data)
        record = SealedPiece.from_bytes(data, where=name)
        (folder / "piece.py").write_bytes(store.read_blob(record.source))
        for kernel in record.kernels:
            suffix = ".so" if isinstance(kernel, CppKernel) else ".cubin"
            (folder / f"{kernel.name}{suffix}").write_bytes(store.read_blob(kernel.blob))


def readable(graph: PieceGraph) -> str:
    """Return a piece's graph as Python-like text."""
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
    for index, node in enumerate(graph.nodes):
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
