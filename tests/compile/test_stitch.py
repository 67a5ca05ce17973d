"""The stitch program's text: readable, complete, and free of anything but calls."""

from __future__ import annotations

import ast
import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import UnsealableError
from pwcc.compile.compiled_model import constant
from pwcc.compile.load import compile_stitch
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.runtime.targets import resolve_target
from pwcc.compile.steps import EagerStep, PieceStep, Program, Ref, SizeOutput
from pwcc.compile.stitch import stitch_source

CPU = torch.device("cpu")
Interpret = Callable[..., Any]


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out, 0.5)
    return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = attend(layer(x))
        return x * 2


def test_the_text(interpreted: Interpret) -> None:
    (source,) = interpreted(Model()).sources
    assert source == (
        "def bind(pieces, operation, constant, weights):\n"
        "    p0, p1, = pieces\n"
        "    o0 = operation('torch.ops.pwcctest.attend')\n"
        "    w0, w1, w2, w3, w4, w5, = weights\n"
        "    def run(arguments, sizes):\n"
        "        a0, = arguments\n"
        "        s0, = sizes\n"
        "        v0, v1, = p0([s0, a0, w0, w1])\n"
        "        o0(v0, v1, 0.5)\n"
        "        del v0\n"
        "        v2, v3, = p0([s0, v1, w2, w3])\n"
        "        del v1\n"
        "        o0(v2, v3, 0.5)\n"
        "        del v2\n"
        "        v4, v5, = p0([s0, v3, w4, w5])\n"
        "        del v3\n"
        "        o0(v4, v5, 0.5)\n"
        "        del v4\n"
        "        v6, = p1([s0, v5])\n"
        "        del v5\n"
        "        return (v6,)\n"
        "    return run\n"
    )


def run(program: Program, *arguments: Tensor, sizes: Sequence[int] = (3,)) -> tuple[Any, ...]:
    source = stitch_source(program, [f"s{index}" for index in range(len(sizes))], len(arguments))
    ast.parse(source)
    bind = compile_stitch(source.encode())
    pieces = [lambda inputs: inputs[-1:]] * len(program.unique)
    return bind(pieces, resolve_target, constant(CPU), [])(arguments, tuple(sizes))


def eager(
    target: str, args: Sequence[object], kwargs: Sequence[object] = (), output: int | None = 0
) -> EagerStep:
    return EagerStep(target, {"tuple": list(args)}, {"dict": list(kwargs)}, output, False)


def r(kind: str, index: int) -> dict[str, object]:
    return {"r": [kind, index]}


def test_every_kind_of_argument() -> None:
    steps = (
        eager(
            "torch.full",
            [[{"s": "2*s0"}, 4], {"float": "-inf"}],
            [
                ["dtype", {"dtype": "bfloat16"}],
                ["device", {"device": "cpu"}],
                ["layout", {"layout": "strided"}],
            ],
        ),
        eager(
            "operator.getitem",
            [r("value", 0), {"tuple": [{"slice": [1, {"s": "s0"}, None]}, {"ellipsis": True}]}],
            output=1,
        ),
        eager("torch.cat", [[r("value", 1), r("argument", 0)]], [["dim", 0]], output=2),
        eager(
            "torch.Tensor.contiguous",
            [r("value", 2)],
            [["memory_format", {"memory_format": "contiguous_format"}]],
            output=3,
        ),
    )
    (found,) = run(Program(steps, (), (Ref("value", 3),), 0), torch.ones(1, 4, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert found[:, 0].tolist() == [float("-inf"), float("-inf"), 1.0]


def test_a_complex_number_is_an_argument() -> None:
    steps = (eager("torch.mul", [r("argument", 0), {"complex": "(1-2.5j)"}]),)
    (found,) = run(Program(steps, (), (Ref("value", 0),), 0), torch.ones(1))
    assert found.tolist() == [1 - 2.5j]


def test_argument_names_that_are_keywords() -> None:
    step = eager("torch.ops.aten.random.from", [r("argument", 0)], [["from", 3], ["to", 4]])
    (found,) = run(Program((step,), (), (Ref("value", 0),), 0), torch.zeros(2, dtype=torch.int64))
    assert found.tolist() == [3, 3]


def test_no_pieces_no_steps_no_outputs() -> None:
    assert run(Program((), (), (), 0)) == ()
    x = torch.ones(2)
    assert run(Program((), (), (Ref("argument", 0), Ref("argument", 0)), 0), x) == (x, x)
    assert run(Program((), (), (), 0), sizes=()) == ()


def test_values_die_after_their_last_use() -> None:
    piece = PieceStep(PieceGraph((), (), ()), ("s0",), (Ref("value", 0),), (1,), ())
    steps = (
        eager("operator.add", [r("argument", 0), 1]),
        piece,
        eager("torch.clone", [r("value", 1)], output=2),
        eager("operator.mul", [r("value", 2), 2], output=3),
    )
    program = Program(steps, (), (Ref("value", 3),), 0)
    source = stitch_source(program, ["s0"], 1)
    assert [line.strip() for line in source.splitlines() if "del" in line] == ["del v0", "del v1", "del v2"]
    unused = Program((eager("operator.add", [r("argument", 0), 1]),), (), (), 0)
    assert "del v0" in stitch_source(unused, ["s0"], 1)


def test_results_are_freed_while_running() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watch(inputs: Sequence[Any]) -> tuple[Tensor]:
        gc.collect()
        assert all(reference() is None for reference in alive[:-1])
        made = inputs[-1] + 1
        alive.append(weakref.ref(made))
        return (made,)

    graph = PieceGraph((), (), ())
    steps = tuple(
        PieceStep(graph, ("s0",), (Ref("value", i - 1) if i else Ref("argument", 0),), (i,), ())
        for i in range(5)
    )
    program = Program(steps, (), (Ref("value", 4),), 0)
    bind = compile_stitch(stitch_source(program, ["s0"], 1).encode())
    (found,) = bind([watch], resolve_target, constant(CPU), [])([torch.zeros(2)], (3,))
    assert found.tolist() == [5, 5]
    assert len(alive) == 5


def test_numbers_are_returned_at_their_places() -> None:
    root = eager("operator.pow", [{"s": "s0 + 1"}, 0.5])
    outputs = (SizeOutput("2*s0"), Ref("argument", 0), SizeOutput(7), Ref("value", 0), SizeOutput(float("inf")))
    x = torch.ones(2)
    assert run(Program((root,), (), outputs, 0), x) == (6, x, 7, 2.0, float("inf"))


def test_numbers_are_no_segment() -> None:
    number = dataclasses.replace(eager("operator.pow", [{"s": "s0"}, 0.5]), number=True)
    piece = PieceStep(PieceGraph((), (), ()), (), (), (), ())
    call = eager("torch.clone", [r("argument", 0)], output=1)
    assert Program((piece, number), (), (), 0).segments == 1
    assert Program((number, call, number, piece), (), (), 0).segments == 2


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(UnsealableError, match="unknown kind 'code'"):
        stitch_source(Program((eager("operator.add", [{"code": "x"}]),), (), (), 0), ["s0"], 1)


def test_strings_can_not_leave_their_quotes() -> None:
    text = "'); __import__('os').abort(); ('\n\\"
    step = eager("operator.eq", [text, text])
    assert run(Program((step,), (), (Ref("value", 0),), 0)) == (True,)
