"""Graph: what a platform must offer for capture, and which platform a device has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pwcc.cache.errors import UsageError
from pwcc.capture.plan import Instantiate

T = TypeVar("T")


class Graph(Protocol):
    """Recorded device work: it reads and writes the addresses of its capture, whatever Python says since."""

    @property
    def nodes(self) -> int | None:
        """Its operations, where the platform can count them."""
        ...

    @property
    def replay(self) -> Callable[[], None]:
        """Enqueues the work on the current stream."""
        ...

    def release(self) -> None:
        """Free it; it must not be replayed again."""
        ...


class GraphBackend(Protocol):
    """One platform's graphs on one device.

    Workflow: ``new_pool`` once; per recording ``with session():`` then any number of ``record``; ``weak`` for
    what a recording must name without holding it. It knows nothing of pieces, sizes or plans.
    """

    @property
    def name(self) -> str:
        """``cuda``, ``hip`` or ``fake``."""
        ...

    def new_pool(self) -> object:
        """Return a fresh memory pool; recordings that share it reuse each other's memory."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Make the device and the capture stream current, ordered after and before the caller's stream."""
        ...

    def record(
        self,
        call: Callable[[list[object]], T],
        inputs: Sequence[object],
        *,
        pool: object,
        owner: object,
        instantiate: Instantiate,
    ) -> tuple[Graph, T]:
        """Record ``call(list(inputs))`` and return the graph and what the call returned.

        ``owner`` is the recording that the graph belongs to: graphs of one owner run in order, those of
        different owners never at once. A failure releases what was recorded and passes through.
        """
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep it from being reused in the pool."""
        ...

    def follow(self) -> None:
        """Order the current stream after the one of the last call, if it is another."""
        ...

    def memory_used(self) -> int:
        """Return the bytes in use on the device, by whatever; only differences mean something."""
        ...

    def release_unused(self) -> None:
        """Return to the device what nothing holds any more; after a failure only, as it may be slow."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether a failure means that the device's memory did not suffice."""
        ...


def backend_for(device: torch.device, name: str | None = None) -> GraphBackend:
    """Return the backend of a device: CUDA (also under HIP, whose API torch gives the same names), else fake.

    Raises:
        UsageError: ``name`` is neither ``cuda``, ``hip`` nor ``fake``, or not possible on this device.
    """
    from pwcc.capture.cuda import CudaBackend
    from pwcc.capture.fake import FakeBackend

    chosen = name or ("cuda" if device.type == "cuda" else "fake")
    if chosen == "fake":
        return FakeBackend()
    if chosen not in ("cuda", "hip"):
        raise UsageError(f"expected a graph backend, got {chosen!r}", hint="one of cuda, hip, fake")
    if device.type != "cuda":
        raise UsageError(
            f"graphs need a GPU, got a model on {device.type}", hint="use the fake backend to try it"
        )
    return CudaBackend(device)
