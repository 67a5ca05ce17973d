"""Store: read-only caches below a writable one, such as one that was baked into an image.

A layered store reads from all of its directories and writes to the uppermost alone. An entry that lies in
two of them counts once, as the upper one's. Blobs are content-addressed, so they are taken from the first
layer that has them intact. Publishing copies what an entry needs from below: every directory is complete
by itself, and a layer may be taken away. Layers are named in order, upper first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pwcc.cache import atomic, layout, ownership
from pwcc.cache.errors import CorruptEntry, MissingBlob, NotAStore
from pwcc.cache.ids import BlobDigest

if TYPE_CHECKING:
    from pwcc.cache.manifest import Manifest
    from pwcc.cache.store import Store

VARIABLE: Final = "PWCC_LAYERS"


def named(asked: Iterable[str | Path] | None, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the layers that a caller asked for; where it is None, those of ``PWCC_LAYERS`` (``A:B``)."""
    if asked is not None:
        return tuple(Path(path) for path in asked)
    return tuple(Path(part) for part in environ.get(VARIABLE, "").split(os.pathsep) if part)


def open_layered(root: Path, paths: Sequence[Path]) -> Store:
    """Open a store for reading, with read-only layers below it; writes nothing.

    With layers, ``root`` may be empty or missing: nothing was written to it yet.

    Raises:
        NotAStore: ``root`` holds something else, or a layer is no pwcc cache. NewerFormat: of a later pwcc.
    """
    from pwcc.cache.store import Store

    if not paths:
        return Store.open(root)
    below = open_layers(paths, upper=root)
    with atomic.os_errors("opening the cache directory", root):
        if not layout.is_empty(root):
            layout.check(root)
    return Store(root, layers=below)


def create_layered(root: Path, paths: Sequence[Path]) -> Store:
    """Open a store for writing, with read-only layers below it.

    Raises: as ``Store.create``, and :func:`open_layered` for the layers.
    """
    from pwcc.cache.store import Store

    below = open_layers(paths, upper=root)
    store = Store.create(root)
    store.layers = below
    return store


def find_layered(root: Path, paths: Sequence[Path], *, hint: str) -> Store:
    """Open a store as :func:`open_layered`, for a caller to whom nothing there at all is a miss.

    Raises:
        CacheMiss: there is no layer, and ``root`` is empty or missing. Others as :func:`open_layered`.
    """
    from pwcc.cache.store import Store

    return open_layered(root, paths) if paths else Store.find(root, hint=hint)


def require_trust(store: Store, *, trust: bool = False) -> tuple[Path, ...]:
    """Raise unless every directory of ``store`` is trusted; return those that are trusted by name.

    Raises:
        UntrustedStore: see :func:`pwcc.cache.ownership.require`.
    """
    roots = (store.root, *(layer.root for layer in store.layers))
    return tuple(root for root in roots if ownership.require(root, trust=trust))


def open_layers(paths: Sequence[Path], *, upper: Path) -> tuple[Store, ...]:
    """Open the stores below ``upper``; one that is named twice, or is ``upper`` itself, counts once."""
    from pwcc.cache.store import Store

    seen = {os.path.realpath(upper)}
    found: list[Store] = []
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        try:
            found.append(Store.open(path))
        except NotAStore as error:
            raise NotAStore(
                f"a layer is no pwcc cache: {error.message}",
                where=str(path),
                hint=f"mount or copy it, or leave it out of --layer and {VARIABLE}",
            ) from None
    return tuple(found)


def read_blob(store: Store, digest: BlobDigest, *, max_bytes: int) -> bytes:
    """Return a blob's verified bytes from the first layer that has them; raise the first one's error."""
    first: CorruptEntry | None = None
    for layer in (store, *store.layers):
        try:
            return layer.blobs.read(digest, max_bytes=max_bytes)
        except CorruptEntry as error:
            # That it is damaged in one layer says more than that it is missing in another.
            if first is None or isinstance(first, MissingBlob):
                first = error
    raise first or MissingBlob("expected a blob, found none", where=digest)


def copy_blobs(store: Store, manifest: Manifest) -> None:
    """Put what an entry needs and only a lower layer has into the upper store.

    Raises:
        CorruptEntry: a layer has it damaged. StoreError: the upper store cannot be written.
    """
    for digest, size in manifest.blobs.items() if store.layers else ():
        if not store.blobs.has(digest, size=size) and store.has_blob(digest, size=size):
            store.put_blob(read_blob(store, digest, max_bytes=size))
