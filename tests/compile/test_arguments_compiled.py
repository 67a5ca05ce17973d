"""One entry made by the real compiler: nested arguments, two sizes, and a branch on the token count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, SizeError
from pwcc.compile.api import precompile
from pwcc.compile.compiled_model import CompiledModel
from pwcc.compile.load import load
from tests.compile.conftest import require_equal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Model(nn.Module):
    """Takes a dict of tensors, and a scale by name; treats more than 4 tokens apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, state: dict[str, Any], *, scale: float = 2.0) -> Any:
        y = torch.tanh(self.lin(x)) * scale
        if x.shape[0] > 4:
            y = y * state["pair"][0]
        return {"y": y + state["bias"], "shape": y.shape, "x": x}


def state(n: int) -> dict[str, Any]:
    return {"bias": torch.full((n, 8), 0.5), "pair": (torch.full((n, 8), 3.0), None)}


class Across(nn.Module):
    """Attends from n tokens to a memory of m rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return torch.softmax(self.lin(x) @ memory.t(), -1) @ memory, memory.shape[0]


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, CompiledModel]:
    root: Path = tmp_path_factory.mktemp("nested")
    model = Model().eval().requires_grad_(False)
    examples = {"inputs": lambda n: {"x": torch.ones(n, 8), "state": state(n)}}
    report = precompile(model, cache_dir=root, max_tokens=12, **examples)  # type: ignore[arg-type]
    assert report.plan.variants == ("n=1", "n=2..4", "n=5..12")
    return model, load(model, cache_dir=root)


def test_every_size_and_way_to_call(nested: tuple[Model, CompiledModel]) -> None:
    model, compiled = nested
    with torch.no_grad():
        for n in range(1, 13):
            x = torch.randn(n, 8)
            require_equal(compiled(x, state(n)), model(x, state(n)), f"size {n}")
            require_equal(compiled(state=state(n), x=x, scale=2.0), model(x, state(n)), f"size {n} by name")
        shifted = torch.randn(8 * 6 + 1)[1:].view(6, 8)
        require_equal(compiled(shifted, state(6)), model(shifted, state(6)), "misaligned")


def test_other_calls_are_refused(nested: tuple[Model, CompiledModel]) -> None:
    compiled = nested[1]
    with pytest.raises(SizeError, match="size 13 of 'x'"):
        compiled(torch.ones(13, 8), state(13))
    with pytest.raises(ArgumentError, match="'scale' was compiled as"):
        compiled(torch.ones(3, 8), state(3), scale=3.0)
    with pytest.raises(ArgumentError, match="keys"):
        compiled(torch.ones(3, 8), {"bias": torch.ones(3, 8)})
    with pytest.raises(TypeError):
        compiled(torch.ones(3, 8))


def test_two_sizes(tmp_path: Path) -> None:
    model = Across().eval().requires_grad_(False)
    inputs = ["x:float32[n,8]", "memory:float32[2<=m<=20,8]"]
    precompile(model, cache_dir=tmp_path, sizes=(3,), max_tokens=12, inputs=inputs)
    compiled = load(model, cache_dir=tmp_path)
    with torch.no_grad():
        for n, m in [(1, 2), (3, 3), (3, 20), (7, 5), (12, 12)]:
            x, memory = torch.randn(n, 8), torch.randn(m, 8)
            require_equal(compiled(x, memory), model(x, memory), f"{n} and {m}")
    with pytest.raises(SizeError, match=r"size 21 of 'memory'"):
        compiled(torch.ones(3, 8), torch.ones(21, 8))
    assert compiled.check(lambda n: (torch.randn(n, 8), torch.randn(5, 8))).ok
