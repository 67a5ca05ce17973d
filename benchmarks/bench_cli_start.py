"""How long the commands take that import no torch: whole processes, from fork to exit.

python benchmarks/bench_cli_start.py [--quick] [--repeat 20]
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lab

from pwcc.cache import strict
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey, factor_digest
from pwcc.cache.manifest import DeviceSummary, Manifest, ModelSummary, Program, UniquePiece, Variant
from pwcc.cache.sources import SourceRecord
from pwcc.cache.store import Store

ENTRIES = 1000
BUDGETS_MS = {"pwcc --help": 150, "pwcc --version": 150, f"pwcc inspect ({ENTRIES:,} entries)": 300}


def main() -> None:
    """Measure, and write the result."""
    given = lab.options(__doc__ or "", repeat=20).parse_args()
    if given.device != "cpu":
        print("bench_cli_start: the same on every device; nothing to do")
        return
    repeat = 3 if given.quick else given.repeat
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "cache"
        fill(store)
        commands = {
            **{
                name: ([sys.executable, "-m", "pwcc", *argv], budget)
                for (name, budget), argv in zip(
                    BUDGETS_MS.items(), (["--help"], ["--version"], ["inspect", str(store)]), strict=True
                )
            },
            "python -c pass": ([sys.executable, "-c", "pass"], None),
            "python -c 'import torch'": ([sys.executable, "-c", "import torch"], None),
        }
        taken: dict[str, list[float]] = {name: [] for name in commands if lab.wanted(given, name)}
        for number in range(repeat + 1):  # in turns, so that a busy spell of the machine hits all alike
            for name, values in taken.items():
                milliseconds = measure(commands[name][0])
                if number:  # the first run warms bytecode and page cache
                    values.append(milliseconds)
    rows = [
        (f"`{name}`", f"{min(values):.0f}", f"{statistics.median(values):.0f}", str(commands[name][1] or ""))
        for name, values in taken.items()
    ]
    columns = ("command", "best ms", "median ms", "budget ms")
    note = f"Whole processes, from fork to exit, {repeat} times in turns."
    lab.publish(given, "cli-start", columns, rows, note=note, data={"milliseconds": taken})


def measure(command: list[str]) -> float:
    """Return the milliseconds of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1000


def fill(root: Path) -> None:
    """Write a store whose entries have manifests of an 8B model's size: 33 pieces, 3 unique, 5 variants."""
    store = Store.create(root)
    blobs: dict[BlobDigest, int] = {}

    def put(data: bytes) -> BlobDigest:
        digest = store.put_blob(data)
        blobs[digest] = len(data)
        return digest

    empty = put(strict.canonical({}))
    records = tuple(put(strict.canonical({"record": index})) for index in range(3))
    ranges = [("dynamic", None, 1, 8192), *(("static", size, size, size) for size in (1, 2, 4, 8))]
    program = Program(
        min_tokens=1,
        max_tokens=8192,
        stitch=put(b"def run(): pass\n"),
        calling=empty,
        shape_predicates=(),
        splits=32,
        pieces=(0, *[1] * 31, 2),
        unique=tuple(
            UniquePiece(factor_digest(b"%d" % index), f"piece_{index}", ("aten.mm.default",) * 20)
            for index in range(3)
        ),
        variants=tuple(Variant(kind, size, low, high, records) for kind, size, low, high in ranges),
    )
    manifest = Manifest(
        pwcc_version="0",
        entry_key=EntryKey("0" * 32),
        lookup_key=LookupKey("0" * 32),
        model=ModelSummary(
            "builtin:llama-8b", {}, 8_030_261_248, 16_060_522_496, "bfloat16", factor_digest(b"tree")
        ),
        device=DeviceSummary("cpu"),
        torch="0",
        min_tokens=1,
        max_tokens=8192,
        sizes=(1, 2, 4, 8),
        profile=None,
        tuned=False,
        build_observed=True,
        requirements=(),
        sources=tuple(SourceRecord(f"m{i}", f"m{i}.py", factor_digest(b"%d" % i)) for i in range(40)),
        predicates=empty,
        factors=empty,
        numerics=None,
        programs=(program,),
        counts={},
        blobs=blobs,
    )
    for index in range(ENTRIES):
        key, lookup = EntryKey(f"{index:032x}"), LookupKey(f"{index // 4:032x}")
        ref = store.entry_ref(lookup, key)
        ref.path.mkdir(parents=True)
        entry = dataclasses.replace(manifest, entry_key=key, lookup_key=lookup)
        ref.manifest.write_bytes(entry.serialise())  # not publish(): 3,000 flushes to disk


if __name__ == "__main__":
    main()
