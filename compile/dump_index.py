"""Artifact: the index of a dump: what each of its files is, its programs and its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pwcc.compile.tracing import Traced, piece_names

INDEX: Final = "README.md"
TITLE: Final = "# What a compile made"

_KINDS: Final = (
    ("program*/graph.py", "a traced program: operations, their shapes and lines, by the call they are part of"),
    ("program*/stitch.py", "what calls the pieces and the operations between them, as it is published"),
    ("program*/bytecode.py", "what Dynamo wrote in place of `forward`"),
    ("pieces/*/graph.py", "a piece: what is compiled, keyed and shared by equal pieces"),
    ("pieces/*/*/pass-*.before.txt", "the graph before a pass that changed it, as Inductor had it"),
    ("pieces/*/*/pass-*.after.txt", "and after it"),
    ("pieces/*/*/inductor.py", "Inductor's own output: wrapper and sources of kernels, before sealing"),
    ("pieces/*/*/piece.py", "the sealed program of a piece, as it is published"),
    ("pieces/*/*/piece.json", "its record: inputs, kernels, what it calls, matches of passes"),
    ("pieces/*/*/*.so", "a compiled kernel of a CPU"),
    ("pieces/*/*/*.cubin", "a compiled kernel of a GPU"),
    ("refused.py", "what Dynamo would have to run beside the graph, which is why the model is refused"),
    ("refused_graph.py", "the graph that could not be cut"),
)  # fmt: skip


def index_text(directory: Path, traced: Sequence[Traced], *, refused: str | None = None) -> str:
    """Return the index of what lies in ``directory``, as Markdown; ``refused`` is the error that ended it."""
    lines = [
        TITLE,
        "",
        "Written by `--dump` for people; nothing reads it back, and no key holds it.",
        "",
    ]
    if refused is not None:
        lines += [f"The compile ended with: {refused}", ""]
    found = [(kind, what) for kind, what in _KINDS if next(directory.glob(kind), None) is not None]
    if found:
        lines += ["| file | what it is |", "| --- | --- |", *(f"| `{k}` | {w} |" for k, w in found), ""]
    if traced:
        lines += [*_programs(traced), *_pieces(traced)]
    return "\n".join(lines)


def _programs(traced: Sequence[Traced]) -> Iterator[str]:
    yield from (
        "## Programs",
        "",
        "| program | tokens | pieces | splits | variants |",
        "| --- | --- | --- | --- | --- |",
    )
    for number, item in enumerate(traced):
        variants = ", ".join(map(str, item.variants))
        numbers = f"{item.low} to {item.high} | {len(item.program.pieces)} | {item.program.splits}"
        yield f"| program{number} | {numbers} | {variants} |"
    yield ""


def _pieces(traced: Sequence[Traced]) -> Iterator[str]:
    names = piece_names(traced)
    yield from ("## Pieces", "", "| piece | graph | operations | calls |", "|" + " --- |" * 4)
    graphs = {graph.digest: graph for item in traced for graph in item.program.unique}
    calls = [piece.graph.digest for item in traced for piece in item.program.pieces]
    for digest, name in names.items():
        yield f"| {name} | {digest[:12]} | {len(graphs[digest].ops)} | {calls.count(digest)} |"
    yield ""
