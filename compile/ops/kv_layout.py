"""Serve the Artifact noun: the shape of the KV cache that a model needs, as seen in one call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pwcc.cache.errors import UsageError
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import ForwardContext, use_forward_context
from pwcc.compile.ops.paged import PagedKVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What a paged KV cache is made for: ``layers`` is one more than the largest layer number."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of ``block_size`` tokens, keys and values of every layer."""
        return 2 * self.layers * block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def cache(self, *, num_blocks: int, block_size: int, device: torch.device | str) -> PagedKVCache:
        """Allocate a cache. Raise ``ValueError`` for sizes that a cache cannot have."""
        return PagedKVCache(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            device=device,
        )


def observe_kv_layout(call: Callable[[], object]) -> KVLayout | None:
    """Run ``call`` once (a model on any tokens); return what its ``pwcc::attention`` calls store.

    None where they store nothing. Works for any model, eager or compiled, without knowing its configuration.
    Attention itself is not computed: every output is 0 in that call.

    Raises:
        UsageError: layers that differ in heads, head size or dtype, or a layer number that attends twice, which
            one ``PagedKVCache`` cannot hold.
    """
    found: dict[int, tuple[int, int, torch.dtype]] = {}

    def note(
        _context: ForwardContext, _q: Tensor, k: Tensor, _v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        if params.layer in found:
            raise UsageError(
                f"attention with layer number {params.layer} runs more than once in one call: the later keys "
                "would overwrite the earlier ones in a KV cache",
                hint="give every call of pwcc::attention a layer number of its own",
            )
        found[params.layer] = (k.shape[1], k.shape[2], k.dtype)
        out.zero_()

    with use_forward_context(ForwardContext(kernel=note)):
        call()
    if not found:
        return None
    kinds = sorted(set(found.values()), key=str)
    if len(kinds) > 1:
        got = " and ".join(
            f"{heads} x {size} {str(dtype).removeprefix('torch.')}" for heads, size, dtype in kinds
        )
        raise UsageError(
            f"expected equal key/value heads, head size and dtype in every layer, got {got}",
            hint="serve this model with a KV cache and an attention kernel of your own",
        )
    ((kv_heads, head_dim, dtype),) = kinds
    return KVLayout(layers=max(found) + 1, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
