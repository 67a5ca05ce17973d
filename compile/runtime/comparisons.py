"""Artifact: how a live value is compared with what was compiled, per kind of predicate.

Each function takes the stored value and returns the ready test. Comparisons are by exact type and by
described value, so that nothing of the live model's own ``__eq__`` decides.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from pwcc.cache import strict
from pwcc.compile.runtime.classes import class_record
from pwcc.compile.runtime.hooks import module_hooks
from pwcc.compile.runtime.paths import Roots, Step, getter, parse_root, parse_step, show_path
from pwcc.compile.runtime.portable import Json, NotPortable, attempt, describe, float_text, show, type_name

Check: TypeAlias = Callable[[Any, Roots], bool]  # Any: the value is what is being found out


def equal(expected: Json) -> Check:
    """Equal and of the same type, with short cuts for the kinds that make up most guards."""
    if expected is None or isinstance(expected, bool):
        return lambda value, _: value is expected
    if isinstance(expected, (int, str)):
        kind = type(expected)
        return lambda value, _: type(value) is kind and value == expected
    if isinstance(expected, list) and expected[:1] == ["float"] and isinstance(expected[1], str):
        text = float_text(float.fromhex(expected[1]))
        return lambda value, _: type(value) is float and float_text(value) == text
    return lambda value, _: attempt(value) == expected


def digest(value: Json) -> str:
    """Return the SHA-256 of a described value that must not be readable in a store."""
    return hashlib.sha256(b"pwcc predicate\0" + strict.canonical(value)).hexdigest()


def digested(expected: Json) -> Check:
    """Equal by digest."""
    return lambda value, _: digest(attempt(value)) == expected


def of_type(expected: Json) -> Check:
    """Of exactly this type, by qualified name."""
    seen: dict[type, bool] = {}  # a handful of types over thousands of values

    def holds(value: object, _: Roots) -> bool:
        cls = type(value)
        found = seen.get(cls)
        if found is None:
            seen[cls] = found = type_name(cls) == expected
        return found

    return holds


def instance(expected: Json) -> Check:
    """Of this type: its name, bases, metaclass and methods."""
    of_class = the_class(expected)
    return lambda value, roots: of_class(type(value), roots)


def the_class(expected: Json) -> Check:
    """Is this class: its name, bases, metaclass and methods."""
    if not isinstance(expected, list) or len(expected) != 4 or not isinstance(expected[3], list):
        raise ValueError("expected the record of a class")
    if not all(isinstance(member, list) and len(member) == 2 for member in expected[3]):
        raise ValueError("expected the members of a class")

    def holds(cls: object, roots: Roots) -> bool:
        if not isinstance(cls, type):
            return False
        found = roots.classes.get(cls)
        if found is None:
            roots.classes[cls] = found = class_record(cls)
        return found == expected

    return holds


_BASES: dict[type, Callable[[Any], object]] = {
    int: int.__int__,  # the base's own converter: a subclass may override its
    float: float.__float__,
    str: str.__str__,
    bytes: bytes,
    complex: complex,
}


def as_base(value: object) -> list[Json]:
    """Return the name of the constant type ``value`` derives from, and its value as that type.

    Raises:
        NotPortable: it derives from none.
    """
    for base, plain in _BASES.items():
        if isinstance(value, base):
            return [base.__name__, describe(plain(value))]
    raise NotPortable(f"an object of type {type_name(type(value))}")


def as_base_type(expected: Json) -> Check:
    """Equal as the constant type it derives from."""
    return lambda value, _: isinstance(value, tuple(_BASES)) and as_base(value) == expected


def length(expected: Json) -> Check:
    """Holds this many items."""
    return lambda value, _: len(value) == expected


def keys_of(value: Any) -> Json:
    """Return the described keys of a mapping, in order, past any method it overrides."""
    return [attempt(key) for key in plain_keys(value)]


def plain_keys(value: Any) -> Iterable[Any]:
    """Return a mapping's keys in the order of its iteration, past any method that a subclass overrides."""
    if isinstance(value, OrderedDict):  # it has an order of its own, beside the dictionary's
        return OrderedDict.keys(value)
    found: Iterable[Any] = dict.keys(value) if isinstance(value, dict) else value.keys()
    return found


def keys(expected: Json) -> Check:
    """Holds these keys in this order."""
    return lambda value, _: keys_of(value) == expected


def show_keys(value: Json) -> str:
    """Word a list of described keys."""
    return "keys " + ", ".join(show(key) for key in value) if isinstance(value, list) and value else "no keys"


def has(expected: Json) -> Check:
    """Has this attribute."""
    name = str(expected)
    return lambda value, _: hasattr(value, name)


def lacks(expected: Json) -> Check:
    """Has not this attribute."""
    name = str(expected)
    return lambda value, _: not hasattr(value, name)


def lacks_own(expected: Json) -> Check:
    """Has not this attribute in its own dictionary."""
    return lambda value, _: expected not in value.__dict__


def contains(expected: Json) -> Check:
    """Holds this key."""
    if isinstance(expected, (str, int)):  # hashes as it is
        return lambda value, _: expected in value
    return lambda value, _: any(attempt(key) == expected for key in value)


def excludes(expected: Json) -> Check:
    """Does not hold this key."""
    inner = contains(expected)
    return lambda value, roots: not inner(value, roots)


def hooks(expected: Json) -> Check:
    """Has these hooks in this order, whatever their ids in this process."""
    return lambda value, _: module_hooks(value) == expected


def not_none(expected: Json) -> Check:
    """Is not None."""
    return lambda value, _: value is not None


def tensor_facts(value: object) -> Json:
    """Return type, dtype, shape and strides of a tensor that is in no module's tree; not its device."""
    if not isinstance(value, torch.Tensor):
        raise NotPortable(f"an object of type {type_name(type(value))}")
    return [type_name(type(value)), str(value.dtype), list(value.shape), list(value.stride())]


def tensor(expected: Json) -> Check:
    """Is a tensor of these facts."""
    return lambda value, _: isinstance(value, torch.Tensor) and tensor_facts(value) == expected


def show_facts(facts: Json) -> str:
    """Word the facts of a tensor."""
    if not isinstance(facts, list) or len(facts) != 4:
        raise ValueError("expected [type, dtype, shape, strides]")
    return f"a {facts[1]} tensor of shape {facts[2]}, strides {facts[3]}"


def show_tensor(value: object) -> str:
    """Word a live value where a tensor was."""
    return show_facts(tensor_facts(value)) if isinstance(value, torch.Tensor) else show(attempt(value))


def _other(value: Json) -> tuple[str, tuple[Step, ...]]:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise ValueError("expected [root, steps]")
    return parse_root(value[0], "same"), tuple(parse_step(step, "same") for step in value[1])


def same(expected: Json) -> Check:
    """Is the very object that the other path leads to."""
    root, steps = _other(expected)
    get = getter(steps)
    return lambda value, roots: get(roots.resolve(root)) is value


def show_other(expected: Json) -> str:
    """Word the other path."""
    return show_path(*_other(expected))
