"""``pwcc diff``: the factors in which two entries differ; nothing is executed, and torch is not imported."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cli import output, units
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import LayerOption, open_store

if TYPE_CHECKING:
    from pwcc.cache.entry_diff import EntryChange
    from pwcc.cache.factors import Absent
    from pwcc.cache.strict import Json

MAX_SHOWN = 50
MAX_VALUE = 200


def diff(
    first: Annotated[str, typer.Argument(metavar="ENTRY", help="The first hex digits of an entry's key.")],
    second: Annotated[str, typer.Argument(metavar="ENTRY", help="The same of another entry.")],
    *,
    cache_dir: Annotated[
        Path | None,
        typer.Option(envvar="PWCC_CACHE_DIR", metavar="DIR", help="Cache to read. Default: the user's."),
    ] = None,
    other_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The second entry's cache. Default: the same.")
    ] = None,
    layer: LayerOption = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Compare two entries, factor by factor."""
    from pwcc.cache.entry_diff import compare_entries
    from pwcc.cache.store import Store
    from pwcc.cli.choice import choose_entry

    store = open_store(cache_dir, layer, layered=True)
    other = store if other_dir is None else Store.open(other_dir)
    refs = choose_entry(store, first), choose_entry(other, second)
    changes = compare_entries((store, refs[0]), (other, refs[1]))
    if json:
        output.data_json(
            {
                "first": refs[0].entry_key,
                "second": refs[1].entry_key,
                "changes": [change.to_json() for change in changes],
            }
        )
    else:
        output.data(change_lines(changes))


def change_lines(changes: list[EntryChange]) -> list[str]:
    """Return one block per difference, at most ``MAX_SHOWN``."""
    from pwcc.cache.difference import printable

    if not changes:
        return ["no factor differs"]
    lines: list[str] = []
    for change in changes[:MAX_SHOWN]:
        note = f" ({change.note})" if change.note else ""
        lines += [
            f"{printable(change.path)}{note}",
            f"  - {_shown(change.first)}",
            f"  + {_shown(change.second)}",
        ]
    more = len(changes) - MAX_SHOWN
    return [*lines, *([f"and {more} more: --json shows all"] if more > 0 else []), _total(len(changes))]


def _total(number: int) -> str:
    return f"{units.count(number, 'difference')}"


def _shown(value: Json | Absent) -> str:
    from pwcc.cache.difference import printable
    from pwcc.cache.factors import ABSENT

    return "absent" if value is ABSENT else shorten(printable(str(value)), MAX_VALUE, placeholder="...")
