"""Key: what a model is called with, argument by argument: a tensor's form, a constant, or a container."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from pwcc.cache import strict
from pwcc.cache.errors import UsageError

TOKENS = "n"
"""How declarations write the token count."""

DEFAULT_BOUND = 8192
"""The largest value of a size beside the token count, where its declaration gives none."""

_NO_SIZES: Mapping[str, int] = MappingProxyType({})

_POSITION_WORDS = ("positions", "position_ids", "position")


class Fill(enum.Enum):
    """Values that ``make_inputs`` may put into a tensor."""

    NORMAL = "normal"
    INTEGERS = "integers"
    ARANGE = "arange"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor argument: sizes are ints, ``"n"`` where the token count goes, or names of other sizes.

    ``bounds`` are (name, low, high) of other sizes, where they were given; high None is the default.
    ``device`` None means the model's. ``low`` and ``high`` bound integers: ``low <= value < high``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    device: str | None = None
    fill: Fill = Fill.NORMAL
    low: int = 0
    high: int = 2
    bounds: tuple[tuple[str, int, int | None], ...] = ()

    def sizes(self, num_tokens: int, others: Mapping[str, int] = _NO_SIZES) -> tuple[int, ...]:
        """Return the shape for this many tokens, and other sizes by name."""
        known = {**others, TOKENS: num_tokens}
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)

    @property
    def token_dims(self) -> tuple[int, ...]:
        """Dimensions whose size is the token count."""
        return tuple(index for index, size in enumerate(self.shape) if size == TOKENS)

    @property
    def dynamic_dims(self) -> dict[int, str]:
        """Dimensions that are no number, with the name of their size."""
        return {index: size for index, size in enumerate(self.shape) if isinstance(size, str)}

    def __str__(self) -> str:
        bounds = {name: (low, high) for name, low, high in self.bounds}
        sizes = ",".join(_size_text(size, bounds) for size in self.shape)
        device = f"@{self.device}" if self.device else ""
        return f"{self.name}:{str(self.dtype).removeprefix('torch.')}[{sizes}]{device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSpec:
    """One argument that is compiled as the value that it has: None, a bool, an int, a float or a string."""

    name: str
    value: bool | int | float | str | None

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One argument that holds others: ``form`` is an output template whose outputs are the leaves."""

    name: str
    form: object
    leaves: tuple[InputSpec | ConstantSpec, ...]

    def __str__(self) -> str:
        return f"{self.name}={strict.canonical(self.form).decode()}({'; '.join(map(str, self.leaves))})"


Spec = InputSpec | ConstantSpec | ContainerSpec


def leaf_specs(specs: Sequence[Spec]) -> list[InputSpec | ConstantSpec]:
    """Return the leaves of all arguments, in order."""
    return [leaf for spec in specs for leaf in (spec.leaves if isinstance(spec, ContainerSpec) else (spec,))]


def other_bounds(specs: Sequence[Spec], default: int = DEFAULT_BOUND) -> dict[str, tuple[int, int]]:
    """Return (low, high) of each size beside the token count, in order of first use.

    Raise ``UsageError`` if bounds contradict each other, or if there are other sizes and no token count.
    """
    given: dict[str, tuple[int, int | None]] = {}
    used: dict[str, None] = {}
    for spec in leaf_specs(specs):
        if isinstance(spec, InputSpec):
            used.update(dict.fromkeys(spec.dynamic_dims.values()))
            for name, low, high in spec.bounds:
                if given.setdefault(name, (low, high)) != (low, high):
                    raise UsageError(f"size {name!r} is declared with two ranges, one in {str(spec)!r}")
    others = [name for name in used if name != TOKENS]
    if others and TOKENS not in used:
        raise UsageError(
            f"the inputs have a size {others[0]!r} and no token count",
            hint=f"write {TOKENS} for the size that --sizes and --max-tokens speak of",
        )
    found = {name: given.get(name, (1, None)) for name in others}
    return {name: (low, default if high is None else high) for name, (low, high) in found.items()}


def _size_text(size: int | str, bounds: Mapping[str, tuple[int, int | None]]) -> str:
    if size not in bounds:
        return str(size)
    low, high = bounds[str(size)]
    return (f"{low}<=" if low > 1 else "") + str(size) + ("" if high is None else f"<={high}")


def named_fill(spec: InputSpec) -> InputSpec:
    """Return a spec whose values are as its name says: positions count up, other integers are ids."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return spec
    positions = any(word in spec.name.lower() for word in _POSITION_WORDS)
    fill = Fill.ARANGE if positions and spec.shape == (TOKENS,) else Fill.INTEGERS
    return replace(spec, fill=fill)
