"""What a trace admits, and how the sizes that it excludes are cut into ranges."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.compile.coverage import admitted, example_tokens, runs, token_predicates
from pwcc.compile.runtime.calling import CallingConvention, Parameter, ShapePredicate, SizeSymbol

X = Parameter("x", "tensor", "float32", "cpu", ("s0", "s10"), ("s10", 1))


def convention(*texts: str) -> CallingConvention:
    symbols = (SizeSymbol("s0", 0, 0, 1, 40), SizeSymbol("s10", 0, 1, 1, 9))
    return CallingConvention((X,), symbols, tuple(ShapePredicate(text, None) for text in texts))


def test_only_predicates_in_the_token_count_alone_cut_the_range() -> None:
    calling = convention("s0 <= 20", "s10 < 4", "s0 == s10", "s0 % 4 != 0")
    assert [p.text for p in token_predicates(calling)] == ["s0 <= 20", "s0 % 4 != 0"]
    assert admitted(calling, 17, 30) == [17, 18, 19]
    assert admitted(convention(), 3, 5) == [3, 4, 5]
    assert admitted(convention("s0 > 40"), 1, 40) == []


@given(st.sets(st.integers(1, 60)))
def test_runs_hold_each_size_once(sizes: set[int]) -> None:
    found = list(runs(sorted(sizes)))
    assert [size for low, high in found for size in range(low, high + 1)] == sorted(sizes)
    assert all(high + 1 < low for (_, high), (low, _) in pairwise(found))


@pytest.mark.parametrize(("low", "high", "size"), [(1, 40, 7), (2, 3, 3), (8, 40, 11), (17, 40, 19), (6, 8, 7)])
def test_examples_are_no_sizes_that_code_compares_with(low: int, high: int, size: int) -> None:
    assert example_tokens(low, high) == size


@given(st.integers(2, 200), st.integers(0, 200))
def test_an_example_lies_in_its_range(low: int, more: int) -> None:
    size = example_tokens(low, low + more)
    assert low <= size <= low + more
    assert more < 12 or gcd(size, 30) == 1
