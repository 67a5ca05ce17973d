"""A call goes to the program of its token count; arguments of any form find it, and sizes of their own stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import GuardViolation, SizeError, WrongCall
from pwcc.compile.compiled_model import CompiledModel, LoadedProgram, LoadedVariant
from pwcc.compile.load import compile_stitch
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import CallingConvention, Parameter, ShapePredicate, SizeSymbol
from pwcc.compile.runtime.output import build_output
from pwcc.compile.runtime.piece import LoadedPiece

CPU = torch.device("cpu")


def program(name: float, low: int, high: int, *, static: bool = False, predicate: str = "") -> LoadedProgram:
    """A program of (x, m-sized y) that returns its own number, its token count and the other size."""
    rows: int | str = low if static else "s0"
    tokens = () if static else (SizeSymbol("s0", 0, 0, low, high),)
    calling = CallingConvention(
        (
            Parameter("x", "tensor", "float32", "cpu", (rows, 2), (2, 1)),
            Parameter("y", "tensor", "float32", "cpu", ("s1",), (1,)),
        ),
        (*tokens, SizeSymbol("s1", 1, 0, 1, 9)),
        (ShapePredicate(predicate, "model.py:3"),) if predicate else (),
        (),
        {"tuple": [{"output": 0}, {"constant": low} if static else {"size": "s0"}, {"size": "2*s1"}]},
    )
    symbols = [symbol.name for symbol in calling.symbols]
    return LoadedProgram(
        low=low,
        high=high,
        calling=calling,
        bind=compile_stitch(
            f"def bind(pieces, operation, constant, weights):\n"
            f"    def run(arguments, sizes):\n        {', '.join(symbols)}, = sizes\n        return ({name},)\n"
            f"    return run\n".encode()
        ),
        variants=(LoadedVariant(low, high, static, cast("tuple[LoadedPiece, ...]", ())),),
        binder=Binder(calling, CPU),
        output=build_output(calling.output, symbols),
    )


@pytest.fixture
def compiled() -> CompiledModel:
    programs = [
        program(1, 1, 1, static=True),
        program(8, 8, 8, static=True),
        program(30, 17, 40),
        program(10, 2, 16, predicate="s0 != 8"),
    ]
    manifest: Any = SimpleNamespace(observed=(), entry_key="key", model=SimpleNamespace(identity="test"))
    return CompiledModel(nn.Identity(), CPU, manifest, programs, lambda digest: b"")


def x(n: int) -> Tensor:
    return torch.ones(n, 2)


@pytest.mark.parametrize(("size", "answers"), [(1, 1), (2, 10), (7, 10), (8, 8), (16, 10), (17, 30), (40, 30)])
def test_the_narrowest_program_answers(size: int, answers: int, compiled: CompiledModel) -> None:
    for _ in range(2):
        assert compiled(x(size), torch.ones(3)) == (answers, size, 6)
        assert compiled(y=torch.ones(4), x=x(size)) == (answers, size, 8)


def test_sizes_that_nothing_serves(compiled: CompiledModel) -> None:
    for size in (0, 41):
        for _ in range(2):
            with pytest.raises(SizeError, match=rf"size {size} of 'x' \(dimension 0\).*\[1, 40\]") as raised:
                compiled(x(size), torch.ones(3))
            assert "--max-tokens" in str(raised.value.hint)
    with pytest.raises(SizeError, match=r"size 10 of 'y' \(dimension 0\)"):
        compiled(x(8), torch.ones(10))


def test_wrong_calls_are_type_errors(compiled: CompiledModel) -> None:
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = [
        ((), {}),
        ((x(3),), {}),
        ((x(3), x(3), x(3)), {}),
        ((x(3),), {"x": x(3)}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(WrongCall):
            compiled(*args, **kwargs)


def test_a_predicate_holds_wherever_a_call_comes_from(compiled: CompiledModel) -> None:
    with pytest.raises(GuardViolation, match="s0 != 8") as raised:
        compiled.programs[-1].binder.bind((x(8), torch.ones(3)), {})
    assert raised.value.where == "model.py:3"
