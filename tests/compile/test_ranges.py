"""Ranges: each a dynamic variant with bounds of its own, checked, in one form, found by size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pwcc
from pwcc.cache.errors import SizeError, UsageError
from pwcc.capture.modes import CaptureMode
from pwcc.capture.planning import plan_for
from pwcc.compile.compiled_model import CompiledModel, LoadedProgram, LoadedVariant
from pwcc.compile.ranges import (
    canonical,
    checked_ranges,
    dynamic_variants,
    gaps,
    held_apart,
    inductor_options,
    serves,
)
from pwcc.compile.rebuild import Variant
from pwcc.compile.report import CompileReport
from pwcc.compile.request import Request
from pwcc.compile.tracing import trace_all

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what Inductor's modules say
Range = tuple[int, int]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((), ()),
        (((1, 40),), ()),  # what there is without ranges
        (((9, 40), (1, 8), (9, 40)), ((1, 8), (9, 40))),
        (((1, 40), (1, 8)), ((1, 8), (1, 40))),
        (((1, 8), (5, 5), (4, 40)), ((1, 8), (4, 40), (5, 5))),
    ],
)
def test_one_form_for_the_key(given: tuple[Range, ...], kept: tuple[Range, ...]) -> None:
    assert checked_ranges(given, sizes=(), max_tokens=40) == kept == canonical(given, 40)


def test_a_range_is_held_apart_where_a_variant_serves_nothing_else() -> None:
    assert held_apart((), ())
    assert held_apart(((1, 8), (9, 40)), ((1, 1), (2, 8), (9, 40)))
    assert not held_apart(((1, 8), (9, 40)), ((1, 40),))
    assert not held_apart(((1, 8), (9, 40)), ((1, 8), (9, 41)))
    assert held_apart(((1, 1), (2, 40)), ((1, 1), (2, 40)), (1,))  # a static variant serves what is one size
    assert not held_apart(((1, 8),), ((4, 4), (1, 40)), (4,))
    assert held_apart(((1, 8),), ((4, 4), (1, 8)), (4,))


@pytest.mark.parametrize(
    "given", [((1, 2, 3),), ("1-8",), "1-8", ((None, 8),), ((1.0, 8.0),), ((True, 8),), (8,)]
)
def test_what_is_no_pair_of_whole_numbers_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="as pairs of whole numbers"):
        checked_ranges(given, sizes=(), max_tokens=8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((8, 1), (1, 40)), "expected a range from low to high, got 8-1"),
        (((0, 40),), r"expected ranges within 1\.\.40, got 0-40"),
        (((1, 41),), r"expected ranges within 1\.\.40, got 1-41"),
        (((1, 8), (10, 40)), r"serve all of 1\.\.40, got none for 9$"),
        (((1, 8), (9, 38)), r"serve all of 1\.\.40, got none for 39-40"),
        (((2, 40),), r"serve all of 1\.\.40, got none for 1$"),
    ],
)
def test_refused(given: tuple[Range, ...], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked_ranges(given, sizes=(), max_tokens=40)
    assert re.search(message, raised.value.message)
    assert raised.value.hint or "low to high" in message


def test_a_static_size_fills_a_gap_and_a_flag_allows_one() -> None:
    split = ((1, 8), (10, 40))
    assert checked_ranges(split, sizes=(9,), max_tokens=40) == split
    assert checked_ranges(split, sizes=(), max_tokens=40, allow_gaps=True) == split


def test_gaps_are_what_nothing_serves() -> None:
    ends = [(low, high) for low in range(1, 6) for high in range(low, 6)]
    for ranges in itertools.combinations(ends, 2):
        listed = {size for low, high in gaps(ranges, (3,), 5) for size in range(low, high + 1)}
        assert listed == {size for size in range(1, 6) if not serves(ranges, (3,), size)}
    assert serves((), (), 7)


def test_inductor_is_told_of_the_range() -> None:
    assert inductor_options(((1, 64),), Variant(1, 64)) == {"unbacked_symint_fallback": 64}
    assert inductor_options(((1, 90000),), Variant(1, 90000)) == {"unbacked_symint_fallback": 8192}
    assert inductor_options((), Variant(1, 64)) == {}  # what an entry without ranges always had
    assert inductor_options(((1, 64),), Variant(4, 4, static=True)) == {}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(F.silu(self.lin(x)) * 2, -1) + x


class Backed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else F.silu(self.lin(x))


@pytest.fixture(scope="module")
def ranged(asked: Callable[..., Request]) -> Callable[..., Request]:
    """The request of a compile with ranges."""

    def call(model: nn.Module, ranges: tuple[Range, ...], **more: Any) -> Request:
        return asked(model, ops=(), ranges=ranges, **more)

    return call


def test_one_trace_with_a_variant_per_range(ranged: Callable[..., Request]) -> None:
    request = ranged(Plain(), ((9, 40), (1, 8)), sizes=(4,))
    (item,) = trace_all(Plain().eval(), request)
    assert item.variants == (Variant(1, 8), Variant(9, 40), Variant(4, 4, static=True))
    assert (item.low, item.high) == (1, 40)


def test_a_trace_from_two_on_cuts_the_ranges(ranged: Callable[..., Request]) -> None:
    model = Backed().eval()
    one, rest = trace_all(model, ranged(model, ((1, 1), (1, 8), (2, 8), (9, 40)), sizes=(4,)))
    assert one.variants == (Variant(1, 1, static=True),)
    assert rest.variants == (Variant(2, 8), Variant(9, 40), Variant(4, 4, static=True))
    (only,) = trace_all(model, ranged(model, ((2, 40),), allow_gaps=True))
    assert only.low == 2
    (only,) = trace_all(model, ranged(model, ((1, 1),), allow_gaps=True))
    assert (only.low, only.high) == (1, 1)
    (two,) = trace_all(model, ranged(model, ((2, 2),), allow_gaps=True, max_tokens=2))
    assert two.low == two.high == 2


def test_ranges_are_in_the_key(ranged: Callable[..., Request]) -> None:
    model = Plain()
    plain, split = ranged(model, ((1, 40),)), ranged(model, ((1, 8), (9, 40)))
    assert plain.options == ranged(model, ()).options != split.options
    assert split.options == ranged(model, ((9, 40), (1, 8), (1, 8))).options


def program(*variants: tuple[int, int, bool]) -> LoadedProgram:
    loaded = tuple(LoadedVariant(*variant, (), run=cast("Any", lambda *_: ())) for variant in variants)
    unused = cast("Any", None)
    return LoadedProgram(1, 40, unused, unused, loaded, unused, unused)


def test_dispatch_is_static_then_tightest_then_lower() -> None:
    found = program((1, 40, False), (1, 8, False), (5, 12, False), (6, 6, False), (8, 8, True))

    def at(size: int) -> tuple[int, int, bool]:
        variant = found.variant(size)
        return variant.low, variant.high, variant.static

    assert at(1) == (1, 8, False)
    assert at(5) == (1, 8, False)  # as wide as 5..12
    assert at(6) == (6, 6, False)
    assert at(8) == (8, 8, True)
    assert at(9) == (5, 12, False)
    assert at(13) == (1, 40, False)


def test_a_gap_at_a_call_names_what_is_served() -> None:
    with pytest.raises(SizeError, match=r"size 9 has .* none of the ranges 1-8, 10-40, static sizes are 4"):
        program((1, 8, False), (10, 40, False), (4, 4, True)).variant(9)


def test_cut_variants_are_each_there_once() -> None:
    assert dynamic_variants((), 2, 40) == (Variant(2, 40),)
    assert dynamic_variants(((1, 8), (2, 8), (1, 1)), 2, 40) == (Variant(2, 8),)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, CompiledModel]:
    """An entry with overlapping ranges, a range of one, a static size and gaps."""
    model, root = Plain().eval(), tmp_path_factory.mktemp("ranges")

    def build(ranges: tuple[Range, ...], *, allow_gaps: bool) -> CompileReport:
        return pwcc.precompile(
            model,
            cache_dir=root,
            inputs=["x:float32[n,8]"],
            splitting_ops=[],
            max_tokens=40,
            sizes=(3,),
            ranges=ranges,
            allow_gaps=allow_gaps,
        )

    ranges = ((1, 8), (1, 24), (5, 5), (30, 40))
    with pytest.raises(UsageError, match="got none for 25-29"):
        build(ranges, allow_gaps=False)
    report = build(ranges, allow_gaps=True)
    assert report.plan.variants == ("n=1..8", "n=1..24", "n=5..5", "n=30..40", "n=3")
    assert build(ranges[::-1], allow_gaps=True).hit
    return model, pwcc.load(model, cache_dir=root)


@pytest.mark.slow
def test_every_size_of_an_entry_with_ranges(compiled: tuple[nn.Module, CompiledModel]) -> None:
    model, served = compiled
    assert served.sizes == (3,)
    assert served.manifest.ranges == ((1, 8), (1, 24), (5, 5), (30, 40))
    for size in range(1, 41):
        x = torch.randn(size, 8)
        if served.manifest.serves(size):
            with torch.no_grad():
                assert torch.allclose(served(x), model(x), atol=1e-5), size
        else:
            assert 24 < size < 30
            with pytest.raises(SizeError, match=f"size {size} has no compiled variant"):
                served(x)
    rows = served.check(lambda n: (torch.randn(n, 8),)).rows
    sizes = {row.size for row in rows if row.what.startswith("model")}
    assert sizes == {1, 3, 5, 17, 30}


@pytest.mark.slow
def test_equal_code_for_two_ranges_is_stored_once(compiled: tuple[nn.Module, CompiledModel]) -> None:
    (program,) = compiled[1].programs
    kernels = {
        (v.low, v.high): [kernel.blob for kernel in v.pieces[0].record.kernels] for v in program.variants
    }
    assert kernels[1, 8]
    assert kernels[1, 8] == kernels[1, 24] == kernels[30, 40]  # their programs differ: each checks its bounds


@pytest.mark.slow
def test_capture_takes_sizes_that_are_served(compiled: tuple[nn.Module, CompiledModel]) -> None:
    served = compiled[1]
    plan = plan_for(served, mode=CaptureMode.FULL, max_num_seqs=20)
    assert plan.sizes == (1, 2, 3, 4, 8, 16, 24, 32, 40)
    with pytest.raises(UsageError, match=r"ranges 1-8, 1-24, 5-5, 30-40; static sizes 3\), got 26"):
        plan_for(served, mode=CaptureMode.FULL, sizes=[3, 26])


@pytest.mark.slow
def test_an_entry_shows_its_ranges(compiled: tuple[nn.Module, CompiledModel]) -> None:
    from pwcc.cache.explain import describe
    from pwcc.cli.entry_view import _spans

    assert describe(compiled[1].manifest).endswith("up to 40 tokens, ranges 1-8,1-24,5-5,30-40")
    assert _spans([[1, 8], [9, 40]]) == "1-8, 9-40"
