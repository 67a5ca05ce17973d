"""Artifact: what a 64-bit ELF shared object needs or defines, read without a linker or a subprocess.

Only what a requirement check needs: symbol versions needed (``.gnu.version_r``) and defined
(``.gnu.version_d``), library names and search paths (``.dynamic``), laid out as in the System V gABI
and the LSB "Symbol Versioning" chapter. Every offset is bounds-checked and every list is bounded,
because the bytes may come from a cache that someone else wrote.
"""

from __future__ import annotations

import struct
from typing import Final

from pwcc.cache.errors import CorruptEntry

SHT_DYNAMIC: Final = 6
DT_NEEDED: Final = 1
DT_RPATH: Final = 15
DT_RUNPATH: Final = 29
MAX_DYNAMIC: Final = 4096
SHT_VERDEF: Final = 0x6FFFFFFD
SHT_VERNEED: Final = 0x6FFFFFFE
MAX_NAME: Final = 4096
MAX_SECTIONS: Final = 4096
MAX_VERSIONS: Final = 4096  # libstdc++ defines about 60


def needed_versions(data: bytes | memoryview, *, where: str = "shared object") -> set[str]:
    """Return version names such as ``GLIBC_2.34`` that the object needs from other libraries.

    Raises:
        CorruptEntry: not a 64-bit ELF file, or its tables point outside of it.
    """
    return _Elf(data, where).versions(SHT_VERNEED)


def defined_versions(data: bytes | memoryview, *, where: str = "shared object") -> set[str]:
    """Return version names such as ``GLIBCXX_3.4.30`` that the object itself defines.

    Raises:
        CorruptEntry: not a 64-bit ELF file, or its tables point outside of it.
    """
    return _Elf(data, where).versions(SHT_VERDEF)


def needed_libraries(data: bytes | memoryview, *, where: str = "shared object") -> list[str]:
    """Return the sonames that the object needs, in order, such as ``libgomp.so.1``.

    Raises:
        CorruptEntry: not a 64-bit ELF file, or its tables point outside of it.
    """
    return _Elf(data, where).dynamic_strings((DT_NEEDED,))


def run_paths(data: bytes | memoryview, *, where: str = "shared object") -> list[str]:
    """Return the object's own library search paths, which a relocatable object does not have.

    Raises:
        CorruptEntry: not a 64-bit ELF file, or its tables point outside of it.
    """
    return _Elf(data, where).dynamic_strings((DT_RPATH, DT_RUNPATH))


class _Elf:
    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self._data = memoryview(data)
        self._where = where
        if bytes(self._data[:5]) != b"\x7fELF\x02" or len(self._data) < 64:
            raise CorruptEntry("expected a 64-bit ELF shared object, got other bytes", where=where)
        if self._data[5] not in (1, 2):
            raise CorruptEntry(f"expected ELF byte order 1 or 2, got {self._data[5]}", where=where)
        self._order = "<" if self._data[5] == 1 else ">"
        (self._table,) = self._unpack("Q", 40)
        self._entry_size, self._count = self._unpack("HH", 58)
        end = self._table + self._count * self._entry_size
        # Without a section table nothing is known about what it needs: that is not "needs nothing".
        if not 0 < self._count <= MAX_SECTIONS or self._entry_size < 64 or end > len(self._data):
            raise CorruptEntry(f"expected a whole ELF section table, got {self._count} sections", where=where)

    def _unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(self._order + layout, self._data, offset)
        except struct.error:
            raise CorruptEntry(f"an ELF table points outside the file at {offset}", where=self._where) from None

    def _section(self, index: int) -> tuple[int, int, int, int]:
        """Return (type, offset, link, number of entries)."""
        base = self._table + index * self._entry_size
        (kind,) = self._unpack("I", base + 4)
        (offset,) = self._unpack("Q", base + 24)
        link, info = self._unpack("II", base + 40)
        return kind, offset, link, info

    def versions(self, wanted: int) -> set[str]:
        found: set[str] = set()
        for index in range(self._count):
            kind, offset, link, entries = self._section(index)
            if kind != wanted:
                continue
            if link >= self._count or entries > MAX_VERSIONS:
                raise CorruptEntry("an ELF version table is malformed", where=self._where)
            strings = self._section(link)[1]
            found |= (
                self._needed(offset, strings, entries)
                if wanted == SHT_VERNEED
                else self._defined(offset, strings, entries)
            )
        return found

    def dynamic_strings(self, tags: tuple[int, ...]) -> list[str]:
        found: list[str] = []
        for index in range(self._count):
            kind, offset, link, _ = self._section(index)
            if kind != SHT_DYNAMIC:
                continue
            if link >= self._count:
                raise CorruptEntry("an ELF dynamic table is malformed", where=self._where)
            strings = self._section(link)[1]
            for entry in range(MAX_DYNAMIC):
                tag, value = self._unpack("QQ", offset + 16 * entry)
                if tag in tags:
                    found.append(self._string(strings + value))
                if not tag:
                    break
        return found

    def _needed(self, offset: int, strings: int, entries: int) -> set[str]:
        found: set[str] = set()
        for _ in range(entries):  # Elf64_Verneed, each with its Elf64_Vernaux records
            _, count, _, aux, step = self._unpack("HHIII", offset)
            record = offset + aux
            for _ in range(min(count, MAX_VERSIONS)):
                _, _, _, name, following = self._unpack("IHHII", record)
                found.add(self._string(strings + name))
                if not following:
                    break
                record += following
            if not step or len(found) > MAX_VERSIONS:
                break
            offset += step
        return found

    def _defined(self, offset: int, strings: int, entries: int) -> set[str]:
        found: set[str] = set()
        for _ in range(entries):  # Elf64_Verdef; the first Elf64_Verdaux holds the version's own name
            _, _, _, count, _, aux, step = self._unpack("HHHHIII", offset)
            if count:
                (name,) = self._unpack("I", offset + aux)
                found.add(self._string(strings + name))
            if not step:
                break
            offset += step
        return found

    def _string(self, offset: int) -> str:
        text = bytes(self._data[offset : offset + MAX_NAME])
        end = text.find(b"\0")
        if end < 0:
            raise CorruptEntry("an ELF name does not end", where=self._where)
        return text[:end].decode("ascii", "replace")
