"""Key: an explanation as data: what would be taken of a cache and what not, each difference by name.

The same values make the reasons of a miss (:meth:`Answer.reasons`, bounded) and the whole answer of
``pwcc explain`` (:meth:`Answer.lines`), so both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pwcc.cache.difference import Difference, all_advice, only_the_host, printable, said
from pwcc.cache.ids import EntryKey, LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.strict import Json

MAX_REASONS: Final = 8  # entries that a miss message names
MAX_DIFFERENCES: Final = 40  # differences of one entry that `pwcc explain` shows as text; --json has all
SHORT: Final = 12


class Outcome(Enum):
    """How a load or a compile would end."""

    HIT = "hit"
    MISS = "miss"
    HOST = "host mismatch"

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends so."""
        return {Outcome.HIT: 0, Outcome.MISS: 3, Outcome.HOST: 4}[self]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One entry: taken; eligible but another was preferred (no differences); or not taken, and why.

    ``what`` describes it in a few words. ``same_key`` tells that it lies under the lookup key asked for.
    """

    entry_key: EntryKey
    lookup_key: LookupKey
    what: str
    differences: tuple[Difference, ...] = ()
    same_key: bool = True
    taken: bool = False

    @property
    def only_the_host(self) -> bool:
        """Whether nothing but the host keeps it from serving."""
        return only_the_host(self.differences)

    def reason(self) -> str:
        """Return the one bounded line that a miss message shows."""
        return f"{self.entry_key[:SHORT]}: {said(self.differences)}"

    def lines(self) -> Iterator[str]:
        """Yield the entry, then each difference, then what to do."""
        state = "taken" if self.taken else "not taken" if self.differences else "also fits"
        place = "" if self.same_key else ", under another lookup key"
        yield f"{state} {self.entry_key[:SHORT]}: {self.what}{place}"
        for difference in self.differences[:MAX_DIFFERENCES]:
            yield f"  {difference.line()}"
        if len(self.differences) > MAX_DIFFERENCES:
            yield f"  and {len(self.differences) - MAX_DIFFERENCES} more: --json shows all"
        for text in all_advice(self.differences):
            yield f"  next: {text}"

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, with every difference."""
        return {
            "entry_key": self.entry_key,
            "lookup_key": self.lookup_key,
            "what": self.what,
            "same_lookup_key": self.same_key,
            "taken": self.taken,
            "differences": [difference.to_json() for difference in self.differences],
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one question found. ``question`` is what would be called: ``pwcc.load`` or ``pwcc compile``.

    ``verdicts`` come in the order of interest: taken, fitting, then by how little differs; ``notes`` are
    what else a reader should know.
    """

    question: str
    outcome: Outcome
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    def reasons(self) -> tuple[str, ...]:
        """Return the bounded reasons of a miss, the nearest entry first."""
        missed = [verdict for verdict in self.verdicts if verdict.differences]
        more = len(missed) - MAX_REASONS
        tail = [f"and {more} more entries: pwcc explain"] if more > 0 else []
        return (*(verdict.reason() for verdict in missed[:MAX_REASONS]), *tail, *self.notes)

    def advice(self) -> tuple[str, ...]:
        """Return what to do about the nearest entry's differences."""
        nearest = next((verdict for verdict in self.verdicts if verdict.differences), None)
        return all_advice(nearest.differences) if nearest is not None else ()

    def lines(self) -> list[str]:
        """Return the whole answer as text."""
        taken = next((verdict for verdict in self.verdicts if verdict.taken), None)
        head = f"{self.question}: {self.outcome.value}"
        found = [head if taken is None else f"{head}, entry {taken.entry_key[:SHORT]}"]
        for verdict in self.verdicts:
            found += [f"  {line}" for line in verdict.lines()]
        return found + [f"  {note}" for note in self.notes]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "question": self.question,
            "outcome": self.outcome.value,
            "exit_code": self.outcome.exit_code,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "notes": list(self.notes),
        }


def answer(question: str, verdicts: Sequence[Verdict], notes: Sequence[str] = ()) -> Answer:
    """Return the answer that verdicts add up to: taken first, then by how little differs."""
    if any(verdict.taken for verdict in verdicts):
        outcome = Outcome.HIT
    elif any(verdict.only_the_host for verdict in verdicts):
        outcome = Outcome.HOST
    else:
        outcome = Outcome.MISS
    order = sorted(verdicts, key=lambda v: (not v.taken, len(v.differences), not v.same_key, v.entry_key))
    return Answer(question=question, outcome=outcome, verdicts=tuple(order), notes=tuple(notes))


def describe(manifest: Manifest) -> str:
    """Return an entry in a few words: model, arguments, device, sizes, profile."""
    args = " ".join(f"{name}={value}" for name, value in sorted(manifest.model.args.items()))
    parts = [
        f"{manifest.model.identity} {args}".rstrip(),
        manifest.model.dtype,
        manifest.device.name or manifest.device.type,
        f"sizes {','.join(map(str, manifest.sizes)) or 'none'}",
        f"up to {manifest.max_tokens} tokens",
    ]
    if len(manifest.ranges) > 1 or any(high < manifest.max_tokens for _, high in manifest.ranges):
        parts.append("ranges " + ",".join(f"{low}-{high}" for low, high in manifest.ranges))
    return printable(", ".join(parts + ([f"profile {manifest.profile}"] if manifest.profile else [])))
