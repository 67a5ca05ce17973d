"""``pwcc gc``: remove entries beyond the limits, and what no entry needs any more."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import CacheDirOption


def gc(
    *,
    cache_dir: CacheDirOption = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            envvar="PWCC_MAX_SIZE", metavar="10G", help="Remove what was used longest ago until the rest fits."
        ),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="30d", help="Remove entries that were last used longer ago.")
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Keep the N last used per lookup key whatever their age, older ones go."
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Leave unused files alone that are younger. Default: by who compiles."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, remove nothing.")
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Remove entries beyond limits, and what nothing uses.

    Pinned entries stay, and those that a reader holds. Safe beside compiles, loads and other collections.
    """
    from pwcc.cache.amounts import parse_age, parse_size
    from pwcc.cache.gc import collect
    from pwcc.cache.retention import Limits
    from pwcc.cache.store import Store, default_root
    from pwcc.cli.gc_view import collected_lines

    limits = Limits(
        max_bytes=None if max_size is None else parse_size(max_size),
        max_age_s=None if max_age is None else parse_age(max_age),
        keep_last=keep_last,
    )
    grace_s = None if grace is None else parse_age(grace)
    now = time.time()
    report = collect(Store.open(cache_dir or default_root()), limits, now=now, grace_s=grace_s, dry_run=dry_run)
    for note in report.notes:
        output.word(f"note: {note}")
    if json:
        output.data_json(report.to_json())
    else:
        output.data(collected_lines(report, now=now, width=output.width()))
