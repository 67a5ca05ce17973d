"""Serve the Key noun: a model's arguments, from text or a file, as the typed values that enter the key."""

from __future__ import annotations

import difflib
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pwcc.cache.errors import UsageError

_PYTHON_WORDS: dict[str, object] = {"True": True, "False": False, "None": None}


def parse_args(pairs: Sequence[str]) -> dict[str, object]:
    """Parse ``key=value`` texts: a JSON value where it is one (also True, False, None), else the text itself.

    ``layers=4`` gives an int, ``eps=1e-5`` a float, ``tied=true`` a bool, ``name=abc`` a str; quote to force
    a str: ``name="4"``. Raise ``UsageError`` for a pair without ``=``, an empty key or a repeated one.
    """
    args: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise UsageError(f"expected --arg key=value, got {pair!r}", hint="for example --arg layers=4")
        if key in args:
            raise UsageError(f"--arg {key} is given twice")
        args[key] = _parse_value(text.strip())
    return args


def _parse_value(text: str) -> object:
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return typing.cast(object, json.loads(text, parse_constant=_refuse_constant))
    except ValueError:
        return text


def _refuse_constant(text: str) -> object:
    # NaN and Infinity are words unless a float is wanted: NaN differs from itself, so it cannot be in a key.
    raise ValueError(text)


def load_args_file(path: Path) -> dict[str, object]:
    """Read model arguments from a ``.json`` or ``.toml`` file: one table of names to values.

    Raise ``UsageError`` if it cannot be read, does not parse, or is not a table.
    """
    parsers: dict[str, Callable[[str], object]] = {".json": json.loads, ".toml": tomllib.loads}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise UsageError(f"expected an arguments file ending in .json or .toml, got {path.name!r}")
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the arguments file: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise UsageError(f"the arguments file does not parse: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise UsageError(
            f"expected a table of argument names to values, got a {type(value).__name__}", where=str(path)
        )
    return {str(name): item for name, item in value.items()}


def convert_args(target: Callable[..., object], args: Mapping[str, object], *, what: str) -> dict[str, object]:
    """Fit ``args`` to ``target``'s parameters and their annotations; defaults are left to ``target``.

    Raise ``UsageError`` naming the parameter if one is unknown, missing or of another type. A parameter
    without annotation, or with one that is not listed in ``_convert``, takes the value as it is.
    """
    parameters = _parameters(target)
    hints = _hints(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name in args:
        if name not in named and not takes_any:
            raise unknown_name(f"{what} has no parameter {name!r}", name, list(named))
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UsageError(f"{what} takes {name!r} by position only, but arguments are given by name")
        if name in named and name not in args and parameter.default is parameter.empty:
            raise UsageError(f"{what} needs a value for {name!r}", hint=f"pass --arg {name}=VALUE")
    return {n: _convert(v, hints.get(n, inspect.Parameter.empty), name=n, what=what) for n, v in args.items()}


def unknown_name(message: str, name: str, known: Sequence[str]) -> UsageError:
    """Return the error for a name that is none of ``known``, with the closest of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known)) or 'none'}"
    return UsageError(message, hint=hint)


def _parameters(target: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # some builtins have none
        return {"args": inspect.Parameter("args", inspect.Parameter.VAR_KEYWORD)}


def _hints(target: Callable[..., object]) -> dict[str, object]:
    function: object = getattr(target, "__init__", target) if isinstance(target, type) else target
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  annotations are user code; without them values pass as they are
        return {}


def _convert(value: object, hint: object, *, name: str, what: str) -> object:
    converted = _fit(value, hint)
    if converted is _MISFIT:
        shown = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")
        raise UsageError(
            f"{what} expects {name} to be {shown}, got {value!r} ({type(value).__name__})",
        )
    return converted


_MISFIT = object()


def _fit(value: object, hint: object) -> object:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, typing.get_args(hint))
    if origin is typing.Literal:
        return value if value in typing.get_args(hint) else _MISFIT
    if origin in (list, tuple, Sequence):
        return _fit_items(value, hint)
    if hint is bool:
        return value if isinstance(value, bool) else _MISFIT
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _MISFIT
    if hint is float:
        return _fit_float(value)
    if hint is str:
        # Typed text such as version=4 was read as JSON; the parameter wants the word.
        return value if isinstance(value, str) else _MISFIT if value is None else json.dumps(value)
    if hint is torch.dtype:
        return dtype_named(value) if isinstance(value, str) else value
    if hint is Path:
        return Path(value) if isinstance(value, str) else _MISFIT
    if hint is type(None):
        return value if value is None else _MISFIT
    return value


def _fit_float(value: object) -> object:
    if isinstance(value, bool):
        return _MISFIT
    if isinstance(value, int | float):
        return float(value)
    return {"inf": float("inf"), "Infinity": float("inf"), "-inf": float("-inf")}.get(str(value), _MISFIT)


def _fit_union(value: object, members: tuple[object, ...]) -> object:
    if value is None:
        return None if type(None) in members else _MISFIT
    # Exact matches first, so that `str | int` leaves 4 an int.
    if any(isinstance(member, type) and type(value) is member for member in members):
        return value
    for member in members:
        fitted = _fit(value, member)
        if fitted is not _MISFIT:
            return fitted
    return _MISFIT


def _fit_items(value: object, hint: object) -> object:
    if not isinstance(value, list | tuple):
        return _MISFIT
    item_hints = [h for h in typing.get_args(hint) if h is not Ellipsis]
    fixed = typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint)
    if fixed and len(item_hints) != len(value):
        return _MISFIT
    per_item = item_hints if fixed else (item_hints or [inspect.Parameter.empty]) * len(value)
    items = [_fit(item, item_hint) for item, item_hint in zip(value, per_item, strict=False)]
    if _MISFIT in items:
        return _MISFIT
    return tuple(items) if typing.get_origin(hint) is tuple else items


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as ``bfloat16``. Raise ``UsageError`` for another word."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        known = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
        raise unknown_name(f"{name!r} is not a torch dtype", name, known)
    return dtype
