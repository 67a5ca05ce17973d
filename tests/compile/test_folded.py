"""What a trace would fold into the graph, and is another in another process, is refused or recorded."""

from __future__ import annotations

import collections
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import TraceError, UnsealableError
from pwcc.cache.policy import Policy
from pwcc.compile.code_scan import scan
from pwcc.compile.observation import Observation
from pwcc.compile.observed_inputs import require_followed
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.trace import SizeMode, Trace, trace
from tests.compile.test_predicates import trace_guards

FACTOR = 2.0


def marked() -> float:
    return FACTOR


mark: Any = torch.compiler.assume_constant_result
mark(marked)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = {"relu", "tanh", "sigmoid"}
        self.frozen = frozenset(self.stages)
        self.ordered = collections.OrderedDict(sin=1.0, exp=2.0)


def body(text: str) -> nn.Module:
    names: dict[str, Any] = {"torch": torch, "marked": marked, "os": os}
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    exec(f"def forward(self, x):\n{lines}    return x + 1\n", names)
    model: nn.Module = type("Model", (Base,), {"forward": names["forward"]})()
    return model.eval()


def traced(model: nn.Module) -> Trace:
    return trace(model, (torch.zeros(7, 8),), {0: (0,)}, mode=SizeMode.UNBACKED, low=1, high=32)


@pytest.mark.parametrize(
    "text",
    [
        "for name in self.stages:\n    x = getattr(torch, name)(x)",
        "for name in self.frozen:\n    x = getattr(torch, name)(x)",
        "for name in {'relu', 'tanh'}:\n    x = getattr(torch, name)(x)",
        "for name in list(self.stages):\n    x = getattr(torch, name)(x)",
        "x = getattr(torch, tuple(self.frozen)[0])(x)",
        "x = getattr(torch, next(iter(self.stages)))(x)",
        "x = getattr(torch, [name for name in self.stages][0])(x)",
        "for at, name in enumerate(self.stages):\n    x = getattr(torch, name)(x) * at",
        "a, b, c = self.stages\nx = getattr(torch, a)(x)",
        "x = getattr(torch, self.stages.copy().pop())(x)",
    ],
)
def test_the_order_of_a_set_is_refused(text: str) -> None:
    with pytest.raises(UnsealableError, match="the order of a set") as error:
        traced(body(text))
    assert error.value.where
    assert "in forward" not in error.value.where
    assert "sorted" in (error.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "if 'relu' in self.stages and 'q' not in self.frozen:\n    x = x * 2",
        "for name in sorted(self.stages):\n    x = getattr(torch, name)(x)",
        "x = getattr(torch, min(self.stages))(x)",
        "if set(self.stages) == self.frozen and len(self.stages) == 3:\n    x = x * 2",
        "if 'relu' in self.stages | {'q'} and self.stages.isdisjoint({'z'}):\n    x = x * 2",
    ],
)
def test_a_set_without_its_order_is_traced(text: str) -> None:
    assert traced(body(text)).graph_module is not None


def test_a_set_whose_order_changes_nothing_is_traced_in_one_order() -> None:
    loop = "for name in set(self.stages):\n    y[name] = getattr(torch, name)(x)"
    text = f"y = {{}}\n{loop}\nx = y['relu'] - y['tanh']"
    first = [node.target for node in traced(body(text)).graph_module.graph.nodes]
    model = body(text)
    vars(model)["stages"] = {"tanh", "sigmoid", "relu"}
    assert [node.target for node in traced(model).graph_module.graph.nodes] == first
    names = [getattr(target, "__name__", target) for target in first]
    assert names.index("relu") < names.index("sigmoid") < names.index("tanh")


def test_numbers_in_a_set_are_refused() -> None:
    with pytest.raises(UnsealableError, match="the order of a set"):
        traced(body("for factor in {2.0, 3.0, 5.5}:\n    x = x * factor"))


def test_what_follows_from_the_torch_build_may_be_marked_constant() -> None:
    pytest.importorskip("transformers")
    from transformers.utils import import_utils

    model = body("if probe('2.0'):\n    x = x * 2")
    model.forward.__func__.__globals__["probe"] = import_utils.is_torch_greater_or_equal  # type: ignore[attr-defined]
    assert traced(model).graph_module is not None


def test_a_distribution_is_traced_without_its_checks_which_come_back() -> None:
    from torch.distributions import Distribution

    before = Distribution._validate_args
    quantile = "torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95))"
    found = traced(body(f"x = x * {quantile}"))
    assert any(node.target is torch.erfinv for node in found.graph_module.graph.nodes)
    assert Distribution._validate_args is before


def test_a_result_that_is_marked_constant_is_refused_by_name() -> None:
    with pytest.raises(UnsealableError, match=r"what marked returned.*assume_constant_result"):
        traced(body("x = x * marked()"))


def test_dynamo_is_as_it_was_afterwards() -> None:
    from torch._dynamo.variables.sets import SetVariable

    before = dict(vars(SetVariable))
    with pytest.raises(UnsealableError):
        traced(body("for name in self.stages:\n    x = getattr(torch, name)(x)"))
    assert dict(vars(SetVariable)) == before


@pytest.mark.parametrize("asked", ["hash('name')", "os.getpid()", "torch.initial_seed()"])
def test_what_no_other_process_has_is_refused(asked: str) -> None:
    code = body(f"x = x * ({asked} % 7)").forward.__func__  # type: ignore[attr-defined]
    found = scan([(code.__code__, code.__globals__)])
    with pytest.raises(TraceError, match="another in every process"):
        require_followed(Observation(), found, Policy())
    own = {**code.__globals__, "hash": len}
    assert scan([(body("x = x * hash(x)").forward.__func__.__code__, own)]).volatile == {}  # type: ignore[attr-defined]


@pytest.fixture
def ordered() -> nn.Module:
    class Ordered(Base):
        def forward(self, x: Tensor) -> Tensor:
            for name, value in self.ordered.items():
                x = getattr(torch, name)(x) * value
            return x

    return Ordered().eval()


def test_the_order_of_an_ordered_dictionary_counts(ordered: Any) -> None:
    predicates = PredicateSet.of(trace_guards(ordered, (torch.zeros(4),)).predicates)
    assert predicates.check(ordered) == []
    ordered.ordered.move_to_end("sin")
    (violated,) = predicates.check(ordered)
    assert "compiled with keys 'sin', 'exp', found keys 'exp', 'sin'" in str(violated)
