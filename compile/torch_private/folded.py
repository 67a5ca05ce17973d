"""Dynamo: what a trace folds into its graph without a guard: the order of a set, and results marked constant.

A set of strings is iterated in a fixed order here, so that a caller can trace in both and compare.
Run on torch 2.13.0+cpu. Private names used, each left unwatched where it does not exist:
``variables.sets.SetVariable.unpack_var_sequence``, ``.tp_iter_impl`` and ``.call_method`` (``pop``),
``variables.lists.CommonListMethodsVariable.call_method`` (``extend``, by which ``list(...)`` is traced),
``variables.functions.invoke_and_store_as_constant`` (what ``assume_constant_result`` marks).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_ORDERED_NOT = ("SetVariable", "FrozensetVariable")  # their subclasses keep an order of their own
_WITHOUT_ORDER = frozenset(("call_sorted", "_call_min_max", "call_set", "call_frozenset", "sq_contains"))
"""Dynamo's own functions that take all items of a set and give a result without their order."""
_POLYFILLS_WITHOUT_ORDER = ("set", "any", "all", "frozenset")


COVERED = {
    "transformers.utils.import_utils": (
        "is_torch_available",
        "is_torch_greater_or_equal",
        "is_torch_less_or_equal",
    ),
}
"""Functions marked constant whose results follow from the torch build, which is a factor of every key."""


@dataclass(frozen=True)
class Folded:
    """One value that differs by process: ``what`` it is, ``hint`` what to write, ``where`` the user's line."""

    what: str
    hint: str
    where: str | None


@dataclass(frozen=True)
class FoldedValues:
    """What one trace folded: ``refused``, and ``ordered``, the sets of strings that were put in order."""

    refused: list[Folded]
    ordered: list[Folded]


@contextlib.contextmanager
def folded_values(
    user_line: Callable[[Any], str | None], *, descending: bool = False
) -> Iterator[FoldedValues]:
    """Note what a trace in this block folds without a guard; ``user_line`` names the line of a stack.

    Sets of strings are iterated in ascending order, or in descending order if that is asked for.
    """
    found = FoldedValues([], [])

    def note_order(variable: Any, *, one: bool = False) -> None:
        items = getattr(variable, "items", ())
        if type(variable).__name__ in _ORDERED_NOT and len(items) > 1 and not _order_is_lost():
            folded = Folded(
                "the order of a set, which differs in every process",
                "iterate over a tuple or a list, or over sorted(...)",
                user_line(_stack()),
            )
            kept = not one and _put_in_order(items, descending)
            (found.ordered if kept else found.refused).append(folded)

    def iterating(original: Any) -> Any:
        def noting(variable: Any, *args: Any, **kwargs: Any) -> Any:
            note_order(variable)
            return original(variable, *args, **kwargs)

        return noting

    def popping(original: Any) -> Any:
        def noting(variable: Any, tx: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "pop":
                note_order(variable, one=True)
            return original(variable, tx, name, *args, **kwargs)

        return noting

    def extending(original: Any) -> Any:
        def noting(variable: Any, tx: Any, name: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
            if name == "extend" and args:
                realize = getattr(args[0], "realize", None)
                note_order(realize() if callable(realize) else args[0])
            return original(variable, tx, name, args, *more, **kwargs)

        return noting

    def constant(original: Any) -> Any:
        def noting(tx: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            module, name = str(getattr(fn, "__module__", "")), getattr(fn, "__name__", "")
            if module.partition(".")[0] != "torch" and name not in COVERED.get(module, ()):
                found.refused.append(
                    Folded(
                        f"what {getattr(fn, '__qualname__', 'a function')} returned: it is marked with "
                        "assume_constant_result, so nothing of what it read is guarded",
                        "remove the mark, or keep the value in an attribute of the model",
                        user_line(_stack()),
                    )
                )
            return original(tx, fn, *args, **kwargs)

        return noting

    sets, lists = "torch._dynamo.variables.sets:SetVariable", "torch._dynamo.variables.lists"
    with contextlib.ExitStack() as wrapped:
        for place, name, wrap in (
            (sets, "unpack_var_sequence", iterating),
            (sets, "tp_iter_impl", iterating),
            (sets, "call_method", popping),
            (f"{lists}:CommonListMethodsVariable", "call_method", extending),
            ("torch._dynamo.variables.functions", "invoke_and_store_as_constant", constant),
            ("torch._dynamo.variables.nn_module", "invoke_and_store_as_constant", constant),
        ):
            wrapped.enter_context(_wrapped(place, name, wrap))
        yield found


def _put_in_order(items: Any, descending: bool) -> bool:
    """Sort the items of Dynamo's set in place; False if they are not all strings."""
    values: dict[Any, str] = {}
    for item in items:
        constant = getattr(getattr(item, "vt", None), "value", None)
        if not isinstance(items, dict) or not isinstance(constant, str):
            return False
        values[item] = constant
    kept = [(item, items[item]) for item in sorted(values, key=values.__getitem__, reverse=descending)]
    items.clear()
    items.update(kept)
    return True


@contextlib.contextmanager
def _wrapped(place: str, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    module, _, attribute = place.partition(":")
    owner: Any = None
    with contextlib.suppress(ImportError):
        owner = importlib.import_module(module)
    owner = getattr(owner, attribute, None) if attribute else owner
    original = vars(owner).get(name) if owner is not None else None
    if original is None:
        yield
        return
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _stack() -> list[traceback.FrameSummary]:
    from torch._guards import TracingContext

    return list(TracingContext.extract_stack())


def _order_is_lost() -> bool:
    """Tell whether what takes the items, in the operation that is traced now, forgets their order."""
    stack = _stack()
    if stack and "polyfills" in stack[-1].filename and stack[-1].name.startswith(_POLYFILLS_WITHOUT_ORDER):
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "step":
        if frame.f_code.co_name in _WITHOUT_ORDER:
            return True
        frame = frame.f_back
    return False
