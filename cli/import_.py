"""``pwcc import``: publish the entries of an archive, every byte verified before any of it can be seen."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from pwcc.cli import output, units
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import CacheDirOption

STDIN = "-"


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What pwcc export wrote; - for stdin.")],
    *,
    cache_dir: CacheDirOption = None,
    require_signature: Annotated[
        bool, typer.Option("--require-signature", help="Take only entries that a trusted key signed.")
    ] = False,
    max_size: Annotated[
        str, typer.Option(metavar="64G", help="Refuse an archive whose blobs take more together.")
    ] = "64GiB",
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Import an archive into a cache, made if needed. All or nothing; importing it again changes nothing."""
    from pwcc.cache import trust
    from pwcc.cache.amounts import parse_size
    from pwcc.cache.atomic import os_errors
    from pwcc.cache.importing import read_archive
    from pwcc.cache.store import Store, default_root

    limit = parse_size(max_size)
    policy = trust.SignaturePolicy.required() if trust.is_required(require_signature) else None
    root = cache_dir or default_root()
    with contextlib.ExitStack() as stack:
        if file == STDIN:
            stream, where = sys.stdin.buffer, "standard input"
        else:
            stack.enter_context(os_errors("opening the archive", Path(file)))
            stream, where = stack.enter_context(Path(file).open("rb")), file
        incoming = read_archive(stream, where=where, policy=policy, max_bytes=limit)
        done = incoming.publish(Store.create(root))  # made only now: what is refused leaves nothing
    if json:
        output.data_json({"entries": [entry.to_json() for entry in done]})
        return
    for entry in done:
        state = "imported" if entry.new else "was there already"
        signed = f", {units.count(entry.signatures, 'signature')} added" if entry.signatures else ""
        output.data([f"{entry.ref.entry_key}  {state}{signed}  {units.bytes_(entry.bytes)}"])
        if entry.kept:
            what = units.count(entry.kept, "signature")
            output.word(f"note: {what} of entry {entry.ref.entry_key} kept: valid, unlike what the archive has")
        if not entry.same:
            output.word(f"note: entry {entry.ref.entry_key} that is there has other bytes; it was kept")
