"""The seam to symbolic shapes: expressions of fake tensors' sizes, ranges and guards as text.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used: ``SymInt.node.expr``,
``ShapeEnv.simplify / var_to_range / guards / deferred_runtime_asserts``, ``create_unbacked_symint``,
``_sympy.printers.PythonPrinter`` (text of an expression).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


def expression(value: object, shape_env: Any) -> Any:
    """Return the simplified sympy expression of an int or SymInt (or SymBool)."""
    import sympy

    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return shape_env.simplify(value.node.expr)
    return sympy.sympify(value)


def free_symbols(expr: Any) -> tuple[Any, ...]:
    """Return the free symbols of an expression, ordered by name."""
    return tuple(sorted(expr.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name)))


def to_text(expr: Any, names: Mapping[Any, str]) -> int | str:
    """Print an integer expression with its symbols renamed; a constant becomes an int."""
    import sympy
    from torch.utils._sympy.printers import PythonPrinter

    if expr.is_number and expr.is_integer:
        return int(expr)
    renamed = expr.xreplace(
        {s: sympy.Symbol(name, integer=True, nonnegative=True) for s, name in names.items()}
    )
    return str(PythonPrinter().doprint(renamed))


def condition_text(expr: Any, names: Mapping[Any, str]) -> str | None:
    """Print a boolean expression with its symbols renamed; None when it always holds."""
    import sympy

    if expr is sympy.true or expr is True:
        return None
    if isinstance(expr, sympy.Eq):
        return f"{to_text(expr.lhs, names)} == {to_text(expr.rhs, names)}"
    if isinstance(expr, sympy.Ne):
        return f"{to_text(expr.lhs, names)} != {to_text(expr.rhs, names)}"
    return str(to_text(expr, names))


def shape_guards(shape_env: Any) -> list[tuple[Any, str | None]]:
    """Return (expression, user's source line) of every guard and deferred runtime assert."""
    found: list[tuple[Any, str | None]] = []
    for guard in getattr(shape_env, "guards", ()):
        found.append((guard.expr, _where(getattr(guard, "sloc", None))))
    for asserts in getattr(shape_env, "deferred_runtime_asserts", {}).values():
        found.extend((item.expr, _where(getattr(item, "stack", None))) for item in asserts)
    return found


def _where(location: Any) -> str | None:
    """Return ``file:line: code`` of the user's frame of a guard (SLoc) or an assert (CapturedTraceback)."""
    if location is None:
        return None
    user = getattr(location, "user_stack", None)
    if user is None and hasattr(location, "summary"):
        user = location.summary()
    own = str(Path(torch.__file__).parent)
    for frame in reversed(list(user or ())):
        if not str(frame.filename).startswith(own):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return None


def symbol_range(symbol: Any, shape_env: Any) -> tuple[int, int | None]:
    """Return the inclusive range of a symbol; None for no upper bound."""
    bounds = shape_env.var_to_range.get(symbol)
    if bounds is None:
        return 0, None
    upper = bounds.upper
    return int(bounds.lower), int(upper) if getattr(upper, "is_integer", False) and upper.is_finite else None


def narrow(symbol: Any, shape_env: Any, low: int, high: int) -> None:
    """Tell the environment that a symbol lies in ``[low, high]``, so that ``max(1, s)`` simplifies to ``s``."""
    shape_env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=high)


def new_unbacked_size(shape_env: Any, low: int, high: int) -> torch.SymInt:
    """Create a size symbol about which only its range ``[low, high]`` is known."""
    from torch.fx.experimental import symbolic_shapes

    size: torch.SymInt = shape_env.create_unbacked_symint()
    symbolic_shapes._constrain_range_for_size(size, min=low, max=high)
    getattr(shape_env, "pending_fresh_unbacked_symbols", []).clear()
    return size


@contextlib.contextmanager
def tracing(fake_mode: Any) -> Iterator[Any]:
    """Enter a tracing context for ``fake_mode`` and yield it."""
    context = torch._guards.TracingContext(fake_mode)
    with torch._guards.tracing(context):
        yield context
