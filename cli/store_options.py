"""The options that name the cache of a command: the directory, and read-only layers below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pwcc.cache.store import Store

CacheDirOption = Annotated[
    Path | None,
    typer.Option(envvar="PWCC_CACHE_DIR", metavar="DIR", help="The cache. Default: the user's."),
]
LayerOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--layer",
        metavar="DIR",
        help="A cache to read from below this one, never written; repeat for more. Default: PWCC_LAYERS.",
    ),
]


def open_store(directory: Path | None, layer: list[Path] | None = None, *, layered: bool = False) -> Store:
    """Open a cache for reading; ``layered`` tells whether the command reads layers, named or by PWCC_LAYERS."""
    from pwcc.cache.layers import named, open_layered
    from pwcc.cache.store import default_root

    return open_layered(directory or default_root(), named(layer or None) if layered else ())
