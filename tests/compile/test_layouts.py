"""Outputs of a piece lie in memory as eager's do, since whoever reads them was traced with eager's strides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import pwcc
from pwcc.cache.errors import UnsealableError
from pwcc.compile.layouts import Ask, OtherLayout, Run, ask_for, check_layouts, check_sharing


def test_only_strides_that_matter_are_compared() -> None:
    x = torch.randn(3, 1, 4)
    same = x.as_strided((3, 1, 4), (4, 77, 1))
    check_layouts(Run([], [x, x[:0], 3]), Run([], [same.clone(), x[:0].clone(), 3]))


def test_the_order_of_every_output_with_memory_of_its_own_comes_with_a_wrong_one() -> None:
    x, turned, shared = torch.randn(3, 1, 4), torch.randn(4, 1, 3).permute(2, 1, 0), torch.randn(6, 2)
    outputs = [x, x.clone(), 3, shared, shared[1:]]
    with pytest.raises(OtherLayout, match=r"outputs \[1\] lie otherwise") as raised:
        check_layouts(Run([x], outputs), Run([x], [x, turned, 3, shared, shared[1:]]))
    assert raised.value.wrong == {1}
    assert raised.value.asks == {1: ((1, 2, 0), False)}
    with pytest.raises(OtherLayout) as raised:
        check_layouts(Run([], [x, x.clone(), shared]), Run([], [x, turned, shared]))
    assert raised.value.asks == {0: ((0, 1, 2), False), 1: ((1, 2, 0), False), 2: ((0, 1), False)}


def test_memory_that_is_new_in_eager_must_be_new() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    check_layouts(Run([x], [x, x[1:]]), Run([y], [y, y[1:]]))
    with pytest.raises(OtherLayout) as raised:
        check_layouts(Run([x], [x, y, y]), Run([x], [x.clone(), y, y.clone()]))
    assert raised.value.wrong == {0, 2}, "the first of two outputs may keep their memory"
    assert raised.value.asks == {0: ((0, 1), True), 1: ((0, 1), False), 2: ((0, 1), True)}


def test_a_layout_with_holes_is_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(
        UnsealableError, match=r"output 0 of the piece has strides \[4, 1\], where eager's has \[8, 1\]"
    ):
        check_layouts(Run([], [x[:, :4].contiguous()]), Run([], [x[:, :4]]))


def test_outputs_that_are_to_share_memory_and_do_not_are_refused() -> None:
    x, empty = torch.randn(3, 8), torch.empty(0)
    shared = [x, x.t(), empty, 3]
    check_sharing(shared, shared, [(0, 1, 2)])
    parted = [x.clone(), *shared[1:]]
    check_sharing(parted, shared, [])
    check_sharing(parted, parted, [(0, 1)])
    with pytest.raises(
        UnsealableError, match=r"outputs \[0, 1\] of the piece share memory in eager and do not"
    ):
        check_sharing(parted, shared, [(0, 1)])


def test_a_graph_gives_the_layout_that_is_asked_for() -> None:
    module = fx.symbolic_trace(lambda x: (x * 2, x + 1))
    module.graph.lint()
    x = torch.randn(2, 3, 4)
    ask_for(module, {1: Ask((1, 2, 0))})
    one, two = module(x)
    assert torch.equal(one, x * 2)
    assert torch.equal(two, x + 1)
    assert one.is_contiguous()
    assert two.permute(1, 2, 0).is_contiguous()


def test_a_number_may_be_asked_for_beside_other_outputs() -> None:
    module = fx.symbolic_trace(lambda x: (x.sum(), x + 1))
    x = torch.randn(2, 3)
    ask_for(module, {0: Ask(()), 1: Ask((1, 0))})
    total, other = module(x)
    assert torch.equal(total, x.sum())
    assert other.t().is_contiguous()


class Heads(nn.Module):
    """Rotary attention as many decoders write it, read before and after a cut in two layouts."""

    cos: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 32)
        self.register_buffer("cos", torch.rand(64, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        q = self.lin(x).view(1, n, -1, 16).transpose(1, 2)
        q = q * self.cos[:n] + torch.cat([-q[..., 8:], q[..., :8]], -1) * 0.5
        shared = q.repeat(1, 2, 1, 1)  # contiguous in eager, while Inductor would keep the order of q
        total = torch.zeros(n, 2, 16)
        for _ in range(2):
            rows = q.squeeze(0).transpose(0, 1)
            out = torch.empty_like(rows, memory_format=torch.contiguous_format)
            torch.ops.pwcctest.attend(rows, out)
            total = total + out
        return total, q, shared


@pytest.mark.slow
def test_a_sum_of_two_layouts_over_a_cut_equals_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Heads().eval()
    pwcc.precompile(
        model,
        cache_dir=tmp_path,
        inputs=lambda tokens: (torch.randn(tokens, 32),),
        max_tokens=16,
        splitting_ops=("pwcctest::attend",),
        jobs=1,
    )
    compiled = pwcc.load(model, cache_dir=tmp_path)
    for size in (1, 2, 7, 16):
        x = torch.randn(size, 32)
        with torch.no_grad():
            results, expected = compiled(x), model(x)
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got, wanted)
            assert size == 1 or got.stride() == wanted.stride()


class Nothing(nn.Module):
    """Results that Inductor's rewriting makes one tensor: an input, a weight, or each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(x) + x, self.scale + 0, x * 2, x * 2


@pytest.mark.slow
def test_results_share_no_memory_that_eagers_do_not(tmp_path: Path) -> None:
    model = Nothing().eval()
    pwcc.precompile(
        model, cache_dir=tmp_path, inputs=lambda tokens: (torch.randn(tokens, 8),), max_tokens=16, jobs=1
    )
    compiled = pwcc.load(model, cache_dir=tmp_path)
    for size in (1, 2, 16):
        x = torch.randn(size, 8)
        with torch.no_grad():
            results, expected = compiled(x), model(x)
        assert all(map(torch.equal, results, expected))
        memory = {tensor.untyped_storage().data_ptr() for tensor in (x, model.scale, *results)}
        assert len(memory) == 6


class Views(Heads):
    """A tensor in eager's layout and a view of it, through which what follows the cut is to see a write."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        q = self.lin(x).view(1, n, -1, 16).transpose(1, 2)
        q = q * self.cos[:n] + torch.cat([-q[..., 8:], q[..., :8]], -1) * 0.5
        shared = q.repeat(1, 2, 1, 1)
        rows = shared.transpose(1, 2)
        torch.ops.pwcctest.attend(rows, rows)
        return shared, rows, shared.flatten(0)


@pytest.mark.slow
def test_a_layout_that_would_part_a_tensor_from_its_view_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsealableError, match="share memory in eager"):
        pwcc.precompile(
            Views().eval(),
            cache_dir=tmp_path,
            inputs=lambda tokens: (torch.randn(tokens, 32),),
            max_tokens=16,
            splitting_ops=("pwcctest::attend",),
            jobs=1,
        )
