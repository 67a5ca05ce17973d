"""NumPy functions of constants are numbers in a traced graph, as they are in eager."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import UnsealableError
from pwcc.compile.split import split
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
    assert not [node for node in graph.nodes if node.target is torch.full], "a Python number, no tensor"
    traced.graph_module.recompile()
    examples = [node.meta["example_value"] for node in graph.nodes if node.op == "placeholder"]
    (result,) = traced.graph_module(*(x if isinstance(example, Tensor) else 5 for example in examples))
    torch.testing.assert_close(result, model(x), atol=0, rtol=1e-6 if dtype is torch.float32 else 0)


def in_two_steps(x: Tensor) -> Tensor:
    root = before = np.sqrt(4.0)
    root += 1  # a number of NumPy's is another one then
    scaled: Tensor = x * (before * 10) + root
    return scaled


def test_a_number_keeps_its_value_when_a_name_gets_another() -> None:
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(run(in_two_steps, x), in_two_steps(x.cos()), atol=0, rtol=1e-6)


def of_whole_numbers(x: Tensor) -> Tensor:
    scaled: Tensor = (x > 0).long() * np.sqrt(WIDTH)
    return scaled


def of_one_element(x: Tensor) -> Tensor:
    scaled: Tensor = x.sum() * np.sqrt(WIDTH)
    return scaled


def by_an_array(x: Tensor) -> Tensor:
    total = before = np.zeros(())
    total += 1  # an array is written in place
    return x * torch.as_tensor(before)


@pytest.mark.parametrize("scale", [of_whole_numbers, of_one_element, by_an_array])
def test_what_would_give_another_type_or_value_than_eager_stays_and_is_refused(
    scale: Callable[[Tensor], Tensor],
) -> None:
    traced = trace(
        Scaled(scale).eval(), [torch.randn(5, WIDTH)], {0: [0]}, mode=SizeMode.UNBACKED, low=1, high=8
    )
    with pytest.raises(UnsealableError, match=r"Wrapped function <original (sqrt|zeros)>.*no qualified name"):
        split(traced)


def test_whole_numbers_scale_whole_numbers() -> None:
    result = run(lambda x: (x > 0).int() * np.floor_divide(7, 2), torch.ones(5, WIDTH))
    assert result.dtype is torch.int32
    assert result.eq(3).all()


def run(scale: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    traced = trace(Scaled(scale).eval(), [x], {0: [0]}, mode=SizeMode.UNBACKED, low=1, high=8)
    graph = traced.graph_module.graph
    traced.graph_module.recompile()
    examples = [node.meta["example_value"] for node in graph.nodes if node.op == "placeholder"]
    (result,) = traced.graph_module(*(x if isinstance(example, Tensor) else 5 for example in examples))
    assert isinstance(result, Tensor)
    return result
