"""Operations of a trace are named so that another process finds them, or refused with the user's line."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.encoding import qualified_name

TRACE = """  File "model.py", line 12, in forward
    x.resize_(3)
"""


def test_a_method_of_numbers_is_a_function() -> None:
    graph = fx.Graph()
    number = graph.placeholder("number")
    assert qualified_name(graph.call_method("__round__", (number,))) == "builtins.round"
    assert qualified_name(graph.call_method("sum", (number,))) == "torch.Tensor.sum"
    assert qualified_name(graph.call_function(torch.sum, (number,))) == "torch.sum"


def test_what_no_piece_may_call_is_refused_with_the_line() -> None:
    graph = fx.Graph()
    node = graph.call_method("resize_", (graph.placeholder("x"), 3))
    node.stack_trace = TRACE
    with pytest.raises(UnsealableError, match="may not call the method 'resize_'") as raised:
        qualified_name(node)
    assert str(raised.value.where) == "model.py:12: x.resize_(3)"
    assert "custom operator" in str(raised.value.hint)
