"""Store: damaged entries, set aside with a record of what was wrong, so that nobody meets them again.

::

    <root>/v1/quarantine/<uuid>/        the entry's folder, as it was
    <root>/v1/quarantine/<uuid>.json    {"schema", "lookup_key", "entry_key", "reason"}
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, strict
from pwcc.cache.entries import EntryRef
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import EntryKey, LookupKey

SCHEMA: Final = 1
MAX_RECORD: Final = 64 * 1024
MAX_RECORDS: Final = 1000  # read by one listing
_MAX_REASON: Final = 4000


@dataclass(frozen=True)
class Quarantined:
    """One entry that was set aside; ``reason`` names the file, what was expected and what came."""

    lookup_key: LookupKey
    entry_key: EntryKey
    reason: str


def set_aside(folder: Path, ref: EntryRef, reason: str) -> Path:
    """Move an entry into ``folder`` and record why; return its new place. OSError passes through.

    The move is one rename; the record is written after it and may be missing after a crash.
    """
    place = folder / uuid.uuid4().hex
    os.rename(ref.path, place)  # noqa: PTH104 - one seam for tests to break
    text = "".join(char if char.isprintable() else " " for char in reason)[:_MAX_REASON]
    record = strict.canonical(
        {"schema": SCHEMA, "lookup_key": ref.lookup_key, "entry_key": ref.entry_key, "reason": text}
    )
    with contextlib.suppress(OSError):
        atomic.write_new(place.with_suffix(".json"), record)
    return place


def put_back(place: Path, ref: EntryRef) -> None:
    """Undo :func:`set_aside`, unless a writer has made the entry again meanwhile. Best effort."""
    with contextlib.suppress(OSError):
        atomic.rename_new(place, ref.path)
    with contextlib.suppress(OSError):
        if not place.exists():
            place.with_suffix(".json").unlink()


def records(folder: Path) -> Iterator[Quarantined]:
    """Yield the records in ``folder``, at most 1,000; what cannot be read is passed over."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return
    for name in names[:MAX_RECORDS]:
        with contextlib.suppress(OSError, StoreError):
            yield _parse(atomic.read_file(folder / name, max_bytes=MAX_RECORD), name)


def _parse(data: bytes, where: str) -> Quarantined:
    fields = strict.Fields(strict.loads(data, where=where), where)
    fields.int_("schema", low=1, high=SCHEMA)
    found = Quarantined(
        LookupKey(fields.key("lookup_key")),
        EntryKey(fields.key("entry_key")),
        fields.item("reason", strict.as_text),
    )
    fields.done()
    return found
