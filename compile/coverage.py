"""Key: which token counts a trace holds for, and the program that serves just these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd

from pwcc.cache.errors import SpecializationError
from pwcc.compile.conditions import first_violation
from pwcc.compile.runtime.calling import TOKENS, CallingConvention, ShapePredicate
from pwcc.compile.runtime.expressions import compile_expressions
from pwcc.compile.trace import Trace

Run = tuple[int, int]
"""Consecutive token counts, the first and the last of them."""

# The trace's example where it can be: not 0 or 1, which specialise, and no size that code is likely to
# compare with or divide by.
EXAMPLE_TOKENS = 7


def example_tokens(low: int, high: int) -> int:
    """Return the token count to trace a range with."""
    if low <= EXAMPLE_TOKENS <= high:
        return EXAMPLE_TOKENS
    odd = (size for size in range(low + 2, high + 1) if gcd(size, 30) == 1)
    return next(odd, high)


def uses(text: str, symbol: str) -> bool:
    """Tell whether a condition speaks of a symbol."""
    return re.search(rf"\b{symbol}\b", text) is not None


def token_predicates(calling: CallingConvention) -> list[ShapePredicate]:
    """Return the predicates in the token count alone."""
    others = [symbol.name for symbol in calling.symbols if symbol.name != TOKENS]
    return [p for p in calling.predicates if not any(uses(p.text, name) for name in others)]


def admitted(calling: CallingConvention, low: int, high: int) -> list[int]:
    """Return the token counts of a range for which every predicate in the token count alone holds."""
    conditions = token_predicates(calling)
    if not conditions:
        return list(range(low, high + 1))
    holds = compile_expressions([condition.text for condition in conditions], [TOKENS])
    return [size for size in range(low, high + 1) if all(holds(size))]


def runs(sizes: Iterable[int]) -> Iterator[Run]:
    """Yield ascending sizes as runs of consecutive ones."""
    first = last = None
    for size in sizes:
        if first is None or last is None:
            first = last = size
        elif size == last + 1:
            last = size
        else:
            yield first, last
            first = last = size
    if first is not None and last is not None:
        yield first, last


def restricted(found: Trace, low: int, high: int) -> Trace:
    """Return a trace for calls of ``low`` to ``high`` tokens, without predicates that all of them meet."""
    calling = found.calling
    ranges = {TOKENS: range(low, high + 1)}
    alone = {p.text for p in token_predicates(calling)}
    always = {text for text in alone if first_violation(text, ranges) == "never"}
    symbols = [replace(s, low=low, high=high) if s.name == TOKENS else s for s in calling.symbols]
    kept = [predicate for predicate in calling.predicates if predicate.text not in always]
    return replace(found, calling=replace(calling, symbols=tuple(symbols), predicates=tuple(kept)))


def require_other_sizes(found: Trace) -> None:
    """Refuse a trace that holds for fewer values of a size beside the token count than were asked for.

    Raises:
        SpecializationError: with the condition and its line.
    """
    for symbol in found.calling.symbols:
        if symbol.name == TOKENS:
            continue
        rest = [other.name for other in found.calling.symbols if other is not symbol]
        for predicate in found.calling.predicates:
            if not uses(predicate.text, symbol.name) or any(uses(predicate.text, name) for name in rest):
                continue
            argument = found.calling.parameters[symbol.parameter].name
            shown = re.sub(rf"\b{symbol.name}\b", "m", predicate.text)
            raise SpecializationError(
                f"the code holds only where {shown} for the size m of {argument!r} (dimension {symbol.dim}), "
                f"but {symbol.low} to {symbol.high} were asked for",
                where=found.lines.get(predicate.text, predicate.where),
                hint="declare the bounds that hold, such as 'm<=512', or make the code independent of the size",
            )


def narrowed_error(found: Trace, low: int, high: int) -> SpecializationError:
    """Return the error of a trace that does not hold for all of a range: condition, first size and line."""
    first = next(
        predicate
        for predicate in token_predicates(found.calling)
        if first_violation(predicate.text, {TOKENS: range(low, high + 1)}) != "never"
    )
    shown = re.sub(rf"\b{TOKENS}\b", "n", first.text)
    size = first_violation(first.text, {TOKENS: range(low, high + 1)})
    return SpecializationError(
        f"the code holds only where {shown} for n tokens, but sizes {low} to {high} were asked for; "
        f"size {size} is the first that does not fit",
        where=found.lines.get(first.text, first.where),
        hint="make the code independent of the size there, give the sizes that do not fit with --sizes, or "
        "lower --max-tokens to the range that holds",
    )
