"""Store: what a person asks about a cache: which entries it holds, and one entry in full.

Everything is read as data. Nothing from the store is executed, imported or unpickled, and one
unreadable entry is a ``problem`` of that entry, not a failure of the listing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pwcc.cache import about, atomic, costs, signing, strict, tuning
from pwcc.cache.entries import EntryRef, check_keys
from pwcc.cache.errors import StoreError
from pwcc.cache.factors import FactorTree
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.operators import DecodeAttention
from pwcc.cache.program import Program, Variant
from pwcc.cache.signing_keys import KeyId
from pwcc.cache.steps import steps_of
from pwcc.cache.store import Store
from pwcc.cache.strict import Json

SHORT: Final = 12  # hex digits that a listing shows and `find` accepts from
MIN_PREFIX: Final = 4
MAX_JSON_BLOB: Final = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class EntrySummary:
    """One line of a listing.

    ``bytes`` counts the entry's blobs, shared ones too; ``age_s`` is seconds since the manifest was
    written or copied here; ``sealed`` is the share of piece records that need no pickle (0 to 1).
    When ``problem`` is set the entry could not be read and the other fields are empty.
    """

    ref: EntryRef
    key: str
    age_s: float | None
    problem: str | None = None
    model: str = ""
    args: dict[str, Json] | None = None
    device: str = ""
    torch: str = ""
    min_tokens: int = 0
    max_tokens: int = 0
    sizes: tuple[int, ...] = ()
    profile: str | None = None
    tuned: bool = False
    pieces: int = 0
    unique: int = 0
    variants: int = 0
    bytes: int = 0
    sealed: float = 0.0

    def to_json(self) -> dict[str, Json]:
        """Return the summary for ``--json``: keys in full, sizes as a list, no paths."""
        return {
            "entry_key": self.ref.entry_key,
            "lookup_key": self.ref.lookup_key,
            "problem": self.problem,
            "age_s": self.age_s,
            "model": self.model,
            "args": self.args or {},
            "device": self.device,
            "torch": self.torch,
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "sizes": list(self.sizes),
            "profile": self.profile,
            "tuned": self.tuned,
            "pieces": self.pieces,
            "unique": self.unique,
            "variants": self.variants,
            "bytes": self.bytes,
            "sealed": self.sealed,
        }


def summaries(store: Store, *, now: float) -> list[EntrySummary]:
    """Return one summary per entry, in key order. ``now`` is in seconds since the epoch."""
    return [_summary(ref, now) for ref in store.entries()]


def _summary(ref: EntryRef, now: float) -> EntrySummary:
    key = ref.entry_key[:SHORT]
    age: float | None = None
    try:
        with open(atomic.open_regular(ref.manifest), "rb", buffering=0) as stream:  # noqa: PTH123 - a thousand of these in 150 ms
            found = os.fstat(stream.fileno())
            age = max(0.0, now - found.st_mtime)
            if found.st_size > strict.MAX_BYTES:
                return EntrySummary(ref=ref, key=key, age_s=age, problem=f"manifest of {found.st_size} bytes")
            data = stream.readall()
        head, _ = about.split(data, where=ref.entry_key)
        check_keys(ref, head.lookup_key, head.entry_key)
    except OSError as error:
        return EntrySummary(ref=ref, key=key, age_s=age, problem=f"manifest cannot be read: {error.strerror}")
    except StoreError as error:
        return EntrySummary(ref=ref, key=key, age_s=age, problem=error.message)
    return EntrySummary(
        ref=ref,
        key=key,
        age_s=age,
        model=head.identity,
        args=head.args,
        device=head.device,
        torch=head.torch,
        min_tokens=head.min_tokens,
        max_tokens=head.max_tokens,
        sizes=head.sizes,
        profile=head.profile,
        tuned=head.tuned,
        pieces=head.pieces,
        unique=head.unique,
        variants=head.variants,
        bytes=head.bytes,
        sealed=1.0 if not head.records else max(0.0, 1.0 - head.unsealed / head.records),
    )


def find(store: Store, prefix: str) -> list[EntryRef]:
    """Return the entries whose entry key starts with ``prefix`` (at least 4 hex digits)."""
    if len(prefix) < MIN_PREFIX:
        return []
    return [ref for ref in store.entries() if ref.entry_key.startswith(prefix.lower())]


def detail(store: Store, ref: EntryRef, *, trusted: Mapping[KeyId, str] | None = None) -> dict[str, Json]:
    """Return everything recorded about one entry as JSON data, for ``inspect ENTRY``.

    The manifest's fields, plus ``factors`` (groups and their digests), ``predicates`` and ``numerics``
    read from their blobs, and per program ``unique[].records``: per variant the piece record with its
    kernels, and ``steps``, the calls in order; ``decode_attention`` with the same of each kernel; ``tuning``
    what was timed and ``costs`` the seconds of the
    compile, None where they were not kept or did not travel. A blob that cannot be read is replaced by
    ``{"problem": ...}``. ``signatures`` says of each signature file whether it is valid, and what its key is
    called among the ``trusted`` ones.

    Raises:
        CorruptEntry, NewerFormat: the manifest itself cannot be read.
    """
    manifest = store.read_manifest(ref)
    return {
        "schema": manifest.schema,
        "pwcc_version": manifest.pwcc_version,
        "entry_key": manifest.entry_key,
        "lookup_key": manifest.lookup_key,
        "model": manifest.model.to_json(),
        "device": manifest.device.to_json(),
        "torch": manifest.torch,
        "tokens": [manifest.min_tokens, manifest.max_tokens],
        "sizes": list(manifest.sizes),
        "ranges": [list(span) for span in manifest.ranges],
        "profile": manifest.profile,
        "tag": manifest.tag,
        "tuned": manifest.tuned,
        "build_observed": manifest.build_observed,
        "counts": dict(manifest.counts),
        "signatures": _signatures(store, ref, trusted or {}),
        "requirements": [requirement.to_json() for requirement in manifest.requirements],
        "sources": [source.to_json() for source in manifest.sources],
        "observed": [item.to_json() for item in manifest.observed],
        "factors": _factors(store, manifest),
        "predicates": _json_blob(store, manifest.predicates),
        "numerics": None if manifest.numerics is None else _json_blob(store, manifest.numerics),
        "tuning": _tuning(store, ref),
        "costs": _costs(store, ref),
        "programs": [_program(store, program) for program in manifest.programs],
        "decode_attention": [_attention(store, kernel) for kernel in manifest.decode_attention],
        "blobs": {str(digest): size for digest, size in manifest.blobs.items()},
        "bytes": sum(manifest.blobs.values()),
        "missing_blobs": [str(d) for d, size in manifest.blobs.items() if not store.has_blob(d, size=size)],
    }


def _signatures(store: Store, ref: EntryRef, trusted: Mapping[KeyId, str]) -> list[Json]:
    return [state.to_json() for state in signing.states(ref, store.read_manifest_bytes(ref), trusted)]


def _factors(store: Store, manifest: Manifest) -> Json:
    try:
        raw = strict.loads(store.read_blob(manifest.factors, max_bytes=MAX_JSON_BLOB), where=manifest.factors)
        tree = FactorTree.from_json(raw)
    except StoreError as error:
        return {"problem": error.message}
    digests: dict[str, Json] = dict(tree.group_digests().items())
    return {"groups": tree.to_json(), "digests": digests}


def _tuning(store: Store, ref: EntryRef) -> Json:
    try:
        found = tuning.read(store, ref.entry_key)
    except StoreError as error:
        return {"problem": error.message}
    return None if found is None else dict(found.to_json())


def _costs(store: Store, ref: EntryRef) -> Json:
    try:
        found = costs.read(store, ref.entry_key)
    except StoreError as error:
        return {"problem": error.message}
    return None if found is None else found.to_json()


def _steps(store: Store, program: Program) -> list[Json]:
    try:
        found = steps_of(store.read_blob(program.stitch, max_bytes=MAX_JSON_BLOB), where=program.stitch)
    except StoreError as error:
        return [{"problem": error.message}]
    return [{"name": step.name, "piece": step.piece} for step in found]


def _program(store: Store, program: Program) -> Json:
    unique: list[Json] = []
    for index, piece in enumerate(program.unique):
        records: list[Json] = [_record(store, variant, index) for variant in program.variants]
        unique.append({**piece.to_json(), "positions": program.pieces.count(index), "records": records})
    return {
        "tokens": [program.min_tokens, program.max_tokens],
        "splits": program.splits,
        "pieces": list(program.pieces),
        "stitch": program.stitch,
        "steps": _steps(store, program),
        "calling": _json_blob(store, program.calling),
        "shape_predicates": list(program.shape_predicates),
        "variants": [_variant(variant) for variant in program.variants],
        "unique": unique,
    }


def _variant(variant: Variant) -> Json:
    return {"kind": variant.kind, "size": variant.size, "tokens": [variant.low, variant.high]}


def _record(store: Store, variant: Variant, index: int) -> Json:
    digest = variant.pieces[index]
    record = _json_blob(store, digest)
    kernels: list[Json] = [dict(kernel) for kernel in _kernels(record)]
    return {"variant": _variant(variant), "blob": digest, "kernels": kernels, "record": record}


def _attention(store: Store, kernel: DecodeAttention) -> Json:
    record = _json_blob(store, kernel.piece)
    kernels: list[Json] = [dict(item) for item in _kernels(record)]
    return {**kernel.to_json(), "blob": kernel.piece, "kernels": kernels, "record": record}


def _kernels(record: Json) -> Iterator[dict[str, Json]]:
    found = record.get("kernels") if isinstance(record, dict) else None
    for kernel in found if isinstance(found, list) else ():
        if isinstance(kernel, dict):
            yield kernel


def _json_blob(store: Store, digest: BlobDigest) -> Json:
    try:
        data = store.read_blob(digest, max_bytes=MAX_JSON_BLOB)
        return strict.as_json(strict.loads(data, where=digest), digest)
    except StoreError as error:
        return {"problem": error.message}
