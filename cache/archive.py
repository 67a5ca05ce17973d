"""Store: the archive that entries travel in: a tar of one fixed form, written and read strictly.

::

    pwcc-export.json                                    {"entries": [[lookup key, entry key], ...], "schema": 1}
    entries/<lookup key>/<entry key>/manifest.json
    entries/<lookup key>/<entry key>/signatures/<key id>.json
    blobs/<digest>

Members in this order, each group sorted by name; then 1,024 zero bytes and nothing else. Every header is
the one that :func:`header` makes of a name and a size: ustar, mode 0644, time, user and group zero.
So the same entries give the same bytes, and a reader can refuse every other header by comparison: links,
devices, folders, sparse files, extended headers, long names, absolute names and ``..`` cannot be expressed.
Any tar program can list and unpack it; what another program packed is not an archive of pwcc.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, NewerFormat
from pwcc.cache.ids import EntryKey, LookupKey

SCHEMA: Final = 1
BLOCK: Final = 512
INDEX: Final = "pwcc-export.json"
END: Final = bytes(2 * BLOCK)
MAX_SIZE: Final = 8**11 - 1  # eleven octal digits
MAX_ENTRIES: Final = 10_000
MAX_INDEX: Final = 2**20
MAX_MANIFESTS: Final = 256 * 2**20  # bytes of all manifests together, which a reader holds in memory
_NAME: Final = re.compile(
    r"pwcc-export\.json"
    r"|entries/[0-9a-f]{32}/[0-9a-f]{32}/(?:manifest\.json|signatures/[0-9a-f]{32}\.json)"
    r"|blobs/[0-9a-f]{64}"
)
_KINDS: Final = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.GNUTYPE_LONGNAME: "a long name",
    tarfile.GNUTYPE_LONGLINK: "a long link",
    tarfile.XHDTYPE: "an extended header",
    tarfile.XGLTYPE: "a global extended header",
}


class Reader(Protocol):
    """A stream of bytes; ``read(n)`` returns fewer than n only before its end."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; none at the end."""
        ...


@dataclass(frozen=True)
class Member:
    """One file of an archive: its name and its size in bytes."""

    name: str
    size: int


def header(name: str, size: int) -> bytes:
    """Return the header block of a member; raise ValueError for a name or size that has none."""
    if not _NAME.fullmatch(name) or not 0 <= size <= MAX_SIZE:
        raise ValueError(f"no member of an archive: {name[:200]!r}, {size} bytes")
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def padding(size: int) -> bytes:
    """Return the zero bytes that fill the last block of ``size`` bytes."""
    return bytes(-size % BLOCK)


class ArchiveReader:
    """Reads an archive from a stream, one member after the other, and trusts nothing in it.

    Memory and time are bounded by what the caller allows per member; :meth:`next` refuses everything that
    :func:`header` does not write.
    """

    def __init__(self, stream: Reader, *, where: str) -> None:
        self._stream = stream
        self._left = 0
        self._pad = 0
        self.where = where

    def next(self) -> Member | None:
        """Return the next member, or None at the end of the archive.

        The member before must have been read in full.

        Raises:
            CorruptEntry: not a member as pwcc writes them, a truncated archive, or data after its end.
        """
        if self._left:
            raise CorruptEntry(f"{self._left} bytes of a member were not read", where=self.where)
        if any(self._exactly(self._pad)):
            raise CorruptEntry("expected zero bytes after a member", where=self.where)
        block = self._exactly(BLOCK)
        if not any(block):
            if any(self._exactly(BLOCK)) or self._stream.read(1):
                raise CorruptEntry("expected the end of the archive, got more data", where=self.where)
            return None
        member = self._member(block)
        self._left, self._pad = member.size, -member.size % BLOCK
        return member

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes of the current member; none at its end.

        Raises:
            CorruptEntry: the archive ends within the member.
        """
        data = self._exactly(min(size, self._left))
        self._left -= len(data)
        return data

    def _member(self, block: bytes) -> Member:
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise CorruptEntry(
                f"expected a tar header, got none: {error}",
                where=self.where,
                hint="pass a file that `pwcc export` wrote",
            ) from None
        if info.type != tarfile.REGTYPE:
            what = _KINDS.get(info.type, f"type {info.type!r}")
            raise CorruptEntry(f"expected a regular file, got {what}: {info.name[:200]!r}", where=self.where)
        try:
            expected = header(info.name, info.size)
        except ValueError as error:
            raise CorruptEntry(f"expected a file of an export, got {error}", where=self.where) from None
        if block != expected:
            raise CorruptEntry(
                f"expected the header that pwcc writes for {info.name!r}, got another", where=self.where
            )
        return Member(info.name, info.size)

    def _exactly(self, size: int) -> bytes:
        found = self._stream.read(size) if size else b""
        while len(found) < size:
            more = self._stream.read(size - len(found))
            if not more:
                raise CorruptEntry(
                    "the archive ends too early", where=self.where, hint="copy or export it again"
                )
            found += more
        return found


def index_bytes(entries: Sequence[tuple[LookupKey, EntryKey]]) -> bytes:
    """Return the first member: the format's version, and which entries follow, in their order."""
    return strict.canonical({"schema": SCHEMA, "entries": [list(keys) for keys in entries]})


def parse_index(data: bytes, *, where: str) -> tuple[tuple[LookupKey, EntryKey], ...]:
    """Return the entries that :func:`index_bytes` named: at least one, in order, each once.

    Raises:
        NewerFormat: a newer pwcc wrote the archive. CorruptEntry: anything else.
    """
    fields = strict.Fields(strict.loads(data, where=where, max_bytes=MAX_INDEX), where)
    schema = fields.int_("schema", low=1)
    if schema > SCHEMA:
        raise NewerFormat(
            f"expected archive schema {SCHEMA}, got {schema}: a newer pwcc wrote it",
            where=where,
            hint="upgrade pwcc on this host, or export with this version",
        )
    entries = fields.list_("entries", _keys, max_items=MAX_ENTRIES)
    fields.done()
    if not entries or list(entries) != sorted(set(entries)):
        raise CorruptEntry("expected at least one entry, in order, each once", where=where)
    return entries


def _keys(value: object, where: str) -> tuple[LookupKey, EntryKey]:
    if not isinstance(value, list) or len(value) != 2:
        raise CorruptEntry("expected a pair of keys", where=where)
    return LookupKey(strict.as_key(value[0], where)), EntryKey(strict.as_key(value[1], where))
