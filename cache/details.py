"""Key: what an entry keeps only to explain itself: the model's rows, its signature, its sources' lines.

Nothing here decides anything; a load never reads it. Of a source's text only four bytes per line are
kept (the head of each line's XXH3), enough to say "+3 -1 lines" when it changed and too little to read.
"""

from __future__ import annotations

import base64
import binascii
import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.factors import normalise
from pwcc.cache.strict import Fields, Json, as_json, as_str

SCHEMA: Final = 1
LINE_BYTES: Final = 4
MAX_BYTES: Final = 32 * 1024 * 1024
MAX_LINES: Final = 200_000  # per file; the longest file of transformers 5 has under 10,000
MAX_ALIGNED: Final = 3_000  # changed lines that are aligned one by one; more are only counted

Lines = tuple[bytes, ...]


@dataclass(frozen=True)
class Details:
    """The record: ``tree`` as ``ModelTree.to_json``, ``signature``, and line digests by ``module:path``."""

    tree: Mapping[str, Json]
    signature: Json
    lines: Mapping[str, Lines]

    @classmethod
    def of(cls, tree: Mapping[str, object], signature: object, lines: Mapping[str, Lines]) -> Details:
        """Return the record of facts as the model gives them."""
        return cls(rows_of(tree), normalise(signature, name="signature"), lines)

    def to_bytes(self) -> bytes:
        """Return canonical JSON: same record, same bytes."""
        lines = {name: base64.b64encode(b"".join(found)).decode() for name, found in self.lines.items()}
        return strict.canonical(
            {"schema": SCHEMA, "tree": dict(self.tree), "signature": self.signature, "lines": lines}
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "details") -> Details:
        """Return what :meth:`to_bytes` wrote; raise CorruptEntry otherwise."""
        fields = Fields(strict.loads(data, where=where, max_bytes=MAX_BYTES), where)
        fields.int_("schema", low=SCHEMA, high=SCHEMA)
        tree = fields.mapping("tree", as_json, max_items=16)
        signature = fields.item("signature", as_json)
        lines = fields.mapping("lines", _as_lines)
        fields.done()
        return cls(tree, signature, lines)


def rows_of(tree: Mapping[str, object]) -> dict[str, Json]:
    """Return the JSON of a model tree (``ModelTree.to_json``) as a record holds it."""
    return {kind: normalise(rows, name=kind) for kind, rows in tree.items()}


def _as_lines(value: object, where: str) -> Lines:
    text = value if isinstance(value, str) else as_str(value, where)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise CorruptEntry("expected base64", where=where) from None
    if len(data) % LINE_BYTES or len(data) > MAX_LINES * LINE_BYTES:
        raise CorruptEntry(f"expected at most {MAX_LINES} digests of {LINE_BYTES} bytes", where=where)
    return tuple(data[start : start + LINE_BYTES] for start in range(0, len(data), LINE_BYTES))


def line_digests(text: bytes) -> Lines:
    """Return four bytes per line of a file; at most ``MAX_LINES`` lines."""
    return tuple(xxhash.xxh3_64_digest(line)[:LINE_BYTES] for line in text.splitlines()[:MAX_LINES])


def diff_size(before: Lines, after: Lines) -> tuple[int, int]:
    """Return how many lines a unified diff would add and remove.

    Exact up to ``MAX_ALIGNED`` changed lines between the first and the last change; beyond that lines
    that only moved are not counted.
    """
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    last = 0
    while last < min(len(before), len(after)) - first and before[-1 - last] == after[-1 - last]:
        last += 1
    old, new = before[first : len(before) - last], after[first : len(after) - last]
    if max(len(old), len(new)) > MAX_ALIGNED:
        gone, come = Counter(old), Counter(new)
        return (come - gone).total(), (gone - come).total()
    added = removed = 0
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            removed += b - a
            added += d - c
    return added, removed


_TENSOR = "tensor "


def tree_changes(before: Mapping[str, Json], after: Mapping[str, Json]) -> list[tuple[str, Json, Json]]:
    """Return ``(path, recorded, now)`` of every row of two model trees that differs; None is no such row."""
    found: list[tuple[str, Json, Json]] = []
    for kind in sorted({*before, *after}):
        old, new = _rows(before.get(kind)), _rows(after.get(kind))
        noun = kind.removesuffix("s")
        found += [
            (f"{noun} {name or '(root)'}", old.get(name), new.get(name))
            for name in [*old, *(name for name in new if name not in old)]
            if old.get(name) != new.get(name)
        ]
        if old == new and list(old) != list(new):
            found.append((f"order of {kind}", list(old), list(new)))
    return found


def moved_rows(changes: Sequence[tuple[str, Json, Json]]) -> dict[str, str]:
    """Return, of tensors that are gone, where a wrapper such as an adapter has put them.

    ``changes`` are those of :func:`tree_changes`. A tensor ``a.weight`` moved to ``a.base_layer.weight`` if
    there was none of that name, and it is of the same kind, dtype and shape.
    """
    added = {path.removeprefix(_TENSOR): row for path, before, row in changes if before is None}
    found: dict[str, str] = {}
    for path, before, after in changes:
        owner, _, leaf = path.removeprefix(_TENSOR).rpartition(".")
        if after is not None or not path.startswith(_TENSOR) or not isinstance(before, list):
            continue
        inside = f"{owner}." if owner else ""
        for name, row in added.items():
            same = isinstance(row, list) and row[:3] == before[:3]
            if same and name.startswith(inside) and name.endswith(f".{leaf}"):
                found.setdefault(path, name)
    return found


def _rows(value: Json) -> dict[str, Json]:
    """Rows by name; the second row of a name (which cannot be) is dropped."""
    rows = value if isinstance(value, list) else []
    return {str(row[0]): row[1:] for row in rows if isinstance(row, list) and row}


def row_text(row: Json) -> str:
    """Return a tree's row as a person reads it: ``parameter torch.float32 [64, 64]``."""
    if not isinstance(row, list):
        return "nothing"
    return " ".join(_cell(cell) for cell in row if cell not in ("", None)) or "nothing"


def _cell(cell: Json) -> str:
    if isinstance(cell, list):
        return "[" + ", ".join(str(item) for item in cell) + "]"
    return str(cell)
