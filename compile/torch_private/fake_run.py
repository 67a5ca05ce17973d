"""The seam to fake tensors: one eager run of a model's code that computes nothing and changes nothing.

Run on torch 2.13.0+cpu. Private names used, and what breaks if they change:
``torch._subclasses.FakeTensorMode`` and its ``allow_non_fake_inputs`` (without them the run needs the
model's weights and writes its buffers), ``OpOverload._schema`` (tells what writes its arguments); of Triton
``JITFunction.run``, ``Autotuner.run`` and ``Heuristics.run`` (every launch goes through them).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pwcc.compile.argument_forms import map_tensors


def run_on_fakes(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], namespaces: Iterable[str]
) -> str:
    """Run ``model.forward`` eagerly on fake copies of its arguments and of whatever tensors it meets.

    The modules' attributes are put back afterwards, and ``functools.lru_cache`` functions of the modules
    named ``namespaces`` that were filled meanwhile are emptied, so that no fake tensor stays behind.

    Returns:
        Empty, or the exception that ended the run, in one line.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _unchanged(model), _caches_emptied(namespaces), warnings.catch_warnings(action="ignore"):
        try:
            fakes = [map_tensors(item, mode.from_tensor) for item in args]
            named = {name: map_tensors(item, mode.from_tensor) for name, item in kwargs.items()}
            with torch.no_grad(), mode, _WritesOnFakes(mode), _no_launches():
                model.forward(*fakes, **named)
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything on fakes
            text = str(error).strip().splitlines()
            return f"{type(error).__name__}: {text[0][:200] if text else ''}".rstrip(": ")
    return ""


class _WritesOnFakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives an operation that writes the fakes of its real tensors.

    FakeTensorMode alone runs arithmetic on real tensors only, such as ``buffer.add_(1)``, as it stands.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self.supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> object:
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is not None and schema.is_mutable:
            args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake: torch.Tensor = tensor if self._mode.is_our_fake(tensor) else self._mode.from_tensor(tensor)
        return fake


@contextmanager
def _no_launches() -> Iterator[None]:
    """Keep Triton kernels from running: a launch would take fake tensors for real ones, and write real ones."""
    places = [("triton.runtime.jit", "JITFunction")]
    places += [("triton.runtime.autotuner", name) for name in ("Autotuner", "Heuristics")]
    found = [getattr(sys.modules.get(module), name, None) for module, name in places]
    kept = [(cls, cls.run) for cls in found if cls is not None and "run" in vars(cls)]
    for cls, _ in kept:
        cls.run = _launch_nothing
    try:
        yield
    finally:
        for cls, run in kept:
            cls.run = run


def _launch_nothing(*_: object, **__: object) -> None: ...


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
