"""A few modules that together do what ``state_cases.py`` does one by one, to be compiled for real.

Each is built anew by its function, alike in every process. All take ``x: float32[n, 8]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.compile.state_cases import attend

_CUT = torch.library.Library("pwcctest", "FRAGMENT")  # type: ignore[no-untyped-call]


def _attend(x: Tensor, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(x.cumsum(0) * scale)


def register_attend() -> None:
    """Define the splitting operation, unless a test's conftest has."""
    if hasattr(torch.ops.pwcctest, "attend"):
        return
    _CUT.define("attend(Tensor x, Tensor(a!) out, float scale=1.0) -> ()")  # type: ignore[no-untyped-call]
    for device in ("CPU", "CUDA"):
        _CUT.impl("attend", _attend, device)  # type: ignore[no-untyped-call]
    _CUT.impl("attend", lambda x, out, scale=1.0: None, "Meta")  # type: ignore[no-untyped-call]


@torch.library.custom_op("pwccstate::scale", mutates_args=())
def scale(x: Tensor, factor: float, bias: Tensor | None = None, *, flag: bool = False) -> Tensor:
    """Functional, with a default, a None and a keyword."""
    return x * (2 * factor if flag else factor) + (0 if bias is None else bias)


@scale.register_fake
def _(x: Tensor, factor: float, bias: Tensor | None = None, *, flag: bool = False) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwccstate::many", mutates_args=())
def many(xs: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    """Lists in, a list out."""
    return [x * factor for x, factor in zip(xs, factors, strict=True)]


@many.register_fake
def _(xs: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


@torch.library.custom_op("pwccstate::two", mutates_args=())
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results."""
    return x + 1, x.sum(0)


@two.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1:])


@torch.library.custom_op("pwccstate::update", mutates_args={"state", "rows"})
def update(x: Tensor, state: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Writes a tensor and each of a list, and returns a result."""
    state.add_(x.sum(0))
    for row in rows:
        row.mul_(2)
    return x * 3


@update.register_fake
def _(x: Tensor, state: Tensor, rows: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(x)


class Held(nn.Module):
    """Buffers, a counter, and caches in containers."""

    cache: Tensor
    row: Tensor
    pos: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("cache", torch.zeros(64, 8))
        self.register_buffer("row", torch.zeros(8))
        self.register_buffer("pos", torch.zeros((), dtype=torch.int64))
        self.pairs = [(torch.zeros(4, 8), torch.zeros(4, 8)) for _ in range(2)]
        self.tables = {"one": torch.randn(8)}


class State(Held):
    """Writes before, in and across pieces, by the splitting operation, and into its argument."""

    def forward(self, x: Tensor) -> Any:
        rows = (self.pos + torch.arange(x.shape[0], device=x.device)) % 64
        self.cache.index_put_((rows,), x)
        self.pos.add_(x.shape[0])
        self.row.add_(1)
        self.row.masked_fill_(self.row > 2, 0.5)
        self.pairs[0][0][0].add_(x.sum(0))
        x.mul_(2)
        y = attend(x + self.row + self.tables["one"])
        torch.ops.pwcctest.attend(y, self.cache[: x.shape[0]])
        self.cache[1:3, ::2] = 7
        self.row.add_(y.sum(0))
        self.pairs[0][1].add_(self.pairs[0][0])
        torch._foreach_add_([*self.pairs[1]], 1.0)  # pyright: ignore[reportPrivateImportUsage]
        return y + self.cache.sum(0) + self.pairs[0][1][0], self.row


class Views(Held):
    """Outputs that are views of the argument, of a weight and of each other; equal values stay two tensors."""

    def forward(self, x: Tensor) -> Any:
        one, other = x + 1, x + 1
        before = self.row.clone()
        part = x[:, ::2]
        part.mul_(2)
        y = attend(one)
        one.mul_(2)
        self.row.add_(1)
        part.add_(1)
        z = y * 2
        return {
            "argument": (x, x[:, 1:], x.t(), part),
            "equal": (one, other),
            "each other": (z, z[:, 2:], z.t()),
            "weight": self.cache[:2],
            "before": before + y,
        }


class Tensors(nn.Module):
    """Tied, shared, listed, keyed, non-persistent, plain and parametrised tensors; a view of a big storage."""

    scratch: Tensor
    slice: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([shared] * 2)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(2)])
        self.keyed = nn.ParameterDict({"a": nn.Parameter(torch.randn(8))})
        self.register_buffer("scratch", torch.randn(8), persistent=False)
        self.plain = torch.randn(8)
        self.big = torch.randn(100_000, 8)
        self.register_buffer("slice", self.big[10:11])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.stacked = [torch.randn(8), torch.randn(8)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x) + self.embed.weight[0] + self.listed[0] * self.listed[1] + self.keyed["a"]
        x = x + self.scratch + self.plain + self.slice + self.stacked[0] - self.stacked[1]
        result: Tensor = self.normed(x)
        return result + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], device=x.device)


class Operators(Held):
    """Opaque custom operators inside one piece, functional and writing, with every kind of argument."""

    def forward(self, x: Tensor) -> Any:
        x = scale(x, 2.0) + scale(x, 1.5, self.row, flag=True) + scale(x, factor=0.5, bias=None)
        first, second = many([x, x + 1], [1.0, 2.0])
        third, total = two(first)
        fourth = update(third, self.row, [self.cache[:1], self.pairs[0][0]])
        return fourth + second + total + self.row


MODELS: dict[str, Callable[[], nn.Module]] = {
    "state": State,
    "views": Views,
    "tensors": Tensors,
    "operators": Operators,
}
