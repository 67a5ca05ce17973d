"""The default list of sizes, and a user's made usable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache.errors import UsageError
from pwcc.capture.size_list import default_sizes, usable_sizes


def test_the_default_list() -> None:
    sizes = default_sizes(max_num_seqs=128)
    assert len(sizes) == 35
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-2:] == (248, 256)
    assert default_sizes(max_num_seqs=1000)[-3:] == (480, 496, 512)
    assert default_sizes(max_num_seqs=256, max_tokens=3) == (1, 2, 3)
    assert default_sizes(max_num_seqs=3)[-1] == 6


@given(st.integers(1, 600), st.integers(1, 600))
def test_the_largest_batch_always_has_a_size(seqs: int, tokens: int) -> None:
    sizes = default_sizes(max_num_seqs=seqs, max_tokens=tokens)
    assert sizes[-1] == min(2 * seqs, 512, tokens)
    assert list(sizes) == sorted(set(sizes))


@given(st.sets(st.integers(1, 100), min_size=1), st.integers(1, 16))
def test_a_multiple_divides_and_the_largest_is_not_lost(sizes: set[int], multiple: int) -> None:
    found = usable_sizes(sizes, max_tokens=100, multiple=multiple)
    assert all(size % multiple == 0 and 0 < size <= 100 for size in found)
    assert found[-1] >= min(max(sizes), 100 // multiple * multiple)


@pytest.mark.parametrize(("sizes", "limit"), [((), 8), ((0, 1), 8), ((9,), 8)])
def test_impossible_sizes_are_named(sizes: tuple[int, ...], limit: int) -> None:
    with pytest.raises(UsageError):
        usable_sizes(sizes, max_tokens=limit)
