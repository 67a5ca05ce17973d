"""The list of known faults names tests that exist."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
OF_THE_KEY = {
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    9,
    10,
    11,
    13,
    14,
    15,
    *range(18, 23),
    *range(24, 29),
    32,
    99,
    103,
}
OF_THE_GRAPH = {59, *range(61, 71), *range(72, 82), *range(83, 88)}
OF_THE_STORE = {*range(37, 42), *range(43, 47), *range(48, 56), 57, 58, 101, 102}
OF_CAPTURE = {88, 89, 90, *range(92, 97)}


def test_every_named_test_exists_and_every_report_has_a_row() -> None:
    text = (REPOSITORY / "docs/faults.md").read_text()
    named = NAMED.findall(text)
    reports = OF_THE_KEY | OF_THE_GRAPH | OF_THE_STORE | OF_CAPTURE
    assert len(named) > len(reports)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^ *def {name}\(", (REPOSITORY / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert sorted(reports - rows) == []
