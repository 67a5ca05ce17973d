"""Artifact: the text of a Triton kernel's launcher, with the grid of the winning configuration written out."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Final

from pwcc.cache.errors import UnsealableError
from pwcc.compile.sealing.program import function_name
from pwcc.compile.torch_private.triton_static import TunedKernel

_CALLS: Final = frozenset({"abs", "int", "max", "min", "round"})
_NODES: Final = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.IfExp,
    ast.Compare,
    ast.Name,
    ast.Constant,
    ast.Call,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)


def launcher_text(name: str, kernel: TunedKernel) -> str:
    """Return ``def name(<parameters>, _stream): ...`` that launches the kernel.

    Raises:
        UnsealableError: a grid expression uses anything but its parameters, integers and arithmetic.
    """
    known = set(kernel.parameters)
    lines = [f"def {name}({', '.join([*kernel.parameters, '_stream'])}):"]
    for line in kernel.prefix:
        target, expression = _assignment(name, line, known)
        lines.append(f"    {target} = {expression}")
        known.add(target)
    grid = [_expression(name, text, known) for text in kernel.grid]
    missing = set(kernel.arguments) - known
    if missing:
        raise UnsealableError(f"kernel {name!r} takes {sorted(missing)}, which its caller does not pass")
    arguments = ", ".join([*kernel.arguments, *["None"] * kernel.scratch])
    if len(kernel.arguments) + kernel.scratch == 1:
        arguments += ","
    lines.append(
        f"    launch_kernel({function_name(name)}, {', '.join(grid)}, {kernel.num_warps}, {kernel.shared}, "
        f"{kernel.arg_types!r}, ({arguments}), _stream)"
    )
    return "\n".join(lines)


def _assignment(name: str, line: str, known: Collection[str]) -> tuple[str, str]:
    try:
        body = ast.parse(line).body
    except SyntaxError:
        body = []
    match body:
        case [ast.Assign(targets=[ast.Name(id=target)], value=value)]:
            return target, _expression(name, ast.unparse(value), known)
        case _:
            raise UnsealableError(f"cannot seal the grid of kernel {name!r}: {line!r}")


def _expression(name: str, text: str, known: Collection[str]) -> str:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise UnsealableError(f"cannot seal the grid of kernel {name!r}: {text!r}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise UnsealableError(f"cannot seal {type(node).__name__} in the grid of kernel {name!r}: {text!r}")
        if isinstance(node, ast.Name) and node.id not in known and node.id not in _CALLS:
            raise UnsealableError(f"cannot seal name {node.id!r} in the grid of kernel {name!r}: {text!r}")
        if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name)):
            raise UnsealableError(f"cannot seal a call in the grid of kernel {name!r}: {text!r}")
    return ast.unparse(tree)
