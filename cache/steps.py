"""Artifact: the order in which a stitched program calls its pieces and operations, read from its text.

The text is parsed as Python and never executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from pwcc.cache.errors import CorruptEntry

MAX_TEXT = 16 * 2**20


@dataclass(frozen=True)
class StepCall:
    """One call: ``piece`` is the index of a unique piece, or None for the operation that ``name`` names."""

    name: str
    piece: int | None = None


def steps_of(text: bytes, *, where: str) -> list[StepCall]:
    """Return the calls of ``stitch.py`` in order.

    Raises:
        CorruptEntry: the text is no stitched program.
    """
    try:
        tree = ast.parse(text.decode()) if len(text) <= MAX_TEXT else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    bind = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    if not isinstance(bind, ast.FunctionDef):
        raise CorruptEntry("expected the text of a stitched program", where=where)
    operations: dict[str, str] = {}
    run: ast.FunctionDef | None = None
    for line in bind.body:
        if isinstance(line, ast.FunctionDef):
            run = line
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            operations[line.targets[0].id] = _operation(line.value)
    if run is None:
        raise CorruptEntry("expected a stitched program to define its run", where=where)
    return [step for line in run.body for step in _steps(line, operations)]


def _operation(value: ast.expr) -> str:
    """Return what ``operation('torch.ops.ns.name')`` names, as ``ns::name``; '' for anything else."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "operation"):
        return ""
    if not (len(value.args) == 1 and isinstance(value.args[0], ast.Constant)):
        return ""
    name = str(value.args[0].value)
    parts = name.removeprefix("torch.ops.").split(".")
    return "::".join(parts[:2]) if name.startswith("torch.ops.") and len(parts) > 1 else name


def _steps(line: ast.stmt, operations: dict[str, str]) -> Iterator[StepCall]:
    if isinstance(line, ast.With):
        for inner in line.body:
            yield from _steps(inner, operations)
        return
    call = line.value if isinstance(line, ast.Assign | ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return
    name = call.func.id
    if name[:1] == "p" and name[1:].isdecimal():
        yield StepCall(name, int(name[1:]))
    elif operations.get(name):
        yield StepCall(operations[name])
