"""A run on fake tensors reads and writes no real one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pwcc.compile.torch_private.fake_run import run_on_fakes


class Writes(nn.Module):
    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.zeros(8))
        self.weight = nn.Parameter(torch.zeros(8))
        self.plain = torch.zeros(8)
        self.listed = [torch.zeros(8)]

    def forward(self, x: Tensor) -> Any:
        for tensor in (self.row, self.weight, self.plain, self.listed[0]):
            tensor.add_(1)  # numbers only: FakeTensorMode by itself would run this for real
            tensor[2:4].mul_(3)
            tensor.copy_(x[0])
            tensor[0] = 9
            torch.add(tensor, 1, out=tensor)
        torch._foreach_add_([self.row, self.plain], 1.0)  # pyright: ignore[reportPrivateImportUsage]
        self.row.unsqueeze_(0)
        return x + self.row


def test_no_tensor_of_the_model_is_written() -> None:
    model, x = Writes(), torch.ones(3, 8)
    assert run_on_fakes(model, [x], {}, []) == ""
    for tensor in (model.row, model.weight, model.plain, model.listed[0]):
        assert isinstance(tensor, Tensor)
        assert tensor.shape == (8,)
        assert torch.equal(tensor, torch.zeros(8))
    assert torch.equal(x, torch.ones(3, 8))


def test_constants_made_inside_keep_their_values() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(3).item()

    assert run_on_fakes(Asks(), [torch.ones(2)], {}, []) == ""


def test_higher_order_operators_run() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Any:
            cond: Any = torch.ops.higher_order.cond
            return cond(x.sum() > 0, lambda y: (y + 1,), lambda y: (y - 1,), (x,))

    assert run_on_fakes(Branches(), [torch.ones(2)], {}, []) == ""
