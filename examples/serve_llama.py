"""Serve the built-in Llama: prompts of several users, one paged KV cache, greedy continuous batching.

python examples/serve_llama.py                       # eager
pwcc compile --model llama-tiny --cache-dir warm
python examples/serve_llama.py --cache-dir warm      # compiled: nothing is traced or compiled here
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import pwcc
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.models.llama import PRESETS
from pwcc.compile.ops.blocks import BlockAllocator, SequenceBlocks
from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache

Step = Callable[[Tensor, Tensor], Tensor]


class Server:
    """One model and one KV cache; `step` runs any mix of prompts and single tokens as one flat batch."""

    def __init__(self, model: Step, name: str, device: str, dtype: torch.dtype) -> None:
        config = PRESETS[name]
        self.model, self.device = model, device
        self.blocks = BlockAllocator(num_blocks=256, block_size=16)
        self.cache = PagedKVCache(
            layers=config.layers, num_blocks=256, block_size=16, kv_heads=config.kv_heads,
            head_dim=config.head_size, dtype=dtype, device=device,
        )  # fmt: skip

    @torch.inference_mode()
    def step(self, batch: list[tuple[SequenceBlocks, list[int]]]) -> list[int]:
        """Run each sequence's new tokens (its blocks are grown already); return each one's next token."""
        positions = [p for seq, new in batch for p in range(seq.length - len(new), seq.length)]
        ids = torch.tensor([token for _, new in batch for token in new], device=self.device)
        metadata = AttentionMetadata.build(
            [(seq, len(new)) for seq, new in batch], block_size=16, device=self.device
        )
        with forward_context(metadata=metadata, cache=self.cache):
            logits = self.model(ids, torch.tensor(positions, device=self.device))
        last_rows = metadata.query_start_loc[1:].long() - 1
        return [int(token) for token in logits[last_rows].argmax(-1)]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedily continue every prompt by `new_tokens` tokens."""
        sequences = [self.blocks.allocate(len(prompt)) for prompt in prompts]
        latest = self.step(list(zip(sequences, prompts, strict=True)))
        answers = [[token] for token in latest]
        for _ in range(new_tokens - 1):
            for sequence in sequences:
                self.blocks.append(sequence)
            latest = self.step([(seq, [token]) for seq, token in zip(sequences, latest, strict=True)])
            for answer, token in zip(answers, latest, strict=True):
                answer.append(token)
        for sequence in sequences:
            self.blocks.free(sequence)
        return answers


def main() -> None:
    """Parse arguments, build or load, answer three prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-tiny", choices=list(PRESETS))
    parser.add_argument("--cache-dir", type=Path, help="a directory that pwcc compile filled; eager without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=8)
    options = parser.parse_args()
    module = build(ModelRef.parse(options.model), device=options.device, weights="random").module
    model: Step = pwcc.load(module, cache_dir=options.cache_dir) if options.cache_dir else module
    server = Server(model, options.model, options.device, next(module.parameters()).dtype)
    for answer in server.generate([[1, 2, 3], [5, 8, 13, 21, 34], [42]], options.new_tokens):
        print(*answer)


if __name__ == "__main__":
    main()
