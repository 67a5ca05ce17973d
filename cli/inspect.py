"""``pwcc inspect``: what a cache directory holds, read as data; nothing in it is executed or unpickled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import LayerOption, open_store


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A cache directory.")],
    entry: Annotated[
        str | None, typer.Argument(metavar="[ENTRY]", help="The first hex digits of one entry's key.")
    ] = None,
    layer: LayerOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="List all of an entry: predicates, factors, sources, kernels.")
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """List the entries of a cache directory, or what one entry is."""
    from pwcc.cache import inspection, ownership

    store = open_store(directory, layer, layered=True)
    for concern in (found for part in (store, *store.layers) for found in ownership.concerns(part.root)):
        output.word(f"warning: loading from this cache needs --trust-dir: {concern}")
    if entry is None:
        from pwcc.cli.listing import listing_lines

        found = inspection.summaries(store, now=time.time())
        if json:
            output.data_json({"entries": [summary.to_json() for summary in found]})
        else:
            output.data(listing_lines(found, width=output.width()))
        return

    from pwcc.cli.choice import choose_entry
    from pwcc.cli.trust import trusted_names

    ref = choose_entry(store, entry)
    detail = inspection.detail(store, ref, trusted=trusted_names())
    if json:
        output.data_json(detail)
    elif not full:
        from pwcc.cli.entry_summary import summary_lines

        output.data(summary_lines(detail, width=output.width()))
    else:
        from pwcc.cli.entry_view import entry_lines

        output.data(entry_lines(detail, width=output.width()))
