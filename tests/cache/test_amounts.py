from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache.amounts import MAX_AMOUNT, parse_age, parse_size, size_text
from pwcc.cache.errors import UsageError

SIZES = {
    "0": 0,
    "1500": 1500,
    "7b": 7,
    "10G": 10 * 10**9,
    "10g": 10 * 10**9,
    "10GB": 10 * 10**9,
    "512MiB": 512 * 2**20,
    "1.5K": 1500,
    "1.5KiB": 1536,
    "0.000001K": 0,
    " 2T ": 2 * 10**12,
}
AGES = {"90s": 90, "15min": 900, "12h": 43200, "30d": 30 * 86400, "2w": 14 * 86400, "1.5h": 5400, "0s": 0}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (856747, "857 kB"), (99_949_999, "99.9 MB"), (10**10, "10.0 GB")],
)
def test_sizes_as_text(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(("text", "expected"), SIZES.items())
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(("text", "expected"), AGES.items())
def test_ages(text: str, expected: int) -> None:
    assert parse_age(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "G", "-1", "+1", "1e3", "1.G", ".5G", "1 G", "10X", "1Gi", "0x10", "nan", "1_000", "١G", "1G\n2"],
)
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a size such as 10G, 1\.5GB or 512MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["30", "1m", "1M", "1y", "d", "-1d", "1d2h", ""])
def test_an_age_needs_a_unit_that_means_one_thing(text: str) -> None:
    with pytest.raises(UsageError, match="expected an age such as 90s"):
        parse_age(text)


def test_what_no_file_system_holds_is_refused() -> None:
    with pytest.raises(UsageError, match=f"at most {MAX_AMOUNT}"):
        parse_size("999999999P")


@given(st.integers(0, 10**9), st.sampled_from([("K", 10**3), ("MiB", 2**20), ("gb", 10**9), ("", 1)]))
def test_a_number_and_a_unit_are_their_product(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


@given(st.text(max_size=30))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    for parse in (parse_size, parse_age):
        with contextlib.suppress(UsageError):
            assert 0 <= parse(text) <= MAX_AMOUNT
