"""Store: what a verification of a cache found, and the exit code that tells it apart.

The exit code is 0, or 64 plus the bits of the kinds that were found and not repaired: 65 to 127, apart from
the codes 0 to 4 of every command.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from pwcc.cache.ids import EntryKey
from pwcc.cache.strict import Json

BASE: Final = 64


class Kind(Enum):
    """A kind of finding: its bit in the exit code, its name, and what it is."""

    ENTRY = (1, "entry", "an entry's manifest, records, factors or plans are not what they must be")
    BLOB = (2, "blob", "a blob is missing or has other bytes than its name says")
    LEFTOVER = (4, "leftover", "nothing needs it: an orphan blob, a crashed writer's file, a foreign name")
    TRUST = (8, "trust", "others could have written it, or a signature does not hold")
    HOST = (16, "host", "this host does not meet what an entry requires; no damage")
    UNREADABLE = (32, "unreadable", "could not be read, so it could not be verified")

    def __init__(self, bit: int, label: str, meaning: str) -> None:
        self.bit = bit
        self.label = label
        self.meaning = meaning


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, what was expected and what came.

    ``entry`` is the entry that it concerns, if it is one. ``repaired`` says what was done about it.
    """

    kind: Kind
    where: str
    message: str
    entry: EntryKey | None = None
    repaired: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "kind": self.kind.label,
            "where": self.where,
            "message": self.message,
            "entry_key": self.entry,
            "repaired": self.repaired,
        }


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome. ``bytes`` of blobs were hashed in ``seconds``; ``notes`` do not count as findings.

    ``quarantined`` entries were set aside before and are not looked at.
    """

    findings: tuple[Finding, ...]
    entries: int
    blobs: int
    bytes: int
    seconds: float
    quarantined: int = 0
    notes: tuple[str, ...] = ()

    @property
    def mask(self) -> int:
        """The bits of all findings that were not repaired."""
        found = 0
        for finding in self.findings:
            if finding.repaired is None:
                found |= finding.kind.bit
        return found

    @property
    def exit_code(self) -> int:
        """0, or 64 plus :attr:`mask`."""
        return BASE + self.mask if self.mask else 0

    def to_json(self) -> dict[str, Json]:
        """Return the report for ``--json``."""
        return {
            "ok": not self.mask,
            "exit_code": self.exit_code,
            "entries": self.entries,
            "blobs": self.blobs,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "quarantined": self.quarantined,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": list(self.notes),
        }
