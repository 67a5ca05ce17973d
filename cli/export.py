"""``pwcc export``: write entries as one archive, verified on the way; same entries, same bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pwcc.cache.errors import UsageError
from pwcc.cli import output, units
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import CacheDirOption, LayerOption, open_store

STDOUT = "-"


def export(
    entries: Annotated[
        list[str] | None, typer.Argument(metavar="[ENTRY...]", help="The first hex digits of entries' keys.")
    ] = None,
    *,
    to: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="FILE.tar or FILE.tar.zst; - for a tar on stdout."),
    ],
    cache_dir: CacheDirOption = None,
    layer: LayerOption = None,
    all_: Annotated[bool, typer.Option("--all", help="Export every entry of the cache.")] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Export entries with their signatures and blobs. Pins and capture plans stay behind."""
    from pwcc.cache.exporting import export_file, export_stream
    from pwcc.cli.choice import choose_entry

    if bool(entries) == all_:
        raise UsageError("expected the entries to export, or --all", hint="pwcc inspect DIR lists them")
    if to == STDOUT and json:
        raise UsageError("expected a file for --json: both would go to stdout", hint="pass -o FILE.tar")
    if to == STDOUT and sys.stdout.isatty():
        raise UsageError("expected a file or a pipe, got a terminal", hint="pass -o FILE.tar")
    store = open_store(cache_dir, layer, layered=True)
    chosen = list(store.entries()) if all_ else [choose_entry(store, prefix) for prefix in entries or ()]
    if to == STDOUT:
        with output.binary() as stream:
            done = export_stream(store, chosen, stream)
    else:
        done = export_file(store, chosen, Path(to))
    if json:
        output.data_json(
            {
                "entries": [ref.entry_key for ref in done.entries],
                "signatures": done.signatures,
                "blobs": done.blobs,
                "tar_bytes": done.bytes,
            }
        )
        return
    what = units.count(len(done.entries), "entry")
    line = f"exported {what}, {units.count(done.blobs, 'blob')}: {units.bytes_(done.bytes)} before compression"
    if to == STDOUT:
        output.word(line)
    else:
        output.data([line])
