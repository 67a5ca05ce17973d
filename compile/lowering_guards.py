"""Key: sizes that a compiled variant does not hold for, by the guards that lowering added."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pwcc.cache.errors import SpecializationError
from pwcc.compile.piece_compiler import PieceResult
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.rebuild import Variant
from pwcc.compile.runtime.expressions import compile_expressions


def excluded_sizes(result: PieceResult, graph: PieceGraph, variant: Variant) -> dict[int, str]:
    """Return the token counts of a variant's range that violate a guard, each with that guard and its line.

    Raises:
        SpecializationError: a guard on another size, which no list of token counts can say where it holds.
    """
    if not result.guards:
        return {}
    symbols = [name for name in graph.symbols if name not in graph.bounds]
    for text, where in result.guards:
        if len(symbols) != 1 or any(re.search(rf"\b{name}\b", text) for name in graph.bounds):
            raise SpecializationError(
                f"lowering holds only where {text}, which speaks of a size beside the token count",
                where=where,
                hint="declare that size as a number, or make the code independent of it",
            )
    holds = compile_expressions([text for text, _ in result.guards], symbols)
    excluded: dict[int, str] = {}
    for size in range(variant.low, variant.high + 1):
        for good, (text, where) in zip(holds(size), result.guards, strict=True):
            if not good:
                excluded.setdefault(size, text + (f" ({where})" if where else ""))
    return excluded


def require_covered(excluded: dict[int, str], static: Sequence[int], variant: Variant) -> None:
    """Accept excluded sizes that have a static variant, and 1, which can be traced on its own.

    Raises:
        SpecializationError: another size is excluded, with the condition and its line.
    """
    missing = sorted(set(excluded) - set(static) - {1})
    if missing:
        raise SpecializationError(
            f"compiled code for {variant} holds only where {excluded[missing[0]]}; size {missing[0]} and "
            f"{len(missing) - 1} more have no variant",
            hint="give those sizes with --sizes, lower --max-tokens, or make the code independent of the size",
        )
