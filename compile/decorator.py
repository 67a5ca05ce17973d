"""Artifact: ``@pwcc.support_compile``, which puts a state before a class's calls and changes nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from torch import nn

from pwcc.cache.errors import UsageError
from pwcc.compile.call import OPTIONS, STATE, dispatch, own_call
from pwcc.compile.decorator_dims import DimsOf, dynamic_dims
from pwcc.compile.decorator_state import ModuleState, compile_state
from pwcc.compile.levels import CompileConfig, context_config
from pwcc.compile.signature import definition

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Decoration:
    """What a class was decorated with."""

    cls: type[nn.Module]
    config: CompileConfig
    dynamic_arg_dims: Mapping[str, DimsOf] | None
    enabled_if: Callable[[Any], bool] | None

    def attach(self, module: nn.Module) -> ModuleState:
        """Give a module its state. A copy has one already; else ``enabled_if`` is asked now."""
        found: ModuleState | None = module.__dict__.get(STATE)
        if found is not None:
            state = found.for_module(module)
        else:
            enabled = True if self.enabled_if is None else bool(self.enabled_if(module))
            state = ModuleState(enabled=enabled, context=context_config(), owner=id(module))
        module.__dict__[STATE] = state
        return state


@overload
def support_compile(cls: type[M], /) -> type[M]: ...
@overload
def support_compile(
    *,
    dynamic_arg_dims: Mapping[str, DimsOf] | None = None,
    enabled_if: Callable[[Any], bool] | None = None,
    config: CompileConfig | None = None,
    **options: object,
) -> Callable[[type[M]], type[M]]: ...
def support_compile(
    cls: type[M] | None = None,
    /,
    *,
    dynamic_arg_dims: Mapping[str, DimsOf] | None = None,
    enabled_if: Callable[[Any], bool] | None = None,
    config: CompileConfig | None = None,
    **options: object,
) -> type[M] | Callable[[type[M]], type[M]]:
    """Let instances of a module class be served from the cache, compiled where that is allowed and needed.

    The class is changed in place and returned: ``isinstance``, subclasses, ``state_dict``, hooks, pickling,
    copying, ``.to()`` and every method stay as they are; ``module.forward(...)`` is eager. The first call
    loads or compiles (see :class:`pwcc.CompileConfig`); later ones go to the compiled code, with its
    arguments checked and no guard evaluated. ``module.compile_state`` tells where it stands.

    Eager, with one warning each: a module in training mode, with hooks around its forward, or called where
    gradients are enabled and needed. A decorated module inside another one becomes part of its graph.

    Args:
        cls: the class; left out where options are given.
        dynamic_arg_dims: what is dynamic of each argument: a dimension, several, or ``{dimension: name}``.
            Default: the first dimension of every argument annotated as a tensor.
        enabled_if: asked with the module when it is constructed (after the class's own ``__init__``); where
            it says no, the module stays eager for life.
        config: a configuration; ``options`` are fields of one, such as ``level=2`` or ``sizes=(1, 2, 4)``,
            and win over it. Both win over the context, the process and the environment.

    Raises:
        UsageError: no module class, an overridden ``__call__``, unknown options, arguments that do not exist.
    """
    made = CompileConfig(**_known(options)).over(config or CompileConfig())

    def decorate(found: type[M]) -> type[M]:
        _check(found)
        if dynamic_arg_dims is not None:
            dynamic_dims(found.forward, dynamic_arg_dims)  # a wrong name is told where it is written
        decoration = Decoration(found, made, dynamic_arg_dims, enabled_if)
        setattr(found, OPTIONS, decoration)
        found.__call__ = dispatch  # type: ignore[method-assign]
        found._apply = _apply  # type: ignore[method-assign]
        found.compile_state = property(compile_state)  # type: ignore[attr-defined]
        found.__init__ = _attaching(found.__init__, found)  # type: ignore[method-assign]
        return found

    return decorate if cls is None else decorate(cls)


def _known(options: Mapping[str, object]) -> dict[str, Any]:
    unknown = [name for name in options if name not in CompileConfig.__dataclass_fields__]
    if unknown:
        known = ", ".join(CompileConfig.__dataclass_fields__)
        raise UsageError(f"unknown option {unknown[0]!r}", hint=f"expected one of {known}")
    return dict(options)


def _check(cls: object) -> None:
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise UsageError(f"expected a class of torch.nn.Module to decorate, got {cls!r:.80}")
    if own_call(cls) is not nn.Module.__call__:
        raise UsageError(
            f"{cls.__qualname__} has a __call__ of its own, which compiled code would not run",
            where=definition(cls.__call__),
            hint="move what it does into forward",
        )
    if "compile_state" in vars(cls):
        if not isinstance(vars(cls).get(OPTIONS), Decoration):
            raise UsageError(f"{cls.__qualname__} has a compile_state of its own", hint="rename it")
        raise UsageError(f"{cls.__qualname__} is decorated twice")


def _attaching(init: Callable[..., None], cls: type[nn.Module]) -> Callable[..., None]:
    """Wrap a constructor: at its end the state is there. Of several decorated bases the lowest gives it."""

    @functools.wraps(init)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        decoration: Decoration = getattr(type(self), OPTIONS)
        if decoration.cls is cls and STATE not in self.__dict__:
            decoration.attach(self)

    return construct


def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Move or convert the module as torch does; what was loaded for its old form is then given up."""
    moved: nn.Module = nn.Module._apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
    state: ModuleState | None = self.__dict__.get(STATE)
    if state is not None and state.owner == id(self):
        state.forget()
    return moved
