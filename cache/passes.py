"""Artifact: which graph passes a sealed piece went through, and how many places each rewrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pwcc.cache.strict import Fields, Json

MAX_PASSES: Final = 1000


@dataclass(frozen=True)
class PassCount:
    """One pass by its name in ``--passes``, and its matches in one piece."""

    name: str
    matches: int

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"name": self.name, "matches": self.matches}

    @classmethod
    def parse(cls, value: object, where: str) -> PassCount:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        count = cls(fields.str_("name", max_length=256), fields.int_("matches"))
        fields.done()
        return count
