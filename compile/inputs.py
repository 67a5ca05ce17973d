"""Serve the Key noun: the inputs of a model, from declarations, an example function or annotations."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, UsageError
from pwcc.compile.argument_forms import form_of
from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.input_forms import (
    TOKENS,
    ConstantSpec,
    ContainerSpec,
    Fill,
    InputSpec,
    Spec,
    named_fill,
    other_bounds,
)
from pwcc.compile.model_args import unknown_name

_ID_WORDS = ("ids", "tokens")


def input_specs(
    module: nn.Module,
    *,
    declarations: Sequence[str | Spec] = (),
    example_inputs: Callable[[int], object] | None = None,
) -> tuple[Spec, ...]:
    """Return one spec per argument of ``module.forward`` that has no plain default, in its order.

    The first of these that is given decides: ``declarations`` (``--input``), ``example_inputs``, the
    forward's annotations. Raise ``UsageError`` if none says enough, or if arguments would be left out that
    have no default.
    """
    if declarations:
        specs = tuple(parse_declaration(item) if isinstance(item, str) else item for item in declarations)
        return _in_forward_order(module, tuple(_with_range(spec, module) for spec in specs))
    if example_inputs is not None:
        return _in_forward_order(module, specs_from_examples(module, example_inputs))
    return specs_from_annotations(module)


def specs_from_annotations(module: nn.Module) -> tuple[Spec, ...]:
    """Infer specs from ``forward``'s annotations: each required ``Tensor`` has tokens as its first dimension.

    An annotation gives neither dtype nor rank, so only the names ``*ids*``, ``*tokens*`` and ``*position*``
    are understood, as int64 ``[n]``. Raise ``UsageError`` for another required parameter. Parameters with a
    default are left out.
    """
    specs: list[Spec] = []
    hints = _forward_hints(module)
    for name, parameter in _forward_parameters(module).items():
        if parameter.default is not parameter.empty:
            continue
        is_tensor = hints.get(name) is Tensor
        spec = named_fill(InputSpec(name=name, dtype=torch.int64, shape=(TOKENS,)))
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


def specs_from_examples(module: nn.Module, example_inputs: Callable[[int], object]) -> tuple[Spec, ...]:
    """Call ``example_inputs`` with two token counts and read off dtypes, devices, token dims and ranges.

    It returns a tuple or list in ``forward``'s order, or a dict by name, of tensors, constants (None, bool,
    int, float, str) and containers of them: tuple, list, dict, dataclass, named tuple. Raise ``UsageError`` if
    it does not, or if a size neither stays nor equals the token count.
    """
    counts = (7, 11)
    first, second = (_named_examples(module, example_inputs(count), count) for count in counts)
    if list(first) != list(second):
        raise UsageError(f"example_inputs gave {list(first)} for 7 tokens and {list(second)} for 11")
    return tuple(_spec_of(name, first[name], second[name], counts) for name in first)


def _named_examples(module: nn.Module, examples: object, count: int) -> dict[str, object]:
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
    return {str(name): value for name, value in examples.items()}


def _spec_of(name: str, first: object, second: object, counts: tuple[int, int]) -> Spec:
    try:
        (form, names, leaves), (other, _, others) = form_of(first, name), form_of(second, name)
    except ArgumentError as error:
        raise UsageError(f"example_inputs: {error.message}", hint=error.hint) from None
    specs = tuple(_leaf_spec(*pair, counts) for pair in zip(names, leaves, others, strict=False))
    if form != other:
        raise UsageError(f"example_inputs changes the structure of {name!r} with the token count")
    return specs[0] if form == {"output": 0} else ContainerSpec(name=name, form=form, leaves=specs)


def _leaf_spec(name: str, first: object, second: object, counts: tuple[int, int]) -> InputSpec | ConstantSpec:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _spec_of_pair(name, first, second, counts)
    same = type(first) is type(second)
    if same and (first is None or isinstance(first, (bool, int, float, str))):
        if repr(first) == repr(second):
            return ConstantSpec(name=name, value=first)
        raise UsageError(
            f"example_inputs gives {first!r:.40} as {name!r} for {counts[0]} tokens and {second!r:.40} for "
            f"{counts[1]}; a value that is no tensor is compiled as a constant",
            hint="pass it as a tensor, or compute it from the sizes of one",
        )
    raise UsageError(f"example_inputs changes the type of {name!r} with the token count")


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


def _names_ids(name: str) -> bool:
    return any(word in name.lower() for word in _ID_WORDS)


def _with_range(spec: Spec, module: nn.Module) -> Spec:
    """Bound ids by the smallest embedding: valid whichever of the model's tables they index."""
    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    if (
        not isinstance(spec, InputSpec)
        or spec.fill is not Fill.INTEGERS
        or not _names_ids(spec.name)
        or not tables
    ):
        return spec
    return replace(spec, high=min(tables))


def _in_forward_order(module: nn.Module, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    parameters = _forward_parameters(module)
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise UsageError(f"an input is declared twice among {', '.join(spec.name for spec in specs)}")
    for name in by_name:
        if name not in parameters:
            raise unknown_name(
                f"{type(module).__name__}.forward has no parameter {name!r}", name, list(parameters)
            )
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in by_name]
    if missing:
        raise UsageError(
            f"{type(module).__name__}.forward also takes {', '.join(missing)}, for which no input is declared",
            hint="declare each argument that has no default; name=None for one that is not given",
        )
    other_bounds(specs)
    return tuple(by_name[name] for name in parameters if name in by_name)


def _forward_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}


def _forward_hints(module: nn.Module) -> dict[str, object]:
    try:
        return typing.get_type_hints(module.forward)
    except Exception:  # noqa: BLE001  annotations are user code; unreadable ones count as absent
        return {}
