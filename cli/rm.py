"""``pwcc rm``: remove entries by name, and the files that only they needed."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pwcc.cache.errors import EntryKept
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import CacheDirOption


def rm(
    entries: Annotated[
        list[str], typer.Argument(metavar="ENTRY...", help="The first hex digits of entries' keys.")
    ],
    *,
    cache_dir: CacheDirOption = None,
    force: Annotated[bool, typer.Option("--force", help="Also what is pinned, or held by a reader.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, remove nothing.")
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Remove entries. All or none: one that is unknown, pinned or in use stops the command before it begins."""
    from pwcc.cache import activity, pins
    from pwcc.cache.gc import collect
    from pwcc.cache.retention import Limits
    from pwcc.cache.store import Store, default_root
    from pwcc.cli.choice import choose_entry
    from pwcc.cli.gc_view import collected_lines

    store = Store.open(cache_dir or default_root())
    chosen = list(dict.fromkeys(choose_entry(store, prefix) for prefix in entries))
    pinned = pins.pinned(store)
    for ref in chosen if not force else ():
        if ref.entry_key in pinned:
            note = pins.note_of(store, ref.entry_key)
            raise EntryKept(
                f"entry {ref.entry_key} is pinned" + (f": {note}" if note else ""),
                hint="pwcc pin --remove it first, or pass --force",
            )
        if activity.is_read(ref):
            raise EntryKept(f"a process uses entry {ref.entry_key}", hint="stop it first, or pass --force")
    now = time.time()
    report = collect(store, Limits(), now=now, dry_run=dry_run, asked=chosen, force=force)
    for note in report.notes:
        output.word(f"note: {note}")
    if json:
        output.data_json(report.to_json())
    else:
        output.data(collected_lines(report, now=now, width=output.width()))
    if len(report.removed) < len(chosen):
        output.word("error: an entry came into use meanwhile and was kept")
        raise typer.Exit(1)
