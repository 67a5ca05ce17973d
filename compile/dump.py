"""Artifact: write what a compile made as readable files, for people; nothing reads them back.

::

    README.md                          what each file is (see dump_index)
    program0/graph.py, stitch.py, bytecode.py
    pieces/p0/graph.py
    pieces/p0/n=1/inductor.py, pass-*.txt, piece.py, piece.json, kernels
    refused.py, refused_graph.py       of a model that is refused
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pwcc.cache import atomic
from pwcc.cache.errors import PwccError, UnsealableError
from pwcc.cache.ids import FactorDigest
from pwcc.cache.sealed import CppKernel, SealedPiece
from pwcc.cache.store import Store
from pwcc.compile.decompiled import decompiled
from pwcc.compile.dump_index import INDEX, TITLE, index_text
from pwcc.compile.graph_text import piece_text, program_text
from pwcc.compile.piece_compiler import INDUCTOR, PieceResult
from pwcc.compile.rebuild import Variant
from pwcc.compile.torch_private.dynamo import SideEffectError
from pwcc.compile.torch_private.structured_trace import artifact
from pwcc.compile.tracing import Traced, piece_names, stitch_of

_CACHED: Final = """\
# This piece came from the piece cache, so Inductor did not run: compile with PWCC_RECACHE=1 to see its code.
"""


@contextlib.contextmanager
def dumping(directory: Path | None) -> Iterator[None]:
    """Make ``directory`` ready, in which an earlier dump is replaced; None does nothing.

    Where the block refuses a model, ``refused.py`` holds Dynamo's rewritten bytecode, if state would have to be
    changed beside the graph, and ``refused_graph.py`` the graph, if it could not be cut. The error goes on, and
    its hint names the file.

    Raises:
        StoreError: the directory cannot be written.
    """
    if directory is None:
        yield
        return
    with atomic.os_errors("writing a dump", directory):
        _begin(directory)
    try:
        yield
    except PwccError as error:
        _dump_refusal(directory, error)
        raise


def _begin(directory: Path) -> None:
    """Remove what an earlier dump wrote, if one did, and nothing else; leave an index that says so."""
    index = directory / INDEX
    if index.is_file() and index.read_text(errors="replace").startswith(TITLE):
        for folder in (directory / "pieces", *directory.glob("program[0-9]*")):
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("refused.py", "refused_graph.py"):
            (directory / name).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    index.write_text(f"{TITLE}\n\nThe compile did not get far enough to write anything.\n")


def _dump_refusal(directory: Path, error: PwccError) -> None:
    texts: dict[str, str] = {}
    cause = error.__cause__
    if isinstance(cause, SideEffectError) and cause.code is not None:
        texts["refused.py"] = decompiled(cause.code)
    if isinstance(error, UnsealableError) and error.graph is not None:
        texts["refused_graph.py"] = error.graph
    for name, text in texts.items():
        path = directory / name
        path.write_text(text)
        what = "what it would do" if name == "refused.py" else "the graph"
        error.hint = "; ".join([*([error.hint] if error.hint else []), f"{path} holds {what}"])
    (directory / INDEX).write_text(index_text(directory, (), refused=error.message))


def dump_programs(directory: Path, traced: Sequence[Traced]) -> None:
    """Write every traced program and the graphs of its pieces, and the index; over those of fewer programs."""
    names = piece_names(traced)
    for number, item in enumerate(traced):
        folder = directory / f"program{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "graph.py").write_text(program_text(item.trace, item.program, names))
        (folder / "stitch.py").write_text(stitch_of(item))
        if item.trace.raw is not None and item.trace.raw.bytecode is not None:
            (folder / "bytecode.py").write_text(decompiled(item.trace.raw.bytecode))
        for piece in reversed(item.program.pieces):  # the lines are those of the first use
            own = directory / "pieces" / names[piece.graph.digest]
            own.mkdir(parents=True, exist_ok=True)
            (own / "graph.py").write_text(piece_text(piece.graph, piece.lines))
    (directory / INDEX).write_text(index_text(directory, traced))


def piece_folder(directory: Path, name: str, variant: Variant) -> Path:
    """Return where the files of one compile of one piece lie."""
    return directory / "pieces" / name / str(variant)


def rename_pieces(directory: Path, before: Mapping[FactorDigest, str], now: Mapping[FactorDigest, str]) -> None:
    """Move the folders of pieces that another program, which comes first, gave other names."""
    moved = [(name, now[digest]) for digest, name in before.items() if digest in now]
    pieces = directory / "pieces"
    for old, _ in moved:
        if (pieces / old).is_dir():
            (pieces / old).rename(pieces / f"{old}.old")
    for old, new in moved:
        if (pieces / f"{old}.old").is_dir():
            (pieces / f"{old}.old").rename(pieces / new)


def dump_pieces(
    directory: Path,
    traced: Sequence[Traced],
    results: Mapping[tuple[FactorDigest, Variant], PieceResult],
    store: Store,
) -> None:
    """Write every sealed piece's record, program and kernels beside Inductor's code, and the index."""
    names = piece_names(traced)
    for (digest, variant), result in results.items():
        if digest not in names:
            continue
        folder = piece_folder(directory, names[digest], variant)
        folder.mkdir(parents=True, exist_ok=True)
        data = store.read_blob(result.sealed)
        (folder / "piece.json").write_bytes(data)
        record = SealedPiece.from_bytes(data, where=names[digest])
        (folder / "piece.py").write_bytes(store.read_blob(record.source))
        for kernel in record.kernels:
            suffix = ".so" if isinstance(kernel, CppKernel) else ".cubin"
            (folder / f"{kernel.name}{suffix}").write_bytes(store.read_blob(kernel.blob))
        if not (folder / INDUCTOR).exists():
            (folder / INDUCTOR).write_text(_CACHED)
    (directory / INDEX).write_text(index_text(directory, traced))


def trace_programs(first: int, traced: Sequence[Traced]) -> None:
    """Add programs, counted from ``first``, to torch's structured trace, which tlparse shows."""
    names = piece_names(traced)
    for number, item in enumerate(traced, first):
        name = f"pwcc_program{number}"
        artifact(f"{name}_graph", lambda item=item: program_text(item.trace, item.program, names))  # type: ignore[misc]
        artifact(f"{name}_stitch", lambda item=item: stitch_of(item))  # type: ignore[misc]
        for graph in item.program.unique:
            artifact(f"{name}_{names[graph.digest]}", lambda graph=graph: piece_text(graph))  # type: ignore[misc]
