"""The seam to fake tensors: one eager run of a model's code that computes nothing and changes nothing.

Run on torch 2.13.0+cpu. Private names used, and what breaks if they change:
``torch._subclasses.FakeTensorMode`` and its ``allow_non_fake_inputs`` (without them the run needs the
model's weights and writes its buffers).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def run_on_fakes(model: nn.Module, inputs: Sequence[object], namespaces: Iterable[str]) -> str:
    """Run ``model.forward`` eagerly on fake copies of ``inputs`` and of whatever tensors it meets.

    The modules' attributes are put back afterwards, and ``functools.lru_cache`` functions of the modules
    named ``namespaces`` that were filled meanwhile are emptied, so that no fake tensor stays behind.

    Returns:
        Empty, or the exception that ended the run, in one line.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _unchanged(model), _caches_emptied(namespaces), warnings.catch_warnings(action="ignore"):
        try:
            fakes = [mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in inputs]
            with torch.no_grad(), mode:
                model.forward(*fakes)
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything on fakes
            text = str(error).strip().splitlines()
            return f"{type(error).__name__}: {text[0][:200] if text else ''}".rstrip(": ")
    return ""


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    held = [(module, _copied(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, kept in held:
            own = vars(module)
            for name in own.keys() - kept.keys():
                del own[name]
            for name, (value, inner) in kept.items():
                own[name] = value
                if inner is not None:
                    value.clear()
                    value.update(inner)


def _copied(module: nn.Module) -> dict[str, tuple[Any, dict[Any, Any] | None]]:
    registries = ("_parameters", "_buffers", "_modules")
    return {name: (value, dict(value) if name in registries else None) for name, value in vars(module).items()}


@contextmanager
def _caches_emptied(namespaces: Iterable[str]) -> Iterator[None]:
    caches = [(cached, cached.cache_info().misses) for cached in _caches(namespaces)]
    try:
        yield
    finally:
        for cached, misses in caches:
            if cached.cache_info().misses != misses:
                cached.cache_clear()


def _caches(namespaces: Iterable[str]) -> Iterator[Any]:
    wrapper: Any = type(functools.lru_cache(_nothing))
    for name in namespaces:
        namespace = vars(sys.modules[name]) if name in sys.modules else {}
        for value in list(namespace.values()):
            inside: Iterable[object] = list(vars(value).values()) if isinstance(value, type) else ()
            for found in (value, *inside):
                if isinstance(found, wrapper):
                    yield found


_nothing: Callable[[], None] = lambda: None  # noqa: E731 - only its cached form's type is wanted
