"""Artifact: size expressions such as ``2*s0 + 1``, checked, then compiled to a plain function.

The grammar is a small part of Python's: names of symbols, integers, ``+ - * // %``, comparisons,
``and or not``, and the calls ``max`` and ``min``. Anything else is refused, so that a text from a
manifest can be compiled without running what it says.
"""

from __future__ import annotations

import ast
import keyword
import re
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
_TEXT = re.compile(r"[A-Za-z0-9_+\-*/%<>=!(), ]*")
_GLUED = re.compile(r"\b[0-9]+[A-Za-z_]")  # "1and 2", of which Python warns, and numbers that are not decimal
MAX_LENGTH = 4096
MAX_DEPTH = 200  # levels of the syntax tree; Python's compiler recurses over them
MAX_EXPRESSIONS = 100_000  # of one call; a parameter has a few per dimension


def parse_expression(text: str, symbols: Sequence[str]) -> ast.expr:
    """Return the checked syntax tree of ``text``, whose only free names are ``symbols``.

    Raises:
        CorruptEntry: the text is longer than 4,096 characters, nested too deeply, or leaves the grammar.
    """
    if len(text) > MAX_LENGTH:
        raise CorruptEntry(f"expected a size expression of at most {MAX_LENGTH} characters, got {len(text)}")
    try:
        if not _TEXT.fullmatch(text) or _GLUED.search(text):
            raise ValueError
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CorruptEntry(f"expected a size expression, got {text[:80]!r}") from None
    _check_depth(tree, text)
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise CorruptEntry(f"a size expression may not hold {type(node).__name__}: {text[:80]!r}")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, bool):
            raise CorruptEntry(f"a size expression holds integers only: {text[:80]!r}")
        if isinstance(node, ast.Call) and not _is_call(node):
            raise CorruptEntry(f"a size expression calls only max and min, of two or more: {text[:80]!r}")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called and node.id not in symbols:
            raise CorruptEntry(f"unknown symbol {node.id!r} in size expression {text[:80]!r}")
    return tree.body


def _check_depth(tree: ast.AST, text: str) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise CorruptEntry(f"a size expression may have {MAX_DEPTH} levels: {text[:80]!r}")


def _is_call(node: ast.Call) -> bool:
    named = isinstance(node.func, ast.Name) and node.func.id in _CALLS
    return named and not node.keywords and len(node.args) >= 2


def check_symbols(symbols: Sequence[str]) -> None:
    """Refuse names that cannot be arguments of a function.

    Raises:
        CorruptEntry: a name is no identifier, reserved, or given twice.
    """
    for name in symbols:
        if not name.isidentifier() or keyword.iskeyword(name) or name in _CALLS or name.startswith("__"):
            raise CorruptEntry(f"expected the name of a symbol, got {name[:80]!r}")
    if len(set(symbols)) != len(symbols):
        raise CorruptEntry(f"expected different symbols, got {list(symbols)[:10]}")


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
    check_symbols(symbols)
    if len(texts) > MAX_EXPRESSIONS:
        raise CorruptEntry(f"expected at most {MAX_EXPRESSIONS} size expressions, got {len(texts)}")
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
