"""Store: sealed pieces by what made them, so that an edit or an added size compiles only what is new."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pwcc.cache import strict
from pwcc.cache.code_digest import digest_code
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import FactorDigest, PieceKey, factor_digest
from pwcc.cache.store import Store
from pwcc.compile.build_factors import piece_factors
from pwcc.compile.operator_globals import reads_of
from pwcc.compile.piece_compiler import PieceResult, PieceTask
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.target import Target
from pwcc.compile.torch_private import operators


class PieceCache:
    """Looks sealed pieces up in a store. A damaged or incomplete record counts as absent.

    So does every record where signatures are required: a record is not signed.

    The key covers the piece's structural digest, the variant, passes, the sealing options, the compiler
    factors, the declared environment and the Python code behind custom operators, which Inductor may have
    looked into (``triton_op``, a decomposition, a fake); not the model, the piece's name or its source lines.
    With ``renew`` nothing is found, and what is put replaces what was there.
    """

    def __init__(self, store: Store, target: Target, *, renew: bool = False) -> None:
        self._store = store
        self._renew = renew
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
            "passes": [spec.to_json() for spec in task.passes],
            "custom ops": list(task.custom_ops),
            "factors": self._factors,
        }
        if task.shared:
            parts["shared"] = [list(group) for group in task.shared]
        if behind := code_behind(task.graph.ops):
            parts["behind"] = behind
        return PieceKey(factor_digest(strict.canonical(parts)))

    def get(self, task: PieceTask) -> PieceResult | None:
        """Return the sealed piece of a task if it is there with all its blobs."""
        if self._renew or self._store.is_restricted:  # nobody signs piece records
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


def code_behind(targets: Sequence[str]) -> list[strict.Json]:
    """Return digests of the code behind the custom operators among a graph's targets, empty for torch's own.

    A file is digested whole, as it is among the entry's sources; code that has none by what it does. Of an
    operator that is looked into, the constants that it reads are among them.
    """
    names = {"::".join(target.split(".")[2:4]) for target in targets if target.startswith("torch.ops.")}
    found = operators.behind(names)
    folded = reads_of(found)
    files = {code.co_filename for code in found.codes} | set(found.files) | set(folded.files)
    if found.compiled:
        files |= {str(path) for path in torch.ops.loaded_libraries}
    texts: dict[str, FactorDigest] = {}
    for file in sorted(files):
        with contextlib.suppress(OSError):
            texts[file] = factor_digest(Path(file).read_bytes())
    loose = [digest_code(code) for code in found.codes if code.co_filename not in texts]
    values = [factor_digest(PredicateSet.of(folded.constants).to_json())] if folded.constants else []
    return [*sorted(set(texts.values())), *sorted(set(loose)), *values]
