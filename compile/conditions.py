"""Key: what a trace assumes of its sizes, as predicates with the user's line that asked for each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import CorruptEntry, TraceError, UnsealableError
from pwcc.compile.runtime.calling import ShapePredicate, SizeSymbol
from pwcc.compile.runtime.expressions import compile_expressions
from pwcc.compile.torch_private import symbols

Condition = tuple[Any, str | None]
"""A sympy condition, and ``file:line: code`` of the user's frame that it comes from."""

Said = tuple[str, str | None]
"""A condition as text in the program's symbols, and the line as above."""

_TORCH = str(Path(torch.__file__).parent)
_ASSERTS = frozenset(
    {
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


def take_asserts(graph_module: fx.GraphModule, env: Any) -> list[Condition]:
    """Remove assert nodes from the graph and return their conditions with the user's line."""
    graph = graph_module.graph
    found: list[Condition] = []
    for node in list(graph.nodes):
        if str(node.target) not in _ASSERTS:
            continue
        condition = node.args[0]
        if isinstance(condition, fx.Node) and str(node.target).startswith("aten._assert"):
            value = condition.meta.get("example_value")
            if isinstance(value, torch.SymBool):
                found.append((symbols.expression(value, env), source_line(node)))
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        value = node.meta.get("example_value")
        if node.op == "call_function" and not node.users and isinstance(value, (torch.SymBool, bool)):
            graph.erase_node(node)
    return found


def source_line(node: fx.Node) -> str | None:
    """Return ``file:line: code`` of the innermost frame behind a node, outside torch if there is one."""
    lines = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    files = [index for index, line in enumerate(lines) if line.strip().startswith("File ")]
    if not files:
        return None
    own = [index for index in files if f'"{_TORCH}' not in lines[index]]
    last = (own or files)[-1]
    _, path, rest = lines[last].strip().split('"', 2)
    number = rest.split("line", 1)[1].split(",", 1)[0].strip()
    code = lines[last + 1].strip() if last + 1 < len(lines) else ""
    return f"{path}:{number}: {code}"


def predicates(
    conditions: Sequence[Condition],
    env: Any,
    names: Mapping[Any, str],
    size_symbols: Sequence[SizeSymbol],
    said: Sequence[Said] = (),
) -> tuple[tuple[ShapePredicate, ...], dict[str, str]]:
    """Turn conditions into predicates, and return with them the full source line of each by its text.

    Conditions that hold for every size in the symbols' ranges are dropped; whether they do is tried for
    each size. Predicates keep a file's name and the line number only: a path would tie the entry to its
    builder. ``said`` are further conditions, as text.

    Raises:
        TraceError: a condition on a value that is computed at run time.
        UnsealableError: a condition without a text.
    """
    ranges = {symbol.name: range(symbol.low, symbol.high + 1) for symbol in size_symbols}
    kept: dict[str, ShapePredicate] = {}
    lines: dict[str, str] = {}
    texts: list[tuple[str | None, str | None]] = []
    for expr, where in conditions:
        simplified = symbols.simplified(expr, env)
        if any(symbol not in names for symbol in symbols.free_symbols(simplified)):
            raise run_time_value(simplified, where)
        texts.append((symbols.condition_text(simplified, names), where))
    for text, where in (*texts, *said):
        if text is None or first_violation(text, ranges, where) == "never":
            continue
        kept.setdefault(text, ShapePredicate(text, _portable(where)))
        if where is not None:
            lines.setdefault(text, where)
    return tuple(kept[text] for text in sorted(kept)), lines


def run_time_value(expr: object, where: str | None) -> TraceError:
    """Return the error for a size that the graph computes; a trace with a hint for the size may know it."""
    error = TraceError(
        f"the code depends on a value that is known only at run time: {expr}",
        where=where,
        hint="item(), nonzero() and masks as indices give such values; compute with tensors instead",
    )
    error.data_dependent = True
    return error


def first_violation(text: str, ranges: Mapping[str, range], where: str | None = None) -> int | str | None:
    """Return the smallest size that violates a condition in one symbol, ``"never"``, or None if it has more.

    Raises:
        UnsealableError: the condition leaves the grammar of size expressions.
    """
    try:
        used = [name for name in ranges if _depends(text, name, list(ranges))]
        if len(used) != 1:
            return None
        holds = compile_expressions([text], used)
    except CorruptEntry as error:
        raise UnsealableError(
            f"the code's condition on its sizes has no portable form: {error.message}", where=where
        ) from None
    return next((size for size in ranges[used[0]] if not holds(size)[0]), "never")


def _depends(text: str, name: str, names: Sequence[str]) -> bool:
    compile_expressions([text], names)
    with contextlib.suppress(CorruptEntry):
        compile_expressions([text], [other for other in names if other != name])
        return False
    return True


def _portable(where: str | None) -> str | None:
    if where is None:
        return None
    path, separator, rest = where.partition(":")
    return path.rsplit("/", 1)[-1] + separator + rest.partition(":")[0]
