"""The text of ``--splitting-ops`` as operator names."""

from __future__ import annotations

import re
from typing import Final

from pwcc.cache.errors import UsageError

_NAME: Final = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


def parse_splitting_ops(text: str) -> tuple[str, ...]:
    """Parse ``a::b,c::d.overload`` into names in their order; an empty text gives none.

    Raises:
        UsageError: an item of another form, by name.
    """
    if not text.strip():
        return ()
    names = [item.strip() for item in text.split(",")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"expected an operator such as pwcc::attention, got {name!r}",
                hint="separate several with commas; an empty text leaves the graph whole",
            )
    return tuple(dict.fromkeys(names))
