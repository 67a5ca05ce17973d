"""Key: the ranges of token counts that get a dynamic variant each, checked and in one form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pwcc.cache.errors import UsageError
from pwcc.compile.rebuild import Variant

Range = tuple[int, int]
"""The lowest and the highest token count of a range, both of it."""

# What Inductor takes a size for that it knows nothing about (its ``unbacked_symint_fallback``).
ASSUMED_TOKENS = 8192


def checked_ranges(
    ranges: Sequence[Range], *, sizes: Sequence[int], max_tokens: int, allow_gaps: bool = False
) -> tuple[Range, ...]:
    """Return the ranges ascending, each once; ``()`` for the one range that holds every size.

    Without ranges one dynamic variant serves ``1..max_tokens``. With them only they do, and static
    variants, so together they must leave no size out, unless ``allow_gaps`` says that this is meant.

    Raises:
        UsageError: no pairs of whole numbers; a range that ends before it begins, or lies outside
            ``1..max_tokens``; a size that nothing serves.
    """
    for span in ranges:
        if not isinstance(span, (tuple, list)) or [type(end) for end in span] != [int, int]:
            raise UsageError(f"expected ranges as pairs of whole numbers such as (1, 64), got {span!r}")
    for low, high in ranges:
        if low > high:
            raise UsageError(f"expected a range from low to high, got {low}-{high}")
        if low < 1 or high > max_tokens:
            raise UsageError(
                f"expected ranges within 1..{max_tokens}, got {low}-{high}",
                hint=f"raise --max-tokens to {high}" if high > max_tokens else "token counts start at 1",
            )
    found = canonical(ranges, max_tokens)
    gap = next(gaps(found, sizes, max_tokens), None) if found else None
    if gap is not None and not allow_gaps:
        raise UsageError(
            f"expected ranges and sizes that serve all of 1..{max_tokens}, got none for {shown(gap)}",
            hint=f"add {shown(gap)} to --ranges, lower --max-tokens to the last range's end, or pass "
            "--allow-gaps: calls of other sizes then raise SizeError",
        )
    return found


def canonical(ranges: Sequence[Range], max_tokens: int) -> tuple[Range, ...]:
    """Return ranges in the form that a key holds: ascending, each once, none where one holds every size."""
    found = tuple(sorted({(low, high) for low, high in ranges}))
    return () if found == ((1, max_tokens),) else found


def serves(ranges: Sequence[Range], sizes: Sequence[int], size: int) -> bool:
    """Tell whether a size was asked for: it has a static variant or lies in a range, or there are no ranges."""
    return not ranges or size in sizes or any(low <= size <= high for low, high in ranges)


def held_apart(ranges: Sequence[Range], variants: Sequence[Range], sizes: Sequence[int] = ()) -> bool:
    """Tell whether every range has a variant of its own: one that serves nothing outside of it.

    ``sizes`` were asked for by themselves: their variants are of a range only where it holds no other size.
    """
    return all(
        any(
            low <= start and end <= high and (start not in sizes or end > start or low == high)
            for start, end in variants
        )
        for low, high in ranges
    )


def gaps(ranges: Sequence[Range], sizes: Sequence[int], max_tokens: int) -> Iterator[Range]:
    """Yield the runs of token counts in ``1..max_tokens`` that no range and no size serves, ascending."""
    following = 1
    for low, high in sorted([*ranges, *((size, size) for size in sizes)]):
        if low > following:
            yield following, low - 1
        following = max(following, high + 1)
    if following <= max_tokens:
        yield following, max_tokens


def shown(span: Range) -> str:
    """Return a range as a user writes it: ``65-512``, or ``7`` for one size."""
    low, high = span
    return str(low) if low == high else f"{low}-{high}"


def dynamic_variants(ranges: Sequence[Range], low: int, high: int) -> tuple[Variant, ...]:
    """Return one dynamic variant per range, as far as it lies in ``[low, high]``; the whole without ranges."""
    cut = [(max(low, first), min(high, last)) for first, last in ranges or ((low, high),)]
    return tuple(dict.fromkeys(Variant(first, last) for first, last in cut if first <= last))


def inductor_options(ranges: Sequence[Range], variant: Variant) -> Mapping[str, object]:
    """Return what Inductor is told of a range beside its bounds: a size to plan blocks for.

    Without ranges, and for one size, nothing is changed: an entry without ranges keeps its key.
    """
    if variant.static or not ranges:
        return {}
    return {"unbacked_symint_fallback": min(variant.high, ASSUMED_TOKENS)}
