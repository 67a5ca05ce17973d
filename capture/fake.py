"""Graph: graphs without a GPU, which go wrong where real ones do, so that safety is tested anywhere."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from pwcc.capture.backend import Graph
from pwcc.capture.plan import Instantiate

T = TypeVar("T")
GRAPH_BYTES = 1024  # what one fake graph is taken to cost beside its outputs


class FakeGraph:
    """A recorded call that is run again on the memory of its capture.

    Like a real graph, a replay reads the addresses that its inputs had (a moved input's old memory), ignores
    what Python holds since, sees the forward context of the capture, and writes into the outputs that the
    capture returned. ``released`` graphs refuse to run.
    """

    def __init__(
        self, call: Callable[[list[object]], object], inputs: Sequence[object], pool: FakePool, owner: object
    ) -> None:
        # detach() shares the storage: what the original is pointed at later does not matter here
        self._inputs = [item.detach() if isinstance(item, Tensor) else item for item in inputs]
        self._call = call
        self._context = contextvars.copy_context()
        self._pool = pool
        self.owner = owner
        self.nodes: int | None = 1
        self.replays = 0
        self.released = False
        self.outputs = self._run()
        self._targets = tensors_in(self.outputs)
        own = {item.data_ptr() for item in self._inputs if isinstance(item, Tensor)}
        self.memory = [target for target in self._targets if target.data_ptr() not in own]

    def _run(self) -> object:
        # A copy of the context, since one that is entered cannot be entered again (nested or other threads).
        return self._context.copy().run(self._call, list(self._inputs))

    @property
    def bytes(self) -> int:
        """Bytes of its outputs."""
        return sum(target.numel() * target.element_size() for target in self.memory)

    def replay(self) -> None:
        """Run the recorded call; with a poisoning pool, other owners' outputs become garbage first."""
        if self.released:
            raise RuntimeError("a released graph was replayed")
        self._pool.enter(self.owner)
        self.replays += 1
        for target, result in zip(self._targets, tensors_in(self._run()), strict=True):
            if target.data_ptr() != result.data_ptr():
                target.copy_(result)

    def release(self) -> None:
        """Forget the memory."""
        self.released = True
        self._pool.graphs.discard(self)
        self._inputs, self.memory, self._targets, self.outputs = [], [], [], None


class FakePool:
    """The graphs that share memory. Poisoning stands for reuse: one owner's replay overwrites the others'."""

    def __init__(self, *, poison: bool) -> None:
        self.graphs: WeakSet[FakeGraph] = WeakSet()
        self._poison = poison
        self._current: object = None

    def enter(self, owner: object) -> None:
        """An owner's graphs run now: overwrite what other owners left in the pool."""
        if owner is self._current:
            return
        self._current = owner
        if not self._poison:
            return
        for graph in self.graphs:
            if graph.owner is not owner:
                for tensor in graph.memory:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    @property
    def bytes(self) -> int:
        """The largest owner's outputs, as owners overlap, and a fixed amount per graph."""
        by_owner: dict[int, int] = {}
        for graph in self.graphs:
            by_owner[id(graph.owner)] = by_owner.get(id(graph.owner), 0) + graph.bytes
        return max(by_owner.values(), default=0) + GRAPH_BYTES * len(self.graphs)


class FakeBackend:
    """Graphs on any device by running the recorded call again.

    ``poison`` makes one recording's replay overwrite the outputs of the others, as a shared pool may.
    ``limit_bytes`` is the memory after which recording fails, ``fail_at`` a count of graphs after which it
    does. ``graphs`` lists what was recorded and not released. It saves no time: it is for tests and trials.
    """

    def __init__(
        self, *, poison: bool = True, limit_bytes: int | None = None, fail_at: int | None = None
    ) -> None:
        self.name = "fake"
        self._poison = poison
        self._limit = limit_bytes
        self._fail_at = fail_at
        self._pools: WeakSet[FakePool] = WeakSet()
        self.recorded = 0
        self.sessions = 0

    @property
    def graphs(self) -> list[FakeGraph]:
        """Graphs that are not released."""
        return [graph for pool in self._pools for graph in pool.graphs]

    def new_pool(self) -> object:
        """See ``GraphBackend``."""
        pool = FakePool(poison=self._poison)
        self._pools.add(pool)
        return pool

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See ``GraphBackend``."""
        self.sessions += 1
        yield

    def record(
        self,
        call: Callable[[list[object]], T],
        inputs: Sequence[object],
        *,
        pool: object,
        owner: object,
        instantiate: Instantiate,
    ) -> tuple[Graph, T]:
        """See ``GraphBackend``."""
        if not isinstance(pool, FakePool):
            raise TypeError(f"expected a pool of this backend, got {type(pool).__name__}")
        if self._fail_at is not None and self.recorded >= self._fail_at:
            raise torch.OutOfMemoryError("fake: out of memory")
        pool.enter(owner)
        graph = FakeGraph(call, inputs, pool, owner)
        pool.graphs.add(graph)
        self.recorded += 1
        if self._limit is not None and self.memory_used() > self._limit:
            graph.release()
            raise torch.OutOfMemoryError("fake: out of memory")
        outputs: Any = graph.outputs
        return graph, outputs

    def weak(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``: its memory is not reused, poison stands for that."""
        return tensor

    def follow(self) -> None:
        """Nothing runs on streams here."""

    def memory_used(self) -> int:
        """Bytes of all pools."""
        return sum(pool.bytes for pool in self._pools)

    def release_unused(self) -> None:
        """Nothing is cached here."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether it is torch's error for that."""
        return isinstance(error, torch.OutOfMemoryError)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of nested tuples and lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
