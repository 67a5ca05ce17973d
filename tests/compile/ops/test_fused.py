"""The fused FP8 operators: what they compute, what they refuse, and the kernels under Triton's interpreter."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.compile.ops.fused import OPERATORS, formulas
from pwcc.compile.ops.fused.formulas import FP8
from pwcc.compile.ops.fused.tiles import MAX_WIDTH, pointwise_tile, row_tile

EPS, FLOOR = 1e-5, 1 / (448 * 512)
SCRIPT = Path(__file__).parents[2] / "fixtures" / "programs" / "interpret_fused.py"
OPS: Any = torch.ops.pwcc
SCALE = torch.tensor([0.02])


def arguments(
    name: str, x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None
) -> dict[str, Any]:
    given: dict[str, Any] = {
        "x": x,
        "gate": x,
        "up": x if residual is None else residual,
        "residual": x if residual is None else residual,
        "weight": torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight,
        "scale": SCALE,
        "eps": EPS,
        "floor": FLOOR,
    }
    return {part.split()[1]: given[part.split()[1]] for part in OPERATORS[name][1:].split(")")[0].split(", ")}


def call(name: str, *values: Any) -> tuple[Any, ...]:
    made = getattr(OPS, name)(**arguments(name, *values))
    return made if isinstance(made, tuple) else (made,)


# --- the formulas, in other words than theirs ------------------------------------------------------


def nearest(value: float) -> float:
    """The 8-bit value that a number is rounded to: 3 bits of mantissa, exponents from -6 to 8."""
    if value == 0 or math.isnan(value):
        return value
    unit = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return max(-448.0, min(448.0, round(value / unit) * unit))


def test_a_norm_is_rounded_once_to_the_nearest_value() -> None:
    x = torch.tensor([[3.0, -4.0, 0.5, 100.0]])
    (rows,) = call("rms_norm_static_fp8_quant", x)
    root = math.sqrt(sum(v * v for v in x[0].tolist()) / 4 + EPS)
    assert rows.dtype is FP8
    assert rows.float()[0].tolist() == [nearest(v / root / SCALE.item()) for v in x[0].tolist()]


def test_a_gate_is_rounded_once_to_the_nearest_value() -> None:
    gate, up = torch.tensor([[1.0, -2.0, 0.3]]), torch.tensor([[0.5, 3.0, -7.0]])
    (rows,) = call("silu_and_mul_static_fp8_quant", gate, up)
    wanted = [g / (1 + math.exp(-g)) * u for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True)]
    assert rows.float()[0].tolist() == [nearest(v / SCALE.item()) for v in wanted]


def test_the_residual_is_rounded_before_it_is_normalised() -> None:
    x, residual = torch.tensor([[1.0, 256.0]]).bfloat16(), torch.tensor([[1.0, 1.0]]).bfloat16()
    rows, total = call("fused_add_rms_norm_static_fp8_quant", x, residual)
    assert total.tolist() == [[2.0, 256.0]]  # 257 is no bfloat16
    assert torch.equal(rows.float(), call("rms_norm_static_fp8_quant", total)[0].float())


def test_the_largest_magnitude_of_every_row_becomes_448() -> None:
    rows, scales = call("rms_norm_dynamic_per_token_fp8_quant", torch.randn(5, 33))
    assert scales.shape == (5, 1)
    assert rows.float().abs().amax(-1).tolist() == [448.0] * 5


def test_zero_rows_have_the_floor_as_their_scale() -> None:
    rows, scales = call("silu_and_mul_dynamic_per_token_fp8_quant", torch.zeros(2, 8))
    assert scales.flatten().tolist() == [torch.tensor(FLOOR).item()] * 2
    assert not rows.float().any()


def test_large_values_saturate_and_nan_stays() -> None:
    up = torch.tensor([[math.nan, math.inf, -math.inf, 1e30]])
    (rows,) = call("silu_and_mul_static_fp8_quant", torch.ones(1, 4), up)
    assert rows.float()[0].tolist()[1:] == [448.0, -448.0, 448.0]
    assert math.isnan(rows.float()[0, 0])
    rows, scales = call(
        "silu_and_mul_dynamic_per_token_fp8_quant", torch.ones(2, 4), torch.cat((up, up * 0 + 1))
    )
    assert math.isnan(scales[0])
    assert rows.float()[0].isnan().all()


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_tensors_get_the_outputs_form(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(6, 2, 10).bfloat16()[::2]
    real = call(name, x)
    mode: Any = FakeTensorMode()
    with mode:
        given = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments(name, x).items()}
        fake = getattr(OPS, name)(**given)
    for one, other in zip(real, fake if isinstance(fake, tuple) else (fake,), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("name", OPERATORS)
def test_schemas_say_what_the_operators_do(name: str) -> None:
    given = tuple(arguments(name, torch.randn(3, 8)).values())
    torch.library.opcheck(getattr(OPS, name).default, given, test_utils=("test_schema", "test_faketensor"))


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "rows": lambda given: given.update(x=torch.randn(8)),
    "weight": lambda given: given.update(weight=torch.ones(7)),
    "weight's device": lambda given: given.update(weight=torch.ones(8, device="meta")),
    "residual": lambda given: given.update(residual=torch.randn(3, 8).bfloat16()),
    "scale": lambda given: given.update(scale=torch.ones(3)),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_of_another_form_are_refused(what: str) -> None:
    name = "fused_add_rms_norm_static_fp8_quant"
    given = arguments(name, torch.randn(3, 8))
    WRONG[what](given)
    with pytest.raises(ValueError, match=f"pwcc::{name} expects .*, got"):
        getattr(OPS, name)(**given)


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_without_columns_are_refused_by_real_and_fake_alike(name: str) -> None:
    for device in ("cpu", "meta"):
        given = arguments(name, torch.randn(3, 0))
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
        with pytest.raises(ValueError, match="at least one column"):
            getattr(OPS, name)(**moved)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("rows", [0, 5])
def test_outputs_are_contiguous_whatever_the_rows_are_as_compiled_code_is_told(name: str, rows: int) -> None:
    x = torch.randn(8, 2, rows).permute(2, 1, 0)
    assert x.stride(-1) != 1
    moved = {
        k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments(name, x.contiguous()).items()
    }
    told = getattr(OPS, name)(**moved)
    found, alike = call(name, x), call(name, x.contiguous())
    for one, other, third in zip(found, told if isinstance(told, tuple) else (told,), alike, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        torch.testing.assert_close(one.float(), third.float(), rtol=0.13, atol=1e-6)  # one step of 8 bits


def test_gate_and_up_must_be_alike() -> None:
    with pytest.raises(ValueError, match=r"expects up like gate, \[3, 8\] float32 on cpu, got \[3, 9\]"):
        OPS.silu_and_mul_static_fp8_quant(torch.randn(3, 8), torch.randn(3, 9), SCALE)


def test_registering_imports_neither_triton_nor_a_compiler() -> None:
    code = (
        "import sys, pwcc.compile.ops.fused\n"
        "print(*[m for m in ('triton', 'torch._dynamo', 'torch._inductor') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


# --- tiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 15, 17, 1000, 4096, 4097, 14336, MAX_WIDTH])
def test_tiles_cover_a_row(width: int) -> None:
    whole, part = row_tile(width), pointwise_tile(width)
    assert whole.count == 1
    assert width <= whole.block < max(2 * width, 17)
    assert part.block * (part.count - 1) < width <= part.block * part.count
    assert all(tile.block & (tile.block - 1) == 0 and 1 <= tile.warps <= 32 for tile in (whole, part))


# --- the kernels -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton")
    folder = str(tmp_path_factory.mktemp("triton"))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": folder},
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_the_kernels_agree_with_the_formulas(interpreted: dict[str, Any]) -> None:
    forms = interpreted["forms"]
    assert len(forms) == 216
    assert not {name: found for name, found in forms.items() if found["steps"] > 1 or found["others"]}
    assert max(found["share"] for found in forms.values()) < 0.01


def test_the_new_residual_may_be_written_over_the_old_one(interpreted: dict[str, Any]) -> None:
    assert interpreted["in place"] == {"same memory": True, "residual": True, "scales": True}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_kernels_compile_for_a_gpu_without_one(dynamic: bool) -> None:
    pytest.importorskip("triton")
    from pwcc.compile.ops.fused.kernels import rms_norm_fp8, silu_and_mul_fp8
    from pwcc.compile.torch_private.triton_aot import compile_kernel

    tile = row_tile(4096)
    rows = dict.fromkeys(("x", "residual", "weight", "residual_out", "gate", "up"), "*bf16")
    others = {"scale": "*fp32", "scales": "*fp32", "out": "*fp8e4nv"}
    strides = dict.fromkeys(("x_stride", "residual_stride", "gate_stride", "up_stride"), "i32")
    sizes = {"HIDDEN": 4096, "WIDTH": 4096, "BLOCK": tile.block, "EPS": EPS, "FLOOR": FLOOR, "ADD": True}
    for kernel in (rms_norm_fp8, silu_and_mul_fp8):
        signature = {k: v for k, v in (rows | others | strides).items() if k in kernel.arg_names}
        constants = {k: v for k, v in {**sizes, "DYNAMIC": dynamic}.items() if k in kernel.arg_names}
        made = compile_kernel(
            kernel,
            signature,
            constants,
            aligned=tuple(signature),
            capability=90,
            num_warps=tile.warps,
            num_stages=3,
        )
        assert made.cubin.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_operators_agree_with_the_formulas_on_a_gpu() -> None:
    ran = subprocess.run(
        [sys.executable, SCRIPT, "cuda"], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    forms = json.loads(ran.stdout)["forms"]
    assert not {name: found for name, found in forms.items() if found["steps"] > 1 or found["others"]}


def test_a_row_too_wide_for_a_program_is_torchs_work() -> None:
    from pwcc.compile.ops.fused import launch

    x = torch.randn(1, MAX_WIDTH + 1)
    weight = torch.ones(MAX_WIDTH + 1)
    ours = launch.rms_norm_static_fp8_quant(x, weight, SCALE, EPS)
    assert torch.equal(ours.float(), formulas.rms_norm_static_fp8_quant(x, weight, SCALE, EPS).float())
