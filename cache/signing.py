"""Store: detached Ed25519 signatures of entries: made, read back and verified over a manifest's exact bytes.

A signature lies beside the manifest as ``signatures/<key id>.json``, one file a signer. What is signed is
:data:`DOMAIN` followed by the manifest file's bytes. The manifest names every blob by SHA-256, so one
signature covers all that loading an entry reads. The signature files themselves are outside the manifest:
an entry is signed, or signed again, without changing what is digested.

Limit: a signature says who made an entry, not that it is the latest: an older signed entry stays valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pwcc.cache import atomic, folders, layout, strict
from pwcc.cache.entries import EntryRef, check_keys
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import KEY_PATTERN
from pwcc.cache.manifest import Manifest
from pwcc.cache.signing_keys import PUBLIC_BYTES, SIGNATURE_BYTES, KeyId, PrivateKey, PublicKey
from pwcc.cache.strict import Fields, Json

if TYPE_CHECKING:
    from pwcc.cache.store import Store

FOLDER: Final = "signatures"
SUFFIX: Final = ".json"
SCHEMA: Final = 1
ALGORITHM: Final = "ed25519"
DOMAIN: Final = b"pwcc manifest signature 1\0"  # no other message that a key signs begins like this
MAX_FILE: Final = 4096
MAX_SIGNATURES: Final = 256  # of one entry that are listed; a required one is looked up by name


@dataclass(frozen=True)
class Signature:
    """One signer's statement over one manifest; whether it is true is for :meth:`verifies`."""

    key: PublicKey
    signature: bytes

    def to_bytes(self) -> bytes:
        """Return the file: same key and manifest, same bytes."""
        return strict.canonical(
            {
                "schema": SCHEMA,
                "algorithm": ALGORITHM,
                "public_key": self.key.raw.hex(),
                "signature": self.signature.hex(),
            }
        )

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Signature:
        """Return what :meth:`to_bytes` wrote; raise CorruptEntry otherwise, a later schema included."""
        fields = Fields(strict.loads(data, where=where, max_bytes=MAX_FILE), where)
        fields.int_("schema", low=SCHEMA, high=SCHEMA)
        algorithm = fields.str_("algorithm", max_length=32)
        if algorithm != ALGORITHM:
            fields.fail("algorithm", repr(ALGORITHM), algorithm)
        found = cls(
            PublicKey(_hex(fields, "public_key", PUBLIC_BYTES)), _hex(fields, "signature", SIGNATURE_BYTES)
        )
        fields.done()
        return found

    def verifies(self, manifest: bytes) -> bool:
        """Return whether the key's owner signed exactly these manifest bytes.

        Raises:
            SigningUnavailable: ``cryptography`` is not installed.
        """
        return self.key.verifies(self.signature, DOMAIN + manifest)


def _hex(fields: Fields, name: str, size: int) -> bytes:
    text = fields.str_(name, max_length=2 * size)
    if len(text) != 2 * size or set(text) - set("0123456789abcdef"):
        fields.fail(name, f"{2 * size} lowercase hex digits", text)
    return bytes.fromhex(text)


def make(manifest: bytes, key: PrivateKey) -> Signature:
    """Return the signature of a manifest file's bytes."""
    return Signature(key.public, key.sign(DOMAIN + manifest))


def path_of(entry: Path, key: KeyId) -> Path:
    """Return where a signer's signature of the entry in directory ``entry`` lies, whether or not it exists."""
    return entry / FOLDER / f"{key}{SUFFIX}"


def write(ref: EntryRef, signature: Signature, *, tmp: Path) -> Path:
    """Put a signature beside an entry's manifest, whole or not at all, replacing the same signer's.

    ``tmp`` is the store's ``v1/tmp``.

    Raises:
        StoreError: the operating system refuses.
    """
    path = path_of(ref.path, signature.key.id)
    with atomic.os_errors("writing a signature", path):
        folders.make(ref.path)
        folders.make(path.parent)
        atomic.write_replace(path, signature.to_bytes(), tmp=tmp)
        atomic.fsync_directory(path.parent)
        atomic.fsync_directory(ref.path)
    return path


def sign_entry(store: Store, ref: EntryRef, key: PrivateKey) -> Path:
    """Verify an entry and sign it, replacing the same signer's signature; return the file's path.

    The bytes that are signed are the very ones that were parsed, and every blob that they list was read.

    Raises:
        CorruptEntry, NewerFormat: the entry is damaged; it is not signed.
        UntrustedStore: a folder of the cache is a symbolic link.
        StoreError: the signature cannot be written.
    """
    layout.require_real(store.root)
    data = store.read_manifest_bytes(ref)
    manifest = Manifest.parse(data, where=str(ref.manifest))
    check_keys(ref, manifest.lookup_key, manifest.entry_key)
    read_blob = store.reader(manifest)
    for digest, size in manifest.blobs.items():
        if len(read_blob(digest)) != size:
            raise CorruptEntry(f"expected {size} bytes in blob {digest}", where=str(ref.manifest))
    return write(ref, make(data, key), tmp=store.tmp)


def read_file(path: Path) -> bytes | None:
    """Return a signature file's bytes, unchecked; None if there is none. Follows no link and waits for nothing.

    Raises:
        CorruptEntry: it is no plain file, is larger than 4 KiB, or cannot be read.
    """
    try:
        return atomic.read_file(path, max_bytes=MAX_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CorruptEntry(f"expected a signature file, got {error.strerror}", where=str(path)) from None


def read(entry: Path, key: KeyId) -> Signature | None:
    """Return the signature of one signer, or None.

    Raises:
        CorruptEntry: the file is not what :meth:`Signature.to_bytes` writes, or is another key's.
    """
    path = path_of(entry, key)
    data = read_file(path)
    if data is None:
        return None
    signature = Signature.parse(data, where=str(path))
    if signature.key.id != key:
        raise CorruptEntry(f"expected a signature of key {key}, got one of {signature.key.id}", where=str(path))
    return signature


def names(entry: Path) -> list[KeyId]:
    """Return the sorted ids of the keys that an entry has signature files of, at most 256 of them."""
    found: list[KeyId] = []
    if not folders.is_real(entry / FOLDER):
        return []
    try:
        with os.scandir(entry / FOLDER) as listing:
            for item in listing:
                name = item.name.removesuffix(SUFFIX)
                if name != item.name and KEY_PATTERN.fullmatch(name):
                    found.append(KeyId(name))
                if len(found) == MAX_SIGNATURES:
                    break
    except OSError:
        return sorted(found)
    return sorted(found)


@dataclass(frozen=True)
class SignatureState:
    """What there is to say of one signature file.

    ``name`` is what the key is trusted as, None if it is not. ``valid`` tells whether the key's owner signed
    this very manifest; None where that cannot be found out, for the reason in ``problem``.
    """

    key: KeyId
    name: str | None
    valid: bool | None
    problem: str | None = None

    @property
    def trusted(self) -> bool:
        """Whether the key is among the trusted ones."""
        return self.name is not None

    def to_json(self) -> dict[str, Json]:
        """Return the state for ``--json``."""
        return {
            "key": self.key,
            "name": self.name,
            "trusted": self.trusted,
            "valid": self.valid,
            "problem": self.problem,
        }

    def __str__(self) -> str:
        what = {True: "valid", False: "NOT VALID", None: "not verified"}[self.valid]
        why = f" ({self.problem})" if self.problem else ""
        known = "not trusted" if self.name is None else f"trusted as {self.name}"
        return f"{what}, by {self.key[:12]}, {known}{why}"


def states(ref: EntryRef, manifest: bytes, trusted: Mapping[KeyId, str]) -> Iterator[SignatureState]:
    """Yield the state of each signature of an entry; ``trusted`` maps trusted keys to their names.

    Raises nothing: what is wrong with a signature is its state, and ``cryptography`` need not be there.
    """
    from pwcc.cache.errors import SigningUnavailable

    for key in names(ref.path):
        name = trusted.get(key)
        try:
            signature = read(ref.path, key)
            if signature is None:
                continue
            valid = signature.verifies(manifest)
        except CorruptEntry as error:
            yield SignatureState(key, name, False, error.message)
        except SigningUnavailable:
            yield SignatureState(key, name, None, "cryptography is not installed")
        else:
            yield SignatureState(key, name, valid, None if valid else "made over another manifest, or forged")
