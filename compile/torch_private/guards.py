"""The seam to Dynamo's guards: what was guarded, as plain views with access paths.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used, and what breaks if they change:
``Guard.create_fn_name()``, ``.create_fn`` (a partial whose keywords or arguments are the guarded key),
``.originating_source``, ``.name`` and ``.user_stack`` (a view cannot be made); ``GuardBuilder`` (the
list of guard types, which ``compile/guard_table.py`` must cover); the globals ``__import_a_dot_b``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from pwcc.compile.runtime.portable import Json, NotPortable, describe
from pwcc.compile.torch_private.sources import NoPath, Path, source_path


@dataclass(frozen=True, slots=True)
class GuardView:
    """One guard. ``path`` is None where a source has no portable path; ``problem`` then names it."""

    type: str
    expression: str
    path: Path | None
    problem: str = ""
    where: str | None = None
    detail: Mapping[str, object] = field(default_factory=dict)
    other: Path | None = None


def guard_types() -> list[str]:
    """Return every guard type of the installed torch: the upper-case methods of ``GuardBuilder``."""
    from torch._dynamo.guards import GuardBuilder

    return [
        name for name, value in vars(GuardBuilder).items() if isinstance(value, FunctionType) and name.isupper()
    ]


def functorch_active() -> bool:
    """Tell whether a functorch transform or a forward-mode AD level is active right now."""
    import torch
    from torch.autograd import forward_ad

    functorch = getattr(torch._C, "_functorch", None)
    peek: Callable[[], object] | None = getattr(functorch, "peek_interpreter_stack", None)
    return bool(peek and peek() is not None) or getattr(forward_ad, "_current_level", -1) >= 0


def view(guard: Any) -> GuardView:
    """Return the view of one ``torch._guards.Guard``."""
    path, problem, other = None, "", None
    detail = _detail(guard.create_fn)
    try:
        path = source_path(guard.originating_source)
        if "source_b" in detail:
            other = source_path(detail.pop("source_b"))
        if guard.create_fn_name() == "HASATTR" and "attr" not in detail:  # 2.11: the last step is the name
            detail["attr"] = path.steps[-1][-1]
            path = Path(path.base, path.name, path.steps[:-1])
    except NoPath as error:
        problem = str(error)
    stack = list(guard.user_stack or ())
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else None
    return GuardView(guard.create_fn_name(), _name(guard), path, problem, where, detail, other)


def _name(guard: Any) -> str:
    try:
        return str(guard.name)
    except (NotImplementedError, RuntimeError):  # sources that refuse to have a name
        return type(guard.originating_source).__name__


def _detail(create_fn: Any) -> dict[str, Any]:
    if not isinstance(create_fn, functools.partial):
        return {}
    names = create_fn.func.__code__.co_varnames[2:]  # after self and guard
    return {**dict(zip(names, create_fn.args, strict=False)), **create_fn.keywords}


def module_of_alias(alias: str) -> str | None:
    """Return the module that Dynamo's global ``__import_a_dot_b`` stands for, if it is imported."""
    prefix = "__import_"
    if not alias.startswith(prefix):
        return None
    wanted = alias.removeprefix(prefix)
    names = [name for name in list(sys.modules) if name.replace(".", "_dot_") == wanted]
    return min(names) if names else None


def describe_key(key: object) -> Json:
    """Return the portable form of a guarded dictionary key.

    Raises:
        NoPath: an object with identity of its own.
    """
    try:
        return describe(key)
    except NotPortable as error:
        raise NoPath(f"a key that is {error}") from None


def views(guards: Sequence[Any]) -> list[GuardView]:
    """Return the views of all guards of a trace."""
    return [view(guard) for guard in guards]
