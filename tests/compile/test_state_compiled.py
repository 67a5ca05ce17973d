"""What is written, aliased and bound by real compiled code, in a fresh process, is what eager does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pwcc
from pwcc.cache.errors import ArgumentError, CacheMiss
from tests.compile.state_models import MODELS, Tensors, register_attend
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


def process(task: str, cache: Path, device: str = "cpu") -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile.state_process", task, str(cache), device]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model of the table compiled in one process."""
    root = tmp_path_factory.mktemp("state") / "cache"
    process("compile", root)
    return root


@pytest.fixture(scope="module")
def served(cache: Path) -> dict[str, Any]:
    """What differed from eager in four calls of each model, loaded in a fresh process."""
    found: dict[str, Any] = json.loads(process("serve", cache).splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_state_outputs_and_aliasing_equal_eager_after_a_reload(name: str, served: dict[str, Any]) -> None:
    assert served[name] == []


def loaded(cache: Path) -> tuple[Tensors, Any]:
    register_attend()
    model = Tensors().eval()
    return model, pwcc.load(model, cache_dir=cache, tag="tensors", trust_dir=True)


def agrees(model: torch.nn.Module, compiled: Any) -> bool:
    x = torch.randn(3, 8)
    with torch.no_grad():
        return torch.allclose(compiled(x), model(x), atol=1e-5)


def test_weights_are_followed_however_they_change(cache: Path) -> None:
    model, compiled = loaded(cache)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        model.stacked[0].add_(1)
    assert agrees(model, compiled)  # in place: seen at once
    model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()}, assign=True)
    model.head.weight = model.embed.weight
    compiled.rebind()
    assert agrees(model, compiled)
    model.blocks[0].weight.data = torch.randn(8, 8)
    model.stacked[1] = torch.randn(8)
    compiled.rebind()
    assert agrees(model, compiled)
    model.to(torch.float32)
    assert agrees(model, compiled)


def untie(model: Tensors) -> None:
    model.head.weight = torch.nn.Parameter(torch.randn(8, 8))


def cast(model: Tensors) -> None:
    model.to(torch.bfloat16)


def quantise(model: Tensors) -> None:
    model.blocks[0].weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)


def wrap(model: Tensors) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base_layer: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x: torch.Tensor) -> Any:
            return self.base_layer(x)

    model.head = Adapter(model.head)  # type: ignore[assignment]


def shorten(model: Tensors) -> None:
    model.stacked.pop()


@pytest.mark.parametrize(
    ("change", "words", "miss"),
    [
        (
            untie,
            "'embed.weight' and 'head.weight' were one tensor when compiled, and are two here",
            "tensor head.weight: compiled with parameter torch.float32 [8, 8] embed.weight",
        ),
        (cast, "expected float32 (8, 8), got bfloat16 (8, 8)", "now parameter torch.bfloat16 [8, 8]"),
        (
            quantise,
            "'blocks.0.weight': expected float32 (8, 8), got int8 (8, 8)",
            "tensor blocks.0.weight: compiled with parameter torch.float32 [8, 8], now parameter torch.int8",
        ),
        (
            wrap,
            "'head.weight' were one tensor when compiled",
            "tensor head.weight: compiled with parameter torch.float32 [8, 8] embed.weight, "
            "now at 'head.base_layer.weight', inside a module that was wrapped around it",
        ),
        (shorten, "expected a tensor 'stacked[1]' in the model, found none", "stacked"),
    ],
)
def test_what_no_longer_fits_is_a_miss_that_names_the_tensor(
    cache: Path, change: Any, words: str, miss: str
) -> None:
    model, compiled = loaded(cache)
    change(model)
    with pytest.raises(CacheMiss) as raised:
        compiled.rebind()
    assert words in str(raised.value)
    with pytest.raises(CacheMiss) as missed:
        pwcc.load(model, cache_dir=cache, tag="tensors", trust_dir=True)
    assert miss in str(missed.value)


def test_calls_that_would_need_gradients_say_so(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, compiled = loaded(cache)
    x = torch.randn(3, 8)
    with torch.no_grad():
        compiled(x)
    assert not caplog.records
    for _ in range(2):
        assert not compiled(x).requires_grad
    (said,) = (record.getMessage() for record in caplog.records if record.name == "pwcc")
    assert "'blocks.0.bias' requires gradients and grad mode is on" in said
    assert "results carry no gradients" in said
    with pytest.raises(ArgumentError, match="requires gradients; compiled pieces are for inference only"):
        compiled(x.requires_grad_())
    with torch.inference_mode():
        inside = torch.randn(3, 8)
        assert torch.allclose(compiled(inside), model(inside), atol=1e-5)
    assert torch.allclose(compiled(inside), model(inside.clone()).detach(), atol=1e-5)


def test_weights_made_in_inference_mode_are_bound(cache: Path) -> None:
    with torch.inference_mode():
        model = Tensors().eval()
    compiled = pwcc.load(model, cache_dir=cache, tag="tensors", trust_dir=True)
    assert agrees(model, compiled)
