"""Global numeric modes: each changes its own entries, and reading them is safe."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from pwcc.cache import strict
from pwcc.compile.numeric_state import MIXED, numeric_state


@contextlib.contextmanager
def attribute(holder: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def call(function: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


@contextlib.contextmanager
def warn_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CUDA, CUDNN, MKLDNN = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
CHANGES: dict[str, tuple[Callable[[], AbstractContextManager[object]], set[str]]] = {
    "dtype": (lambda: call(torch.set_default_dtype, torch.float64, torch.float32), {"default_dtype"}),
    "device": (lambda: call(torch.set_default_device, "meta", None), {"default_device"}),
    "deterministic": (
        lambda: call(torch.use_deterministic_algorithms, True, False),
        {"deterministic"},
    ),
    "warn only": (warn_only, {"deterministic", "deterministic_warn_only"}),
    "fill": (
        lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        {"deterministic_fill"},
    ),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), {"autocast.cpu"}),
    "fp16 reduction": (
        lambda: attribute(CUDA.matmul, "allow_fp16_reduced_precision_reduction", False),
        {"cuda.matmul.fp16_reduction"},
    ),
    "bf16 reduction": (
        lambda: attribute(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False),
        {"cuda.matmul.bf16_reduction"},
    ),
    "flash": (lambda: call(CUDA.enable_flash_sdp, False, True), {"sdpa.flash"}),
    "efficient": (lambda: call(CUDA.enable_mem_efficient_sdp, False, True), {"sdpa.efficient"}),
    "math": (lambda: call(CUDA.enable_math_sdp, False, True), {"sdpa.math"}),
    "cudnn sdpa": (lambda: call(CUDA.enable_cudnn_sdp, False, True), {"sdpa.cudnn"}),
    "math reduction": (
        lambda: call(CUDA.allow_fp16_bf16_reduction_math_sdp, True, False),
        {"sdpa.math_reduction"},
    ),
    "cudnn": (lambda: attribute(CUDNN, "enabled", False), {"cudnn.enabled"}),
    "cudnn deterministic": (lambda: attribute(CUDNN, "deterministic", True), {"cudnn.deterministic"}),
    "function mode": (Mode, {"function_modes"}),
}


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


@pytest.mark.parametrize("name", CHANGES)
def test_each_mode_changes_its_own_entry(name: str) -> None:
    enter, expected = CHANGES[name]
    before = numeric_state()
    with enter():
        assert differing(before, numeric_state()) == expected
    assert numeric_state() == before


def test_the_autocast_type_counts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        first = numeric_state()
    with torch.autocast("cpu", torch.float16):
        assert differing(first, numeric_state()) == {"autocast.cpu"}


def test_state_is_json() -> None:
    state = numeric_state()
    assert json.loads(strict.canonical(state)) == state
    assert MIXED not in state.values()


PRECISION = """
import json, sys, torch
from pwcc.compile.numeric_state import numeric_state
before = numeric_state()
{change}
after = numeric_state()
changed = sorted(n for n in before if before[n] != after.get(n))
print(json.dumps([changed, torch.cuda.is_initialized(), "torch._dynamo" in sys.modules]))
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("torch.set_float32_matmul_precision('high')", "float32_matmul_precision"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "cuda.matmul.allow_tf32"),
        ("torch.backends.cudnn.allow_tf32 = False", "cudnn.allow_tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "fp32_precision.cuda.matmul"),
        ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "fp32_precision.mkldnn.matmul"),
        ("torch.backends.fp32_precision = 'tf32'", "fp32_precision.generic.all"),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "fp32_precision.cuda.conv"),
    ],
)
def test_float32_precision_is_seen_through_either_api(change: str, expected: str) -> None:
    """In a process of its own: the two APIs, once mixed, cannot be told apart again."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRECISION.format(change=change)],
        capture_output=True,
        text=True,
        check=True,
    )
    changed, initialised, dynamo = json.loads(done.stdout)
    assert expected in changed
    assert not initialised
    assert not dynamo
