"""What ``test_state_compiled.py`` shows on a CPU, on a GPU: Triton kernels, and misaligned arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.compile.state_models import MODELS
from tests.compile.test_state_compiled import process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("state") / "cache"
    process("compile", root, "cuda")
    found: dict[str, Any] = json.loads(process("serve", root, "cuda").splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_state_outputs_and_aliasing_equal_eager_on_a_gpu(name: str, served: dict[str, Any]) -> None:
    assert served[name] == []
