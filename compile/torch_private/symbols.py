"""The seam to symbolic shapes: expressions of fake tensors' sizes, ranges and guards as text.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used: ``SymInt.node.expr / _expr``,
``ShapeEnv.simplify / replace / bound_sympy / guards / deferred_runtime_asserts / replacements_slocs``,
``create_unbacked_symint``, ``_sympy.printers.PythonPrinter`` (text of an expression),
``_sympy.value_ranges.ValueRangeError``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def expression(value: object, shape_env: Any) -> Any:
    """Return the simplified sympy expression of an int or SymInt (or SymBool)."""
    import sympy

    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return simplified(value.node.expr, shape_env)
    return sympy.sympify(value)


def simplified(expr: Any, shape_env: Any) -> Any:
    """Return an expression as the environment simplifies it, its value unchanged.

    torch takes ``int(a / b)`` for ``a // b``, which it is for one sign only.
    """
    from torch.utils._sympy import functions

    of: Any = functions
    exact: dict[Any, Any] = {}
    for atom in expr.atoms(of.TruncToInt) if hasattr(expr, "atoms") else ():
        (quotient,) = atom.args
        if not isinstance(quotient, of.IntTrueDiv):
            continue
        base, divisor = (shape_env.replace(part) for part in quotient.args)
        if shape_env.bound_sympy(divisor).upper < 0:
            base, divisor = -base, -divisor
        if shape_env.bound_sympy(divisor).lower <= 0:  # of either sign: no integer division says it
            exact[atom] = of.TruncToInt(of.FloatTrueDiv(of.ToFloat(base), of.ToFloat(divisor)))
        elif shape_env.bound_sympy(base).lower < 0:
            up, down = of.Max(0, base), of.Max(0, -base)
            exact[atom] = of.FloorDiv(up, divisor) - of.FloorDiv(down, divisor)
        else:
            exact[atom] = of.FloorDiv(base, divisor)
    return shape_env.simplify(expr.xreplace(exact) if exact else expr)


def free_symbols(expr: Any) -> tuple[Any, ...]:
    """Return the free symbols of an expression, ordered by name."""
    return tuple(sorted(expr.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name)))


def to_text(expr: Any, names: Mapping[Any, str]) -> int | str:
    """Print an integer expression with its symbols renamed; a constant becomes an int.

    Symbols may share a name: they are then one number, and the text is simplified accordingly.
    """
    from torch.utils._sympy.printers import PythonPrinter

    renamed = _renamed(expr, names)
    if renamed.is_number and renamed.is_integer:
        return int(renamed)
    return str(PythonPrinter().doprint(renamed))


def condition_text(expr: Any, names: Mapping[Any, str]) -> str | None:
    """Print a boolean expression with its symbols renamed; None when it always holds."""
    import sympy

    renamed = _renamed(expr, names) if isinstance(expr, sympy.Basic) else expr
    if renamed in (sympy.true, True):
        return None
    if isinstance(renamed, (sympy.Eq, sympy.Ne)):
        operation = "==" if isinstance(renamed, sympy.Eq) else "!="
        return f"{to_text(renamed.lhs, {})} {operation} {to_text(renamed.rhs, {})}"
    return str(to_text(renamed, {}))


def _renamed(expr: Any, names: Mapping[Any, str]) -> Any:
    import sympy

    return expr.xreplace({s: sympy.Symbol(name, integer=True, nonnegative=True) for s, name in names.items()})


def shape_guards(
    shape_env: Any, lines: Mapping[Any, str] | None = None, files: Sequence[str] = ()
) -> list[tuple[Any, str | None]]:
    """Return (expression, user's ``file:line: code``) of every guard and deferred runtime assert.

    ``lines`` are known lines of asserts by expression; ``files`` are the traced files, by which torch's
    shortened file names become whole again.
    """
    known = lines or {}
    found: list[tuple[Any, str | None]] = []
    for guard in getattr(shape_env, "guards", ()):
        found.append((guard.expr, _where(getattr(guard, "sloc", None), files)))
    for asserts in getattr(shape_env, "deferred_runtime_asserts", {}).values():
        found.extend((item.expr, known.get(item.expr)) for item in asserts)
    return found


def fixed_by(symbol: Any, shape_env: Any, files: Sequence[str] = ()) -> str | None:
    """Return the user's line at which a symbol was replaced by a value or another symbol."""
    return _where(getattr(shape_env, "replacements_slocs", {}).get(symbol), files)


def _where(location: Any, files: Sequence[str]) -> str | None:
    """Turn torch's ``code  # short/file.py:3 in name`` into ``file:line: code``."""
    match = re.fullmatch(
        r"(.*)  # (.*):(\d+) in .*", getattr(location, "maybe_user_loc", None) or "", re.DOTALL
    )
    if match is None:
        return None
    code, short, line = match.groups()
    whole = [name for name in files if name.endswith(short)]
    return f"{whole[0] if whole else short}:{line}: {code}"


def original_symbol(value: object) -> Any | None:
    """Return the symbol that a size was before the trace replaced it by a value."""
    expr = getattr(getattr(value, "node", None), "_expr", None)
    return expr if getattr(expr, "is_symbol", False) else None


def equal(left: Any, right: Any) -> Any:
    """Return the condition that two expressions are equal."""
    import sympy

    return sympy.Eq(left, right)


def narrow(symbol: Any, shape_env: Any, low: int, high: int) -> bool:
    """Tell the environment that a symbol lies in ``[low, high]``, so that ``max(1, s)`` simplifies to ``s``.

    False if the trace knows already that it lies in no part of that range.
    """
    from torch.utils._sympy.value_ranges import ValueRangeError

    try:
        shape_env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=high)
    except ValueRangeError:
        return False
    return True


def new_unbacked_size(shape_env: Any, low: int, high: int) -> torch.SymInt:
    """Create a size symbol about which only its range ``[low, high]`` is known."""
    from torch.fx.experimental import symbolic_shapes

    size: torch.SymInt = shape_env.create_unbacked_symint()
    symbolic_shapes._constrain_range_for_size(size, min=low, max=high)
    getattr(shape_env, "pending_fresh_unbacked_symbols", []).clear()
    return size


def new_backed_size(shape_env: Any, name: str, low: int, high: int, *, hint: int) -> torch.SymInt:
    """Create a size symbol in ``[low, high]`` with a hint; questions about it become guards."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
    shape_env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=high)
    size: torch.SymInt = shape_env.create_symintnode(symbol, hint=hint, source=source)
    return size


@contextlib.contextmanager
def tracing(fake_mode: Any) -> Iterator[Any]:
    """Enter a tracing context for ``fake_mode`` and yield it."""
    from torch import _guards

    context = _guards.TracingContext(fake_mode)
    with _guards.tracing(context):
        yield context
