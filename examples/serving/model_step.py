"""Serve: one step of the model over its paged KV cache, eager, loaded by pwcc, or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from serving.scheduler import Work

Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]
"""Logits ``[tokens, vocab]`` of flat ids and positions ``[tokens]``; a ``GraphRunner`` is one."""


def uncaptured(model: Callable[[Tensor, Tensor], Tensor], cache: PagedKVCache) -> Forward:
    """Return a ``Forward`` over a module, with the default attention kernel and without graphs."""

    def forward(ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        with forward_context(metadata=metadata, cache=cache):
            return model(ids, positions)

    return forward


@dataclass(frozen=True)
class ModelStep:
    """Runs the scheduler's batches; the next token is the most likely one."""

    forward: Forward
    block_size: int
    device: torch.device

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Work]) -> list[int]:
        """Return the next token after every work's last one."""
        ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for work in batch:
            ids += work.request.next_tokens(work.count)
            length = work.request.blocks.length
            positions += range(length - work.count, length)
            last_rows.append(len(ids) - 1)
        metadata = AttentionMetadata.build(
            [(work.request.blocks, work.count) for work in batch],
            block_size=self.block_size,
            device=self.device,
        )
        logits = self.forward(
            torch.tensor(ids, device=self.device), torch.tensor(positions, device=self.device), metadata
        )
        tokens: list[int] = logits[last_rows].argmax(-1).tolist()
        return tokens


def vocabulary(model: nn.Module) -> int:
    """Return how many tokens the model's first embedding knows."""
    return next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
