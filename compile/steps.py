"""Artifact: the steps of a split program: pieces to call, and operations to call between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.regions import State


@dataclass(frozen=True)
class Ref:
    """A program value: ``weight``, ``argument`` or ``value`` (made by an earlier step), and its index."""

    kind: str
    index: int


@dataclass(frozen=True)
class SizeOutput:
    """A size that the program returns: an expression in its symbols, or a number."""

    size: int | float | str


@dataclass(frozen=True)
class PieceStep:
    """Call a piece: which graph, the program symbols for its own, tensors in, values out.

    ``alias_groups`` are positions among the graph's inputs of tensors that share memory; ``shared`` those among
    its outputs of tensors whose common memory is written later or returned twice. ``nodes`` name the nodes of
    the traced graph that it was made of.
    """

    graph: PieceGraph
    symbols: tuple[str, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    lines: tuple[str | None, ...] = field(compare=False)
    alias_groups: tuple[tuple[int, ...], ...] = ()
    shared: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class EagerStep:
    """Call one operation outside every piece; arguments are encoded over program values.

    ``regions`` are the autocast regions that it runs in. ``number`` tells that it only computes a number.
    ``nodes`` name the node of the traced graph.
    """

    target: str
    args: object
    kwargs: object
    output: int | None
    splitting: bool
    regions: State = ()
    number: bool = False
    nodes: tuple[str, ...] = field(default=(), compare=False)


Step = PieceStep | EagerStep


@dataclass(frozen=True)
class Program:
    """A straight-line program over pieces and eager calls, with its weights and arguments by position."""

    steps: tuple[Step, ...]
    weights: tuple[tuple[str, ...], ...]
    outputs: tuple[Ref | SizeOutput, ...]
    splits: int

    @property
    def segments(self) -> int:
        """Compiled pieces plus runs of eager calls between them: 2 x layers + 1 for a decoder."""
        eager = [isinstance(s, EagerStep) for s in self.steps if isinstance(s, PieceStep) or not s.number]
        return len(self.pieces) + sum(
            now and not before for before, now in zip([False, *eager], eager, strict=False)
        )

    @property
    def pieces(self) -> tuple[PieceStep, ...]:
        """The piece calls in order."""
        return tuple(step for step in self.steps if isinstance(step, PieceStep))

    @property
    def unique(self) -> tuple[PieceGraph, ...]:
        """The structurally different pieces, in order of first use."""
        return tuple({piece.graph.digest: piece.graph for piece in self.pieces}.values())
