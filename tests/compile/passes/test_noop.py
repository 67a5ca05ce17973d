"""No-op elimination on ATen graphs made by hand and by tracing, with numbers and with symbols for sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pwcc.compile.passes.base import PassContext
from pwcc.compile.passes.manager import PassRun
from pwcc.compile.passes.noop import NoopElimination
from pwcc.compile.torch_private.symbols import new_unbacked_size

aten = torch.ops.aten
MODES = ("fake", "symbolic")
CONTEXT = PassContext(torch.device("cpu"), 1, 100, static=False)


def traced(function: Callable[..., object], *inputs: Tensor, mode: Any = "symbolic") -> fx.GraphModule:
    """Return the ATen graph of a function, as Inductor's passes see one."""
    return make_fx(function, tracing_mode=mode)(*inputs)


def run(module: fx.GraphModule) -> int:
    """Run the pass as a compile does; return its matches."""
    passes = PassRun([("noop", NoopElimination())], CONTEXT)
    passes(module.graph)
    module.recompile()
    return passes.counts[0].matches


def targets(module: fx.GraphModule) -> list[str]:
    """Return the names of the ATen operations that compute tensors."""
    return [
        str(node.target).removeprefix("aten.")
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    ]


def outputs(value: object) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]  # type: ignore[list-item]


X = torch.arange(48.0).reshape(6, 8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: aten.view(x * 2, x.shape) + 1, ["mul.Tensor", "add.Tensor"]),
        (lambda x: aten.view(aten.view(x * 2, [-1]), [x.shape[0], -1]) + 1, ["mul.Tensor", "add.Tensor"]),
        (lambda x: aten.slice(x * 2, 1, 0, x.shape[1]) + 1, ["mul.Tensor", "add.Tensor"]),
        (lambda x: aten.slice(x * 2, 0) + 1, ["mul.Tensor", "add.Tensor"]),
        (lambda x: aten.expand(x * 2, [-1, x.shape[1]]) + 1, ["mul.Tensor", "add.Tensor"]),
        (lambda x: aten.slice_scatter(x * 2, x + 3, 1, 0, x.shape[1]) + 1, ["add.Tensor", "add.Tensor"]),
        (
            lambda x: aten.view(aten.view(aten.view(x * 2, [-1]), [-1, 2]), [-1, 4]) + 1,
            ["mul.Tensor", "view.default", "add.Tensor"],
        ),
    ],
    ids=["same", "there and back", "slice", "open slice", "expand", "scatter", "chain"],
)
def test_what_changes_nothing_goes(function: Callable[[Tensor], Tensor], left: list[str], mode: str) -> None:
    module = traced(function, X, mode=mode)
    assert run(module) > 0
    assert targets(module) == left
    assert torch.equal(module(X), function(X))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.view(x * 2, [x.shape[1], x.shape[0]]) + 1,
        lambda x: aten.slice(x * 2, 1, 0, 7) + 1,
        lambda x: aten.slice(x * 2, 1, 1, 8) + 1,
        lambda x: aten.expand(aten.slice(x, 0, 0, 1) * 2, [3, -1]) + 1,
        lambda x: aten.slice_scatter(x * 2, aten.slice(x, 1, 0, 7), 1, 1, 8) + 1,
        lambda x: aten.slice_scatter(x * 2, aten.slice(x, 0, 0, 3), 0, 0, 6, 2) + 1,
    ],
    ids=["other shape", "narrower", "later", "wider", "part", "every other"],
)
def test_what_changes_something_stays(function: Callable[[Tensor], Tensor], mode: str) -> None:
    module = traced(function, X, mode=mode)
    before = targets(module)
    assert run(module) == 0
    assert targets(module) == before


def unbacked(function: Callable[..., object], count: int) -> fx.GraphModule:
    """Return a graph over ``count`` inputs ``[n, 8]``, each of a size of its own of which nothing is known."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        sizes = [new_unbacked_size(env, 1, 100) for _ in range(count)]
        inputs = [torch.empty(size, 8) for size in sizes]
        return make_fx(function)(*inputs)


def test_one_unknown_size_is_equal_to_itself_only() -> None:
    kept = unbacked(lambda x, y: aten.slice(x * 2, 0, 0, y.shape[0]) + 1, 2)
    assert run(kept) == 0
    gone = unbacked(lambda x: aten.view(aten.view(x * 2, [-1]), [x.shape[0], 8]) + 1, 1)
    assert run(gone) > 0
    assert targets(gone) == ["mul.Tensor", "add.Tensor"]


def test_asking_adds_no_guard() -> None:
    module = traced(lambda x: aten.slice(x * 2, 0, 0, x.shape[1]) + 1, torch.ones(5, 7))
    env = next(iter(module.graph.nodes)).meta["val"].fake_mode.shape_env
    before = list(env.guards)
    run(module)
    assert env.guards == before


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.view(x, x.shape),
        lambda x: (x + 1, aten.view(x, x.shape)),
        lambda x: _twice(x + 1),
        lambda x: aten.slice_scatter(x * 2, x, 1, 0, x.shape[1]),
        lambda x: aten.view(aten.slice_scatter(x * 2, aten.view(x, [-1, 8]), 1, 0, x.shape[1]), [-1]),
        lambda x: _scattered_twice(x + 1),
    ],
    ids=[
        "an input",
        "an input beside",
        "one twice",
        "scattered input",
        "views of both",
        "scatter of a scatter",
    ],
)
def test_what_is_returned_shares_memory_as_before(function: Callable[[Tensor], object]) -> None:
    """An output does not become an input, nor two outputs one tensor, nor their memory each other's."""
    module = traced(function, X)
    expected, given = sharing(function(X), X), X.clone()
    run(module)
    assert sharing(module(given), given) == expected
    assert all(map(torch.equal, outputs(module(X)), outputs(function(X))))


def _twice(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, aten.view(y, y.shape)


def _scattered_twice(y: Tensor) -> tuple[Tensor, Tensor]:
    width = y.shape[1]
    first = aten.slice_scatter(y * 2, y, 1, 0, width)
    second = aten.slice_scatter(y * 3, aten.view(first, [-1, 8]), 1, 0, width)
    return second, aten.slice_scatter(y * 4, aten.view(aten.view(first, [-1]), [-1, 8]), 1, 0, width)


def sharing(value: object, given: Tensor) -> list[tuple[bool, bool]]:
    """Say of each pair among the input and the outputs whether they are one object, and share memory."""
    found = [given, *outputs(value)]
    return [
        (a is b, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
        for i, a in enumerate(found)
        for b in found[:i]
    ]


def test_memory_that_is_written_keeps_its_readers() -> None:
    def function(x: Tensor) -> Any:
        y = x * 2
        z = aten.slice_scatter(x + 1, y, 1, 0, x.shape[1])  # a copy of y
        y.add_(1)
        return z + y

    module = traced(function, X)
    assert run(module) == 0
    assert torch.equal(module(X), function(X))


def test_a_view_of_written_memory_is_the_same_view() -> None:
    def function(x: Tensor) -> Any:
        y = x * 2
        z = aten.view(aten.view(y, [-1]), [-1, x.shape[1]])
        y.add_(1)
        return z + 0

    module = traced(function, X)
    assert run(module) >= 1
    assert "view.default" not in targets(module)
    assert torch.equal(module(X), function(X))


def test_another_layout_is_another_value() -> None:
    def function(x: Tensor) -> Any:
        columns = aten.permute(aten.view(x, [x.shape[1], x.shape[0]]) + 1, [1, 0])
        return aten.slice_scatter(x * 2, columns, 1, 0, x.shape[1]) * 2

    module = traced(function, X)
    assert run(module) == 0


STEPS: Sequence[Callable[[Tensor], Any]] = (
    lambda x: aten.view(x, [-1]) if x.is_contiguous() else x.contiguous(),
    lambda x: aten.view(x, [-1, 8]) if x.is_contiguous() and x.numel() % 8 == 0 else x,
    lambda x: aten.view(x, x.shape) if x.is_contiguous() else x,
    lambda x: aten.slice(x, 0, 0, x.shape[0]),
    lambda x: aten.slice(x, 0, 1),
    lambda x: aten.slice_scatter(x + 1, x, 0, 0, x.shape[0]),
    lambda x: aten.slice_scatter(x, aten.slice(x, 0, 1) * 2, 0, 1),
    lambda x: aten.expand(x, x.shape),
    lambda x: aten.permute(x, list(reversed(range(x.dim())))),
    lambda x: x * 2,
    lambda x: x.add_(1),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=8), st.sampled_from(MODES), st.booleans())
def test_any_chain_computes_the_same(steps: list[int], mode: str, keep: bool) -> None:
    """Values, aliasing and writes to the input are those of the function itself."""

    def function(x: Tensor) -> object:
        values = [x]
        for step in steps:
            values.append(STEPS[step](values[-1]))
        return (values[len(values) // 2], values[-1]) if keep else values[-1]

    start = torch.arange(64.0).reshape(8, 8)
    module = traced(function, start.clone(), mode=mode)
    expected_input, got_input = start.clone(), start.clone()
    expected = function(expected_input)
    shared = sharing(module(start.clone()), start)
    run(module)
    got = module(got_input)
    assert all(map(torch.equal, outputs(got), outputs(expected)))
    assert torch.equal(got_input, expected_input)
    assert [b for _, b in sharing(module(start.clone()), start)] == [b for _, b in shared]
