"""Operators of the generated models; copied beside them, so that a fresh process finds it as they do.

``attend``, ``pair`` and ``note`` are splitting operations, ``inside`` is an opaque operator inside a piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SPLITTING = ("fuzz::attend", "fuzz::pair", "fuzz::note")

_LIBRARY: Any = torch.library.Library("fuzz", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("attend(Tensor x, Tensor(a!) out, float scale=1.0) -> ()")
_LIBRARY.define("pair(Tensor x, Tensor y) -> (Tensor, Tensor)")
_LIBRARY.define("note(Tensor x) -> ()")
_LIBRARY.define("inside(Tensor x, *, int shift=1) -> Tensor")


def _attend(x: Tensor, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(torch.tanh(x.float().cumsum(0) * scale * 0.1))


def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x) + y, x * torch.cos(y)


def _note(x: Tensor) -> None:
    """Look at a value and say nothing."""
    x.sum()


def _inside(x: Tensor, *, shift: int = 1) -> Tensor:
    return torch.roll(x, shift, -1).contiguous()


for _name, _run in (("attend", _attend), ("pair", _pair), ("note", _note), ("inside", _inside)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")


def _fake_attend(_x: Tensor, _out: Tensor, _scale: float = 1.0) -> None:
    return None


def _fake_pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


def _fake_note(_x: Tensor) -> None:
    return None


def _fake_inside(x: Tensor, *, shift: int = 1) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _name, _fake in (
    ("attend", _fake_attend),
    ("pair", _fake_pair),
    ("note", _fake_note),
    ("inside", _fake_inside),
):
    torch.library.register_fake(f"fuzz::{_name}", _fake, lib=_LIBRARY)
