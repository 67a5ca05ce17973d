"""The processes of a soak: writers, readers and a collector on one cache, each until it is killed.

``python roles.py ROLE ROOT LOG SEED``. Every deed is one line in LOG, written at once: a killed process has
said what it did. A line that begins with ``violation`` says that a guarantee of the store was broken.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pwcc.cache.errors import CorruptEntry, MissingBlob, StoreError
from pwcc.cache.gc import collect
from pwcc.cache.retention import Limits
from pwcc.cache.store import EntryRef, Store
from tests.cache.conftest import put_blobs

MODELS = 60  # most are rarely written, so that their blobs age
GRACE_S = 5.0

Say = Callable[[str], None]


def write(root: Path, say: Say, choose: random.Random) -> None:
    """Publish one of a few entries, over and over, under its lock; where it is there, load it."""
    while True:
        store = Store.create(root)
        name = f"model{int(MODELS * choose.random() ** 4)}"
        with store.lock(name, timeout_s=60) as held:
            if not held:
                say("violation: no lock")
            try:
                published = store.publish(put_blobs(store, name=name))
            except MissingBlob:
                say("retried")  # collected between put and publish; a compile tries again
                continue
        say("published" if published.won else "found")


def read(root: Path, say: Say, choose: random.Random) -> None:
    """Read every entry that can be seen; one that stays must be whole."""
    store = Store.open(root)
    while True:
        for ref in store.entries():
            hold = store.hold(ref) if choose.random() < 0.5 else None
            before = _identity(ref)
            try:
                manifest = store.read_manifest(ref)
                for digest in manifest.blobs:
                    _read(store, digest)
            except CorruptEntry as error:
                if before is not None and _identity(ref) == before:
                    say(f"violation: {ref.entry_key} {error.message}")
                else:
                    say("vanished")
            else:
                say("read")
            del hold
        time.sleep(0.001)


def _read(store: Store, digest: str) -> None:
    """A collection that meets a writer takes a blob away for a moment; a load looks twice, and so does this."""
    try:
        store.read_blob(digest)  # type: ignore[arg-type]
    except MissingBlob:
        time.sleep(0.05)
        store.read_blob(digest)  # type: ignore[arg-type]


def _identity(ref: EntryRef) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = ref.manifest.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def collect_all(root: Path, say: Say, choose: random.Random) -> None:
    """Collect with small limits, so that entries and their blobs go while they are read and made again."""
    store = Store.create(root)
    while True:
        limit = choose.choice((0, 4_000, 12_000))
        done = collect(store, Limits(max_bytes=limit), now=time.time(), grace_s=GRACE_S)
        say(f"collected {len(done.removed)} {done.blobs}")
        time.sleep(choose.random())


def main(role: str, root: str, log: str, seed: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(text: str) -> None:
        os.write(descriptor, f"{role} {text}\n".encode())

    roles = {"writer": write, "reader": read, "collector": collect_all}
    try:
        roles[role](Path(root), say, random.Random(seed))
    except StoreError as error:
        say(f"violation: {error.message} at {error.where}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:5])
