"""``pwcc pin``: keep entries from every collection, or let them go again, or list what is kept."""

from __future__ import annotations

from typing import Annotated

import typer

from pwcc.cache.errors import UsageError
from pwcc.cache.strict import Json
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import CacheDirOption


def pin(
    entries: Annotated[
        list[str] | None, typer.Argument(metavar="[ENTRY...]", help="The first hex digits of entries' keys.")
    ] = None,
    *,
    cache_dir: CacheDirOption = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why; shown by --list and by rm.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Take the pins away.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the pinned entries.")] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Pin entries: gc never removes them, and rm only with --force."""
    from pwcc.cache import pins
    from pwcc.cache.store import Store, default_root
    from pwcc.cli.choice import choose_entry

    if bool(entries) == list_ or (remove and (note or list_)):
        raise UsageError("expected entries to pin, or to --remove the pins of, or --list alone")
    store = Store.open(cache_dir or default_root())
    if list_:
        there = {ref.entry_key for ref in store.entries()}
        kept = [(key, pins.note_of(store, key), key in there) for key in sorted(pins.pinned(store))]
        if json:
            output.data_json({"pins": [{"entry_key": k, "note": n, "present": p} for k, n, p in kept]})
        else:
            output.data(f"{k}  {n}".rstrip() + ("" if p else "  (no such entry)") for k, n, p in kept)
        return
    chosen = list(dict.fromkeys(choose_entry(store, prefix) for prefix in entries or ()))
    changed: list[Json] = []
    for ref in chosen:
        if remove:
            if pins.unpin(store, ref.entry_key):
                changed.append(ref.entry_key)
        else:
            pins.pin(store, ref, note=note)
            changed.append(ref.entry_key)
    if json:
        output.data_json({"removed" if remove else "pinned": changed})
    else:
        output.data(f"{'unpinned' if remove else 'pinned'} {key}" for key in changed)
        if len(changed) < len(chosen):
            output.word("note: the others were not pinned")
