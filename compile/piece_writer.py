"""Key: the nodes of one piece written in canonical form, with the autocast regions that they lie in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from pwcc.compile.conditions import source_line
from pwcc.compile.encoding import Encoder, qualified_name
from pwcc.compile.piece_graph import ENTER, EXIT, PieceNode
from pwcc.compile.regions import State
from pwcc.compile.sizes import Sizes


class PieceWriter:
    """Writes nodes one by one. ``values`` are the numbers of the piece's tensor inputs, by node."""

    def __init__(
        self, sizes: Sizes, names: Mapping[Any, str], values: Mapping[fx.Node, int], inputs: int
    ) -> None:
        self.nodes: list[PieceNode] = []
        self.lines: list[str | None] = []
        self._values = dict(values)
        self._encoder = Encoder(sizes, names, self.value)
        self._inputs = inputs
        self._state: State = ()
        self._entered: list[int] = []

    def value(self, node: fx.Node) -> object:
        """Return a node's value as the argument of another."""
        return {"v": self._values[node]}

    def enter(self, state: State) -> None:
        """Leave and enter autocast regions so that exactly ``state`` holds."""
        if state == self._state:
            return
        while self._entered:
            self._append(PieceNode("call_function", EXIT, [{"v": self._entered.pop()}], {"dict": []}), None)
        self._entered = [
            self._append(PieceNode("call_function", ENTER, region.arguments, {"dict": []}), None)
            for region in state
        ]
        self._state = state

    def add(self, node: fx.Node) -> None:
        """Write one operation."""
        name = qualified_name(node)
        method = name == f"torch.Tensor.{node.target}"
        encoded = PieceNode(
            "call_method" if method else "call_function",
            str(node.target) if method else name,
            self._encoder.encode(list(node.args), node),
            self._encoder.encode(dict(node.kwargs), node),
        )
        self._values[node] = self._append(encoded, source_line(node))

    def _append(self, node: PieceNode, line: str | None) -> int:
        self.nodes.append(node)
        self.lines.append(line)
        return self._inputs + len(self.nodes) - 1
