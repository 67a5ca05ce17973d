"""JSON of any shape, read for showing: what is not of the expected kind is shown as nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pwcc.cache.strict import Json


def scalar(value: Json) -> str:
    """Return one value as a person reads it: yes and no, ``-`` for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def obj(value: Json) -> Mapping[str, Json]:
    """Return an object, or an empty one."""
    return value if isinstance(value, dict) else {}


def array(value: Json) -> Sequence[Json]:
    """Return a list, or an empty one."""
    return value if isinstance(value, list) else ()


def number(value: Json) -> int:
    """Return an integer, or 0."""
    return value if isinstance(value, int) else 0


def real(value: Json) -> float:
    """Return a number, or 0."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def variant_text(value: Json) -> str:
    """Return a variant of ``inspection.detail`` as ``n=8`` or ``dynamic 1..8192``."""
    variant = obj(value)
    if variant.get("size") is not None:
        return f"n={scalar(variant.get('size'))}"
    return "dynamic " + "..".join(scalar(item) for item in array(variant.get("tokens")))
