"""A model's keys and factors as text."""

from __future__ import annotations

from collections.abc import Mapping

from pwcc.cache.strict import Json
from pwcc.cli.entry_view import outline

_LATER = "  known after tracing; --cache-dir shows those of an entry that serves this model"


def key_lines(found: Mapping[str, Json], *, width: int) -> list[str]:
    """Return the JSON of ``pwcc key`` as lines of at most ``width``."""
    entry = found.get("entry_key")
    lines = [f"lookup key  {found['lookup_key']}", f"entry key   {entry or 'known after tracing'}"]
    lines += ["", "lookup key, of", *outline(found["lookup"], width=width, indent="  ")]
    known = found["known"]
    for name, group in known.items() if isinstance(known, dict) else ():
        if isinstance(group, dict):
            lines += ["", f"{name} ({str(group['digest'])[:12]})"]
            lines += outline(group["factors"], width=width, indent="  ")
    lines += ["", "switches, which no key holds", *outline(found["switches"], width=width, indent="  ")]
    traced = found.get("after_tracing")
    lines += ["", "sources and what else a trace tells"]
    return lines + ([_LATER] if traced is None else outline(traced, width=width, indent="  "))
