"""NumPy functions of constants are numbers in a traced graph, as they are in eager."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pwcc.compile.trace import SizeMode, trace

WIDTH = 16


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x.cos())


def by_root(x: Tensor) -> Tensor:
    scaled: Tensor = x * np.sqrt(WIDTH)
    return scaled


def over_root(x: Tensor) -> Tensor:
    scaled: Tensor = x / np.sqrt(WIDTH)
    return scaled


def by_several(x: Tensor) -> Tensor:
    scaled: Tensor = x * (np.log(3.0) / np.sqrt(WIDTH) + 1)
    return scaled


@pytest.mark.parametrize("scale", [by_root, over_root, by_several])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_graph_holds_a_number(scale: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(5, WIDTH, dtype=dtype)
    model = Scaled(scale).eval()
    traced = trace(model, [x], {0: [0]}, mode=SizeMode.UNBACKED, low=1, high=8)
    graph = traced.graph_module.graph
    assert "Wrapped" not in str([node.target for node in graph.nodes])
    assert len([node for node in graph.nodes if node.target is torch.full]) == 1
    traced.graph_module.recompile()
    examples = [node.meta["example_value"] for node in graph.nodes if node.op == "placeholder"]
    (result,) = traced.graph_module(*(x if isinstance(example, Tensor) else 5 for example in examples))
    torch.testing.assert_close(result, model(x), atol=0, rtol=1e-6 if dtype is torch.float32 else 0)
