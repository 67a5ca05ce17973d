"""The fusion passes on the graphs that Inductor's decompositions make of what models write."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from pwcc.cache.errors import UsageError
from pwcc.compile.ops.fused.tiles import MAX_WIDTH
from pwcc.compile.passes.base import GraphPass, PassContext
from pwcc.compile.passes.fusion_base import Fusion
from pwcc.compile.passes.fusion_gate import SiluMulDynamicQuant, SiluMulStaticQuant
from pwcc.compile.passes.fusion_norm import RMSNormDynamicQuant, RMSNormStaticQuant
from pwcc.compile.passes.manager import PassRun
from pwcc.compile.passes.registry import make, resolve
from pwcc.compile.torch_private.symbols import new_unbacked_size, shape_guards

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
PASSES: tuple[type[Fusion], ...] = (
    RMSNormStaticQuant,
    RMSNormDynamicQuant,
    SiluMulStaticQuant,
    SiluMulDynamicQuant,
)
HIDDEN = 48
Function = Callable[..., Any]


# --- what models write -----------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def norm_weight_first(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(1e-5 + wide.square().mean(-1, keepdim=True))).to(x.dtype)


def norm_all_wide(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5) * wide * weight.float()).to(x.dtype)


def norm_of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, 1e-5)


def static(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(-448, 448).to(FP8)


def static_by_reciprocal(y: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(y * scale.reciprocal(), torch.finfo(FP8).min, torch.finfo(FP8).max).to(FP8)


def static_in_low_precision(y: Tensor, scale: Tensor) -> Tensor:
    return (y / scale).clamp(max=448.0).clamp(min=-448.0).to(FP8)


def dynamic(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (y.float() / scale).clamp(-448, 448).to(FP8), scale


def dynamic_floor_inside(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(dim=-1, keepdim=True).float().clamp(min=4.48e-4) * (1 / 448)
    return (y * scale.reciprocal()).clamp(-448, 448).to(FP8), scale


def dynamic_without_floor(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, True).float() / torch.finfo(FP8).max
    return (y / scale).clamp(-448, 448).to(FP8), scale


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gated_by_sigmoid(x: Tensor) -> Tensor:
    gate, up = x[:, :HIDDEN], x[:, HIDDEN:]
    return up * (gate.float() * torch.sigmoid(gate.float())).to(x.dtype)


# --- how they are run ------------------------------------------------------------------------------


def rows(tokens: int, width: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(dtype)


WEIGHT = (1 + 0.1 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))).bfloat16()
SCALE = torch.tensor([0.02])


def graph_of(
    function: Function, inputs: Sequence[Tensor], *, symbolic: bool
) -> tuple[fx.GraphModule, ShapeEnv]:
    """Return the ATen graph; with ``symbolic``, for any number of tokens, about which nothing may be asked."""
    env = ShapeEnv()
    mode: Any = FakeTensorMode(shape_env=env)
    with mode:
        tokens = new_unbacked_size(env, 1, 8192)

        def fake(tensor: Tensor) -> Tensor:
            shape = [tokens if symbolic and tensor.dim() > 1 else tensor.shape[0], *tensor.shape[1:]]
            return torch.empty(shape if tensor.dim() else [], dtype=tensor.dtype)

        given = [fake(tensor) for tensor in inputs]
        module = make_fx(functionalize(make_fx(function, select_decomp_table())(*given)))(*given)
    return module, env


def fused(
    module: fx.GraphModule, passes: Sequence[GraphPass] = (), context: PassContext | None = None
) -> list[int]:
    """Run the passes as a compile does; return their matches."""
    chosen = passes or [kind(min_tokens=1, max_tokens=None, cpu=True) for kind in PASSES]
    run = PassRun([(one.name, one) for one in chosen], context or PassContext(CPU, 1, 8192, static=False))
    run(module.graph)
    module.recompile()
    return [count.matches for count in run.counts]


def operators(module: fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return [name.removeprefix("pwcc.").removesuffix(".default") for name in names if name.startswith("pwcc.")]


def assert_close(ours: object, theirs: object) -> None:
    """8-bit values within one step of each other, others within the rounding of bfloat16."""
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        if one.dtype is FP8:
            bits = [t.view(torch.uint8).int() for t in (one, other)]
            ordered = [torch.where(b < 128, b, 128 - b) for b in bits]
            assert int((ordered[0] - ordered[1]).abs().max()) <= 1
        else:
            torch.testing.assert_close(one, other, rtol=1.6e-2, atol=1e-6)


def check(function: Function, inputs: Sequence[Tensor], wanted: list[str], *, symbolic: bool) -> fx.GraphModule:
    """The operators that a function becomes, and that it still computes the same at 1 and more tokens."""
    module, env = graph_of(function, inputs, symbolic=symbolic)
    before = len(shape_guards(env))
    count = sum(fused(module))
    assert operators(module) == wanted
    assert count == len(wanted)
    assert len(shape_guards(env)) == before
    for tokens in (1, 7) if symbolic else (inputs[0].shape[0],):
        given = [rows(tokens, t.shape[1], t.dtype) if t.dim() > 1 else t for t in inputs]
        assert_close(module(*given), function(*given))
    return module


X, R = rows(5), rows(6)[:5]
NORMS = (norm, norm_weight_first, norm_all_wide, norm_of_torch)
STATIC = (static, static_by_reciprocal, static_in_low_precision)
DYNAMIC = (dynamic, dynamic_floor_inside, dynamic_without_floor)
symbolically = pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])


# --- matches ---------------------------------------------------------------------------------------


def pairs(ones: Sequence[Function], others: Sequence[Function]) -> list[tuple[Function, Function]]:
    """Every one with the first other, and the first one with every other."""
    return [(one, others[0]) for one in ones] + [(ones[0], other) for other in others[1:]]


@symbolically
@pytest.mark.parametrize(("normalise", "quantise"), pairs(NORMS, STATIC))
def test_a_norm_and_a_static_scale_become_one_operator(
    normalise: Function, quantise: Function, symbolic: bool
) -> None:
    check(
        lambda x, w, s: quantise(normalise(x, w), s),
        (X, WEIGHT, SCALE),
        ["rms_norm_static_fp8_quant"],
        symbolic=symbolic,
    )


@symbolically
@pytest.mark.parametrize(("normalise", "quantise"), pairs(NORMS, DYNAMIC))
def test_a_norm_and_a_scale_a_token_become_one_operator(
    normalise: Function, quantise: Function, symbolic: bool
) -> None:
    check(
        lambda x, w: quantise(normalise(x, w)),
        (X, WEIGHT),
        ["rms_norm_dynamic_per_token_fp8_quant"],
        symbolic=symbolic,
    )


@symbolically
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("normalise", NORMS[::3])
def test_the_addition_of_a_residual_joins_and_its_sum_may_be_used_by_all(
    normalise: Function, per_token: bool, symbolic: bool
) -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        y = normalise(total, weight)
        return (dynamic(y) if per_token else static(y, scale)), total, total * 2

    kind = "dynamic_per_token" if per_token else "static"
    check(layer, (X, R, WEIGHT, SCALE), [f"fused_add_rms_norm_{kind}_fp8_quant"], symbolic=symbolic)


def test_a_residual_may_be_added_in_float32_and_returned_narrow() -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        wide = x.float() + residual.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return dynamic(normed.to(x.dtype) * weight), wide.to(x.dtype)

    wanted = ["fused_add_rms_norm_dynamic_per_token_fp8_quant"]
    module = check(layer, (X, R, WEIGHT), wanted, symbolic=True)
    (node,) = [n for n in module.graph.nodes if str(n.target).startswith("pwcc.")]
    assert [argument.op for argument in node.args[:3]] == ["placeholder"] * 3  # no cast is read from memory


def test_a_sum_whose_float32_form_is_used_elsewhere_stays() -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        wide = x.float() + residual.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return static(normed * weight, scale), wide.to(x.dtype), wide

    module, _ = graph_of(layer, (X, R, WEIGHT, SCALE), symbolic=True)
    assert sum(fused(module)) == 0


@symbolically
@pytest.mark.parametrize(("gate", "quantise"), pairs((gated, gated_by_sigmoid), (*STATIC, *DYNAMIC)))
def test_a_gate_and_its_quantisation_become_one_operator(
    gate: Function, quantise: Function, symbolic: bool
) -> None:
    x = rows(5, 2 * HIDDEN)
    if quantise in DYNAMIC:
        wanted = ["silu_and_mul_dynamic_per_token_fp8_quant"]
        check(lambda x: quantise(gate(x)), (x,), wanted, symbolic=symbolic)
    else:
        wanted = ["silu_and_mul_static_fp8_quant"]
        check(lambda x, s: quantise(gate(x), s), (x, SCALE), wanted, symbolic=symbolic)


def test_gate_and_up_may_be_tensors_of_their_own() -> None:
    wanted = ["silu_and_mul_static_fp8_quant"]
    check(lambda g, u, s: static(F.silu(g) * u, s), (X, R, SCALE), wanted, symbolic=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_match(dtype: torch.dtype) -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = x + residual
        return dynamic(norm(total, weight)), total

    inputs = (rows(5, dtype=dtype), rows(5, dtype=dtype), WEIGHT.to(dtype))
    check(layer, inputs, ["fused_add_rms_norm_dynamic_per_token_fp8_quant"], symbolic=False)


def test_several_places_each_become_an_operator() -> None:
    def layers(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        first = x + residual
        y = static(norm(first, weight), scale)
        second = first + residual
        return y, dynamic(norm(second, weight)), second

    wanted = ["fused_add_rms_norm_static_fp8_quant", "fused_add_rms_norm_dynamic_per_token_fp8_quant"]
    check(layers, (X, R, WEIGHT, SCALE), wanted, symbolic=True)


def test_a_value_that_is_quantised_several_times_alike_is_one() -> None:
    def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = norm(x, weight)
        return [static(y, scale) for _ in range(3)]

    check(layer, (X, WEIGHT, SCALE), ["rms_norm_static_fp8_quant"], symbolic=False)


def test_epsilon_and_floor_are_those_of_the_model() -> None:
    module, _ = graph_of(lambda x, w: dynamic_floor_inside(norm(x, w, 3e-4)), (X, WEIGHT), symbolic=False)
    fused(module)
    (node,) = [n for n in module.graph.nodes if str(n.target).startswith("pwcc.")]
    assert node.args[2] == 3e-4
    assert math.isclose(node.args[3], 1e-6, rel_tol=1e-6)


# --- no matches ------------------------------------------------------------------------------------


def used_elsewhere(x: Tensor, w: Tensor, s: Tensor) -> Any:
    y = norm(x, w)
    return static(y, s), y


def two_scales(x: Tensor, w: Tensor, s: Tensor) -> Any:
    y = norm(x, w)
    return static(y, s), static(y, s * 2)


def maximum_used(x: Tensor, w: Tensor, s: Tensor) -> Any:
    y = norm(x, w)
    highest = y.float().abs().amax(-1, keepdim=True)
    scale = highest / 448
    return (y.float() / scale).clamp(-448, 448).to(FP8), scale, highest


def low_variance(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return static((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * w, s)


def another_dim(x: Tensor, w: Tensor, s: Tensor) -> Any:
    wide = x.float()
    return static(wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5) * w, s)


def another_power(x: Tensor, w: Tensor, s: Tensor) -> Any:
    wide = x.float()
    return static(wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + 1e-5) * w, s)


def another_input(x: Tensor, w: Tensor, s: Tensor) -> Any:
    wide = x.float()
    return static((wide + 1) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * w, s)


def quantised_first(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return static(x, s).float().to(x.dtype) * w


def another_bound(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return (norm(x, w).float() / s).clamp(-240, 240).to(FP8)


def one_bound(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return (norm(x, w).float() / s).clamp(max=448).to(FP8)


def another_format(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return (norm(x, w).float() / s).clamp(-448, 448).to(torch.float8_e5m2)


def a_scale_a_column(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return static(norm(x, w), s.expand(HIDDEN))


def weight_computed(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return static(norm(x, 1 + w), s)


def another_gate(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return static(F.gelu(x) * w, s)


def broadcast_up(x: Tensor, w: Tensor, s: Tensor) -> Any:
    return static(F.silu(x) * w, s)


def scale_of_another(x: Tensor, w: Tensor, s: Tensor) -> Any:
    _, scale = dynamic(x)
    return (norm(x, w).float() / scale).clamp(-448, 448).to(FP8)


@pytest.mark.parametrize(
    "function",
    [
        used_elsewhere, two_scales, maximum_used, low_variance, another_dim, another_power, another_input,
        quantised_first, another_bound, one_bound, another_format, a_scale_a_column, weight_computed,
        another_gate, broadcast_up, scale_of_another,
    ],
)  # fmt: skip
def test_what_computes_something_else_stays(function: Function) -> None:
    module, _ = graph_of(function, (X, WEIGHT, SCALE), symbolic=True)
    before = str(module.graph)
    assert fused(module) == [0, 0, 0, 0]
    assert str(module.graph) == before


def test_rows_too_wide_for_one_program_stay() -> None:
    wide, weight = rows(1, MAX_WIDTH + 1), torch.ones(MAX_WIDTH + 1).bfloat16()
    module, _ = graph_of(lambda x, w, s: static(norm(x, w), s), (wide, weight, SCALE), symbolic=False)
    assert sum(fused(module)) == 0


def test_a_residual_of_another_dtype_is_not_joined() -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        return static(norm(total, weight), scale), total

    check(layer, (X, R.float(), WEIGHT, SCALE), ["rms_norm_static_fp8_quant"], symbolic=False)


def test_a_vector_of_as_many_elements_as_there_are_tokens_is_no_weight() -> None:
    env = ShapeEnv()
    mode: Any = FakeTensorMode(shape_env=env)
    with mode:
        tokens = new_unbacked_size(env, 1, 8192)
        given = (torch.empty(HIDDEN, tokens).bfloat16(), torch.empty(tokens).bfloat16(), torch.empty(1))
        module = make_fx(lambda x, w, s: static(norm(x, w), s), select_decomp_table())(*given)
    assert sum(fused(module)) == 0
    assert not shape_guards(env)[1:]


def test_a_scale_on_another_device_stays() -> None:
    mode: Any = FakeTensorMode()
    with mode:
        given = (
            torch.empty(4, HIDDEN, device="cuda").bfloat16(),
            torch.empty(HIDDEN, device="cuda"),
            torch.empty(()),
        )
        module = make_fx(lambda x, w, s: static(norm(x, w), s), select_decomp_table())(*given)
    assert sum(fused(module)) == 0


@pytest.mark.parametrize("between", [False, True])
def test_nothing_is_read_beyond_a_write_in_place(between: bool) -> None:
    def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        if between:
            x.zero_()
        return static((wide * root).to(x.dtype) * weight, scale)

    module = make_fx(layer, select_decomp_table(), tracing_mode="fake")(X.clone(), WEIGHT, SCALE)
    assert sum(fused(module)) == (0 if between else 1)
    assert_close(module(X.clone(), WEIGHT, SCALE), layer(X.clone(), WEIGHT, SCALE))


# --- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "matches"), [(1, 8, 0), (8, 8, 1), (8, 64, 1), (64, 64, 1), (9, 65, 0), (65, 65, 0)]
)
def test_limits_hold_for_all_sizes_of_a_variant(low: int, high: int, matches: int) -> None:
    module, _ = graph_of(lambda x, w, s: static(norm(x, w), s), (X, WEIGHT, SCALE), symbolic=True)
    limited = RMSNormStaticQuant(min_tokens=8, max_tokens=64, cpu=True)
    assert fused(module, [limited], PassContext(CPU, low, high, low == high)) == [matches]


def test_on_a_cpu_nothing_is_fused_unless_asked() -> None:
    module, _ = graph_of(lambda x, w, s: static(norm(x, w), s), (X, WEIGHT, SCALE), symbolic=False)
    assert fused(module, [RMSNormStaticQuant()]) == [0]


@pytest.mark.parametrize("kind", PASSES)
def test_every_pass_is_found_by_its_name_and_needs_no_op_elimination(kind: type[Fusion]) -> None:
    with pytest.raises(UsageError, match="needs noop before it"):
        resolve(kind.name)
    spec = resolve(f"noop,{kind.name}(min_tokens=2,max_tokens=512)")[1]
    assert make(spec) == kind(min_tokens=2, max_tokens=512)


@pytest.mark.parametrize("options", ["min_tokens=0", "min_tokens=9,max_tokens=8"])
def test_limits_that_no_size_meets_are_refused(options: str) -> None:
    with pytest.raises(UsageError, match="expected 1 <= min_tokens <= max_tokens"):
        resolve(f"noop,rms_norm_static_fp8({options})")


def test_the_digest_follows_the_kernels_and_the_lowering() -> None:
    names = {path.name for path in RMSNormStaticQuant.files()}
    assert {"kernels.py", "formulas.py", "register.py", "tiles.py", "fused_lowering.py"} <= names
    assert {"fusion_values.py", "fusion_quant.py"} <= names


# --- pieces ----------------------------------------------------------------------------------------


class AcrossAttention(nn.Module):
    """A norm on one side of a splitting operation, the quantisation of its output on the other."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.tensor([0.02]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = static(norm(x, self.weight), self.scale)
        y = norm(first.float() + 1, self.weight)
        out = torch.empty_like(y)
        torch.ops.pwcctest.attend(y, out)
        return static(y, self.scale), out


def test_nothing_is_fused_across_a_splitting_operation(traced: Callable[..., Any]) -> None:
    from pwcc.compile.rebuild import Variant, rebuild

    (found,) = traced(AcrossAttention())
    counts = []
    for graph in found.program.unique:
        whole = rebuild(graph, Variant(1, 40), CPU)
        with whole.fake_mode:
            module = make_fx(functionalize(whole.graph_module), select_decomp_table())(*whole.inputs)
        counts.append(sum(fused(module)))
    assert counts == [1, 0]
