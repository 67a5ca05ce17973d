"""Serve: generated tokens compared with the eager model, which knows no pwcc, no cache and no batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the largest logit. Two tokens that eager itself puts closer than rounding are a tie: code that rounds in
# another order may take either. bfloat16 has 8 bits, and 32 layers add their errors.
TIE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Verdict:
    """``compared`` tokens: ``equal`` to eager's greedy choice, ``ties`` within rounding of it, or neither."""

    compared: int = 0
    equal: int = 0
    ties: int = 0
    first_difference: str = ""

    @property
    def ok(self) -> bool:
        """Something was compared, and every token is eager's choice or a tie."""
        return 0 < self.compared == self.equal + self.ties

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.compared + other.compared,
            self.equal + other.equal,
            self.ties + other.ties,
            self.first_difference or other.first_difference,
        )

    def __str__(self) -> str:
        text = f"{self.compared} tokens compared with eager, {self.equal} equal"
        text += f", {self.ties} ties within rounding" if self.ties else ""
        return text + (f"; first difference: {self.first_difference}" if self.first_difference else "")


@torch.inference_mode()
def compare_with_eager(
    model: Callable[[Tensor, Tensor], Tensor],
    prompt: Sequence[int],
    answer: Sequence[int],
    device: torch.device,
) -> Verdict:
    """Compare every token of an answer with eager's choice after the same tokens before it.

    The eager model reads prompt and answer in one call. If all are equal, eager alone would have generated this
    very answer: each token is its choice after the ones before.
    """
    tokens = torch.tensor([*prompt, *answer[:-1]], device=device)
    logits = model(tokens, torch.arange(len(tokens), device=device))[len(prompt) - 1 :]
    best = logits.argmax(-1).tolist()
    bound = TIE[logits.dtype] * float(logits.abs().max())
    verdict = Verdict()
    for index, (got, wanted) in enumerate(zip(answer, best, strict=True)):
        gap = float(logits[index, wanted] - logits[index, got])
        if got == wanted:
            verdict += Verdict(1, 1)
        elif gap <= bound:
            verdict += Verdict(1, 0, 1)
        else:
            said = f"token {index}: got {got}, eager {wanted}, logits {gap:.3g} apart, rounding {bound:.3g}"
            verdict += Verdict(1, first_difference=said)
    return verdict
