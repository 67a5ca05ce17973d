"""Artifact: size expressions such as ``2*s0 + 1``, checked, then compiled to a plain function.

The grammar is a small part of Python's: names of symbols, integers, ``+ - * // %``, comparisons,
``and or not``, and the calls ``max`` and ``min``. Anything else is refused, so that a text from a
manifest can be compiled without running what it says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from pwcc.cache.errors import CorruptEntry

_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Call,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.USub,
    ast.Not,
    ast.And,
    ast.Or,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
)
_CALLS = {"max": max, "min": min}
MAX_LENGTH = 4096


def parse_expression(text: str, symbols: Sequence[str]) -> ast.expr:
    """Return the checked syntax tree of ``text``, whose only free names are ``symbols``.

    Raises:
        CorruptEntry: the text is longer than 4,096 characters or leaves the grammar.
    """
    if len(text) > MAX_LENGTH:
        raise CorruptEntry(f"expected a size expression of at most {MAX_LENGTH} characters, got {len(text)}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CorruptEntry(f"expected a size expression, got {text[:80]!r}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise CorruptEntry(f"a size expression may not hold {type(node).__name__}: {text[:80]!r}")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, bool):
            raise CorruptEntry(f"a size expression holds integers only: {text[:80]!r}")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and not node.keywords):
            raise CorruptEntry(f"a size expression calls only max and min: {text[:80]!r}")
        if isinstance(node, ast.Name) and node.id not in symbols and node.id not in _CALLS:
            raise CorruptEntry(f"unknown symbol {node.id!r} in size expression {text[:80]!r}")
    return tree.body


def compile_expressions(
    texts: Sequence[str | int],
    symbols: Sequence[str],
    *,
    calls: Mapping[str, Callable[..., object]] = _CALLS,
) -> Callable[..., tuple[int, ...]]:
    """Return a function of the symbols' values (positional, in the order given) to the tuple of values.

    ``calls`` are what ``max`` and ``min`` mean, for values that are symbolic themselves.

    Raises:
        CorruptEntry: as :func:`parse_expression`.
    """
    elements = [
        ast.Constant(text) if isinstance(text, int) else parse_expression(text, symbols) for text in texts
    ]
    arguments = ast.arguments(
        posonlyargs=[ast.arg(name) for name in symbols], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    tree = ast.Expression(ast.Lambda(arguments, ast.Tuple(list(elements), ast.Load())))
    code = compile(ast.fix_missing_locations(tree), "<size expressions>", "eval")
    function: Callable[..., tuple[int, ...]] = eval(code, {"__builtins__": {}, **calls})  # noqa: S307 (grammar checked above)
    return function
