from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache.errors import UsageError
from pwcc.capture.sizes import parse_sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1,2,4,8", (1, 2, 4, 8)),
        ("8, 2 ,2,1", (1, 2, 8)),
        ("1-4", (1, 2, 3, 4)),
        ("3-3,1 - 2", (1, 2, 3)),
        ("", ()),
        ("  ", ()),
        ("64", (64,)),
    ],
)
def test_sizes_are_sorted_and_unique(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text, max_tokens=64) == sizes


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("1,0", "'0'"),
        ("-1", "'-1'"),
        ("1,,2", "''"),
        ("1,", "''"),
        ("two", "'two'"),
        ("1.5", "'1.5'"),
        ("4-1", "'4-1'"),
        ("0-3", "'0-3'"),
        ("1-", "'1-'"),
        ("65", "'65'"),
        ("1-65", "'1-65'"),
        ("1-9999999999", "'1-9999999999'"),
        ("99999999999999999999", "'99999999999999999999'"),
        ("٣", "'٣'"),
        ("1_0", "'1_0'"),
    ],
)
def test_the_item_that_is_no_size_is_named(text: str, item: str) -> None:
    with pytest.raises(UsageError, match="got") as caught:
        parse_sizes(text, max_tokens=64)
    assert item in caught.value.message


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31])
def test_max_tokens_has_bounds(max_tokens: int) -> None:
    with pytest.raises(UsageError, match="--max-tokens"):
        parse_sizes("1", max_tokens=max_tokens)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=20))
def test_any_list_round_trips(sizes: list[int]) -> None:
    assert parse_sizes(",".join(map(str, sizes)), max_tokens=4096) == tuple(sorted(set(sizes)))


@given(st.text(max_size=12))
def test_any_text_gives_sizes_or_a_usage_error(text: str) -> None:
    try:
        sizes = parse_sizes(text, max_tokens=64)
    except UsageError:
        return
    assert all(1 <= size <= 64 for size in sizes)
    assert list(sizes) == sorted(set(sizes))
