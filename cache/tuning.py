"""Store: what tuning measured for an entry, in ``v1/tuning/<entry-key>.json``, outside what is digested.

Two tunings of one kernel never measure the same microseconds, so no digest may cover them: an entry whose
winners are equal has equal bytes, whatever the candidates took. The file also keeps the compilers' own
records of their choices (``files``), which a later compile with ``--autotune-from`` starts from. It is
neither signed, exported nor needed to load an entry; see :mod:`pwcc.cache.sidecar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import EntryKey
from pwcc.cache.sidecar import Sidecar
from pwcc.cache.store import Store
from pwcc.cache.strict import Fields, Json

FILES: Final = Sidecar("tuning", "the tuning", schema=1, max_bytes=64 * 2**20)
MAX_CANDIDATES: Final = 100_000
# The only files that are written back: a kernel's winner, a fused kernel's time, the times of operations.
_FILE: Final = re.compile(r"[A-Za-z0-9_]{1,64}/[A-Za-z0-9_]{1,200}(?:\.best_config|\.kernel_perf)?")


@dataclass(frozen=True)
class Candidate:
    """One configuration that was tried, and the microseconds that it took; None where it could not run."""

    config: str
    us: float | None

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"config": self.config, "us": self.us}

    @classmethod
    def parse(cls, value: object, where: str) -> Candidate:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        config = fields.item("config", strict.as_text)
        us = fields.take("us")
        if us is not None and (isinstance(us, bool) or not isinstance(us, int | float)):
            fields.fail("us", "microseconds or null", us)
        fields.done()
        return cls(config, None if us is None else float(us))


@dataclass(frozen=True)
class TunedChoice:
    """One choice: of a kernel's configuration (``kernel``), or of a kernel for an operation (``operation``).

    ``candidates`` are in the order in which they were timed, those of coordinate descent last; none where
    there was nothing to choose, or an equal kernel of another piece was tuned before.
    """

    kind: str
    name: str
    winner: str
    descent: bool = False
    candidates: tuple[Candidate, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "name": self.name,
            "winner": self.winner,
            "descent": self.descent,
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }

    @classmethod
    def parse(cls, value: object, where: str) -> TunedChoice:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        choice = cls(
            kind=fields.item("kind", strict.as_name),
            name=fields.item("name", strict.as_text),
            winner=fields.item("winner", strict.as_text),
            descent=fields.bool_("descent"),
            candidates=fields.list_("candidates", Candidate.parse, max_items=MAX_CANDIDATES),
        )
        fields.done()
        return choice


@dataclass(frozen=True)
class PieceTuning:
    """The tuning of one compiled piece: its choices, how often something was timed, the compilers' own files.

    ``files`` map paths below Inductor's cache directory to their text.
    """

    choices: tuple[TunedChoice, ...] = ()
    runs: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "choices": [choice.to_json() for choice in self.choices],
            "runs": self.runs,
            "files": dict(sorted(self.files.items())),
        }

    @classmethod
    def parse(cls, value: object, where: str) -> PieceTuning:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        tuning = cls(
            fields.list_("choices", TunedChoice.parse), fields.int_("runs"), fields.item("files", parse_files)
        )
        fields.done()
        return tuning


@dataclass(frozen=True)
class EntryTuning:
    """The tuning of an entry by piece and variant, such as ``p0 n=1``."""

    entry_key: EntryKey
    pieces: Mapping[str, PieceTuning]

    @property
    def files(self) -> dict[str, str]:
        """The compilers' files of all pieces together; of one that several hold, the last."""
        merged: dict[str, str] = {}
        for tuning in self.pieces.values():
            for path, text in tuning.files.items():
                merged[path] = _merged(merged[path], text) if path in merged else text
        return merged

    def to_json(self) -> dict[str, Json]:
        """Return what a person asks for: the choices, without the compilers' files."""
        return {
            name: {"runs": tuning.runs, "choices": [choice.to_json() for choice in tuning.choices]}
            for name, tuning in self.pieces.items()
        }


def parse_files(value: object, where: str) -> dict[str, str]:
    """Item parser: relative paths of the compilers' files, each with a text of times or a JSON object.

    Raises:
        CorruptEntry: another path, or another text.
    """
    if not isinstance(value, dict) or len(value) > 100_000:
        raise CorruptEntry("expected an object of files", where=where)
    for path, text in value.items():
        if not _FILE.fullmatch(path) or not isinstance(text, str) or not _is_data(path, text):
            raise CorruptEntry(f"expected a file of tuning results, got {path[:80]!r}", where=where)
    return value


def _is_data(path: str, text: str) -> bool:
    """Tell whether a text is what its file holds: times in ``.kernel_perf``, a JSON object in the others."""
    try:
        if path.endswith(".kernel_perf"):
            return all(float(part) >= 0 for part in text.split())
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _merged(one: str, other: str) -> str:
    """Return two states of one JSON file as one: objects are united, of two values the later is kept."""

    def unite(a: object, b: object) -> object:
        if not isinstance(a, dict) or not isinstance(b, dict):
            return b
        return {**a, **{key: unite(a[key], item) if key in a else item for key, item in b.items()}}

    try:
        return json.dumps(unite(json.loads(one), json.loads(other)))
    except ValueError:
        return other


def write(store: Store, tuning: EntryTuning) -> Path:
    """Write an entry's tuning, whole or not at all, over what is there. Return its file.

    Raises:
        StoreError: the store cannot be written.
    """
    pieces: dict[str, Json] = {name: item.to_json() for name, item in tuning.pieces.items()}
    return FILES.write(store, tuning.entry_key, {"pieces": pieces})


def read(store: Store, key: EntryKey) -> EntryTuning | None:
    """Return an entry's tuning, or None where nothing was tuned or it did not travel with the entry.

    Raises:
        CorruptEntry: the file is damaged or of another entry. StoreError: it cannot be read.
    """
    fields = FILES.read(store, key)
    if fields is None:
        return None
    found = EntryTuning(key, fields.mapping("pieces", PieceTuning.parse))
    fields.done()
    return found
