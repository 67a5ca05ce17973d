"""The runtime's parsers against files made to break them, and against what they could be made to run."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import blob_digest
from pwcc.compile.numerics import NumericsRecord
from pwcc.compile.piece_compiler import PieceResult
from pwcc.compile.piece_graph import PieceGraph, PieceNode, SymbolInput, TensorInput
from pwcc.compile.runtime.arguments import torch_value
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import (
    CallingConvention,
    Parameter,
    ShapePredicate,
    SizeSymbol,
    Weight,
)
from pwcc.compile.runtime.expressions import compile_expressions, parse_expression
from pwcc.compile.runtime.output import build_output
from pwcc.compile.runtime.predicates import MAX_PREDICATES, Predicate, PredicateSet, Rule
from pwcc.compile.runtime.targets import resolve_target
from tests.hostile import TEXTS, hostile, only_expected

CPU = torch.device("cpu")
fuzz = settings(max_examples=150, deadline=5000)

CALLING = CallingConvention(
    parameters=(
        Parameter("x", "tensor", "float32", "cpu", ("s0", 8), (8, 1)),
        Parameter("mask", "constant", value=None),
        Parameter("p", "tensor", "int64", "cpu", ("2*s0 + 1",), (1,), written=True),
    ),
    symbols=(SizeSymbol("s0", 0, 0, 1, 40),),
    predicates=(ShapePredicate("s0 % 4 == 0 or s0 < 8", "m.py:3"),),
    weights=(Weight(("a.weight", "b.weight"), "float32", (8, 8), (8, 1)),),
    output={"tuple": [{"output": 0}, {"dict": [["k", {"constant": 1.5}]]}, {"list": [{"weight": 0}]}]},
).to_bytes()
PREDICATES = PredicateSet.of(
    [
        Predicate("model:", Rule((("attr", "eps"),), "is", ["float", (1e-5).hex()], "m.py:1")),
        Predicate("model:0", Rule((("attr", "sizes"), ("dict_item", "a")), "type", "builtins:int")),
        Predicate("model:0", Rule((("attr", "sizes"),), "keys", ["a"])),
        Predicate("forward:", Rule((("free", "x"),), "same", ["model:", [["attr", "y"]]])),
        Predicate("module:torch", Rule((("vars",), ("key", 3)), "length", 3)),
    ]
).to_json()
GRAPH = PieceGraph(
    inputs=(SymbolInput("s0"), TensorInput("float32", "cpu", ("s0", 8), (8, 1))),
    nodes=(
        PieceNode("call_function", "torch.ops.aten.add.Tensor", [{"v": 1}, 1], {"dict": [["alpha", 2]]}),
        PieceNode("call_method", "view", [{"v": 2}, {"s": "2*s0"}, 4], {"dict": []}),
        PieceNode("call_function", "operator.getitem", [{"v": 3}, {"slice": [None, 2, None]}], {"dict": []}),
        PieceNode("call_method", "to", [{"v": 4}, {"dtype": "int64"}, {"device": "cpu"}], {"dict": []}),
    ),
    outputs=({"v": 5},),
).to_bytes()
BLOB = blob_digest(b"record")
NUMERICS = NumericsRecord(8, 0, 0.0, 1e-7, 1e-7, 1e-6)
RESULT = strict.canonical(PieceResult(BLOB, (NUMERICS,), (("s0 < 9", None),), {BLOB: 6}, 1, 0.5, 0.0).to_json())


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.eps = 1e-5


@fuzz
@given(hostile(CALLING))
def test_calling_conventions(data: bytes) -> None:
    def use(data: bytes) -> object:
        convention = CallingConvention.from_bytes(data, where="calling")
        return Binder(convention, CPU), build_output(convention.output)

    only_expected(use, data)


@fuzz
@given(hostile(PREDICATES))
def test_predicates(data: bytes) -> None:
    model = Model()
    only_expected(lambda data: PredicateSet.from_json(data).check(model), data)


@fuzz
@given(hostile(GRAPH))
def test_piece_graphs(data: bytes) -> None:
    def use(data: bytes) -> object:
        graph = PieceGraph.from_bytes(data, where="graph")
        return graph.digest, graph.written_outputs

    only_expected(use, data)


@fuzz
@given(hostile(RESULT))
def test_piece_results(data: bytes) -> None:
    only_expected(lambda data: PieceResult.parse(data, "piece"), data)


@settings(max_examples=300, deadline=2000)
@given(st.sampled_from(TEXTS) | st.text(st.sampled_from("s0123 +-*/%()<>=!,andortmxi._"), max_size=40))
def test_size_expressions(text: str) -> None:
    """What is accepted compiles, and a value or a division by zero comes out: nothing else can run."""
    try:
        function = compile_expressions([text], ["s0"])
    except CorruptEntry:
        return
    try:
        (value,) = function(7)
    except ZeroDivisionError:
        return
    assert isinstance(value, int)


@pytest.mark.parametrize("text", ["-" * 300 + "1", "not " * 300 + "s0", "s0" + "+1" * 300, "9**9**9", "1and 2"])
def test_expressions_that_python_itself_stumbles_over(text: str) -> None:
    with pytest.raises(CorruptEntry, match="size expression"):
        parse_expression(text, ["s0"])


def test_a_division_by_zero_at_a_call_is_the_entrys_fault() -> None:
    value = json.loads(CALLING)
    value["predicates"] = [{"text": "8 % (s0 - 4) == 0", "where": None}]
    binder = Binder(CallingConvention.from_bytes(json.dumps(value).encode(), where="x"), CPU)
    good, bad = (
        (torch.ones(n, 8), None, torch.ones(2 * n + 1, dtype=torch.int64)) for n in (2, 4)
    )  # 8 % -2 holds
    assert binder.bind(good, {})[1] == (2,)
    with pytest.raises(CorruptEntry, match="divides by zero"):
        binder.bind(bad, {})


def predicates(groups: Sequence[Any], rules: Sequence[Any]) -> bytes:
    return json.dumps({"schema": 1, "rules": rules, "groups": groups}).encode()


def test_few_bytes_cannot_ask_for_many_checks() -> None:
    """Each root with each rule: two short lists would keep a load busy for hours."""
    rule: list[object] = [[], "is", None, ""]
    with pytest.raises(CorruptEntry, match=f"at most {MAX_PREDICATES}"):
        PredicateSet.from_json(predicates([[["model:"] * 20_000, [0] * 20_000]], [rule]))
    started = time.process_time()
    many = PredicateSet.from_json(predicates([[["model:"] * 1000, [0] * 1000]], [[[], "not_none", None, ""]]))
    assert many.check(Model()) == []
    assert time.process_time() - started < 5


@pytest.mark.parametrize("root", ["model:" + "." * 1000, "model:" + "a." * 500, "model:0" * 146])
def test_a_deep_root_is_absent(root: str) -> None:
    (violation,) = PredicateSet.from_json(predicates([[[root], [0]]], [[[], "is", None, ""]])).check(Model())
    assert violation.got == "no submodule"


def test_only_the_tables_name_what_runs() -> None:
    for test in ("__import__", "call", "eval", "__class__"):
        with pytest.raises(CorruptEntry, match="known test"):
            PredicateSet.from_json(predicates([], [[[], test, None, ""]]))
    for step in (["call"], ["eval", "1"], ["attr"], ["attr", "a", "b"], ["import", "os"]):
        with pytest.raises(CorruptEntry, match="step"):
            PredicateSet.from_json(predicates([], [[[step], "is", None, ""]]))
    for target in (
        "os.system",
        "torch.load",
        "torch.ops.load_library",
        "torch.hub.load",
        "builtins.eval",
        "torch.nn",
    ):
        with pytest.raises(CorruptEntry):
            resolve_target(target)
    for name in ("load", "nn", "__class__", "float", "device"):
        if name != "float":  # the dtype
            with pytest.raises(CorruptEntry, match="dtype"):
                torch_value("dtype", name)


LAZY = """
import sys, torch
from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.arguments import torch_value
from pwcc.compile.runtime.targets import resolve_target
before = set(sys.modules)
for name in ("_dynamo", "_inductor", "_export", "onnx", "compiler"):
    for use in (lambda: torch_value("dtype", name), lambda: resolve_target("torch." + name)):
        try:
            use()
        except CorruptEntry:
            continue
        raise SystemExit(name)
print(sorted(n for n in set(sys.modules) - before if n.startswith("torch._")))
"""


@pytest.mark.slow
def test_a_name_from_a_file_imports_nothing() -> None:
    """Torch imports some modules when they are asked for as attributes."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LAZY)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
