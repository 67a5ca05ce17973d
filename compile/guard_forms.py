"""Key: from a form of the guard table and the guarded value to what is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pwcc.compile.guard_table import Form
from pwcc.compile.runtime.comparisons import as_base, plain_keys, tensor_facts
from pwcc.compile.runtime.portable import Json, NotPortable, describe, type_name
from pwcc.compile.torch_private.guards import GuardView, describe_key


@dataclass(frozen=True, slots=True)
class Written:
    """A test and the value it compares with."""

    test: str
    value: Json


def write(form: Form, value: object, guard: GuardView) -> list[Written]:
    """Return the tests that carry a guard of this form on ``value``.

    Raises:
        NotPortable, NoPath: the value, or the key the guard names, has no portable form.
    """
    return _WRITERS[form](value, guard)


def _name(guard: GuardView, detail: str) -> str:
    found = guard.detail.get(detail)
    if not isinstance(found, str):
        raise NotPortable(f"expected the guard to name its {detail}, got {type(found).__name__}")
    return found


def _length(value: object, guard: GuardView) -> list[Written]:
    size = len(value)  # type: ignore[arg-type]  # Dynamo took its length too
    kind = [] if isinstance(value, dict) else [Written("type", type_name(type(value)))]
    return [*kind, Written("length", size)]


def _keys(value: object, guard: GuardView) -> list[Written]:
    return [Written("keys", [describe_key(key) for key in plain_keys(value)])]


def _contains(wanted: bool) -> Callable[[object, GuardView], list[Written]]:
    def writer(value: object, guard: GuardView) -> list[Written]:
        holds = wanted != bool(guard.detail.get("invert", False))  # 2.11 inverts, 2.13 has a type of its own
        return [Written("contains" if holds else "excludes", describe_key(guard.detail.get("key")))]

    return writer


def _attribute(value: object, guard: GuardView) -> list[Written]:
    name = _name(guard, "attr")
    return [Written("has" if hasattr(value, name) else "lacks", name)]


_WRITERS: dict[Form, Callable[[object, GuardView], list[Written]]] = {
    Form.VALUE: lambda value, guard: [Written("is", describe(value))],
    Form.IDENTITY: lambda value, guard: [Written("is", describe(value))],
    Form.TYPE: lambda value, guard: [Written("type", type_name(type(value)))],
    Form.CONSTANT_SUBCLASS: lambda value, guard: [Written("base", as_base(value))],
    Form.LENGTH: _length,
    Form.KEYS: _keys,
    Form.CONTAINS: _contains(True),
    Form.EXCLUDES: _contains(False),
    Form.ATTRIBUTE: _attribute,
    Form.LACKS_OWN: lambda value, guard: [Written("lacks_own", _name(guard, "attr"))],
    Form.EMPTY_HOOKS: lambda value, guard: [Written("length", 0)],
    Form.NOT_NONE: lambda value, guard: [Written("not_none", None)],
    Form.TENSOR: lambda value, guard: [Written("tensor", tensor_facts(value))],
}
