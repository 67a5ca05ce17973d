"""Artifact: one entry verified as data: its manifest, factors, records, plans and names; nothing is executed.

Blobs are looked up in what :mod:`pwcc.cache.blob_check` found, so that each is read once however many
entries share it; only the JSON blobs of an entry are read again to be parsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from pwcc.cache import folders, ownership, signing, strict
from pwcc.cache.blob_check import Checked, State
from pwcc.cache.entries import MANIFEST, EntryRef, check_keys
from pwcc.cache.errors import CorruptEntry, NewerFormat, StoreError
from pwcc.cache.factors import FactorTree, entry_key
from pwcc.cache.findings import Finding, Kind
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.requirements import unmet
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.signing_keys import KeyId
from pwcc.cache.store import Store

FindBlob = Callable[[BlobDigest], Checked]
_NAMES: Final = (MANIFEST, signing.FOLDER)


def check_entry(
    store: Store,
    ref: EntryRef,
    find_blob: FindBlob,
    *,
    facts: Mapping[str, object],
    trusted: Mapping[KeyId, str],
) -> tuple[Manifest | None, list[Finding]]:
    """Return an entry's manifest, None where it cannot be read, and everything that is wrong with the entry.

    ``facts`` are this host's by requirement kind; a kind that is not among them is not checked.
    """
    found: list[Finding] = []

    def say(kind: Kind, where: object, message: str) -> None:
        found.append(Finding(kind, str(where), message, ref.entry_key))

    concern = ownership.entry_concern(ref.path, ref.manifest)
    if concern is not None:
        say(Kind.TRUST, ref.path, f"expected an entry that only you or root can write, got {concern}")
    signatures = ref.path / signing.FOLDER
    if os.path.lexists(signatures) and not folders.is_real(signatures):
        say(Kind.TRUST, signatures, "expected a folder of signatures, got a link or file")
    for name in _foreign_names(ref):
        say(Kind.LEFTOVER, ref.path / name, "expected a manifest and signatures, got another name")
    try:
        data = store.read_manifest_bytes(ref)
        manifest = Manifest.parse(data, where=str(ref.manifest))
        check_keys(ref, manifest.lookup_key, manifest.entry_key)
    except CorruptEntry as error:
        say(Kind.ENTRY, error.where or ref.manifest, error.message)
        return None, found
    except StoreError as error:  # of a newer pwcc, or an I/O error: perhaps intact
        say(Kind.UNREADABLE, error.where or ref.manifest, error.message)
        return None, found
    for state in signing.states(ref, data, trusted):
        if state.valid is False:
            say(Kind.TRUST, signing.path_of(ref.path, state.key), f"signature {state}")
    problems = list(_blob_findings(store, ref, manifest, find_blob))
    found += problems
    if not problems:
        for message in content_problems(store, manifest):
            say(Kind.ENTRY, ref.manifest, message)
    known = [requirement for requirement in manifest.requirements if facts.get(requirement.kind) is not None]
    for line in unmet(known, facts):
        say(Kind.HOST, ref.manifest, line)
    return manifest, found


def _blob_findings(store: Store, ref: EntryRef, manifest: Manifest, find_blob: FindBlob) -> Iterator[Finding]:
    for digest, size in manifest.blobs.items():
        checked = find_blob(digest)
        if checked.state is State.GOOD and checked.size != size:
            message = f"expected {size} bytes in blob {digest}, got {checked.size}"
            yield Finding(Kind.ENTRY, str(ref.manifest), message, ref.entry_key)
        elif checked.state is not State.GOOD:
            kind = Kind.UNREADABLE if checked.state is State.UNREADABLE else Kind.BLOB
            yield Finding(kind, str(store.blob_path(digest)), checked.message, ref.entry_key)


def _foreign_names(ref: EntryRef) -> list[str]:
    try:
        return sorted(set(os.listdir(ref.path)) - set(_NAMES))  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def content_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong inside an entry whose blobs all have their digests."""
    read = store.reader(manifest)
    try:
        factors = FactorTree.from_json(strict.loads(read(manifest.factors), where="factors"))
        key = entry_key(factors)
        if key != manifest.entry_key:
            yield f"expected factors of entry key {manifest.entry_key}, got those of {key}"
    except StoreError as error:
        yield f"factors: {error.message}"
    for name, digest in (("predicates", manifest.predicates), ("numerics", manifest.numerics)):
        if digest is not None:
            try:
                strict.loads(read(digest), where=name)
            except StoreError as error:
                yield f"{name}: {error.message}"
    for digest in manifest.piece_records():
        try:
            record = SealedPiece.from_bytes(read(digest), where=f"piece {digest[:12]}")
        except NewerFormat:
            continue
        except StoreError as error:
            yield f"piece record {digest[:12]}: {error.message}"
            continue
        for blob in record.blobs:
            if blob not in manifest.blobs:
                yield f"piece record {digest[:12]} names blob {blob}, which the manifest does not list"
