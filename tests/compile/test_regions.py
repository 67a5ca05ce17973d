"""Autocast regions are read as what holds at each operation; only what changes something is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from pwcc.cache.errors import UnsealableError
from pwcc.compile.regions import Region, Regions
from pwcc.compile.runtime.arguments import decode_argument
from tests.compile.split_cases import attend, make

BF16, F16 = Region("cpu", "bfloat16", True), Region("cpu", "float16", True)
OFF = Region("cpu", "bfloat16", False)


def graph_of(*script: object) -> tuple[fx.Graph, list[fx.Node]]:
    """Build a graph: tuples enter a region, ``"exit"`` leaves the innermost, ``"op"`` is an operation."""
    graph = fx.Graph()
    entered: list[fx.Node] = []
    operations: list[fx.Node] = []
    for item in script:
        if isinstance(item, tuple):
            entered.append(graph.call_function(_enter_autocast, item))
        elif item == "exit":
            graph.call_function(_exit_autocast, (entered.pop(),))
        else:
            operations.append(graph.call_function(torch.ones, (3,)))
    return graph, operations


def test_innermost_region_holds() -> None:
    outer, inner = ("cpu", torch.bfloat16, True, None), ("cpu", torch.float16, True, None)
    graph, nodes = graph_of("op", outer, "op", inner, "op", "exit", "op", "exit", "op")
    regions = Regions.of(graph, {"cpu"})
    assert [regions.at[node] for node in nodes] == [(), (BF16,), (F16,), (BF16,), ()]
    assert [regions.around(node) for node in nodes] == [regions.at[node] for node in nodes]


def test_regions_that_change_nothing_are_dropped() -> None:
    graph, nodes = graph_of(
        ("cpu", torch.bfloat16, False, None), "op", "exit", ("cuda:1", torch.float16, True, None), "op", "exit"
    )
    regions = Regions.of(graph, {"cpu"})
    assert [regions.at[node] for node in nodes] == [(), ()]
    both = Regions.of(graph, {"cpu", "cuda"})
    assert both.at[nodes[1]] == (Region("cuda", "float16", True),)


def test_off_inside_on_is_off() -> None:
    graph, (node,) = graph_of(("cpu", torch.bfloat16, True, None), ("cpu", None, False, None), "op")
    assert Regions.of(graph, {"cpu"}).at[node] == ()


def test_default_dtype_is_written_down() -> None:
    graph, (node,) = graph_of(("cpu", None, True, None), "op")
    (region,) = Regions.of(graph, {"cpu"}).at[node]
    assert region.dtype == str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
    encoded = {"tuple": region.arguments}
    assert decode_argument(encoded, (), int, torch.device("cpu")) == ("cpu", torch.bfloat16, True, False)


def test_region_around_the_call() -> None:
    graph, nodes = graph_of("op", ("cpu", torch.float16, True, None), "op", ("cpu", None, False, None), "op")
    with torch.autocast("cpu", torch.bfloat16):
        regions = Regions.of(graph, {"cpu"})
    assert [regions.at[node] for node in nodes] == [(BF16,), (F16,), (OFF,)]
    assert [regions.around(node) for node in nodes] == [(), (F16,), (OFF,)]


def test_region_that_never_began() -> None:
    graph = fx.Graph()
    node = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_exit_autocast, (node,))
    graph.call_function(_exit_autocast, (node,))
    with pytest.raises(UnsealableError, match="ends before it begins"):
        Regions.of(graph, {"cpu"})


def inside(self: Any, x: Tensor) -> Any:
    y = self.lin(attend(self.lin(x)))
    with torch.autocast("cpu", enabled=False):
        return self.lin(y.float()), torch.ops.pwcctest.project(y.float(), self.lin.weight)


def test_model_that_is_compiled_and_called_in_autocast(same_as_eager: Callable[..., Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        program = same_as_eager(make(inside), max_tokens=12, sizes=(1, 7))
        cast = program(torch.ones(3, 8))
    plain = same_as_eager(make(inside), max_tokens=12, sizes=(1, 7))(torch.ones(3, 8))
    assert not torch.equal(cast[0], plain[0])


def test_failing_splitting_op_leaves_no_region(interpreted: Callable[..., Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.ops.pwcctest.project(self.lin(x), self.lin.weight)

    program = interpreted(make(forward), max_tokens=12)
    step = program.traced[0].program.steps[-1]
    assert step.regions == (BF16,)
    assert "with o" in program.sources[0]

    def fails(*_: object) -> None:
        assert torch.is_autocast_enabled("cpu")
        raise RuntimeError("out of luck")

    namespace: dict[str, Any] = {}
    exec(program.sources[0], namespace)
    run = namespace["bind"](
        [lambda inputs: (torch.ones(2, 8),)],
        lambda name: torch.autocast if name.endswith("autocast") else fails,
        lambda kind, text: getattr(torch, text),
        program._weights[0],
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        run([torch.ones(2, 8)], (2,))
    assert not torch.is_autocast_enabled("cpu")
