"""Artifact: names, schemas and shapes of the fused FP8 operators in torch's registry; importing registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from pwcc.compile.ops import registration
from pwcc.compile.ops.fused import formulas, launch
from pwcc.compile.ops.fused.formulas import FP8

_ADD: Final = "Tensor x, Tensor residual, Tensor weight"

OPERATORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rms_norm_static_fp8_quant": "(Tensor x, Tensor weight, Tensor scale, float eps) -> Tensor",
        "fused_add_rms_norm_static_fp8_quant": f"({_ADD}, Tensor scale, float eps) -> (Tensor, Tensor)",
        "rms_norm_dynamic_per_token_fp8_quant": (
            "(Tensor x, Tensor weight, float eps, float floor) -> (Tensor, Tensor)"
        ),
        "fused_add_rms_norm_dynamic_per_token_fp8_quant": (
            f"({_ADD}, float eps, float floor) -> (Tensor, Tensor, Tensor)"
        ),
        "silu_and_mul_static_fp8_quant": "(Tensor gate, Tensor up, Tensor scale) -> Tensor",
        "silu_and_mul_dynamic_per_token_fp8_quant": (
            "(Tensor gate, Tensor up, float floor) -> (Tensor, Tensor)"
        ),
    }
)
"""The operators of namespace ``pwcc``: name to schema."""


def check(name: str, given: Mapping[str, object]) -> None:
    """Refuse arguments of another form: the kernels trust theirs.

    Compares static sizes and equal symbols only, so that a trace gets no guard.

    Raises:
        ValueError: says what was expected and what came.
    """
    first, second = ("x", "residual") if "x" in given else ("gate", "up")
    x, beside, weight, scale = (given.get(key) for key in (first, second, "weight", "scale"))
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"pwcc::{name} expects {first} as floating-point rows [..., columns], got {_form(x)}")
    if isinstance(x.shape[-1], int) and not x.shape[-1]:
        raise ValueError(f"pwcc::{name} expects {first} with at least one column, got {_form(x)}")
    if isinstance(weight, Tensor) and (
        weight.dim() != 1 or weight.shape[0] != x.shape[-1] or weight.device != x.device
    ):
        raise ValueError(f"pwcc::{name} expects weight [{x.shape[-1]}] on {x.device}, got {_form(weight)}")
    if isinstance(beside, Tensor) and (
        beside.shape != x.shape or beside.dtype != x.dtype or beside.device != x.device
    ):
        raise ValueError(f"pwcc::{name} expects {second} like {first}, {_form(x)}, got {_form(beside)}")
    if isinstance(scale, Tensor) and (
        scale.dim() > 1 or scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device
    ):
        raise ValueError(f"pwcc::{name} expects one float32 scale on {x.device}, got {_form(scale)}")


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"


def _meta(name: str) -> Callable[..., object]:
    """Return the function that gives outputs without values, which fake tensors run."""

    def run(*args: object) -> object:
        given = _named(name, args)
        check(name, given)
        x = given["x" if "x" in given else "gate"]
        if not isinstance(x, Tensor):
            raise TypeError(f"expected a tensor, got {type(x).__name__}")
        made = [torch.empty(x.shape, dtype=FP8, device=x.device)]
        if "per_token" in name:
            made.append(torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device))
        if "residual" in given:
            made.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _checked(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return what runs: the arguments checked, the outputs contiguous as compiled code was told they are."""

    def run(*args: object) -> object:
        check(name, _named(name, args))
        made: object = function(*args)
        if isinstance(made, tuple):
            return tuple(part.contiguous() for part in made)
        return made.contiguous() if isinstance(made, Tensor) else made

    return run


def _named(name: str, args: tuple[object, ...]) -> dict[str, object]:
    return dict(zip(_NAMES[name], args, strict=True))


_NAMES: Final = {
    name: [part.split()[1] for part in schema[1 : schema.index(")")].split(", ")]
    for name, schema in OPERATORS.items()
}


_library = globals().get("_library") or registration.register(
    {
        name: registration.Operator(
            schema,
            _checked(name, getattr(formulas, name)),
            _checked(name, getattr(launch, name)),
            _meta(name),
        )
        for name, schema in OPERATORS.items()
    }
)
