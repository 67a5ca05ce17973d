"""Store: sealed pieces by what made them, so that an edit or an added size compiles only what is new."""

from __future__ import annotations

from dataclasses import replace

from pwcc.cache import strict
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import PieceKey, factor_digest
from pwcc.cache.store import Store
from pwcc.compile.build_factors import piece_factors
from pwcc.compile.piece_compiler import PieceResult, PieceTask
from pwcc.compile.target import Target


class PieceCache:
    """Looks sealed pieces up in a store. A damaged or incomplete record counts as absent.

    So does every record where signatures are required: a record is not signed.

    The key covers the piece's structural digest, the variant, the sealing options, the compiler
    factors and the declared environment; not the model, the piece's name or its source lines.
    """

    def __init__(self, store: Store, target: Target) -> None:
        self._store = store
        self._factors = piece_factors(target)

    def key(self, task: PieceTask) -> PieceKey:
        """Return the key of a task."""
        parts = {
            "graph": task.graph.digest,
            "variant": task.variant.to_json(),
            "options": {name: repr(value) for name, value in task.options.items()},
            "march": task.march,
            "cpu flags": list(task.cpu_flags),
            "tuned": task.tuned,
            "aliases": [list(group) for group in task.alias_groups],
            "factors": self._factors,
        }
        return PieceKey(factor_digest(strict.canonical(parts)))

    def get(self, task: PieceTask) -> PieceResult | None:
        """Return the sealed piece of a task if it is there with all its blobs."""
        if self._store.is_restricted:  # nobody signs piece records
            return None
        key = self.key(task)
        try:
            data = self._store.get_piece(key)
            if data is None:
                return None
            result = PieceResult.parse(data, f"piece {key[:12]}")
            complete = all(self._store.has_blob(digest, size=size) for digest, size in result.blobs.items())
            if not complete or result.sealed not in result.blobs:
                return None
            for digest in result.blobs:  # a blob that was bit-flipped must be made again, not published
                self._store.read_blob(digest)
                self._store.blobs.touch(digest)  # so that no collection takes it before it is published
        except StoreError:
            return None
        return replace(result, seconds=0.0, tune_seconds=0.0)

    def put(self, task: PieceTask, result: PieceResult) -> None:
        """Remember a sealed piece; without its timings, so that the same piece gives the same bytes."""
        record = replace(result, seconds=0.0, tune_seconds=0.0)
        self._store.put_piece(self.key(task), strict.canonical(record.to_json()))
