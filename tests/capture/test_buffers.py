"""Arguments that graphs cannot hold in buffers by name are refused before anything is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pwcc.cache.errors import UsageError
from pwcc.capture import buffers
from pwcc.compile.runtime.arrange import Argument
from pwcc.compile.runtime.calling import CallingConvention, Parameter, SizeSymbol

X = Parameter("x", "tensor", "float32", "cpu", ("s0", 8), (8, 1))
SCALE = Parameter("scale", "constant", value=0.5)
TOKENS = SizeSymbol("s0", 0, 0, 1, 40)
ROWS = SizeSymbol("s1", 0, 1, 1, 40)
LEAF, SECOND = {"leaf": 0}, {"leaf": 1}


def program(*arguments: Argument, symbols: tuple[SizeSymbol, ...] = (TOKENS,)) -> Any:
    calling = CallingConvention((X, SCALE), symbols, (), arguments=arguments)
    return SimpleNamespace(calling=calling, low=1, high=40)


def test_tensors_by_name_and_default_constants_are_taken() -> None:
    for arguments in (
        (),
        (Argument("x", "keyword", "other", LEAF), Argument("scale", "either", "compiled", SECOND)),
    ):
        assert list(buffers._tensor_parameters([program(*arguments)])) == ["x"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((Argument("x", "positional", "required", LEAF), Argument("scale", "either", "compiled", SECOND)), "x"),
        ((Argument("x", "either", "required", LEAF), Argument("scale", "either", "other", SECOND)), "scale"),
        ((Argument("both", "either", "required", {"tuple": [LEAF, SECOND]}),), "both"),
    ],
)
def test_other_arguments_are_refused_by_name(arguments: tuple[Argument, ...], name: str) -> None:
    with pytest.raises(UsageError, match=f"argument '{name}' is positional-only, nested or a constant"):
        buffers._tensor_parameters([program(*arguments)])


@pytest.mark.parametrize("symbols", [(TOKENS, ROWS), (ROWS,)])
def test_sizes_beside_the_token_count_are_refused(symbols: tuple[SizeSymbol, ...]) -> None:
    with pytest.raises(UsageError, match="the entry has other sizes, too"):
        buffers._tensor_parameters([program(symbols=symbols)])
