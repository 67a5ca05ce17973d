"""Store: the keys that this user or server trusts, and the rule that only entries they signed are read.

Trusted keys lie in one directory, one small file a key: ``PWCC_TRUSTED_KEYS``, or ``trust`` below the user's
configuration directory for pwcc. Whoever may write there decides what is trusted, so a directory or file
that others than its owner may write, or that is neither this user's nor root's, is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pwcc.cache import atomic, signing, strict
from pwcc.cache.difference import UNSIGNED, advice
from pwcc.cache.entries import EntryRef
from pwcc.cache.errors import CorruptEntry, StoreError, UntrustedEntry, UsageError
from pwcc.cache.signing import Signature
from pwcc.cache.signing_keys import KeyId, PublicKey, configuration_directory, require_available
from pwcc.cache.strict import Fields

if TYPE_CHECKING:
    from pwcc.cache.store import Store

KEYS_VARIABLE: Final = "PWCC_TRUSTED_KEYS"
REQUIRE_VARIABLE: Final = "PWCC_REQUIRE_SIGNATURE"
SCHEMA: Final = 1
MAX_KEYS: Final = 1000
MAX_FILE: Final = 4096
_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class TrustedKey:
    """A public key and what it is called here."""

    key: PublicKey
    name: str


def keys_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where trusted keys lie; it need not exist."""
    named = environment.get(KEYS_VARIABLE)
    return Path(named) if named else configuration_directory() / "trust"


def is_required(asked: bool = False, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a signature is required: asked for, or by ``PWCC_REQUIRE_SIGNATURE``.

    The variable can only add the requirement: an argument does not lift what the host asks for.

    Raises:
        UsageError: the variable is neither yes nor no.
    """
    text = environment.get(REQUIRE_VARIABLE, "").strip().lower()
    if text not in _YES + _NO:
        raise UsageError(f"expected 1 or 0 in {REQUIRE_VARIABLE}, got {text[:80]!r}")
    return asked or text in _YES


class TrustedKeys:
    """The directory of trusted keys. Reading needs no ``cryptography``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def all(self) -> list[TrustedKey]:
        """Return the trusted keys by id; none when the directory does not exist.

        Raises:
            StoreError: others may write to it, it cannot be read, or a file in it is damaged: a key that
                cannot be read must not silently be one fewer.
        """
        if not self.root.is_dir():
            return []
        _require_ours(self.root)
        suffix = ".json"
        try:
            listed = sorted(path for path in self.root.iterdir() if path.name.endswith(suffix))
        except OSError as error:
            raise StoreError(f"listing trusted keys failed: {error.strerror}", where=str(self.root)) from error
        if len(listed) > MAX_KEYS:
            raise StoreError(
                f"expected at most {MAX_KEYS} trusted keys, got {len(listed)}", where=str(self.root)
            )
        return [self._read(path) for path in listed]

    def _read(self, path: Path) -> TrustedKey:
        _require_ours(path)
        where = str(path)
        with atomic.os_errors("reading a trusted key", path):
            data = strict.read_bounded(path, max_bytes=MAX_FILE)
        fields = Fields(strict.loads(data, where=where), where)
        fields.int_("schema", low=SCHEMA, high=SCHEMA)
        digits = fields.digest("public_key")
        name = fields.item("name", strict.as_text)
        fields.done()
        key = PublicKey(bytes.fromhex(digits))
        if path.stem != key.id or not name:
            raise CorruptEntry(f"expected a file named after its key, {key.id}.json", where=where)
        return TrustedKey(key, name)

    def add(self, key: PublicKey, name: str) -> bool:
        """Trust a key under a name; return whether it was not trusted before. Its name may change.

        Raises:
            UsageError: the name is empty, too long, not printable, or another key's.
            StoreError: the directory is not safe, or cannot be written.
        """
        if not name.strip() or len(name) > 128 or not name.isprintable():
            raise UsageError(f"expected a name of 1 to 128 printable characters, got {name[:80]!r}")
        held = self.all()
        if any(item.name == name and item.key != key for item in held):
            raise UsageError(
                f"another key is trusted as {name!r}", hint="choose another --name, or remove it first"
            )
        record = {"schema": SCHEMA, "public_key": key.raw.hex(), "name": name}
        path = self.root / f"{key.id}.json"
        with atomic.os_errors("writing a trusted key", path):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o755, exist_ok=True)
            _require_ours(self.root)
            atomic.write_replace(path, strict.canonical(record), tmp=self.root)
            path.chmod(0o644)
        return all(item.key != key for item in held)

    def remove(self, text: str) -> TrustedKey:
        """Stop trusting the key of this name, or whose id begins so (at least 4 digits); return it.

        Raises:
            UsageError: no key or several are meant. StoreError: the file cannot be removed.
        """
        held = self.all()
        found = [item for item in held if item.name == text]
        if not found and len(text) >= 4:
            found = [item for item in held if item.key.id.startswith(text.lower())]
        if len(found) != 1:
            what = "several trusted keys are" if found else "no trusted key is"
            raise UsageError(
                f"{what} named {text[:80]!r}", where=str(self.root), hint="pwcc trust ls lists them"
            )
        path = self.root / f"{found[0].key.id}.json"
        with atomic.os_errors("removing a trusted key", path):
            path.unlink()
        return found[0]

    def names(self) -> dict[KeyId, str]:
        """Return the trusted keys' names by id."""
        return {item.key.id: item.name for item in self.all()}


@dataclass(frozen=True)
class SignaturePolicy:
    """The rule that an entry must carry a valid signature by one of ``keys``; ``where`` they are kept."""

    keys: tuple[TrustedKey, ...]
    where: Path

    @classmethod
    def required(cls, environment: Mapping[str, str] = os.environ) -> SignaturePolicy:
        """Return the policy over this host's trusted keys.

        Raises:
            SigningUnavailable: ``cryptography`` is not installed. Nothing is skipped for want of it.
            StoreError: the directory of trusted keys is not safe or not readable.
        """
        require_available("a signature is required")
        directory = keys_directory(environment)
        return cls(tuple(TrustedKeys(directory).all()), directory)

    def admit(self, ref: EntryRef, manifest: bytes) -> None:
        """Accept an entry by its manifest's very bytes, before any of its blobs is opened.

        Raises:
            UntrustedEntry: no trusted key signed these bytes; says what was found instead.
        """
        found = signing.names(ref.path)
        self.check(
            manifest, lambda key: signing.read_file(signing.path_of(ref.path, key)), found, where=str(ref.path)
        )

    def check(
        self,
        manifest: bytes,
        find: Callable[[KeyId], bytes | None],
        signers: Iterable[KeyId] = (),
        *,
        where: str,
    ) -> TrustedKey:
        """Return the trusted key that signed ``manifest``; for entries that are not in a store yet.

        ``find`` returns the bytes of the signature file of a key, or None. It is asked for trusted keys
        only, so that no number of other files matters; ``signers`` only word the message.

        Raises:
            UntrustedEntry: there is none.
        """
        bad: list[str] = []
        for trusted in self.keys:
            try:
                data = find(trusted.key.id)
                signature = None if data is None else Signature.parse(data, where=where)
            except CorruptEntry as error:
                bad.append(f"the signature of {trusted.name} cannot be read: {error.message}")
                continue
            if signature is None:
                continue
            if signature.key == trusted.key and signature.verifies(manifest):
                return trusted
            bad.append(f"the signature of {trusted.name} is not over this manifest")
        others = [key[:12] for key in signers if all(key != item.key.id for item in self.keys)]
        if bad:
            found = "; ".join(bad[:3])
        elif others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            found = f"only signatures of {', '.join(others[:3])}{more}, not trusted here"
        else:
            found = "none"
        if not self.keys:
            found += f" (no key is trusted: {self.where} holds none)"
        raise UntrustedEntry(
            f"expected a signature by a trusted key, got {found}",
            where=where,
            hint=advice(UNSIGNED),
        )


def restrict(store: Store, asked: bool = False) -> None:
    """Let ``store`` give out only entries that a trusted key signed, if asked or if the host requires it.

    Raises:
        UsageError, SigningUnavailable, StoreError: as :func:`is_required`, :meth:`SignaturePolicy.required`.
    """
    if is_required(asked):
        store.require(SignaturePolicy.required().admit)


def _require_ours(path: Path) -> None:
    """Refuse a directory or file of keys that others could have written; a read-only mount is the host's.

    Raises:
        StoreError: see above.
    """
    with atomic.os_errors("reading trusted keys", path):
        found = path.stat()
        read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    if found.st_uid not in (0, os.geteuid()):
        raise StoreError(
            f"expected trusted keys of this user or root, got those of user {found.st_uid}",
            where=str(path),
            hint=f"make a directory of your own and name it in {KEYS_VARIABLE}",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not read_only:
        raise StoreError(
            f"expected keys that only their owner may write, got mode {stat.S_IMODE(found.st_mode):04o}",
            where=str(path),
            hint="chmod go-w it, after a look at what it holds",
        )
