"""Which pieces are the same compile, and that a damaged record is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pwcc.cache.ids import blob_digest
from pwcc.cache.store import Store
from pwcc.compile.numerics import NumericsRecord
from pwcc.compile.passes.registry import resolve
from pwcc.compile.piece_cache import PieceCache, code_behind
from pwcc.compile.piece_compiler import PieceResult, PieceTask
from pwcc.compile.piece_graph import PieceGraph, PieceNode, SymbolInput, TensorInput
from pwcc.compile.rebuild import Variant
from pwcc.compile.target import target_of


def graph(*, width: int = 4, target: str = "torch.relu", dtype: str = "float32") -> PieceGraph:
    x = TensorInput(dtype, "cpu", ("s0", width), (width, 1), 0)
    node = PieceNode("call_function", target, [{"v": 1}], {"dict": []})
    return PieceGraph((SymbolInput("s0"), x), (node,), ({"v": 2},))


TASK = PieceTask(
    name="p0",
    graph=graph(),
    variant=Variant(1, 64),
    device="cpu",
    options={"freezing": False, "cpp.simdlen": 256},
    march="x86-64-v3",
    cpu_flags=("avx2",),
    lines=("model.py:3",),
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


@pytest.fixture
def cache(store: Store) -> PieceCache:
    return PieceCache(store, target_of("cpu"))


def result(store: Store) -> PieceResult:
    """A result whose blobs are in the store."""
    record, kernel = store.put_blob(b"record"), store.put_blob(b"kernel")
    return PieceResult(
        sealed=record,
        numerics=(NumericsRecord(64, 1, 1e-7, 1.5e-7, 1.5e-7, 3e-7),),
        guards=(("s0 >= 2", "model.py:3"), ("s0 <= 64", None)),
        blobs={record: 6, kernel: 6},
        kernels=1,
        seconds=3.25,
        tune_seconds=0.5,
    )


@pytest.mark.parametrize(
    "same",
    [
        replace(TASK, name="p7"),
        replace(TASK, lines=("elsewhere.py:30",)),
        replace(TASK, options=dict(sorted(TASK.options.items()))),
        replace(TASK, graph=graph()),
        replace(TASK, dump="/somewhere"),
    ],
)
def test_names_and_lines_are_not_in_the_key(cache: PieceCache, same: PieceTask) -> None:
    assert cache.key(same) == cache.key(TASK)


@pytest.mark.parametrize(
    "other",
    [
        replace(TASK, graph=graph(width=8)),
        replace(TASK, graph=graph(target="torch.neg")),
        replace(TASK, graph=graph(dtype="bfloat16")),
        replace(TASK, variant=Variant(1, 128)),
        replace(TASK, variant=Variant(2, 64)),
        replace(TASK, variant=Variant(64, 64, static=True)),
        replace(TASK, options={**TASK.options, "cpp.simdlen": 512}),
        replace(TASK, options={"freezing": False}),
        replace(TASK, march="native"),
        replace(TASK, cpu_flags=("avx2", "fma")),
        replace(TASK, tuned=True),
        replace(TASK, alias_groups=((1, 2),)),
        replace(TASK, shared=((0, 1),)),
        replace(TASK, passes=resolve("noop")),
        replace(TASK, custom_ops=("rms_norm",)),
    ],
)
def test_whatever_changes_the_code_is_in_the_key(cache: PieceCache, other: PieceTask) -> None:
    assert cache.key(other) != cache.key(TASK)


def test_numeric_modes_are_in_the_key(store: Store, cache: PieceCache) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert PieceCache(store, target_of("cpu")).key(TASK) != cache.key(TASK)
    assert PieceCache(store, target_of("cpu")).key(TASK) == cache.key(TASK)


def test_what_was_put_is_found_without_its_timings(store: Store, cache: PieceCache) -> None:
    assert cache.get(TASK) is None
    made = result(store)
    cache.put(TASK, made)
    assert cache.get(replace(TASK, name="p9")) == replace(made, seconds=0.0, tune_seconds=0.0)
    assert cache.get(replace(TASK, tuned=True)) is None


def test_the_same_piece_gives_the_same_bytes(store: Store, cache: PieceCache) -> None:
    made = result(store)
    cache.put(TASK, made)
    first = store.get_piece(cache.key(TASK))
    cache.put(TASK, replace(made, seconds=9.0))
    assert store.get_piece(cache.key(TASK)) == first


Damage = Callable[[Store, PieceCache], None]


def _record(store: Store, cache: PieceCache) -> Path:
    return store.root / "v1/pieces" / f"{cache.key(TASK)}.json"


def truncated(store: Store, cache: PieceCache) -> None:
    path = _record(store, cache)
    path.write_bytes(path.read_bytes()[:-20])


def of_another_form(store: Store, cache: PieceCache) -> None:
    _record(store, cache).write_bytes(b'{"sealed": "x"}')


def with_a_lost_blob(store: Store, cache: PieceCache) -> None:
    store.blob_path(blob_digest(b"kernel")).unlink()


def with_a_short_blob(store: Store, cache: PieceCache) -> None:
    store.blob_path(blob_digest(b"kernel")).write_bytes(b"kern")


def with_a_flipped_blob(store: Store, cache: PieceCache) -> None:
    store.blob_path(blob_digest(b"record")).write_bytes(b"recorD")


def without_its_own_record(store: Store, cache: PieceCache) -> None:
    made = result(store)
    kept = {digest: size for digest, size in made.blobs.items() if digest != made.sealed}
    cache.put(TASK, replace(made, blobs=kept))


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        of_another_form,
        with_a_lost_blob,
        with_a_short_blob,
        with_a_flipped_blob,
        without_its_own_record,
    ],
)
def test_a_damaged_record_counts_as_absent_and_is_replaced(
    store: Store, cache: PieceCache, damage: Damage
) -> None:
    cache.put(TASK, result(store))
    damage(store, cache)
    assert cache.get(TASK) is None
    cache.put(TASK, result(store))
    assert cache.get(TASK) is not None


def test_code_behind_custom_operators_is_part_of_the_key(tmp_path: Path, cache: PieceCache) -> None:
    """Torch may look into an operator when it compiles a piece, as into a CompositeImplicitAutograd one."""
    path = tmp_path / "piece_cache_op.py"
    task = replace(TASK, graph=graph(target="torch.ops.pwcc_piece_cache.op"))

    def key_with(text: str) -> str:
        path.write_text(
            "import torch\nlibrary = torch.library.Library('pwcc_piece_cache', 'FRAGMENT')\n"
            "if not hasattr(torch.ops.pwcc_piece_cache, 'op'):\n    library.define('op(Tensor x) -> Tensor')\n"
            f"library.impl('op', lambda x: {text}, 'CompositeImplicitAutograd')\n"
        )
        namespace: dict[str, object] = {}
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        try:
            return cache.key(task)
        finally:
            namespace["library"]._destroy()  # type: ignore[attr-defined]

    first, same, other = key_with("x + 1"), key_with("x + 1"), key_with("x + 2")
    assert first == same
    assert first != other
    assert code_behind(TASK.graph.ops) == []
