"""The text of ``--ranges`` as pairs of token counts."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer

from pwcc.cache.errors import UsageError

_ITEM: Final = re.compile(r"([0-9]{1,10})(?:\s*-\s*([0-9]{1,10}))?")

AllowGapsOption = Annotated[
    bool,
    typer.Option("--allow-gaps", help="Let --ranges leave sizes unserved: such calls raise SizeError."),
]


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``1-64,65-512`` into pairs in their order; one size is a range of one, an empty text gives none.

    Whether the ranges fit each other and ``--max-tokens`` is for ``pwcc.compile.ranges`` to say.

    Raises:
        UsageError: an item of another form, by name.
    """
    if not text.strip():
        return ()
    return tuple(_item(item.strip()) for item in text.split(","))


def _item(item: str) -> tuple[int, int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise UsageError(
            f"expected a range of token counts such as 1-64, got {item!r}",
            hint="for example --ranges 1-64,65-512,513-8192",
        )
    return int(match[1]), int(match[2] or match[1])
