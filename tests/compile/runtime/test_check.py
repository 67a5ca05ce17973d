"""The debug check of a piece's inputs names what differs from what was compiled."""

from __future__ import annotations

import pytest
import torch

from pwcc.cache.errors import ArgumentError
from pwcc.cache.ids import blob_digest
from pwcc.cache.sealed import InputFacts, SealedPiece
from pwcc.compile.runtime.check import input_checker

RECORD = SealedPiece(
    source=blob_digest(b""),
    code=None,
    device_type="cpu",
    inputs=(
        InputFacts("symint", value="u0"),
        InputFacts("tensor", "float32", ("u0", 4), (4, 1)),
        InputFacts("tensor", "float32", ("2*u0",), (1,)),
        InputFacts("int", value=7),
    ),
    outputs=1,
    mutated=(),
    realigned=(),
    aligned=(1,),
    kernels=(),
    externs=(),
    fallbacks=(),
    ops=(),
    constants=None,
    tuned=False,
    requirements=(),
)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_accepts_what_was_compiled(size: int) -> None:
    input_checker(RECORD)([size, torch.zeros(size, 4), torch.zeros(2 * size), 7])


def test_strides_of_single_elements_do_not_matter() -> None:
    input_checker(RECORD)([1, torch.zeros(4, 1).t(), torch.zeros(2), 7])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([3], "4 inputs"),
        ([3, torch.zeros(3, 4), torch.zeros(6), 8], "expected 7, got 8"),
        ([2, torch.zeros(3, 4), torch.zeros(6), 7], r"shape \(2, 4\)"),
        ([3, torch.zeros(3, 4), torch.zeros(5), 7], r"shape \(6,\)"),
        ([3, torch.zeros(4, 3).t(), torch.zeros(6), 7], r"strides \(4, 1\)"),
        ([3, torch.zeros(3, 4).double(), torch.zeros(6), 7], "dtype float32"),
        ([3, None, torch.zeros(6), 7], "a tensor"),
        ([None, torch.zeros(3, 4), torch.zeros(6), 7], "an integer"),
        ([3, torch.zeros(13)[1:].view(3, 4), torch.zeros(6), 7], "16 divides"),
        ([3, torch.zeros(3, 4, device="meta"), torch.zeros(6), 7], "tensor on cpu"),
    ],
)
def test_names_what_differs(args: list[object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        input_checker(RECORD)(args)
