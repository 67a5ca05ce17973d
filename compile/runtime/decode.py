"""Serve the Artifact noun: attention through an entry's sealed decode kernels, and the default for the rest."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from torch import Tensor

from pwcc.cache.ids import BlobDigest
from pwcc.cache.operators import DecodeAttention
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.paged_attention import paged_attention
from pwcc.compile.runtime.realign import PieceCall

if TYPE_CHECKING:
    from pwcc.compile.ops.forward_context import ForwardContext

TILE: Final = 64  # keys that a program loads at once
MIN_ROWS: Final = 16  # the smallest tile of a matrix instruction
_PROGRAMS: Final = 1056  # eight on each of 132 multiprocessors: most of a long context's may find no keys
_MIN_SPLITS: Final = 4  # fewer do not pay for the launch that joins them
_MAX_SPLITS: Final = 64
_ALIGNMENT: Final = 16  # bytes of an address, elements of a row's stride
_MAX_SEEN: Final = 4096  # layouts remembered; a server sees one a batch size


Form = tuple[str, int, int, int, bool, bool, str | None]
"""The facts of ``DecodeAttention`` in order: ``dtype`` to ``sinks``."""


class DecodeKernels:
    """An ``AttentionKernel``: decode batches run one sealed kernel, all others ``paged_attention``.

    A batch is a decode batch when each sequence has one row. Tensors of another form, odd alignment or a
    block size that is no power of two take the default kernel, so that the answer never depends on which
    one ran. Captured in a CUDA graph, a call holds for every length up to ``max_seq_len``: the lengths are
    read on the device. Safe to call from several threads.
    """

    def __init__(self, calls: Mapping[Form, PieceCall]) -> None:
        self._calls = dict(calls)
        self._seen: dict[object, PieceCall | None] = {}

    @classmethod
    def of(
        cls, kernels: Sequence[DecodeAttention], calls: Mapping[BlobDigest, PieceCall]
    ) -> DecodeKernels | None:
        """Return the kernels that a manifest names, by the calls of their loaded pieces; None without any."""
        if not kernels:
            return None
        return cls(
            {
                (k.dtype, k.heads, k.kv_heads, k.head_dim, k.window, k.softcap, k.sinks): calls[k.piece]
                for k in kernels
            }
        )

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that have a sealed kernel."""
        return tuple(self._calls)

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
        """Store ``k`` and ``v``, attend, write every row of ``out``; see ``AttentionKernel``."""
        metadata, cache = context.metadata, context.cache
        if metadata is not None and cache is not None and metadata.max_query_len == 1:
            seqs = metadata.seq_lens.shape[0]
            layer = params.layer
            keys, values = cache.keys[layer], cache.values[layer]
            call = self._call_for(q, k, v, out, keys, cache.block_size, params) if q.shape[0] == seqs else None
            if call is not None:
                splits, chunk = split_keys(metadata.max_seq_len, seqs * k.shape[1])
                call(
                    [
                        q,
                        k,
                        v,
                        keys,
                        values,
                        metadata.slot_mapping,
                        metadata.block_table,
                        metadata.seq_lens,
                        q if params.sinks is None else params.sinks,
                        out,
                        params.scale,
                        params.softcap or 0.0,
                        params.window or 0,
                        cache.block_size.bit_length() - 1,
                        splits,
                        chunk,
                    ]
                )
                return
        paged_attention(context, q, k, v, out, params)

    def _call_for(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        keys: Tensor,
        block_size: int,
        params: AttentionParams,
    ) -> PieceCall | None:
        """Return the sealed kernel that takes these tensors; layouts are looked at once, addresses always."""
        if params.chunk is not None or params.bias is not None:
            return None
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & (_ALIGNMENT - 1):
            return None
        sinks = params.sinks
        seen = (
            q.dtype,
            keys.dtype,
            q.shape,
            k.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            out.stride(),
            block_size,
            params.window is None,
            params.softcap is None,
            None if sinks is None else sinks.dtype,
        )
        try:
            return self._seen[seen]
        except KeyError:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            plain = all(_plain(tensor) for tensor in (q, k, v, out))
            fits = plain and keys.dtype == q.dtype and block_size & (block_size - 1) == 0
            found = self._seen[seen] = self._calls.get(_form(q, k, params)) if fits else None
            return found


def _form(q: Tensor, k: Tensor, params: AttentionParams) -> Form:
    sinks = params.sinks
    return (
        _name(q),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        params.window is not None,
        params.softcap is not None,
        None if sinks is None else _name(sinks),
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@functools.cache
def split_keys(max_seq_len: int, programs: int) -> tuple[int, int]:
    """Return how many programs share one sequence's keys, and how many keys each takes (a multiple of TILE).

    Few sequences leave most of a GPU idle, so their keys are split; with ``programs`` (sequences x key heads)
    of their own to fill it, they are not. A split costs a second launch, so short contexts stay whole.
    """
    wanted = min(_MAX_SPLITS, _PROGRAMS // max(1, programs), -(-max_seq_len // (2 * TILE)))
    if wanted < _MIN_SPLITS:
        return 1, max(TILE, -(-max_seq_len // TILE) * TILE)
    chunk = -(-max_seq_len // (wanted * TILE)) * TILE
    return -(-max_seq_len // chunk), chunk


def _plain(tensor: Tensor) -> bool:
    """Whether rows are dense and their stride is a multiple of 16 elements, as the kernels assume."""
    return tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] and tensor.stride(0) % _ALIGNMENT == 0
