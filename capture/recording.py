"""Graph: one recording: the steps that a batch of one size takes, and the addresses they hold for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pwcc.cache.errors import MovedInputError
from pwcc.capture.backend import Graph
from pwcc.capture.plan import GraphKey

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Watched:
    """A tensor whose address a recording holds for: an argument, a weight or a value between pieces."""

    kind: str
    name: str
    tensor: Tensor
    address: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" if self.kind != "value" else self.name


class Recording:
    """Graphs and eager calls in order, for one mode and batch. :meth:`replay` runs them; that is all it costs.

    In mode FULL there is one step. In mode PIECEWISE each piece of each layer has a graph of its own, because
    weights differ, and the splitting ops between them run eagerly with the live forward context, on tensors
    that lie where the graphs have them. A step is a bound method or a closure: under 1 us each beside the work.

    ``outputs`` name memory in the pool without holding it: they are valid until the next replay of *any*
    recording that shares the pool. Weights and arguments are held, so that a replaced one is stale, not gone.
    """

    def __init__(
        self,
        key: GraphKey,
        *,
        graphs: Sequence[Graph],
        steps: Sequence[Step],
        watched: Sequence[Watched],
        outputs: tuple[object, ...],
    ) -> None:
        self.key = key
        self.graphs = tuple(graphs)
        self.outputs = outputs
        self.watched = tuple(watched)
        self.replays = 0
        self._steps = tuple(steps)

    def replay(self) -> None:
        """Run every step, in order, on the current stream."""
        self.replays += 1
        for step in self._steps:
            step()

    def check(self, now: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Compare addresses: arguments by name in ``now``, weights by name in ``weights``, values as recorded.

        Raises:
            MovedInputError: names the first that lies elsewhere; nothing has run.
        """
        for item in self.watched:
            if item.kind == "value":
                current: Tensor | None = item.tensor
            else:
                current = (now if item.kind == "argument" else weights).get(item.name)
            if current is None or current.data_ptr() != item.address:
                where = "nowhere" if current is None else f"at {current.data_ptr():#x}"
                raise MovedInputError(
                    f"{item} was captured at {item.address:#x} and lies {where} now: "
                    f"the graph of {self.key.batch.num_tokens} tokens would read the old memory",
                    hint=_ADVICE[item.kind],
                )

    @property
    def nodes(self) -> int | None:
        """Operations in all graphs; None if one cannot be counted."""
        counts = [graph.nodes for graph in self.graphs]
        return None if None in counts else sum(count or 0 for count in counts)

    def release(self) -> None:
        """Free the graphs and their share of the pool; a replay afterwards does nothing."""
        for graph in self.graphs:
            graph.release()
        self._steps, self.graphs, self.watched, self.outputs = (), (), (), ()


_ADVICE = {
    "argument": "write into the buffer that was captured, or make it a copied input",
    "weight": "write weights in place, or call recapture() after replacing them",
    "value": "a splitting op must write into its out tensor and not replace its memory",
}
