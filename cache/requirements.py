"""Artifact: what an entry requires of the host that runs it, and which of it a host does not meet."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pwcc.cache import elf, strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.strict import Fields, Json

_NUMBER = re.compile(r"\d{1,6}")


@dataclass(frozen=True)
class Requirement:
    """One named requirement.

    ``kind`` is a key of :data:`KINDS`; ``value`` is a string, or a tuple of strings for ``cpu_flags``
    and ``openmp``. A kind that this version does not know is kept, and counts as unmet.
    """

    kind: str
    value: str | tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"kind": self.kind, "value": self.value if isinstance(self.value, str) else list(self.value)}

    @classmethod
    def parse(cls, value: object, where: str) -> Requirement:
        """Return the requirement that :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        kind = fields.item("kind", strict.as_name)
        raw = fields.take("value")
        if isinstance(raw, list) and len(raw) > 512:
            fields.fail("value", "at most 512 items", raw)
        found = (
            tuple(strict.as_text(v, where) for v in raw)
            if isinstance(raw, list)
            else strict.as_text(raw, where)
        )
        fields.done()
        return cls(kind, found)


def _equal(expected: str | tuple[str, ...], got: object) -> str | None:
    return None if expected == got else f"expected {_show(expected)}, got {_show(got)}"


def _at_least(expected: str | tuple[str, ...], got: object) -> str | None:
    if isinstance(expected, str) and isinstance(got, str) and version(got) >= version(expected) != ():
        return None
    return f"expected {_show(expected)} or newer, got {_show(got)}"


def _all_of(expected: str | tuple[str, ...], got: object) -> str | None:
    wanted = (expected,) if isinstance(expected, str) else expected
    have = got if isinstance(got, Collection) and not isinstance(got, str) else (got,)
    missing = [item for item in wanted if item not in have]
    return f"expected {' '.join(wanted)}, missing {' '.join(missing)}" if missing else None


Check = Callable[[str | tuple[str, ...], object], str | None]

# kind -> how the host's fact of the same name is compared with the recorded value
KINDS: Final[Mapping[str, Check]] = {
    "machine": _equal,  # "x86_64"
    "os": _equal,  # "linux"
    "byte_order": _equal,  # "little"
    "python_abi": _equal,  # "cpython-311": C++ kernels are extension modules
    "cpu_flags": _all_of,  # the names of /proc/cpuinfo
    "glibc": _at_least,
    "glibcxx": _at_least,
    "cxxabi": _at_least,
    "openmp": _all_of,  # sonames, such as "libgomp.so.1", among those the process can reach
    "torch": _equal,  # version and git hash: pieces call private helpers of that very build
    "cuda_capability": _equal,  # "9.0": cubins are not portable across architectures
    "cuda_device_name": _equal,
    "cuda_version": _at_least,  # what the host's driver supports against what the cubin was built for
}


def unmet(requirements: Iterable[Requirement], facts: Mapping[str, object]) -> list[str]:
    """Return one line per requirement that ``facts`` does not meet: kind, expected, got.

    ``facts`` maps kinds to this host's values (``HostFacts.facts()`` plus what only torch knows, which
    the caller adds: this package does not import torch). A missing fact is unmet, and so is a kind
    that this version does not know.
    """
    lines = []
    for requirement in requirements:
        check = KINDS.get(requirement.kind)
        if check is None:
            shown = _show(requirement.value)
            lines.append(f"{requirement.kind}: unknown requirement {shown} (from a newer pwcc?)")
            continue
        problem = check(requirement.value, facts.get(requirement.kind))
        if problem:
            lines.append(f"{requirement.kind}: {problem}")
    return lines


def symbol_versions(data: bytes | memoryview, *, where: str = "shared object") -> dict[str, str]:
    """Return the highest version of each family that a shared object needs.

    Keys are the requirement kinds ``glibc``, ``glibcxx`` and ``cxxabi``, present when needed.

    Raises:
        CorruptEntry: ``data`` is not a 64-bit ELF object or its tables are malformed.
    """
    return highest(elf.needed_versions(data, where=where))


def highest(names: Iterable[str]) -> dict[str, str]:
    """Return the highest dotted version per family among names such as ``GLIBCXX_3.4.30``."""
    found: dict[str, str] = {}
    for name in names:
        family, _, number = name.partition("_")
        kind = {"GLIBC": "glibc", "GLIBCXX": "glibcxx", "CXXABI": "cxxabi"}.get(family)
        # GLIBC_PRIVATE, CXXABI_TM_1 and GLIBC_ABI_DT_RELR are markers, not points on the version line
        if kind and version(number) > version(found.get(kind, "")):
            found[kind] = number
    return found


def version(text: str) -> tuple[int, ...]:
    """Return a dotted version as integers; ``()`` when it is anything else."""
    parts = text.split(".")
    if not all(_NUMBER.fullmatch(part) for part in parts):
        return ()
    return tuple(int(part) for part in parts)


def library_requirements(data: bytes | memoryview, *, where: str = "shared object") -> tuple[Requirement, ...]:
    """Return :func:`symbol_versions` of a shared object as requirements, in kind order."""
    return tuple(
        Requirement(kind, number) for kind, number in sorted(symbol_versions(data, where=where).items())
    )


def merge(requirements: Iterable[Requirement]) -> tuple[Requirement, ...]:
    """Return one requirement per kind that implies all the given ones, in kind order.

    Versions take the highest, lists the union.

    Raises:
        CorruptEntry: two different values of a kind that only one host value can meet.
    """
    found: dict[str, Requirement] = {}
    for item in requirements:
        have = found.get(item.kind)
        if have is None or have == item:
            found[item.kind] = item
        elif KINDS.get(item.kind) is _all_of:
            found[item.kind] = Requirement(item.kind, tuple(sorted({*_items(have), *_items(item)})))
        elif KINDS.get(item.kind) is _at_least and isinstance(have.value, str) and isinstance(item.value, str):
            found[item.kind] = max(have, item, key=lambda r: version(str(r.value)))
        else:
            raise CorruptEntry(f"{item.kind}: {_show(have.value)} and {_show(item.value)} are both required")
    return tuple(found[kind] for kind in sorted(found))


def _items(requirement: Requirement) -> tuple[str, ...]:
    return (requirement.value,) if isinstance(requirement.value, str) else requirement.value


def _show(value: object) -> str:
    if value is None:
        return "nothing (unknown on this host)"
    return (
        value
        if isinstance(value, str)
        else " ".join(str(item) for item in value)
        if isinstance(value, Iterable)
        else str(value)
    )
