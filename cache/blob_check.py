"""Store: every blob of a cache hashed once, several at a time, and compared with its name.

Hashing releases the interpreter's lock, so threads pay for large blobs; small ones go to a thread by the
hundred, so that handing them over costs nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from pwcc.cache import atomic
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import BlobDigest

_BATCH_FILES: Final = 128
_BATCH_BYTES: Final = 8 * 2**20
_CHUNK: Final = 2**20
MAX_THREADS: Final = 8


class State(Enum):
    """What became of one blob."""

    GOOD = "good"
    DAMAGED = "damaged"
    MISSING = "missing"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Checked:
    """One blob: its bytes on disk and, unless it is good, what was expected and what came."""

    state: State
    size: int
    message: str = ""


def check_blobs(
    paths: Iterable[tuple[BlobDigest, Path, int]], *, threads: int | None = None
) -> Iterator[tuple[BlobDigest, Checked]]:
    """Yield the state of every blob, given with its size; order is kept. Memory is bounded."""
    count = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if count == 1:
        for digest, path, _ in paths:
            yield digest, check_blob(digest, path)
        return
    with ThreadPoolExecutor(count) as pool:
        for batch in pool.map(_check_batch, _batches(paths)):
            yield from batch


def check_blob(digest: BlobDigest, path: Path) -> Checked:
    """Return the state of one blob; never raises."""
    try:
        found, size = atomic.retrying(lambda: _hash(path))
    except (FileNotFoundError, NotADirectoryError):
        return Checked(State.MISSING, 0, f"expected blob {digest}, found none")
    except OSError as error:
        return Checked(State.UNREADABLE, 0, f"expected a readable blob, got {error.strerror}")
    except CorruptEntry as error:
        return Checked(State.DAMAGED, 0, error.message)
    if found == digest:
        return Checked(State.GOOD, size)
    return Checked(State.DAMAGED, size, f"expected SHA-256 {digest}, got {found} ({size} bytes)")


def _hash(path: Path) -> tuple[str, int]:
    descriptor = atomic.open_regular(path)
    try:
        state, size = hashlib.sha256(), 0
        while data := os.read(descriptor, _CHUNK):
            state.update(data)
            size += len(data)
        return state.hexdigest(), size
    finally:
        os.close(descriptor)


def _check_batch(batch: list[tuple[BlobDigest, Path]]) -> list[tuple[BlobDigest, Checked]]:
    return [(digest, check_blob(digest, path)) for digest, path in batch]


def _batches(paths: Iterable[tuple[BlobDigest, Path, int]]) -> Iterator[list[tuple[BlobDigest, Path]]]:
    batch: list[tuple[BlobDigest, Path]] = []
    total = 0
    for digest, path, size in paths:
        batch.append((digest, path))
        total += size
        if len(batch) == _BATCH_FILES or total >= _BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
