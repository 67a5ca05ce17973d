"""Artifact: run the passes of one piece in their order: count, check, and keep the text of what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from pwcc.cache.errors import PieceCompileError, PwccError
from pwcc.cache.passes import PassCount
from pwcc.compile.passes.base import GraphPass, PassContext


@dataclass(frozen=True)
class PassText:
    """The graph before and after a pass that changed it; ``position`` counts the passes from 0."""

    position: int
    name: str
    before: str
    after: str


@dataclass
class PassRun:
    """The passes of one compile of one piece, called once with its graph; what they did is kept here."""

    passes: Sequence[tuple[str, GraphPass]]
    context: PassContext
    keep_text: bool = False
    counts: list[PassCount] = field(default_factory=list)
    texts: list[PassText] = field(default_factory=list)

    def __call__(self, graph: fx.Graph) -> None:
        """Run every pass.

        Raises:
            PieceCompileError: a pass failed or left a graph that is not well formed; names the pass.
        """
        for position, (name, one) in enumerate(self.passes):
            before = readable(graph) if self.keep_text else ""
            known = {node: bool(node.users) for node in graph.nodes}
            try:
                matches = one(graph, self.context)
                if type(matches) is not int or matches < 0:
                    raise TypeError(f"it returned {matches!r}, not how many places it rewrote")
                if matches:
                    _remove_unused(graph, known)
                    _require_values(graph, known)
                    graph.lint()
            except PwccError:
                raise
            except Exception as error:
                raise PieceCompileError(
                    f"the pass {name!r} failed: {type(error).__name__}: {error}",
                    hint="leave the pass out of --passes, or mend it",
                ) from error
            self.counts.append(PassCount(name, matches))
            if self.keep_text and matches:
                self.texts.append(PassText(position, name, before, readable(graph)))


def _remove_unused(graph: fx.Graph, known: Mapping[fx.Node, bool]) -> None:
    """Erase what the pass left without users; what had none before is another's business."""
    for node in reversed(list(graph.nodes)):
        if not node.users and known.get(node, True) and not node.is_impure():
            graph.erase_node(node)


def _require_values(graph: fx.Graph, known: Mapping[fx.Node, bool]) -> None:
    for node in graph.nodes:
        if node not in known and node.op == "call_function" and "val" not in node.meta:
            raise ValueError(f"it made a node without meta['val']: {node.format_node()}")


def readable(graph: fx.Graph) -> str:
    """Return a graph as text with the dtype, shape and stride of every value."""
    lines: list[str] = []
    for node in graph.nodes:
        line = node.format_node() or ""
        value = node.meta.get("val")
        if hasattr(value, "dtype") and hasattr(value, "stride"):
            dtype = str(value.dtype).removeprefix("torch.")
            line += (
                f"  # {dtype}{[str(size) for size in value.shape]}, stride {[str(s) for s in value.stride()]}"
            )
        lines.append(line.replace("'", ""))
    return "\n".join(lines) + "\n"


def dump_passes(folder: Path, texts: Sequence[PassText]) -> None:
    """Write ``pass-<position>-<name>.before.txt`` and ``.after.txt`` for each, for people."""
    for text in texts:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"pass-{text.position}-{text.name.replace(':', '.')}"
        (folder / f"{stem}.before.txt").write_text(text.before)
        (folder / f"{stem}.after.txt").write_text(text.after)
