"""Key: declarations of inputs, as people write them (``--input``), read as forms."""

from __future__ import annotations

import contextlib
import math
import re

from pwcc.cache.errors import UsageError
from pwcc.compile.input_forms import TOKENS, ConstantSpec, InputSpec, Spec, named_fill
from pwcc.compile.model_args import dtype_named

_CONSTANT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(.*?)\s*", re.DOTALL)
_SIZE = re.compile(r"(?:(\d+)\s*<=\s*)?([A-Za-z_]\w*)(?:\s*<=\s*(\d+))?")
_DECLARATION = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*([\w.]+)\s*\[([^\[\]]*)\]\s*(?:@\s*([\w:]+))?\s*")


def parse_declaration(text: str) -> Spec:
    """Parse ``name:dtype[sizes]`` or ``name:dtype[sizes]@device``, or ``name=value`` for a constant.

    A size is a positive integer, ``n`` for the token count, or another name with bounds if wanted:
    ``hidden:float32[n,128]``, ``memory:float32[m<=512,128]``, ``causal=true``. Raise ``UsageError`` for
    anything else.
    """
    constant = _CONSTANT.fullmatch(text)
    if constant is not None:
        return ConstantSpec(name=constant[1], value=_value(constant[2], text))
    return parse_tensor(text)


def parse_tensor(text: str) -> InputSpec:
    """Parse the declaration of a tensor; see :func:`parse_declaration`."""
    match = _DECLARATION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"cannot read the input declaration {text!r}",
            hint="expected name:dtype[sizes], for example 'input_ids:int64[n]' or 'hidden:float32[n,128]', "
            "or name=value for a constant",
        )
    name, dtype, sizes, device = match.groups()
    shape: list[int | str] = []
    bounds: dict[str, tuple[int, int | None]] = {}
    for size in [part.strip() for part in sizes.split(",")] if sizes.strip() else []:
        named = _SIZE.fullmatch(size)
        if size.isdecimal() and int(size) > 0:
            shape.append(int(size))
        elif named is not None and ((named[1] is None and named[3] is None) or named[2] != TOKENS):
            shape.append(named[2])
            if named[1] is not None or named[3] is not None:
                low, high = int(named[1] or 1), None if named[3] is None else int(named[3])
                if low < 1 or (high is not None and high < low):
                    raise UsageError(
                        f"expected bounds of at least 1, the lower first, got {size!r} in {text!r}"
                    )
                bounds[named[2]] = (low, high)
        else:
            raise UsageError(
                f"size {size!r} in {text!r} is neither a positive integer nor a name such as {TOKENS!r}",
                hint=f"{TOKENS!r} stands for the number of tokens, whose range --max-tokens gives; another "
                "name for another size, with bounds if wanted: 'm<=512', '2<=m<=512'",
            )
    declared = tuple((key, low, high) for key, (low, high) in bounds.items())
    return named_fill(
        InputSpec(name=name, dtype=dtype_named(dtype), shape=tuple(shape), device=device, bounds=declared)
    )


def _value(text: str, declaration: str) -> bool | int | float | str | None:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            if math.isfinite(number):
                return number
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    raise UsageError(
        f"cannot read the value in {declaration!r}",
        hint="expected None, true, false, a number, or a string in quotes",
    )
