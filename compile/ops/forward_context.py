"""Serve the Artifact noun: what a server sets around a call, so that splitting ops find their KV state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.ops.paged_attention import paged_attention


class AttentionKernel(Protocol):
    """What a server plugs in for attention: FlashAttention, FlashInfer, SDPA or its own."""

    def __call__(
        self,
        context: ForwardContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        params: AttentionParams,
        /,
    ) -> None:
        """Store ``k`` and ``v`` for ``params.layer``, attend, and write every row of ``out``.

        Shapes as in ``pwcc::attention``. To be captured in a CUDA graph it must not wait for the device.
        """
        ...


class RunMode(StrEnum):
    """How one call runs: compiled pieces launched one by one, a graph per piece, or one graph."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What tells captured graphs apart: the padded token count, and whether each sequence has one token."""

    num_tokens: int
    uniform_decode: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """State of one model call.

    ``metadata`` describes the batch and ``cache`` holds its keys and values; the default kernel needs both.
    A server with its own kernel may leave them out and keep what that kernel needs in ``extras``.
    ``mode`` and ``batch`` are the decision of ``capture``'s dispatcher; what holds graphs trusts them blindly.
    In mode FULL a kernel is being captured, or stands for what was: it must read nothing of the batch on the
    host, except what is the same for every batch of that descriptor.
    """

    metadata: AttentionMetadata | None = None
    cache: PagedKVCache | None = None
    kernel: AttentionKernel = paged_attention
    extras: Mapping[str, object] = field(default_factory=dict)
    mode: RunMode = RunMode.NONE
    batch: BatchDescriptor | None = None


# A context variable, not a global: concurrent calls (threads, asyncio tasks) each see their own.
_current: ContextVar[ForwardContext | None] = ContextVar("pwcc_forward_context", default=None)

current_forward_context = _current.get
"""Return the innermost ``ForwardContext`` of this thread or task, or None. About 30 ns."""


@contextmanager
def forward_context(
    *,
    metadata: AttentionMetadata | None = None,
    cache: PagedKVCache | None = None,
    kernel: AttentionKernel = paged_attention,
    extras: Mapping[str, object] | None = None,
) -> Iterator[ForwardContext]:
    """Set the context that ``pwcc::attention`` finds during the ``with`` block; contexts nest."""
    context = ForwardContext(metadata=metadata, cache=cache, kernel=kernel, extras=extras or {})
    with use_forward_context(context):
        yield context


@contextmanager
def use_forward_context(context: ForwardContext) -> Iterator[None]:
    """Set a context that was built before, for a server that keeps one per batch shape."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
