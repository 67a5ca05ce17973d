"""Running passes: order, counts, texts, what a pass may leave behind, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pwcc.cache.errors import PieceCompileError
from pwcc.compile.passes.base import GraphPass, PassContext
from pwcc.compile.passes.manager import PassRun, dump_passes

aten = torch.ops.aten
CONTEXT = PassContext(torch.device("cpu"), 1, 8, static=False)


@dataclass(frozen=True)
class Halve(GraphPass):
    """``x * 2`` becomes ``x + x``, or something that is wrong."""

    name: ClassVar[str] = "halve"
    fault: str = ""

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        if self.fault == "raise":
            raise KeyError("oops")
        found = [node for node in graph.nodes if node.target is aten.mul.Tensor]
        for node in found:
            with graph.inserting_before(node):
                made = graph.call_function(aten.add.Tensor, (node.args[0], node.args[0]))
            if self.fault != "value":
                made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
            if self.fault == "order":
                graph.erase_node(node)
                next(iter(graph.nodes)).prepend(made)
        return len(found)


def graph() -> fx.GraphModule:
    def function(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return (x * 2).relu()

    return make_fx(function, tracing_mode="fake")(torch.ones(3), torch.ones(3))


def test_passes_run_in_order_and_are_counted() -> None:
    module = graph()
    run = PassRun([("one", Halve()), ("two", Halve())], CONTEXT, keep_text=True)
    run(module.graph)
    assert [(count.name, count.matches) for count in run.counts] == [("one", 1), ("two", 0)]
    assert [text.name for text in run.texts] == ["one"]
    assert "mul.Tensor" in run.texts[0].before
    assert "mul.Tensor" not in run.texts[0].after


def test_what_lost_its_users_goes_and_what_writes_stays() -> None:
    module = graph()
    PassRun([("halve", Halve())], CONTEXT)(module.graph)
    module.recompile()
    y = torch.ones(3)
    assert torch.equal(module(torch.ones(3), y), torch.full((3,), 2.0))
    assert torch.equal(y, torch.full((3,), 2.0))
    assert aten.mul.Tensor not in [node.target for node in module.graph.nodes]


@pytest.mark.parametrize(
    ("fault", "says"), [("raise", "KeyError"), ("value", "meta"), ("order", "used before")]
)
def test_a_pass_that_fails_or_leaves_a_broken_graph_is_named(fault: str, says: str) -> None:
    with pytest.raises(PieceCompileError, match="the pass 'halve' failed") as caught:
        PassRun([("halve", Halve(fault))], CONTEXT)(graph().graph)
    assert says in str(caught.value)


@dataclass(frozen=True)
class Counts(GraphPass):
    """A pass that returns no count."""

    name: ClassVar[str] = "counts"
    given: Any = None

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        return self.given  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", [None, "many", -1, True])
def test_a_pass_that_returns_no_count_is_named(given: object) -> None:
    with pytest.raises(PieceCompileError, match=f"the pass 'counts' failed: TypeError: it returned {given!r}"):
        PassRun([("counts", Counts(given))], CONTEXT)(graph().graph)


def test_texts_are_written_one_pair_a_pass(tmp_path: Path) -> None:
    run = PassRun([("my.mod:Pass", Halve())], CONTEXT, keep_text=True)
    run(graph().graph)
    dump_passes(tmp_path / "n=3", run.texts)
    names = sorted(path.name for path in (tmp_path / "n=3").iterdir())
    assert names == [f"pass-0-my.mod.Pass.{when}.txt" for when in ("after", "before")]
    assert "float32[3]" in (tmp_path / "n=3" / names[0]).read_text()
