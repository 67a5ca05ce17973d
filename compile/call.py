"""Artifact: the call of a decorated module: to what serves it by one look at its state, else the slow way.

This file is small and apart, since Dynamo traces :func:`dispatch` where a decorated module is part of
another model's graph: it is then among the sources of that model's entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from pwcc.cache.errors import ArgumentError, CacheMiss
from pwcc.compile.runtime.hooks import is_hooked

STATE = "_pwcc_state"
"""Where a module keeps its state, in its ``__dict__``: no parameter, buffer or submodule."""

OPTIONS = "__pwcc_options__"
"""Where a decorated class keeps what it was decorated with."""

_inside: ContextVar[bool] = ContextVar("pwcc_inside", default=False)


class Serving(Protocol):
    """What a module's state is to its call."""

    owner: int
    """The ``id`` of the module that it belongs to: a shallow copy of a module brings its original's."""

    run: Callable[..., Any] | None
    """Compiled code that takes the call's arguments; None while there is none."""

    def answer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that is not plainly for ``run``."""

    def explain(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: ArgumentError | CacheMiss
    ) -> Any:
        """Answer or refuse a call that ``run`` refused."""


def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a decorated module. Evaluates no guard and enters no frame of Dynamo's once compiled code is there.

    Raises:
        CallError: a call that the compiled code must not answer. CacheMiss: nothing fits, and nothing may be
            compiled.
    """
    if torch.compiler.is_compiling():  # part of a larger graph
        return nn.Module.__call__(self, *args, **kwargs)
    found: Serving | None = self.__dict__.get(STATE)
    state: Serving = found if found is not None and found.owner == id(self) else _attach(self)
    run = state.run
    if run is None or self.training or torch.is_grad_enabled() or _inside.get() or is_hooked(self):
        return state.answer(self, args, kwargs)
    try:
        return run(*args, **kwargs)
    except (ArgumentError, CacheMiss) as error:
        return state.explain(self, args, kwargs, error)


def _attach(module: nn.Module) -> Serving:
    """Give a module its state that was made or copied without its constructor."""
    attached: Serving = getattr(type(module), OPTIONS).attach(module)
    return attached


def own_call(cls: type) -> Any:
    """Return a class's ``__call__`` as it is without the decorator."""
    found: Any = cls.__call__
    return nn.Module.__call__ if found is dispatch else found


def is_inside() -> bool:
    """Tell whether an eager run of a model around this module is going on."""
    return _inside.get()


@contextmanager
def eager_region() -> Iterator[None]:
    """Run decorated modules in the block as they are: an outer one runs eagerly, or is watched or compared."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)
