"""Memory that is shared only here is refused where the program writes one side of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, CacheMiss, CorruptEntry, UnsealableError
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import CallingConvention, Parameter, SizeSymbol, Weight
from pwcc.compile.runtime.held import bind_weights
from pwcc.compile.runtime.memory import Extents, extent, overlap
from pwcc.compile.trace import SizeMode, trace

CPU = torch.device("cpu")
A = Weight(("a",), "float32", (8,), (1,), written=True)
B = Weight(("b",), "float32", (8,), (1,))
X = Parameter("x", "tensor", "float32", "cpu", ("s0", 8), (8, 1))
CONVENTION = CallingConvention((X,), (SizeSymbol("s0", 0, 0, 1, 64),), (), (A, B))


class Writes(nn.Module):
    """Writes ``a``, by a method of a view, and reads ``b``; ``b`` may be a view of ``a``."""

    a: Tensor
    b: Tensor

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(16))
        self.register_buffer("b", torch.zeros(8))
        if tied:
            self.b = self.a[:8]

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.b
        self.a[:8].add_(1.0)
        return y


def traced(model: nn.Module) -> dict[str, Weight]:
    with torch.no_grad():
        found = trace(model.eval(), [torch.ones(5, 8)], {0: [0]}, mode=next(iter(SizeMode)), low=2, high=32)
    calling = found.calling
    assert CallingConvention.from_bytes(calling.to_bytes(), where="calling") == calling
    return {weight.names[0]: weight for weight in calling.weights}


def test_a_trace_says_which_weights_are_written_and_shared() -> None:
    weights = traced(Writes())
    assert (weights["a"].written, weights["a"].shares) == (True, ())
    assert not weights["b"].written
    assert "written" not in weights["b"].to_json()  # programs that write none are stored as before
    both = traced(Writes(tied=True))
    assert [len(both[name].shares) for name in "ab"] == [1, 1]


def test_a_lazily_negated_weight_is_refused_at_compile_time() -> None:
    model = Writes()
    model.b = torch.ops.aten._neg_view(torch.ones(8))
    with pytest.raises(UnsealableError, match="'b' is a lazily conjugated or negated view"):
        traced(model)


@pytest.mark.parametrize(
    "other", [lambda a: a, lambda a: a[:], lambda a: a.view(2, 4).view(8), lambda a: nn.Parameter(a, False)]
)
def test_a_weight_that_shares_memory_with_a_written_one(other: Callable[[Tensor], Tensor]) -> None:
    a = torch.zeros(8)
    held = {"a": a, "b": other(a)}
    with pytest.raises(CacheMiss, match="'a' and 'b' share memory here, and did not when compiled"):
        bind_weights(held, [A, B], CPU)
    assert bind_weights(held, [replace(A, shares=(1,)), B], CPU)  # it was so at the compile
    assert bind_weights(held, [replace(A, written=False), B], CPU)  # nothing is written


def test_neighbours_in_one_buffer_share_nothing() -> None:
    flat = torch.zeros(24)
    assert bind_weights({"a": flat[:8], "b": flat[8:16]}, [A, B], CPU)
    with pytest.raises(CacheMiss, match="share memory"):
        bind_weights({"a": flat[:8], "b": flat[7:15]}, [A, B], CPU)


def binder(convention: CallingConvention, *weights: Tensor) -> Binder:
    found = Binder(convention, CPU)
    found.bound(weights)
    return found


def test_an_input_in_a_written_weight_is_refused() -> None:
    flat = torch.zeros(80)
    found = binder(CONVENTION, flat[8:16], torch.zeros(8))
    for x in (flat[8:16].view(1, 8), flat[:16].view(2, 8), flat.view(10, 8)):
        with pytest.raises(ArgumentError, match=r"'x' shares memory with the model's 'a'.*writes the weight"):
            found.bind([x], {})
    found.bind([flat[16:].view(8, 8)], {})
    found.bind([torch.zeros(4, 8)], {})


def test_a_written_input_in_a_weight_is_refused() -> None:
    weights = (replace(A, written=False), B)
    flat = torch.zeros(16)
    read = binder(replace(CONVENTION, weights=weights), torch.zeros(8), flat[:8])
    read.bind([flat[:8].view(1, 8)], {})  # nobody writes
    wrote = replace(CONVENTION, parameters=(replace(X, written=True),), weights=weights)
    with pytest.raises(ArgumentError, match=r"'x' shares memory with the model's 'b'.*writes the argument"):
        binder(wrote, torch.zeros(8), flat[:8]).bind([flat[:8].view(1, 8)], {})


def test_programs_that_write_nothing_look_at_no_memory() -> None:
    found = binder(replace(CONVENTION, weights=(B,)), torch.zeros(8))
    assert found._memory is None


def test_lazily_negated_and_conjugated_tensors_are_refused() -> None:
    negated = torch.ops.aten._neg_view(torch.ones(8))
    with pytest.raises(CacheMiss, match="'b' is a lazily conjugated or negated view"):
        bind_weights({"b": negated}, [B], CPU)
    conjugated = torch.zeros(8, dtype=torch.complex64).conj()
    with pytest.raises(CacheMiss, match="'b' is a lazily"):
        bind_weights({"b": conjugated}, [replace(B, dtype="complex64")], CPU)
    found = binder(replace(CONVENTION, weights=()))
    with pytest.raises(ArgumentError, match="'x' is a lazily conjugated or negated view"):
        found.bind([torch.ops.aten._neg_view(torch.ones(2, 8))], {})
    wide = replace(CONVENTION, parameters=(replace(X, dtype="complex64"),), weights=())
    with pytest.raises(ArgumentError, match="'x' is a lazily"):
        binder(wide).bind([torch.zeros(2, 8, dtype=torch.complex64).conj()], {})


def test_extents() -> None:
    flat = torch.zeros(4, 4)
    start = flat.data_ptr()
    assert extent(flat[:, 1]) == (start + 4, start + 4 + 13 * 4)
    assert extent(torch.empty(0)) == (0, 0)
    assert extent(torch.empty(3, device="meta")) == (0, 0)
    assert not overlap((0, 4), (4, 8))
    found = Extents([((8, 16), "b"), ((0, 8), "a"), ((20, 30), "c"), ((22, 24), "d")])
    assert [found.holder((at, at + 1)) for at in (0, 7, 8, 15, 16, 19, 20, 29, 30)] == [
        "a", "a", "b", "b", None, None, "c", "c", None,
    ]  # fmt: skip


def test_a_bad_record_is_refused() -> None:
    data = CONVENTION.to_bytes().replace(b'"written":[]', b'"written":true')
    assert data != CONVENTION.to_bytes()
    with pytest.raises(CorruptEntry):
        CallingConvention.from_bytes(data, where="calling")
