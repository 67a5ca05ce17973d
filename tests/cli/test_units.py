from __future__ import annotations

import pytest

from pwcc.cli import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345, "12.3 kB"),
        (999_600, "1.0 MB"),
        (123_456_789, "123 MB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert units.bytes_(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0012, "1.2 ms"), (0.5, "500 ms"), (1, "1.0 s"), (3.44, "3.4 s"), (128.4, "128 s")]
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min"), (7300, "2 h"), (86400 * 3, "3 d"), (86400 * 800, "2 y")],
)
def test_age(value: float, text: str) -> None:
    assert units.age(value) == text


def test_counts_and_sizes() -> None:
    assert [units.count(n, "entry") for n in (0, 1, 2000)] == ["0 entries", "1 entry", "2,000 entries"]
    assert units.count(2, "split") == "2 splits"
    assert units.sizes(()) == "-"
    assert units.sizes((1, 2, 4, 5, 6, 9)) == "1,2,4-6,9"
