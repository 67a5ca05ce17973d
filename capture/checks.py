"""Graph: what a runner refuses before anything is copied: metadata, options and a KV cache that do not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, NoReturn

import torch
from torch import Tensor

from pwcc.cache.errors import ArgumentError, CaptureMemoryError, UsageError
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import AttentionKernel, ForwardContext
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache

_INTEGERS: Final = frozenset({torch.int32, torch.int64})
_SHAPES: Final = {
    "slot_mapping": "[{count}]",
    "seq_lens": "[sequences]",
    "query_start_loc": "[{seqs} + 1]",
    "block_table": "[{seqs}, blocks]",
}


def require_fitting(
    metadata: AttentionMetadata, count: int, *, device: torch.device, block_size: int | None
) -> None:
    """Refuse metadata that does not describe ``count`` tokens, by what the host knows, without a wait.

    Shapes, dtypes (int32 or int64), the device, and the host integers: ``max_query_len`` times the sequences
    covers the tokens, and the block table's columns of ``block_size`` tokens cover ``max_seq_len`` (None: the
    block size is the kernel's own business). What the tensors hold is not read. About 1 us.

    Raises:
        ArgumentError: names the first that does not fit.
    """
    slots, table = metadata.slot_mapping, metadata.block_table
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    extents = table.shape
    seqs = lengths.numel()
    if not (
        slots.shape == (count,)
        and lengths.shape == (seqs,)
        and starts.shape == (seqs + 1,)
        and len(extents) == 2
        and extents[0] == seqs
    ):
        _refuse_shape(metadata, count)
    if not (
        slots.dtype in _INTEGERS
        and table.dtype in _INTEGERS
        and starts.dtype in _INTEGERS
        and lengths.dtype in _INTEGERS
        and slots.device == table.device == starts.device == lengths.device == device
    ):
        _refuse_kind(metadata, device)
    if metadata.max_query_len * seqs < count:
        raise ArgumentError(
            f"expected a max_query_len that covers {count} tokens in {seqs} sequences, "
            f"got {metadata.max_query_len}",
            hint="it is the most new tokens of one sequence",
        )
    if block_size is not None and not 1 <= metadata.max_seq_len <= extents[1] * block_size:
        raise ArgumentError(
            f"expected a max_seq_len from 1 to what a row of the block table holds "
            f"({extents[1]} blocks of {block_size} tokens), got {metadata.max_seq_len}",
            hint="AttentionMetadata.build(...) makes a table that is wide enough",
        )


def _refuse_shape(metadata: AttentionMetadata, count: int) -> NoReturn:
    if metadata.slot_mapping.dim() == 1 and metadata.slot_mapping.shape[0] != count:
        raise ArgumentError(
            f"expected metadata of {count} tokens, as the arguments have, got {metadata.slot_mapping.shape[0]}",
            hint="build it without padding: the runner pads",
        )
    got = ", ".join(f"{name} {list(getattr(metadata, name).shape)}" for name in _SHAPES)
    seqs = metadata.seq_lens.shape[0] if metadata.seq_lens.dim() == 1 else "sequences"
    wanted = ", ".join(f"{name} {shape.format(count=count, seqs=seqs)}" for name, shape in _SHAPES.items())
    raise ArgumentError(
        f"expected metadata of {count} tokens with the shapes {wanted}, got {got}",
        hint="AttentionMetadata.build(...) makes them",
    )


def _refuse_kind(metadata: AttentionMetadata, device: torch.device) -> NoReturn:
    for name in _SHAPES:
        tensor: Tensor = getattr(metadata, name)
        if tensor.dtype not in _INTEGERS or tensor.device != device:
            raise ArgumentError(
                f"metadata's {name}: expected int32 or int64 on {device}, "
                f"got {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            )
    raise ArgumentError(f"expected metadata on {device}")


def require_block_size(block_size: int | None, cache: PagedKVCache | None) -> None:
    """Refuse a block size below 1, or another than the cache's.

    Raises:
        UsageError: says both.
    """
    if block_size is None:
        return
    if block_size < 1:
        raise UsageError(f"expected a block_size of at least 1, got {block_size}")
    if cache is not None and block_size != cache.block_size:
        raise UsageError(
            f"expected the block size of the KV cache, {cache.block_size}, got {block_size}",
            hint="leave block_size out: it is for kernels that keep their cache themselves",
        )


def fitting_cache(kernel: AttentionKernel) -> AttentionKernel:
    """Return ``kernel`` behind a check that the paged KV cache holds what the model stores.

    Raises, when called:
        ArgumentError: other layers, heads, head size, dtype or device; says both.
    """

    def checked(
        context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        cache = context.cache
        if cache is not None:
            held = cache.keys[0]
            wanted = (*k.shape[1:], k.dtype, k.device)
            if (*held.shape[2:], held.dtype, held.device) != wanted or params.layer >= len(cache.keys):
                raise ArgumentError(
                    f"expected a KV cache of {_described(k, params.layer + 1, 'or more layers')}, "
                    f"got {_described(held, len(cache.keys), 'layers')}",
                    hint="observe_kv_layout(...).cache(...) makes one of the model's own shape",
                )
        kernel(context, q, k, v, out, params)

    return checked


def _described(keys: Tensor, layers: int, what: str) -> str:
    heads, size = keys.shape[-2:]
    dtype = str(keys.dtype).removeprefix("torch.")
    return f"{layers} {what} of {heads} heads x {size} {dtype} on {keys.device}"


@contextlib.contextmanager
def memory_for(what: str, *, hint: str) -> Iterator[None]:
    """Say in one sentence that an allocation of ``what`` failed; sizes beyond what torch can count, too.

    Raises:
        CaptureMemoryError: in place of what torch raises.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CaptureMemoryError(f"out of memory for {what}: {text}", hint=hint) from error
