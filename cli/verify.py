"""``pwcc verify``: every manifest parsed, every blob hashed; nothing in the cache is executed or unpickled."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cache.errors import UsageError
from pwcc.cli import output, units
from pwcc.cli.invocation import DebugOption, JsonOption

if TYPE_CHECKING:
    from pwcc.cache.findings import Verification
    from pwcc.cache.store import EntryRef, Store

MAX_LINES = 100  # findings in text; --json has them all


def verify(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[DIR|ENTRY]", help="A cache directory, or the first digits of an entry's key."),
    ] = None,
    *,
    cache_dir: Annotated[
        Path | None,
        typer.Option(envvar="PWCC_CACHE_DIR", metavar="DIR", help="The cache directory. Default: the user's."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Set damaged entries aside; remove damaged blobs and crashed writers' files."
        ),
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Let a requirement that this host does not meet count, too.")
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Verify a cache directory, or one entry of it. Imports no torch, executes nothing, writes nothing.

    Exit code 0, or 64 plus what was found and not repaired: 1 a damaged entry, 2 a missing or damaged blob,
    4 leftovers, 8 written by others or a bad signature, 16 a requirement of this host (--host), 32 unreadable.
    """
    from dataclasses import replace

    from pwcc.cache.findings import Kind
    from pwcc.cache.store import Store, default_root
    from pwcc.cache.torch_build import quick_facts
    from pwcc.cache.trust import TrustedKeys, keys_directory
    from pwcc.cache.verify import verify as verify_store

    directory, prefix = _target(target, cache_dir or default_root())
    store = Store.open(directory)
    refs = None if prefix is None else [_entry(store, prefix)]
    found = verify_store(
        store, refs, now=time.time(), facts=quick_facts(), trusted=TrustedKeys(keys_directory()).names()
    )
    if not host:
        notes = tuple(f"{f.entry}: {f.message}" for f in found.findings if f.kind is Kind.HOST)
        kept = tuple(f for f in found.findings if f.kind is not Kind.HOST)
        found = replace(found, findings=kept, notes=(*found.notes, *notes))
    if repair and found.mask:
        from pwcc.cache.repair import repair as repair_store

        found = repair_store(store, found)
    if json:
        output.data_json(found.to_json())
    else:
        output.data(_lines(found))
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _target(target: str | None, cache_dir: Path) -> tuple[Path, str | None]:
    """Return the directory and the entry's prefix that one argument names."""
    if target is None:
        return cache_dir, None
    if not Path(target).is_dir() and re.fullmatch(r"[0-9a-fA-F]{4,32}", target):
        return cache_dir, target
    if "/" not in target and not Path(target).exists():
        raise UsageError(f"expected a directory, or 4 to 32 hex digits of an entry's key, got {target!r}")
    return Path(target), None


def _entry(store: Store, prefix: str) -> EntryRef:
    from pwcc.cli.choice import choose_entry

    return choose_entry(store, prefix)


def _lines(found: Verification) -> list[str]:
    lines = []
    for finding in found.findings[:MAX_LINES]:
        lines.append(f"{finding.kind.label}: {finding.where}: {finding.message}")
        if finding.repaired:
            lines.append(f"  {finding.repaired}")
    if len(found.findings) > MAX_LINES:
        lines.append(f"... and {len(found.findings) - MAX_LINES} more: --json has them all")
    lines += [f"note: {note}" for note in found.notes[:MAX_LINES]]
    if found.quarantined:
        lines.append(f"note: {units.count(found.quarantined, 'entry')} in quarantine")
    what = f"{units.count(found.entries, 'entry')}, {units.count(found.blobs, 'blob')}"
    speed = f", {found.bytes / found.seconds / 1e9:.2f} GB/s" if found.seconds > 0 else ""
    took = f"{units.bytes_(found.bytes)} in {units.seconds(found.seconds)}{speed}"
    open_ = sum(finding.repaired is None for finding in found.findings)
    ended = "ok" if not open_ else units.count(open_, "finding")
    return [*lines, f"{ended}: {what}, {took}"]
