"""Key: seeded weights that make every part of a tiny model matter."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Overwrite every floating-point parameter, deterministically by its name.

    Matrices get variance 1 / (last dimension), stacks of experts too, so that no branch of a network fades
    and every token has logits of its own. Vectors lie around 1 where they scale and around 0 elsewhere.
    """
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator(device=parameter.device).manual_seed(seed)
        if parameter.dim() >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.1, generator=generator)
            if name.endswith("weight"):
                parameter.add_(1.0)
