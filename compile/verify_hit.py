"""Artifact: the poison check, an entry that was found against the same compile made again from nothing.

An entry is only as good as the process that wrote it. ``--verify-hit`` compiles once more into a
private store that is thrown away, and compares every sealed byte and, where bytes differ, the numbers.
Two builds of the same inputs must be byte-identical, so any difference is worth a look. Tuned entries are
the exception: a tuner's choice depends on the clock, so there equal numbers are what can be asked for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import torch

from pwcc.cache import about, strict
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import Store
from pwcc.compile.report import CompileReport, HitCheck, HitDifference
from pwcc.compile.request import Request
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.verify_numbers import ReadBlob, Side, errors_of_changed, pieces_of, records_agree

MAX_LINES = 3  # first differing lines shown of a text
MAX_LINE = 160  # characters of each
TOLERANCE = 1e-6  # relative, between two builds of a piece whose bytes differ
NUMERICS = "numerics"
ONLY_FOUND, ONLY_AGAIN = "only in the entry", "only compiled again"


def compile_again(
    store: Store, manifest: Manifest, request: Request, run: Callable[[Store], CompileReport]
) -> HitCheck:
    """Compile what an entry was found for once more, into a store of its own, and compare.

    ``run`` is the whole compile over a store; nothing of the cache is used by it or changed.

    Raises:
        PwccError: the second compile failed.
    """
    with tempfile.TemporaryDirectory(prefix="pwcc-verify-") as scratch:
        private = Store.create(Path(scratch) / "cache")
        report = run(private)
        ref = private.entry_ref(LookupKey(report.lookup_key), EntryKey(report.entry_key))
        again = Side(private.read_manifest(ref), private.read_blob)
        return compare(Side(manifest, store.read_blob), again, request.target.device)


def compare(found: Side, again: Side, device: torch.device) -> HitCheck:
    """Compare an entry that was found with one that was compiled again from the same request.

    A damaged or missing blob of the entry found is a difference, not an error. Takes about as long as
    reading both; pieces are run only where their bytes differ.
    """
    tuned = found.manifest.tuned
    theirs, ours = dict(_blobs(found)), dict(_blobs(again))
    differences = [
        *_keys(found.manifest, again.manifest),
        *_named(found, again, theirs, ours),
        *_unnamed(found.manifest, again.manifest, {*theirs.values(), *ours.values()}),
    ]
    old, new = _body(found.manifest), _body(again.manifest)
    if not differences and old != new:
        differences.append(HitDifference("manifest", _changed(old, new)))
    if tuned:
        differences = [item for item in differences if not _is_tuned(item.what)]
    errors = dict(errors_of_changed(found, again, device))
    return HitCheck(
        ok=not differences and all(error <= TOLERANCE for error in errors.values()),
        compared=len(ours),
        differences=tuple(differences),
        errors={what: error for what, error in errors.items() if error > 0},
        tuned=tuned,
        retraced=tuple(_retraced(found, again)),
    )


def _retraced(found: Side, again: Side) -> Iterator[str]:
    """Yield how two traces differ: the first graph of a piece that does, and the first predicate."""
    graphs = (
        (f"program {number}", old, new)
        for number, (one, two) in enumerate(
            zip_longest(found.manifest.programs, again.manifest.programs, fillvalue=None)
        )
        for old, new in zip_longest(one.unique if one else (), two.unique if two else ())
        if old is None or new is None or old.digest != new.digest
    )
    for where, old, new in graphs:
        if old is None or new is None:
            piece, said = (old or new), (ONLY_AGAIN if old is None else ONLY_FOUND)
            yield f"{where}: the graph of piece {piece.name if piece else '?'} is {said}"
        else:
            ops = next((pair for pair in zip_longest(old.ops, new.ops) if pair[0] != pair[1]), None)
            said = f"operation {ops[0]}, now {ops[1]}" if ops else "the same operations, with other values"
            yield f"{where}: the graph of piece {old.name} differs: {said}"
        break
    old_text, new_text = (_predicate_lines(side) for side in (found, again))
    if old_text is not None and new_text is not None and old_text != new_text:
        gone = [line for line in old_text if line not in new_text]
        came = [line for line in new_text if line not in old_text]
        shown = [*(f"- {line[:MAX_LINE]}" for line in gone[:1]), *(f"+ {line[:MAX_LINE]}" for line in came[:1])]
        yield f"predicates differ: {' '.join(shown) or 'in their order'}"


def _predicate_lines(side: Side) -> list[str] | None:
    """Return an entry's predicates, one text each: where on the model, and what must hold there."""
    data = _read(side.read, side.manifest.predicates)
    try:
        return None if data is None else PredicateSet.from_json(data).lines()
    except StoreError:
        return None


def _keys(found: Manifest, again: Manifest) -> Iterator[HitDifference]:
    if found.entry_key != again.entry_key:
        yield HitDifference("entry key", (f"- {found.entry_key}", f"+ {again.entry_key}"))


def _named(
    found: Side, again: Side, theirs: Mapping[str, BlobDigest], ours: Mapping[str, BlobDigest]
) -> Iterator[HitDifference]:
    for what in dict.fromkeys((*theirs, *ours)):
        before, after = theirs.get(what), ours.get(what)
        if before is None or after is None:
            yield HitDifference(what, (ONLY_AGAIN if before is None else ONLY_FOUND,))
            continue
        old = _read(found.read, before)
        same = before == after or (what == NUMERICS and old and records_agree(old, again.read(after)))
        if old is None or not same:
            yield HitDifference(what, _lines(found.read, before, again.read, after))


def _unnamed(found: Manifest, again: Manifest, named: set[BlobDigest]) -> Iterator[HitDifference]:
    for digest in sorted((found.blobs.keys() ^ again.blobs.keys()) - named):
        yield HitDifference(f"blob {digest[:12]}", (ONLY_FOUND if digest in found.blobs else ONLY_AGAIN,))


def _is_tuned(what: str) -> bool:
    """Tell whether a part depends on what a tuner chose."""
    return " piece " in what or what.startswith("blob ") or what in (NUMERICS, "manifest")


def _blobs(side: Side) -> Iterator[tuple[str, BlobDigest]]:
    """Yield every blob of an entry with the words that name it in a report."""
    manifest = side.manifest
    yield "factors", manifest.factors
    yield "predicates", manifest.predicates
    if manifest.numerics is not None:
        yield NUMERICS, manifest.numerics
    if manifest.details is not None:
        yield "details", manifest.details
    for number, program in enumerate(manifest.programs):
        yield f"program {number}: stitch.py", program.stitch
        yield f"program {number}: calling convention", program.calling
    for what, record_digest in pieces_of(manifest):
        yield f"{what}: record", record_digest
        record = _record(side.read, record_digest)
        if record is None:
            continue
        yield f"{what}: piece.py", record.source
        if record.code is not None:
            yield f"{what}: byte code", record.code.blob
        for kernel in record.kernels:
            yield f"{what}: kernel {kernel.name}", kernel.blob
        if record.constants is not None:
            yield f"{what}: constants", record.constants


def _record(read: ReadBlob, digest: BlobDigest) -> SealedPiece | None:
    try:
        return SealedPiece.from_bytes(read(digest), where=f"piece {digest[:12]}")
    except StoreError:
        return None


def _read(read: ReadBlob, digest: BlobDigest) -> bytes | None:
    try:
        return read(digest)
    except StoreError:
        return None


def _lines(read: ReadBlob, before: BlobDigest, read_again: ReadBlob, after: BlobDigest) -> tuple[str, ...]:
    """Return the first lines in which two blobs differ, or their sizes where they are no text."""
    try:
        old, new = read(before), read_again(after)
    except StoreError as error:
        return (error.message,)
    try:
        return _changed(_text(old), _text(new))
    except UnicodeDecodeError:
        at = next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
        )
        return (f"{len(old)} bytes, now {len(new)}; the first difference is at byte {at}",)


def _changed(old: list[str], new: list[str]) -> tuple[str, ...]:
    shown: list[str] = []
    for number, (one, two) in enumerate(zip_longest(old, new), start=1):
        if one != two:
            shown += [
                f"line {number}: - {(one or '')[:MAX_LINE]}",
                f"line {number}: + {(two or '')[:MAX_LINE]}",
            ]
        if len(shown) >= 2 * MAX_LINES:
            break
    return tuple(shown)


def _text(data: bytes) -> list[str]:
    """Return a text's lines; canonical JSON, which is one line, is laid out first."""
    text = data.decode()
    if text[:1] in ("{", "["):
        text = json.dumps(strict.loads(data, where="blob"), indent=1, sort_keys=True)
    return text.splitlines()


def _body(manifest: Manifest) -> list[str]:
    """Return a manifest's fields as lines, without those whose blobs are compared on their own."""
    fields = json.loads(about.split(manifest.serialise(), where="manifest")[1])
    for name in ("blobs", "numerics"):
        del fields[name]
    return json.dumps(fields, indent=1, sort_keys=True).splitlines()
