"""Serve the Key noun: what a model is called with, and seeded values of that form for tracing and checks."""

from __future__ import annotations

import enum
import hashlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pwcc.cache.errors import UsageError
from pwcc.compile.model_args import dtype_named, unknown_name

TOKENS = "n"
"""How declarations write the token count."""

_ID_WORDS = ("ids", "tokens")
_POSITION_WORDS = ("positions", "position_ids", "position")
_DECLARATION = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*([\w.]+)\s*\[([^\[\]]*)\]\s*(?:@\s*([\w:]+))?\s*")


class Fill(enum.Enum):
    """Values that ``make_inputs`` may put into a tensor."""

    NORMAL = "normal"
    INTEGERS = "integers"
    ARANGE = "arange"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor argument: sizes are ints, or ``"n"`` where the token count goes.

    ``device`` None means the model's. ``low`` and ``high`` bound integers: ``low <= value < high``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    device: str | None = None
    fill: Fill = Fill.NORMAL
    low: int = 0
    high: int = 2

    def sizes(self, num_tokens: int) -> tuple[int, ...]:
        """Return the shape for this many tokens."""
        return tuple(num_tokens if isinstance(size, str) else size for size in self.shape)

    @property
    def token_dims(self) -> tuple[int, ...]:
        """Dimensions whose size is the token count."""
        return tuple(index for index, size in enumerate(self.shape) if isinstance(size, str))

    def __str__(self) -> str:
        sizes = ",".join(str(size) for size in self.shape)
        device = f"@{self.device}" if self.device else ""
        return f"{self.name}:{str(self.dtype).removeprefix('torch.')}[{sizes}]{device}"


def input_specs(
    module: nn.Module,
    *,
    declarations: Sequence[str] = (),
    example_inputs: Callable[[int], object] | None = None,
) -> tuple[InputSpec, ...]:
    """Return one spec per tensor argument of ``module.forward``, in its order.

    The first of these that is given decides: ``declarations`` (``--input``), ``example_inputs``, the
    forward's annotations. Raise ``UsageError`` if none says enough, or if arguments would be left out that
    have no default.
    """
    if declarations:
        specs = tuple(parse_declaration(text) for text in declarations)
        return _in_forward_order(module, tuple(_with_range(spec, module) for spec in specs))
    if example_inputs is not None:
        return _in_forward_order(module, specs_from_examples(module, example_inputs))
    return specs_from_annotations(module)


def parse_declaration(text: str) -> InputSpec:
    """Parse ``name:dtype[sizes]`` or ``name:dtype[sizes]@device``, such as ``hidden:float32[n,128]``.

    A size is a positive integer or ``n``, the token count. Raise ``UsageError`` for anything else.
    """
    match = _DECLARATION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"cannot read the input declaration {text!r}",
            hint="expected name:dtype[sizes], for example 'input_ids:int64[n]' or 'hidden:float32[n,128]'",
        )
    name, dtype, sizes, device = match.groups()
    shape: list[int | str] = []
    for size in [part.strip() for part in sizes.split(",")] if sizes.strip() else []:
        if size == TOKENS:
            shape.append(TOKENS)
        elif size.isdecimal() and int(size) > 0:
            shape.append(int(size))
        else:
            raise UsageError(
                f"size {size!r} in {text!r} is neither a positive integer nor {TOKENS!r}",
                hint=f"{TOKENS!r} stands for the number of tokens",
            )
    return _named_fill(InputSpec(name=name, dtype=dtype_named(dtype), shape=tuple(shape), device=device))


def specs_from_annotations(module: nn.Module) -> tuple[InputSpec, ...]:
    """Infer specs from ``forward``'s annotations: each required ``Tensor`` has tokens as its first dimension.

    An annotation gives neither dtype nor rank, so only the names ``*ids*``, ``*tokens*`` and ``*position*``
    are understood, as int64 ``[n]``. Raise ``UsageError`` for another required parameter. Parameters with a
    default are left out.
    """
    specs: list[InputSpec] = []
    hints = _forward_hints(module)
    for name, parameter in _forward_parameters(module).items():
        if parameter.default is not parameter.empty:
            continue
        is_tensor = hints.get(name) is Tensor
        spec = _named_fill(InputSpec(name=name, dtype=torch.int64, shape=(TOKENS,)))
        if not is_tensor or (spec.fill is Fill.INTEGERS and not _names_ids(name)):
            said = "is not annotated as a Tensor" if not is_tensor else "has no known dtype and shape"
            raise UsageError(
                f"cannot tell what to pass as {name!r} of {type(module).__name__}.forward: it {said}",
                hint=f"pass --input '{name}:float32[n,WIDTH]' (and one for each other argument), "
                "or write example_inputs(num_tokens) beside the model",
            )
        specs.append(_with_range(spec, module))
    if not specs:
        raise UsageError(
            f"{type(module).__name__}.forward has no required tensor argument",
            hint="pass --input declarations, or write example_inputs(num_tokens) beside the model",
        )
    return tuple(specs)


def specs_from_examples(module: nn.Module, example_inputs: Callable[[int], object]) -> tuple[InputSpec, ...]:
    """Call ``example_inputs`` with two token counts and read off dtypes, devices, token dims and ranges.

    It returns a tuple or list in ``forward``'s order, or a dict by name, of tensors. Raise ``UsageError`` if
    it does not, or if a size neither stays nor equals the token count.
    """
    counts = (7, 11)
    first, second = (_named_examples(module, example_inputs(count), count) for count in counts)
    if list(first) != list(second):
        raise UsageError(f"example_inputs gave {list(first)} for 7 tokens and {list(second)} for 11")
    return tuple(_spec_of_pair(name, first[name], second[name], counts) for name in first)


def _named_examples(module: nn.Module, examples: object, count: int) -> dict[str, Tensor]:
    parameters = list(_forward_parameters(module))
    if isinstance(examples, Tensor):
        examples = (examples,)
    if isinstance(examples, list | tuple):
        if len(examples) > len(parameters):
            raise UsageError(
                f"example_inputs({count}) gave {len(examples)} values for forward{tuple(parameters)}"
            )
        examples = dict(zip(parameters, examples, strict=False))
    if not isinstance(examples, Mapping):
        raise UsageError(
            f"expected a tuple or dict of tensors from example_inputs({count}), got a {type(examples).__name__}"
        )
    for name, value in examples.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"example_inputs({count}) gave a {type(value).__name__} for {name!r}, expected a tensor",
                hint="give constants a default in forward, or fix them when the model is built",
            )
    return {str(name): value for name, value in examples.items()}


def _spec_of_pair(name: str, first: Tensor, second: Tensor, counts: tuple[int, int]) -> InputSpec:
    if first.dtype != second.dtype or first.dim() != second.dim():
        raise UsageError(f"example_inputs changes the dtype or rank of {name!r} with the token count")
    shape: list[int | str] = []
    for dim, (a, b) in enumerate(zip(first.shape, second.shape, strict=True)):
        if a == b:
            shape.append(a)
        elif (a, b) == counts:
            shape.append(TOKENS)
        else:
            raise UsageError(
                f"dimension {dim} of {name!r} is {a} for {counts[0]} tokens and {b} for {counts[1]}",
                hint="a size must stay, or equal the number of tokens",
            )
    spec = InputSpec(name=name, dtype=first.dtype, shape=tuple(shape), device=_foreign_device(first))
    if first.dtype.is_floating_point or first.dtype.is_complex:
        return spec
    values = [t.flatten().tolist() for t in (first, second)]
    if spec.shape == (TOKENS,) and all(v == list(range(len(v))) for v in values):
        return replace(spec, fill=Fill.ARANGE)
    seen = [int(value) for v in values for value in v] or [0]
    return replace(spec, fill=Fill.INTEGERS, low=min(seen), high=max(seen) + 1)


def _foreign_device(tensor: Tensor) -> str | None:
    # CPU is what an author gets without asking: it means "wherever the model is".
    return None if tensor.device.type == "cpu" else str(tensor.device)


def _named_fill(spec: InputSpec) -> InputSpec:
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return spec
    positions = any(word in spec.name.lower() for word in _POSITION_WORDS)
    fill = Fill.ARANGE if positions and spec.shape == (TOKENS,) else Fill.INTEGERS
    return replace(spec, fill=fill)


def _names_ids(name: str) -> bool:
    return any(word in name.lower() for word in _ID_WORDS)


def _with_range(spec: InputSpec, module: nn.Module) -> InputSpec:
    """Bound ids by the smallest embedding: valid whichever of the model's tables they index."""
    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    if spec.fill is not Fill.INTEGERS or not _names_ids(spec.name) or not tables:
        return spec
    return replace(spec, high=min(tables))


def _in_forward_order(module: nn.Module, specs: tuple[InputSpec, ...]) -> tuple[InputSpec, ...]:
    parameters = _forward_parameters(module)
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise UsageError(f"an input is declared twice among {', '.join(spec.name for spec in specs)}")
    for name in by_name:
        if name not in parameters:
            raise unknown_name(
                f"{type(module).__name__}.forward has no parameter {name!r}", name, list(parameters)
            )
    leading = list(parameters)[: len(specs)]
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in by_name]
    gaps = missing or [name for name in leading if name not in by_name]
    if gaps:
        raise UsageError(
            f"{type(module).__name__}.forward also takes {', '.join(gaps)}, for which no input is declared",
            hint="inputs are passed by position: declare each one up to the last that is wanted",
        )
    return tuple(by_name[name] for name in leading)


def _forward_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def _forward_hints(module: nn.Module) -> dict[str, object]:
    try:
        return typing.get_type_hints(module.forward)
    except Exception:  # noqa: BLE001  annotations are user code; unreadable ones count as absent
        return {}


def make_inputs(
    specs: Sequence[InputSpec], num_tokens: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Tensor, ...]:
    """Return one tensor per spec; equal arguments give equal values on every device.

    Values are drawn on the CPU, each input from its own stream, so adding an input changes no other.
    Raise ``UsageError`` if ``num_tokens`` is below 1.
    """
    if num_tokens < 1:
        raise UsageError(f"expected at least one token, got {num_tokens}")
    return tuple(_make(spec, num_tokens, seed).to(spec.device or device) for spec in specs)


def _make(spec: InputSpec, num_tokens: int, seed: int) -> Tensor:
    sizes = spec.sizes(num_tokens)
    if spec.fill is Fill.ARANGE:
        return torch.arange(num_tokens, dtype=spec.dtype)
    digest = hashlib.sha256(f"{seed}:{num_tokens}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if spec.fill is Fill.INTEGERS:
        high = min(spec.high, 2) if spec.dtype is torch.bool else spec.high
        return torch.randint(spec.low, high, sizes, generator=generator).to(spec.dtype)
    return torch.randn(sizes, generator=generator, dtype=torch.float32).to(spec.dtype)
