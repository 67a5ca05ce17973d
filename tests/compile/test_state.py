"""What a program writes, aliases, draws and differentiates: as eager does, or refused by name and line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pwcc.cache.errors import PwccError, UnsealableError
from pwcc.compile.runtime.held import named_tensors
from tests.compile.aliasing import aliasing
from tests.compile.conftest import require_equal
from tests.compile.state_cases import EQUAL, REFUSED, Forward, make

SIZES = (3, 1, 3, 12)  # one after another on one model: the state goes from call to call
_library = torch.library.Library("pwcctest", "FRAGMENT")  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    """One that draws, to cut at, and one that only has such a name."""
    _library.define("dropout(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    _library.impl("dropout", lambda x: x * 2, "CPU")  # type: ignore[no-untyped-call]
    _library.impl("dropout", torch.empty_like, "Meta")  # type: ignore[no-untyped-call]
    _library.define("draw(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    _library.impl("draw", lambda x: x + torch.rand_like(x), "CPU")  # type: ignore[no-untyped-call]
    _library.impl("draw", torch.empty_like, "Meta")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("forward", EQUAL, ids=lambda forward: forward.__name__)
def test_equal_to_eager_call_after_call(forward: Forward, interpreted: Callable[..., Any]) -> None:
    model = make(forward)
    eager = copy.deepcopy(model)
    options = {"ops": ("pwcctest::attend", "pwcctest::draw")}
    program = interpreted(model, max_tokens=12, **options)
    for size in SIZES:
        wanted_x = torch.randn(size, 8)
        x = wanted_x.clone()
        with torch.no_grad():
            torch.manual_seed(size)
            wanted = eager(wanted_x)
            torch.manual_seed(size)
            got = program(x)
        require_equal(got, wanted, f"size {size}")
        require_equal(x, wanted_x, f"size {size}, argument")
        state, wanted_state = dict(named_tensors(model)), dict(named_tensors(eager))
        require_equal(state, wanted_state, f"size {size}, state")
        assert aliasing(got, {"x": x, **state}) == aliasing(wanted, {"x": wanted_x, **wanted_state})


@pytest.mark.parametrize(("forward", "words"), REFUSED, ids=[forward.__name__ for forward, _ in REFUSED])
def test_refused_by_name_and_line(forward: Forward, words: str, traced: Callable[..., Any]) -> None:
    with pytest.raises(PwccError) as raised:
        traced(make(forward), max_tokens=12, ops=("pwcctest::attend",))
    assert words in raised.value.message
    assert raised.value.hint
    file, number = str(raised.value.where).split(":")[:2]
    first, lines = forward.__code__.co_firstlineno, inspect.getsource(forward).count("\n")
    assert file.endswith("state_cases.py")
    assert first <= int(number.split()[0]) < first + lines


def test_freezing_is_refused_by_name(traced: Callable[..., Any]) -> None:
    from torch._inductor import config

    with (
        config.patch(freezing=True),
        pytest.raises(UnsealableError, match=r"fold weights into the code \(freezing\)"),
    ):
        traced(make(EQUAL[0]), ops=("pwcctest::attend",))


def test_train_mode_is_refused(traced: Callable[..., Any]) -> None:
    class Drops(torch.nn.Sequential):
        pass

    model = Drops(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).eval()
    model[1].train()  # one module only: monte-carlo dropout
    with pytest.raises(PwccError, match=r"draws random numbers \(dropout\)|training"):
        traced_as_is(traced, model)


def traced_as_is(traced: Callable[..., Any], model: torch.nn.Module) -> None:
    model.eval = lambda: model  # type: ignore[method-assign]  # the fixture's own call
    traced(model, ("input:float32[n,8]",))
