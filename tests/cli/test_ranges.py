"""The text of ``--ranges``."""

from __future__ import annotations

import pytest

from pwcc.cache.errors import UsageError
from pwcc.cli.ranges import parse_ranges


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("  ", ()),
        ("1-64", ((1, 64),)),
        ("65-512, 1-64", ((65, 512), (1, 64))),
        ("7,1 - 8", ((7, 7), (1, 8))),
        ("8-1", ((8, 1),)),  # read as it stands; pwcc.compile.ranges refuses it
    ],
)
def test_parsed(text: str, found: tuple[tuple[int, int], ...]) -> None:
    assert parse_ranges(text) == found


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1..64", "1-64-128", "1-64,", "1.5-2", "\u0661-8", "9" * 11])
def test_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="expected a range of token counts such as 1-64, got"):
        parse_ranges(text)
