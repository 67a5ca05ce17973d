"""Inputs that a piece's results may be views of."""

from __future__ import annotations

import ast

import pytest

from pwcc.compile.sealing.returned import returned_inputs

PROGRAM = """
def call(args):
    s0, a, b, c, d = args
    args.clear()
    a = copy_if_misaligned(a)
    buf0 = empty_strided_cuda((s0, 8), (8, 1), float32)
    cpp_fused_0(b, buf0)
    buf1 = reinterpret_tensor(a, (s0,), (8,), 2)
    if not s0 <= 6:
        buf1 = c
    buf2 = buf1
    del a
    return ({}, )
"""


@pytest.mark.parametrize(
    ("result", "positions"),
    [
        ("buf0", {0}),  # its size; a size is never checked for alignment
        ("buf2", {0, 1, 3}),
        ("buf1", {0, 1, 3}),
        ("reinterpret_tensor(d, (8,), (1,), 0)", {4}),
        ("b", {2}),
        ("a", {1}),
    ],
)
def test_names_lead_back_to_inputs(result: str, positions: set[int]) -> None:
    call = ast.parse(PROGRAM.format(result)).body[0]
    assert isinstance(call, ast.FunctionDef)
    assert returned_inputs(call, ("s0", "a", "b", "c", "d")) == positions
