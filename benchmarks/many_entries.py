"""Thousands of cheap, complete entries with manifests of an 8B model's size, for measuring store commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pwcc.cache import strict
from pwcc.cache.factors import FactorTree
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey, blob_digest, factor_digest
from pwcc.cache.manifest import DeviceSummary, Manifest, ModelSummary, Program, UniquePiece, Variant
from pwcc.cache.sources import SourceRecord
from pwcc.cache.store import Store

PER_LOOKUP = 4  # entries that share a lookup key


def fill(root: Path, count: int, *, own_blobs: int = 3, blob_bytes: int = 256) -> Store:
    """Write ``count`` entries below ``root`` and return the store.

    Each entry has ``own_blobs`` blobs of ``blob_bytes`` bytes that no other has, shares six with all, and has
    one piece record. Files are written as they lie at the end: ``publish`` would flush each to the device.
    """
    store = Store.create(root)
    template = _template(store)
    pieces = root / "v1" / "pieces"
    for index in range(count):
        blobs = dict(template.blobs)
        own: dict[str, int] = {}
        for number in range(own_blobs):
            data = f"{index} {number} ".encode().ljust(blob_bytes, b".")
            digest = _write(store, data)
            blobs[digest] = own[digest] = len(data)
        key, lookup = EntryKey(f"{index:032x}"), LookupKey(f"{index // PER_LOOKUP:032x}")
        ref = store.entry_ref(lookup, key)
        ref.path.mkdir(parents=True)
        entry = dataclasses.replace(
            template, entry_key=key, lookup_key=lookup, blobs=dict(sorted(blobs.items()))
        )
        ref.manifest.write_bytes(entry.serialise())
        (pieces / f"{key}.json").write_bytes(strict.canonical({"blobs": own}))
    return store


def _write(store: Store, data: bytes) -> BlobDigest:
    digest = blob_digest(data)
    path = store.blob_path(digest)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return digest


def _template(store: Store) -> Manifest:
    """Return the manifest of an entry with 33 pieces, 3 of them unique, and 5 variants; its blobs are put."""
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
    return Manifest(
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
        factors=put(strict.canonical(FactorTree.of(compiler={"torch": "0"}).to_json())),
        numerics=None,
        programs=(program,),
        counts={},
        blobs=blobs,
    )
