"""Key: the typed identifiers, so that a lookup key is never passed for a blob digest.

``EntryKey``, ``LookupKey`` and ``PieceKey`` are XXH3-128 hex digests (32 digits) of factor trees;
``BlobDigest`` is a SHA-256 hex digest (64 digits) of a blob's bytes.
"""

from __future__ import annotations

import hashlib
import re
from typing import NewType

import xxhash

EntryKey = NewType("EntryKey", str)
LookupKey = NewType("LookupKey", str)
PieceKey = NewType("PieceKey", str)
BlobDigest = NewType("BlobDigest", str)
FactorDigest = NewType("FactorDigest", str)

KEY_PATTERN = re.compile(r"[0-9a-f]{32}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


def blob_digest(data: bytes) -> BlobDigest:
    """Return the SHA-256 of ``data`` as 64 hex digits."""
    return BlobDigest(hashlib.sha256(data).hexdigest())


def factor_digest(data: bytes) -> FactorDigest:
    """Return the XXH3-128 of ``data`` as 32 hex digits."""
    return FactorDigest(xxhash.xxh3_128_hexdigest(data))
