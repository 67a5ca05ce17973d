"""Artifact: hooks, those around every module of a process and those of one module, as facts to compare."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module

from pwcc.compile.runtime.portable import Json, NotPortable, describe, show, type_name

_GLOBAL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

_CALLS = {
    "__call__": "_wrapped_call_impl",
    "_wrapped_call_impl": "_wrapped_call_impl",
    "_call_impl": "_call_impl",
    "__getattr__": "__getattr__",
}
"""Functions of ``nn.Module`` that compiled code skips, and the name each was defined under."""

HOOK_TABLES: dict[str, tuple[str, ...]] = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
}
"""A module's tables of hooks by id, and the tables of the same ids that say how each is called."""

ALL_HOOK_TABLES = frozenset({*HOOK_TABLES, *(side for sides in HOOK_TABLES.values() for side in sides)})


def global_hooks() -> list[str]:
    """Return the names of torch's registries of global module hooks that are not empty."""
    return [name for name in _GLOBAL if getattr(module, name, None)]


def is_hooked(holder: Any) -> bool:
    """Tell whether hooks run around a module's forward: its own, or global ones. Some 100 ns."""
    return bool(
        holder._forward_hooks
        or holder._forward_pre_hooks
        or holder._backward_hooks
        or holder._backward_pre_hooks
        or module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
    )


def replaced_calls() -> list[str]:
    """Return the names of ``nn.Module``'s own functions behind a call or an attribute that were replaced.

    Code is compiled past them, as torch has them.
    """
    return [
        f"Module.{name}"
        for name, own in _CALLS.items()
        if getattr(vars(module.Module).get(name), "__globals__", None) is not vars(module)
        or vars(module.Module)[name].__code__.co_qualname != f"Module.{own}"
    ]


def module_hooks(holder: Any) -> Json:
    """Return the hooks of one module in the order they run: ``[table, what, options]`` each.

    The id under which torch keeps a hook counts the hooks of the whole process, so it is left out. A hook
    that is no function is given by its type; the predicates on what it holds say the rest.
    """
    found: list[Json] = []
    for table, sides in HOOK_TABLES.items():
        for key, hook in getattr(holder, table, {}).items():
            options: list[Json] = [side for side in sides if key in getattr(holder, side, {})]
            found.append([table, _described(hook), options])
    return found


def _described(hook: object) -> Json:
    try:
        return describe(hook)
    except NotPortable:
        return ["object", type_name(type(hook))]


def show_hooks(hooks: Any) -> str:
    """Word what :func:`module_hooks` returned."""
    names = ", ".join(f"{table}: {show(what)}" for table, what, _ in hooks)
    return f"hooks {names}" if names else "no hooks"
