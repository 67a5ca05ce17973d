"""Triton kernels of a model's own code, and forwards that launch them."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tests.compile.user_kernel_parts import doubled

OFFSET: tl.constexpr = tl.constexpr(3)


@triton.jit
def shift(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(out_ptr + places, doubled(tl.load(x_ptr + places, mask=inside)) + OFFSET, mask=inside)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["count"])
@triton.jit
def tuned(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(out_ptr + places, tl.load(x_ptr + places, mask=inside) * 3, mask=inside)


@triton.jit
def increment(state_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(state_ptr + places, tl.load(state_ptr + places, mask=inside) + 1, mask=inside)


@torch.library.triton_op("pwcckernels::shifted", mutates_args={})
def shifted(x: Tensor) -> Tensor:
    """A launch that torch looks into."""
    out = torch.empty_like(x)
    torch.library.wrap_triton(shift)[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


class Launches(nn.Module):
    """Launches with a fixed grid, and of an autotuned kernel with a grid that its configuration decides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1))  # says on which device the model lies

    def forward(self, x: Tensor) -> Any:
        x = x * 2
        one, two = torch.empty_like(x), torch.empty_like(x)
        shift[(triton.cdiv(x.numel(), 64),)](x, one, x.numel(), BLOCK=64)  # pyright: ignore[reportArgumentType]
        tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](one, two, x.numel())
        return one + 1, two * 2


class Counts(nn.Module):
    """A launch that writes a buffer."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        increment[(1,)](self.state, 8, BLOCK=8)  # pyright: ignore[reportArgumentType]
        return x + self.state


class Looked(nn.Module):
    """A launch inside a ``triton_op``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1))  # says on which device the model lies

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = shifted(x * 2)
        return result + 1
