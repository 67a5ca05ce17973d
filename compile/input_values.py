"""Serve the Key noun: seeded values of what a model is called with, as one call's arguments."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pwcc.cache.errors import UsageError
from pwcc.compile.argument_forms import is_scalar
from pwcc.compile.input_forms import (
    ConstantSpec,
    ContainerSpec,
    Fill,
    InputSpec,
    Spec,
    leaf_specs,
    other_bounds,
)
from pwcc.compile.runtime.output import build_output
from pwcc.compile.signature import parameter_names

# Example sizes beside the token count: primes, so that none is equal to another or divides it.
_EXAMPLES = (11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def make_call(
    model: nn.Module,
    specs: Sequence[Spec],
    num_tokens: int,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Call:
    """Return one call of ``model.forward`` with a value per spec; the rest keeps its default, or is None.

    Arguments are passed by position up to the first that is left out, then by name. Raises as
    :func:`make_inputs`.
    """
    values = dict(
        zip(
            (spec.name for spec in specs),
            make_inputs(specs, num_tokens, device=device, seed=seed),
            strict=True,
        )
    )
    args: list[object] = []
    parameters = inspect.signature(model.forward).parameters
    for name in parameter_names(model):
        if name not in values and parameters[name].default is not inspect.Parameter.empty:
            break
        args.append(values.pop(name, None))
    hidden = [name for name in values if parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    if hidden:
        raise UsageError(f"{hidden[0]!r} is positional-only: declare every input before it, too")
    return Call(tuple(args), values)


def leaf_positions(model: nn.Module, specs: Sequence[Spec]) -> dict[int, InputSpec | ConstantSpec]:
    """Return the spec of each leaf by its position among the leaves of all arguments of ``forward``.

    What is left out counts as one leaf where it is recorded: None, or a plain default.
    """
    by_name = {spec.name: spec for spec in specs}
    found: dict[int, InputSpec | ConstantSpec] = {}
    position = 0
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if name in by_name:
            for leaf in leaf_specs([by_name[name]]):
                found[position] = leaf
                position += 1
        elif parameter.default is inspect.Parameter.empty or is_scalar(parameter.default):
            position += 1
    return found


def make_inputs(
    specs: Sequence[Spec], num_tokens: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Any, ...]:
    """Return one value per spec, a tensor for an ``InputSpec``; equal arguments give equal values everywhere.

    Values are drawn on the CPU, each tensor from its own stream, so adding an input changes no other. Sizes
    beside the token count are as :func:`example_sizes` says.
    Raise ``UsageError`` if ``num_tokens`` is below 1.
    """
    if num_tokens < 1:
        raise UsageError(f"expected at least one token, got {num_tokens}")
    sizes = example_sizes(specs, num_tokens)

    def make(spec: Spec) -> Any:
        if isinstance(spec, ConstantSpec):
            return spec.value
        if isinstance(spec, ContainerSpec):
            return build_output(spec.form)([make(leaf) for leaf in spec.leaves], (), ())
        return _make(spec, num_tokens, sizes, seed).to(spec.device or device)

    return tuple(make(spec) for spec in specs)


def example_sizes(specs: Sequence[Spec], num_tokens: int) -> dict[str, int]:
    """Return an example of each size beside the token count, within its bounds and different if it can be."""
    found: dict[str, int] = {}
    for name, (low, high) in other_bounds(specs).items():
        taken = {num_tokens, *found.values()}
        fitting = (size for size in _EXAMPLES if low <= size <= high and size not in taken)
        near = (size for size in range(max(low, 2), min(high, low + 20) + 1) if size not in taken)
        found[name] = next(fitting, None) or next(near, None) or low
    return found


def _make(spec: InputSpec, num_tokens: int, others: Mapping[str, int], seed: int) -> Tensor:
    sizes = spec.sizes(num_tokens, others)
    if spec.fill is Fill.ARANGE:
        return torch.arange(num_tokens, dtype=spec.dtype)
    digest = hashlib.sha256(f"{seed}:{num_tokens}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if spec.fill is Fill.INTEGERS:
        high = min(spec.high, 2) if spec.dtype is torch.bool else spec.high
        return torch.randint(spec.low, high, sizes, generator=generator).to(spec.dtype)
    if spec.dtype.is_complex:
        return torch.randn(sizes, generator=generator, dtype=torch.complex64).to(spec.dtype)
    return torch.randn(sizes, generator=generator, dtype=torch.float32).to(spec.dtype)
