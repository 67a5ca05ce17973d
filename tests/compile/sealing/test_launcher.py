"""Launchers of Triton kernels: the winner's grid written out, nothing else let through."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pwcc.cache.errors import UnsealableError
from pwcc.compile.sealing.launcher import launcher_text
from pwcc.compile.torch_private.triton_static import TunedKernel

KERNEL = TunedKernel(
    symbol="triton_poi_fused_1",
    cubin=b"\x7fELF",
    shared=512,
    num_warps=4,
    arg_types="OOiOO",
    scratch=2,
    parameters=("in_ptr0", "out_ptr0", "xnumel"),
    arguments=("in_ptr0", "out_ptr0", "xnumel"),
    prefix=(),
    grid=("-((xnumel) // -(256))", "1", "1"),
    config="XBLOCK=256",
    capability="9.0",
    registers=32,
    spills=0,
)


def launch(kernel: TunedKernel, *args: object) -> tuple[object, ...]:
    seen: list[tuple[object, ...]] = []
    scope: dict[str, Any] = {"launch_kernel": lambda *a: seen.append(a), "_function_k": 77}
    exec(launcher_text("k", kernel), scope)
    scope["k"](*args)
    return seen[0]


@pytest.mark.parametrize(("xnumel", "blocks"), [(1, 1), (256, 1), (257, 2), (1024, 4)])
def test_launches_with_the_grid_of_the_size(xnumel: int, blocks: int) -> None:
    assert launch(KERNEL, "a", "b", xnumel, 5) == (
        77, blocks, 1, 1, 4, 512, "OOiOO", ("a", "b", xnumel, None, None), 5,
    )  # fmt: skip


def test_prefix_lines_and_conditional_grids() -> None:
    kernel = dataclasses.replace(
        KERNEL,
        prefix=("y_grid_raw_ = -((xnumel) // -(8))", "y_grid_div_ = -((y_grid_raw_) // -(65535))"),
        grid=("1", "(0 if y_grid_div_ == 0 else -((y_grid_raw_) // -(y_grid_div_)))", "y_grid_div_"),
    )
    assert launch(kernel, "a", "b", 80, 5)[1:4] == (1, 10, 1)
    assert launch(kernel, "a", "b", 8 * 65536, 5)[1:4] == (1, 32768, 2)


def test_grids_handed_in_by_the_wrapper() -> None:
    kernel = dataclasses.replace(
        KERNEL,
        parameters=("x", "_grid_0", "_grid_1", "_grid_2"),
        arguments=("x",),
        arg_types="O",
        scratch=0,
        grid=("_grid_0", "_grid_1", "_grid_2"),
    )
    assert launch(kernel, "a", 3, 2, 1, 5) == (77, 3, 2, 1, 4, 512, "O", ("a",), 5)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": ("__import__('os')", "1", "1")},
        {"grid": ("xnumel.real", "1", "1")},
        {"grid": ("ynumel", "1", "1")},
        {"grid": ("(lambda: 1)()", "1", "1")},
        {"grid": ("1 +", "1", "1")},
        {"prefix": ("import os",)},
        {"prefix": ("a, b = 1, 2",)},
        {"arguments": ("in_ptr0", "missing")},
    ],
)
def test_other_grids_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsealableError, match="'k'"):
        launcher_text("k", dataclasses.replace(KERNEL, **change))
