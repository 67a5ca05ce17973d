"""Artifact: which inputs of a sealed piece its results may be, or be views of, read off the program's text."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def returned_inputs(call: ast.FunctionDef, arguments: Sequence[str]) -> frozenset[int]:
    """Return the positions of inputs that reach the returned tuple by name.

    A name that was assigned expressions stands for every input in any of them, whatever the expression
    does: an input too many costs one check a call, one too few would lose a view.
    """
    stands: dict[str, set[str]] = {name: {name} for name in arguments}
    found: set[str] = set()
    for node in _statements(call.body):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                stands[target] = stands.get(target, set()) | _inputs(value, stands)
            case ast.Return(value=ast.expr() as value):
                found |= _inputs(value, stands)
            case _:
                pass
    return frozenset(index for index, name in enumerate(arguments) if name in found)


def _statements(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """Return all statements in order, those of both branches of a condition among them."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If):
            found += [*_statements(node.body), *_statements(node.orelse)]
    return found


def _inputs(value: ast.expr, stands: dict[str, set[str]]) -> set[str]:
    names = (node.id for node in ast.walk(value) if isinstance(node, ast.Name))
    return set().union(*(stands.get(name, set()) for name in names))
