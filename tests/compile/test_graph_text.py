"""A traced program as text: every operation under its line and the call that it is part of."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from pwcc.compile.graph_text import piece_text, program_text
from pwcc.compile.inputs import input_specs
from pwcc.compile.split import DEFAULT_SPLITTING_OPS, split
from pwcc.compile.trace import SizeMode, Trace, trace


class Layers(nn.Module):
    """Two equal halves around an operation that is cut out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch._C._log_api_usage_once("pwcc.test")
        y = self.first(x).relu()
        y = torch.sort(y, dim=-1)[0]
        return y.sin() + x.shape[0]


@pytest.fixture(scope="module")
def traced() -> Trace:
    model = Layers().eval()
    assert input_specs(model, declarations=("x:float32[n,8]",))
    return trace(model, (torch.zeros(4, 8),), {0: (0,)}, mode=SizeMode.UNBACKED, low=1, high=64)


def test_nodes_lie_under_their_calls_and_lines(traced: Trace) -> None:
    program = split(traced, ("aten::sort",))
    names = {graph.digest: f"p{i}" for i, graph in enumerate(program.unique)}
    text = program_text(traced, program, names)
    assert re.findall(r"^    # (.* of 4\b.*)$", text, re.MULTILINE) == [
        "piece 1 of 4 (p0)",
        "torch.sort (splitting operation, 2 of 4)",
        "operator.getitem (called eagerly, 3 of 4)",
        "piece 4 of 4 (p1)",
    ]
    compile(text, "graph.py", "exec")
    before, _, after = text.partition("# torch.sort (splitting")
    assert "y = self.first(x).relu()" in before
    assert "return y.sin() + x.shape[0]" in after
    assert f"# {__file__}:" in before
    shown = {line.split(":")[0].strip() for line in text.splitlines()}
    assert {node.name for node in traced.graph_module.graph.nodes if node.op != "output"} <= shown
    assert "# weight first.weight" in text
    assert "# argument x" in text


def test_an_uncut_program_is_one_piece(traced: Trace) -> None:
    program = split(traced, DEFAULT_SPLITTING_OPS)
    text = program_text(traced, program, {})
    assert f"# piece 1 of 1 ({program.unique[0].digest[:12]})" in text


def test_a_piece_has_its_lines(traced: Trace) -> None:
    (step,) = split(traced, ()).pieces
    plain, lined = piece_text(step.graph), piece_text(step.graph, step.lines)
    assert plain.startswith(f"# {step.graph.digest}\n")
    assert __file__ not in plain
    assert [line for line in lined.splitlines() if __file__ not in line] == plain.splitlines()
    compile(lined, "piece.py", "exec")
