"""Markers stand for what a graph returns, so that Dynamo's output bytecode can be run without values."""

from __future__ import annotations

import torch
from torch import fx

from pwcc.compile.markers import ArgumentMarker, SizeMarker, TensorMarker, make_markers, settled, unwrap_numbers


def test_markers_by_kind() -> None:
    size, condition, tensor = make_markers([3, True, None])
    assert type(size) is SizeMarker
    assert torch.Size([size, 2])[0] is size
    assert type(condition) is object
    assert isinstance(tensor, TensorMarker)


def test_shape_of_an_argument() -> None:
    size = SizeMarker(1 << 61)
    argument = ArgumentMarker.of(torch.empty(3, 8), {0: size})
    assert argument.shape[0] is argument.size()[0] is argument.size(0) is size
    assert argument.shape[1] == argument.size(1) == 8


def test_number_that_is_taken_of_a_tensor() -> None:
    graph = fx.Graph()
    number = graph.placeholder("number")
    scalar = graph.call_function(torch.scalar_tensor, (number,), {"dtype": torch.float64})
    other = graph.call_function(torch.scalar_tensor, (number,), {"dtype": torch.float64})
    output = graph.output((scalar, other))
    made = make_markers([scalar, other])
    taken = made[0].item()
    assert made[0].item() is taken
    assert settled(made)[0] is taken
    assert settled(made)[1] is made[1]
    unwrap_numbers(output, made)
    assert output.args == ((number, other),)
