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
from pwcc.compile.numeric_state import UNREADABLE, numeric_state


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


@contextlib.contextmanager
def priority() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel([*order, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        yield


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
    "sdpa priority": (priority, {"sdpa.priority"}),
    "fast path": (
        lambda: call(torch.backends.mha.set_fastpath_enabled, False, True),
        {"mha_fastpath"},
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


def test_cudnns_place_in_the_sdpa_priority_does_not_count() -> None:
    """torch moves it by itself when it meets a GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *others], set_priority=True):
        first, order = numeric_state(), torch._C._get_sdp_priority_order()
    with sdpa_kernel([*others, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        assert torch._C._get_sdp_priority_order() != order
        assert numeric_state() == first
    assert first["sdpa.priority"] == [kind for kind in order if kind != SDPBackend.CUDNN_ATTENTION.value]


def test_the_autocast_type_counts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        first = numeric_state()
    with torch.autocast("cpu", torch.float16):
        assert differing(first, numeric_state()) == {"autocast.cpu"}


def test_state_is_json() -> None:
    state = numeric_state()
    assert json.loads(strict.canonical(state)) == state
    assert UNREADABLE not in state.values()


PRECISION = """
import json, os, sys, torch
from pwcc.compile.numeric_state import numeric_state

def state_after(change):
    # the two APIs, once mixed, cannot be told apart again: each change in a process of its own
    read, write = os.pipe()
    if os.fork() == 0:
        exec(change)
        os.write(write, json.dumps([numeric_state(), torch.cuda.is_initialized()]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.wait()
    return json.loads(text)

print(json.dumps([state_after(change) for change in json.loads(sys.argv[1])]))
assert "torch._dynamo" not in sys.modules
"""

MATMUL = {"fp32_precision.cuda.matmul", "fp32_precision.mkldnn.matmul"}
CONV = {"fp32_precision.cuda.conv", "fp32_precision.cuda.rnn"}
OF_MKLDNN = {f"fp32_precision.mkldnn.{part}" for part in ("all", "conv", "matmul", "rnn")}
CHANGED: dict[str, set[str]] = {
    "torch.set_float32_matmul_precision('high')": MATMUL,
    "torch.set_float32_matmul_precision('medium')": MATMUL,
    "torch.backends.cuda.matmul.allow_tf32 = True": {"fp32_precision.cuda.matmul"},
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": {"fp32_precision.cuda.matmul"},
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": {"fp32_precision.mkldnn.matmul"},
    "torch.backends.fp32_precision = 'tf32'": {"fp32_precision.cuda.matmul", *OF_MKLDNN},
    "torch.backends.fp32_precision = 'ieee'": CONV,
    "torch.backends.cudnn.allow_tf32 = False": CONV,
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'": {"fp32_precision.cuda.conv"},
    # what is the default already is no change, whoever says so
    "torch.set_float32_matmul_precision('highest')": set(),
    "torch.backends.cuda.matmul.allow_tf32 = False": set(),
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": set(),
    "torch.backends.mkldnn.matmul.fp32_precision = 'none'": set(),
    "torch.backends.cudnn.allow_tf32 = True": set(),
}
BOTH_BACKENDS = (
    "torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = 'tf32'"
)


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, Any]]:
    """The state after each change, by the change."""
    changes = ["pass", BOTH_BACKENDS, *CHANGED]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRECISION, json.dumps(changes)],
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout)
    assert not any(initialised for _, initialised in answers)
    return dict(zip(changes, [state for state, _ in answers], strict=True))


@pytest.mark.parametrize("change", CHANGED)
def test_float32_precision_is_seen_through_either_api(states: dict[str, dict[str, Any]], change: str) -> None:
    assert differing(states["pass"], states[change]) == CHANGED[change]


def test_both_apis_give_one_state(states: dict[str, dict[str, Any]]) -> None:
    """``high`` is tf32 in both back ends: set so through the newer API, it is the same state."""
    assert states[BOTH_BACKENDS] == states["torch.set_float32_matmul_precision('high')"]
