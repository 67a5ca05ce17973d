"""Decorated modules that a process beside the tests can import; small, since each is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pwcc


class Affine(nn.Module):
    """x * scale + shift, masked where a mask is given."""

    shift: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 3.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(float(width)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``[tokens, width]`` to the same."""
        x = x * self.scale + self.shift
        return x if mask is None else x * mask[:, None]


@pwcc.support_compile(max_tokens=64)
class Decorated(Affine):
    """Level 3, by what is configured around it."""


@pwcc.support_compile(max_tokens=64, level=2)
class Once(Affine):
    """Level 2."""


@pwcc.support_compile(level=1)
class Stock(Affine):
    """Level 1."""


@pwcc.support_compile(level=0)
class Plain(Affine):
    """Level 0."""


@pwcc.support_compile(level=3, max_tokens=64)
class Rebinding(Affine):
    """A forward that rebinds a buffer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Count up, then as the base."""
        self.shift = self.shift + 1
        return super().forward(x, mask)


class Outer(nn.Module):
    """Holds two decorated modules, and a plain one between them."""

    def __init__(self, cls: Any = Decorated) -> None:
        super().__init__()
        self.first, self.middle, self.last = cls(), Affine(), cls()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


@pwcc.support_compile(max_tokens=64, tag="outer")
class DecoratedOuter(Outer):
    """A decorated module around decorated ones."""


@dataclass
class Batch:
    """An argument that is a dataclass of tensors."""

    ids: Tensor
    positions: Tensor | None
    name: str
