"""Store: Ed25519 keys, their files and their short ids; the one place that imports ``cryptography``.

A private key file is standard PEM (PKCS 8, not encrypted), readable by its owner only. Beside it lies the
public key as PEM (SubjectPublicKeyInfo), ``FILE.pub``. A key's id is the first 32 hex digits of the SHA-256
of its 32 public bytes. ``openssl pkey`` reads both files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NewType

from pwcc.cache import atomic, strict
from pwcc.cache.errors import CorruptEntry, SigningUnavailable, UsageError, install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KeyId = NewType("KeyId", str)

PUBLIC_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
MAX_KEY_FILE: Final = 16 * 1024
_RAW: Final = re.compile(r"[0-9a-f]{64}")


def configuration_directory() -> Path:
    """Return the user's configuration directory for pwcc; it need not exist."""
    import platformdirs

    return platformdirs.user_config_path("pwcc")


def signing_key_path() -> Path:
    """Return where the user's own signing key lies, whether or not it exists."""
    return configuration_directory() / "signing-key.pem"


def require_available(why: str) -> None:
    """Raise unless signatures can be verified here; ``why`` says what needs them.

    Raises:
        SigningUnavailable: the package ``cryptography`` is not installed, or does not work.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: F401
    except ImportError as error:
        raise SigningUnavailable(
            f"{why}, but the package 'cryptography' cannot be imported: {error}",
            hint=install("sign"),
        ) from None


@dataclass(frozen=True)
class PublicKey:
    """The 32 bytes of an Ed25519 public key."""

    raw: bytes

    @property
    def id(self) -> KeyId:
        """The key's short name: 32 hex digits."""
        return KeyId(hashlib.sha256(self.raw).hexdigest()[:32])

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether ``signature`` was made over ``message`` with this key's private half.

        Raises:
            SigningUnavailable: ``cryptography`` is not installed.
        """
        require_available("a signature is to be verified")
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """An Ed25519 private key in memory; ``repr`` does not show it."""

    _key: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> PrivateKey:
        """Return a new random key.

        Raises:
            SigningUnavailable: ``cryptography`` is not installed.
        """
        require_available("a key is to be made")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> PrivateKey:
        """Read a private key file.

        Raises:
            SigningUnavailable: ``cryptography`` is not installed.
            UsageError: no such file, or it holds no unencrypted Ed25519 private key in PEM.
        """
        require_available("an entry is to be signed")
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data = _read_file(path, "make one: pwcc trust keygen FILE")
        try:
            key = load_pem_private_key(data, password=None)
        except TypeError:
            raise UsageError(
                "expected a private key without a pass phrase, got an encrypted one",
                where=str(path),
                hint="decrypt it: openssl pkey -in FILE",
            ) from None
        except (ValueError, UnsupportedAlgorithm):
            raise UsageError("expected a private key in PEM, got something else", where=str(path)) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError("expected an Ed25519 private key, got one of another algorithm", where=str(path))
        return cls(key)

    def __repr__(self) -> str:
        return f"PrivateKey(id={self.public.id})"

    @property
    def public(self) -> PublicKey:
        """The public half."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return PublicKey(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature: the same key and message give the same bytes."""
        return self._key.sign(message)

    def write(self, path: Path) -> Path:
        """Write the private key to ``path`` (mode 0600) and the public one beside it; return the latter's path.

        Nothing is overwritten, and nothing is left behind when one of the two cannot be written.

        Raises:
            UsageError: one of the files exists. StoreError: the operating system refuses.
        """
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            PublicFormat,
        )

        private = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        beside = path.with_name(path.name + ".pub")
        made: list[Path] = []
        try:
            for target, data, mode in ((path, private, 0o600), (beside, public, 0o644)):
                _write_new(target, data, mode)
                made.append(target)
        finally:
            if len(made) == 1:
                made[0].unlink(missing_ok=True)
        return beside


def read_public(text: str) -> PublicKey:
    """Return the public key that ``text`` names: a PEM file's path, or 64 hex digits.

    A file with a private key is refused, so that one is not copied about by mistake.

    Raises:
        SigningUnavailable: ``cryptography`` is not installed.
        UsageError: neither such a file nor such digits.
    """
    if _RAW.fullmatch(text):
        return PublicKey(bytes.fromhex(text))
    require_available("a key file is to be read")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    path = Path(text)
    data = _read_file(path, "pass the .pub file that pwcc trust keygen wrote, or its 64 hex digits")
    if b"PRIVATE KEY" in data:
        raise UsageError("expected a public key, got a private one", where=text, hint="pass the file FILE.pub")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError("expected an Ed25519 public key in PEM, got something else", where=text) from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError("expected an Ed25519 public key, got one of another algorithm", where=text)
    return PublicKey(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def is_exposed(path: Path) -> bool:
    """Return whether others than the owner may read a private key file."""
    with contextlib.suppress(OSError):
        return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    return False


def _read_file(path: Path, hint: str) -> bytes:
    with atomic.os_errors("reading a key", path):
        try:
            return strict.read_bounded(path, max_bytes=MAX_KEY_FILE)
        except (FileNotFoundError, CorruptEntry):
            raise UsageError("expected a key file, found none", where=str(path), hint=hint) from None


def _write_new(path: Path, data: bytes, mode: int) -> None:
    with atomic.os_errors("writing a key", path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            raise UsageError(
                "expected a new file, found one that exists",
                where=str(path),
                hint="choose another name: a key is never overwritten",
            ) from None
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
