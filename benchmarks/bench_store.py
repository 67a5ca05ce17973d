"""The store's own work: listing, verifying, collecting, and publishing and loading under readers.

python benchmarks/bench_store.py [--quick] [--repeat 5]

Needs no compiler: entries are cheap ones with manifests of an 8B model's size. ``verify`` is compared with
SHA-256 of the same bytes in the same run; every command is a whole process, from fork to exit.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lab
from many_entries import fill

from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.cache.verify import verify

COUNTS = (1_000, 10_000)
READERS = 8
BIG_BLOBS, BIG_BYTES = 24, 16 * 2**20
BUDGETS_MS = {1_000: 300}

READ = """
import sys
from pathlib import Path
from pwcc.cache.store import Store
store = Store.open(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for ref in store.entries():
        for digest in store.read_manifest(ref).blobs:
            store.read_blob(digest)
"""

Rows = list[tuple[str, str, str, str]]


def main() -> None:
    """Measure, and write the result."""
    given = lab.options(__doc__ or "", repeat=5).parse_args()
    if given.device != "cpu":
        print("bench_store: the same on every device; nothing to do")
        return
    repeat = 2 if given.quick else given.repeat
    counts = COUNTS[:1] if given.quick else COUNTS
    rows: Rows = []
    data: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="pwcc-bench-") as folder:
        for count in counts:
            _commands(Path(folder) / f"many{count}", count, repeat, rows, data)
        _verify(Path(folder) / "big", repeat, rows, data)
        _under_readers(Path(folder) / "shared", 4 * repeat, rows, data)
    columns = ("what", "best", "median", "budget")
    note = f"Page cache warm; {READERS} readers read and hash every blob without a pause, on the same cores."
    lab.publish(given, "store", columns, rows, note=note, data=data)


def _commands(root: Path, count: int, repeat: int, rows: Rows, data: dict[str, object]) -> None:
    fill(root, count)
    runs = {
        f"`pwcc inspect`, {count:,} entries": ["inspect", str(root)],
        f"`pwcc verify`, {count:,} entries": ["verify", str(root)],
        f"`pwcc gc --max-age 1d --dry-run`, {count:,} entries": [
            "gc", "--cache-dir", str(root), "--max-age", "1d", "--dry-run"
        ],
    }  # fmt: skip
    for name, argv in runs.items():
        taken = [_process(argv) for _ in range(repeat + 1)][1:]
        budget = f"{BUDGETS_MS[count]} ms" if argv[0] == "inspect" and count in BUDGETS_MS else ""
        _row(rows, data, name, taken, budget)
    old = time.time() - 2 * 86400
    for part in ("entries", "blobs", "pieces"):
        for path in (root / "v1" / part).rglob("*"):
            os.utime(path, (old, old))
    argv = ["gc", "--cache-dir", str(root), "--max-age", "1d"]
    _row(rows, data, f"`pwcc gc` that removes {count:,} entries, once", [_process(argv)], "")


def _process(argv: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pwcc", *argv], check=False, stdout=subprocess.DEVNULL)
    taken = time.perf_counter() - start
    if done.returncode not in (0, *range(64, 128)):  # verify says that toy entries have other keys
        raise RuntimeError(f"{argv}: {done.returncode}")
    return taken


def _verify(root: Path, repeat: int, rows: Rows, data: dict[str, object]) -> None:
    """Many bytes in few blobs, and the same bytes hashed by one plain loop."""
    store = fill(root, 1)
    for _ in range(BIG_BLOBS):
        store.put_blob(os.urandom(BIG_BYTES))
    paths = [path for path in (root / "v1/blobs/sha256").rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in paths)

    def plain() -> None:
        for path in paths:
            with path.open("rb") as stream:
                hashlib.file_digest(stream, "sha256")

    ways: dict[str, Callable[[], object]] = {
        "SHA-256 of the same bytes, one thread": plain,
        "verify, one thread": lambda: verify(store, now=time.time(), threads=1),
        "verify, a thread per core": lambda: verify(store, now=time.time()),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeat + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                taken[name].append(time.perf_counter() - start)
    for name, values in taken.items():
        speeds = [total / value / 1e9 for value in values]
        data[name] = values
        rows.append((name, f"{max(speeds):.2f} GB/s", f"{statistics.median(speeds):.2f} GB/s", ""))


def _under_readers(root: Path, repeat: int, rows: Rows, data: dict[str, object]) -> None:
    store = fill(root, 200)
    (ref, *_) = store.entries()
    template = store.read_manifest(ref)
    for readers in (0, READERS):
        running = [
            subprocess.Popen([sys.executable, "-c", READ, str(root)], stdout=subprocess.PIPE)
            for _ in range(readers)
        ]
        try:
            for process in running:
                if process.stdout is not None:
                    process.stdout.readline()
            published = [_publish(store, template, f"{readers}-{number}") for number in range(repeat)]
            read = [_read(store, template) for _ in range(repeat)]
            if any(process.poll() is not None for process in running):
                raise RuntimeError("a reader ended")
        finally:
            for process in running:
                process.kill()
                process.wait()
        _row(rows, data, f"publish 12 blobs and a manifest, {readers} readers", published, "")
        _row(rows, data, f"read and verify an entry's blobs, {readers} readers", read, "")


def _publish(store: Store, template: Manifest, name: str) -> float:
    import dataclasses

    from pwcc.cache.ids import EntryKey, factor_digest

    key = EntryKey(factor_digest(name.encode()))
    start = time.perf_counter()
    blobs = dict(template.blobs)
    for number in range(12):
        data = f"{name} {number}".encode().ljust(20_000, b".")
        blobs[store.put_blob(data)] = len(data)
    store.publish(dataclasses.replace(template, entry_key=key, blobs=dict(sorted(blobs.items()))))
    return time.perf_counter() - start


def _read(store: Store, template: Manifest) -> float:
    start = time.perf_counter()
    manifest = store.read_manifest(store.entry_ref(template.lookup_key, template.entry_key))
    for digest in manifest.blobs:
        store.read_blob(digest)
    return time.perf_counter() - start


def _row(rows: Rows, data: dict[str, object], name: str, taken: list[float], budget: str) -> None:
    data[name] = taken
    best, middle = min(taken), statistics.median(taken)
    rows.append((name, _show(best), _show(middle) if len(taken) > 1 else "", budget))


def _show(seconds: float) -> str:
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms" if seconds < 10 else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
