"""``pwcc report``: one entry as one HTML file, to look at or to send; nothing of the entry is executed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.store_options import LayerOption, open_store

if TYPE_CHECKING:
    from pwcc.cache.store import EntryRef, Store


def report(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR|ENTRY", help="A cache, an entry's folder, or a key in the default cache."),
    ],
    entry: Annotated[
        str | None, typer.Argument(metavar="[ENTRY]", help="The first hex digits of one entry's key.")
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The file to write; replaced if it is there.")
    ] = Path("report.html"),
    layer: LayerOption = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Write one entry as an HTML page: pieces, bytes, seconds, kernels."""
    from pwcc.cache import atomic, inspection
    from pwcc.cache.errors import UsageError
    from pwcc.cli.report_page import page
    from pwcc.cli.trust import trusted_names

    store, ref = _find(directory, entry, layer)
    text = page(inspection.detail(store, ref, trusted=trusted_names()))
    if not out.parent.is_dir():
        raise UsageError(f"expected a file in a directory that exists, got {str(out)!r}")
    with atomic.os_errors("writing the report", out):
        atomic.write_replace(out, text.encode(), tmp=out.parent)
    if json:
        output.data_json({"entry_key": ref.entry_key, "file": str(out), "bytes": len(text.encode())})
    else:
        output.data([f"{out}: entry {ref.entry_key[: inspection.SHORT]}, {len(text.encode()):,} bytes"])


def _find(first: str, entry: str | None, layer: list[Path] | None) -> tuple[Store, EntryRef]:
    """Return the entry that the arguments name."""
    from pwcc.cache.errors import UsageError
    from pwcc.cache.store import default_root
    from pwcc.cli.choice import choose_entry

    path = Path(first)
    if entry is not None:
        store = open_store(path, layer, layered=True)
        return store, choose_entry(store, entry)
    if (path / "manifest.json").is_file() and len(path.absolute().parents) > 3:
        store = open_store(path.absolute().parents[3], layer)
        return store, choose_entry(store, path.name)
    if not path.is_dir():
        store = open_store(default_root(), layer, layered=True)
        return store, choose_entry(store, first)
    store = open_store(path, layer, layered=True)
    found = list(store.entries())
    if len(found) != 1:
        raise UsageError(
            f"expected the key of one entry, since the cache holds {len(found)}",
            where=str(path),
            hint=f"pwcc inspect {first} lists them",
        )
    return store, found[0]
