"""The padding table: smallest size that holds, limits, and compiled sizes that it must not hide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache.errors import UsageError
from pwcc.capture.padding import PaddingTable, check_fixed_points


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(0, 70))
def test_a_batch_gets_the_smallest_size_that_holds_it(sizes: set[int], count: int) -> None:
    table = PaddingTable(sorted(sizes))
    expected = min((size for size in sizes if size >= count), default=0) if count else 0
    assert table.padded(count) == expected


def test_the_waste_limit_leaves_out_what_pads_too_far() -> None:
    table = PaddingTable((1, 2, 4, 16), waste_limit=2)
    assert [table.padded(n) for n in (1, 2, 3, 4, 5, 7, 8, 16, 17)] == [1, 2, 4, 4, 0, 0, 16, 16, 0]
    with pytest.raises(UsageError):
        PaddingTable((1,), waste_limit=0.5)


def test_a_compiled_size_that_would_be_padded_away_is_refused() -> None:
    table = PaddingTable((1, 2, 4, 8))
    check_fixed_points((1, 4, 100), table)  # 100 is above the largest: it runs unpadded
    with pytest.raises(UsageError, match="sizes 3, 6"):
        check_fixed_points((1, 3, 6), table)
