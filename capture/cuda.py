"""Graph: CUDA graphs through ``torch.cuda.CUDAGraph``; HIP graphs too, which torch gives the same names."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pwcc.capture.backend import Graph
from pwcc.capture.plan import Instantiate
from pwcc.compile.torch_private.graphs import graph_nodes, unowned

T = TypeVar("T")


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``, its raw form kept so that it can be counted and instantiated later."""

    def __init__(self, graph: torch.cuda.CUDAGraph, *, raw: bool) -> None:
        self._graph = graph
        self._raw = raw
        self.replay: Callable[[], None] = graph.replay

    @property
    def nodes(self) -> int | None:
        """Its nodes, by the driver; None where the raw graph was not kept or the driver is not CUDA's."""
        if not self._raw or torch.version.hip is not None:
            return None
        return graph_nodes(self._graph.raw_cuda_graph())

    def release(self) -> None:
        """Free the executable and the raw graph, and its share of the pool."""
        self._graph.reset()


class CudaBackend:
    """CUDA graphs on one device, captured on one stream of their own.

    The capture mode is ``thread_local``, so that other threads may go on allocating. Nothing is collected,
    emptied or synchronised per graph: ``torch.cuda.graph`` does all three on entry, which is most of what a
    naive capture costs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = "hip" if torch.version.hip is not None else "cuda"
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.current_stream(device)

    def new_pool(self) -> object:
        """Return the handle of a fresh pool."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See ``GraphBackend``."""
        with torch.cuda.device(self._device):
            outer = torch.cuda.current_stream(self._device)
            for earlier in (outer, self._last):  # a background thread's current stream is not the server's
                self._stream.wait_stream(earlier)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                outer.wait_stream(self._stream)
                self._last = self._stream

    def record(
        self,
        call: Callable[[list[object]], T],
        inputs: Sequence[object],
        *,
        pool: object,
        owner: object,
        instantiate: Instantiate,
    ) -> tuple[Graph, T]:
        """See ``GraphBackend``; the capture stream must be current."""
        graph, raw = _new_graph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            outputs = call(list(inputs))
        except BaseException:
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a failed capture is empty is no news
                graph.capture_end()  # ends the capture; the first error is the one to tell
            with contextlib.suppress(RuntimeError):
                graph.reset()
            raise
        graph.capture_end()
        if raw and instantiate == "eager":
            graph.instantiate()
        return CudaGraph(graph, raw=raw), outputs

    def weak(self, tensor: Tensor) -> Tensor:
        """See ``GraphBackend``."""
        return unowned(tensor)

    def follow(self) -> None:
        """See ``GraphBackend``."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._last:
            stream.wait_stream(self._last)
            self._last = stream

    def memory_used(self) -> int:
        """Bytes of the device that are not free, those of other processes included."""
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def release_unused(self) -> None:
        """Empty the allocator's cache, the pools of released graphs included."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the allocator or the driver ran out; the driver's own error has no class of its own."""
        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and "out of memory" in str(error)
        )


def _new_graph() -> tuple[torch.cuda.CUDAGraph, bool]:
    """Return a graph, and whether it keeps its raw form (``keep_graph``, torch 2.8 and later)."""
    try:
        return torch.cuda.CUDAGraph(keep_graph=True), True
    except TypeError:
        return torch.cuda.CUDAGraph(), False
