"""Store: what an entry cost to make, in ``v1/costs/<entry-key>.json``: seconds by stage and by piece.

Seconds differ from run to run, so no digest covers them; see :mod:`pwcc.cache.sidecar`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import EntryKey
from pwcc.cache.sidecar import Sidecar
from pwcc.cache.store import Store
from pwcc.cache.strict import Fields, Json

FILES: Final = Sidecar("costs", "the costs of a compile", schema=1, max_bytes=16 * 2**20)


@dataclass(frozen=True)
class PieceCost:
    """Seconds that one piece took for one variant: in Inductor, and in its first run, which tunes."""

    compile_s: float
    tune_s: float

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"compile_s": self.compile_s, "tune_s": self.tune_s}

    @classmethod
    def parse(cls, value: object, where: str) -> PieceCost:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        cost = cls(fields.float_("compile_s"), fields.float_("tune_s"))
        fields.done()
        return cost


@dataclass(frozen=True)
class Costs:
    """The cost of one entry.

    ``stages``: wall-clock seconds of ``trace``, ``split``, ``compile``, ``publish`` and ``total``. ``pieces``:
    by piece and variant, such as ``p0 n=1``; those that were found in the piece cache took none. ``jobs`` is
    how many processes compiled pieces at once, so the pieces' seconds may add up to more than the stage's.
    """

    stages: Mapping[str, float]
    pieces: Mapping[str, PieceCost]
    jobs: int

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "stages": dict(self.stages),
            "pieces": {name: cost.to_json() for name, cost in self.pieces.items()},
            "jobs": self.jobs,
        }


def write(store: Store, key: EntryKey, costs: Costs) -> Path:
    """Write an entry's costs over what is there and return the file. Raises StoreError."""
    return FILES.write(store, key, costs.to_json())


def read(store: Store, key: EntryKey) -> Costs | None:
    """Return an entry's costs, or None where they were not kept or did not travel with the entry.

    Raises:
        CorruptEntry: the file is damaged or of another entry. StoreError: it cannot be read.
    """
    fields = FILES.read(store, key)
    if fields is None:
        return None
    stages = fields.mapping("stages", _seconds)
    costs = Costs(stages, fields.mapping("pieces", PieceCost.parse), fields.int_("jobs", low=1))
    fields.done()
    return costs


def _seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise CorruptEntry(f"expected seconds, got {repr(value)[:80]}", where=where)
    return float(value)
