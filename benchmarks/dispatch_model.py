"""What ``bench_dispatch.py`` calls: many modules and parameters, next to no compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Affine(nn.Module):
    """One layer: two parameters and two Python constants, each of which Dynamo guards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.gain = 1.0
        self.is_last = False

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale * self.gain) + self.shift


class Stack(nn.Module):
    """Layers in a row; Inductor makes one kernel of them."""

    def __init__(self, layers: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Affine() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
