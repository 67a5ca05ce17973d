"""Sizes as people write them."""

from __future__ import annotations

import pytest

from pwcc.cache.errors import UsageError
from pwcc.cli.byte_count import parse_byte_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("2G", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("1.5KiB", 1536),
        ("500MB", 500 * 10**6),
        ("3T", 3 * 2**40),
        ("7b", 7),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_byte_count(text, option="--x") == count


@pytest.mark.parametrize("text", ["", "0", "0.1", "-1", "GiB", "2PB", "1e9", "2 Gi B", "nan", "9" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--x: expected a size such as 2GiB"):
        parse_byte_count(text, option="--x")
