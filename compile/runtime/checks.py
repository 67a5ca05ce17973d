"""Artifact: the tests a predicate may name, in one table.

Each :class:`Kind` makes a ready test from the stored value, once at load; validates what was stored;
and words both sides for a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime import comparisons as compare
from pwcc.compile.runtime.classes import contrast, contrast_class
from pwcc.compile.runtime.comparisons import Check
from pwcc.compile.runtime.hooks import module_hooks, show_hooks
from pwcc.compile.runtime.portable import Json, attempt, show, type_name
from pwcc.compile.runtime.secrets import secret


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of test: what it needs stored, how it is made ready, how both sides are worded."""

    ready: Callable[[Json], Check]
    got: Callable[[Any], str]
    expected: Callable[[Any], str] = show
    stored: tuple[type, ...] = ()
    """Types of JSON the stored value may have; empty means any."""
    contrast: Callable[[Json, Any], tuple[str, str]] | None = None
    """Words both sides by what differs, where each on its own would be too long."""

    def validate(self, value: Json, where: str) -> None:
        """Refuse a stored value of the wrong form.

        Raises:
            CorruptEntry: see above.
        """
        if self.stored and (not isinstance(value, self.stored) or isinstance(value, bool)):
            raise CorruptEntry("expected another form of predicate value", where=where)
        try:
            self.ready(value)
            self.expected(value)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CorruptEntry(f"expected another form of predicate value: {error}", where=where) from None


def _count(value: int) -> str:
    return f"{value} item" + "s" * (value != 1)


def _live(value: object) -> str:
    return show(attempt(value))


CHECKS: dict[str, Kind] = {
    "is": Kind(compare.equal, _live),
    "digest": Kind(compare.digested, lambda v: "another", lambda e: f"a value of digest {e[:8]}", (str,)),
    "secret": Kind(secret, lambda v: "another", lambda e: "a value that is not shown", (list,)),
    "type": Kind(compare.of_type, lambda v: f"type {type_name(type(v))}", lambda e: f"type {e}", (str,)),
    "instance": Kind(
        compare.instance,
        lambda v: f"type {type_name(type(v))}",
        lambda e: f"type {e[0]}",
        (list,),
        lambda e, v: contrast(e, type(v)),
    ),
    "class": Kind(
        compare.the_class,
        _live,
        lambda e: f"class {e[0]}",
        (list,),
        contrast_class,
    ),
    "base": Kind(compare.as_base_type, lambda v: repr(v)[:80], lambda e: f"{e[0]} {show(e[1])}", (list,)),
    "length": Kind(compare.length, lambda v: _count(len(v)), _count, (int,)),
    "keys": Kind(compare.keys, lambda v: compare.show_keys(compare.keys_of(v)), compare.show_keys, (list,)),
    "has": Kind(compare.has, lambda v: "none", lambda e: f"an attribute {e!r}", (str,)),
    "lacks": Kind(compare.lacks, lambda v: "one", lambda e: f"no attribute {e!r}", (str,)),
    "lacks_own": Kind(compare.lacks_own, lambda v: "one", lambda e: f"no attribute {e!r} of its own", (str,)),
    "contains": Kind(compare.contains, lambda v: "none", lambda e: f"an entry {show(e)}"),
    "excludes": Kind(compare.excludes, lambda v: "one", lambda e: f"no entry {show(e)}"),
    "tensor": Kind(compare.tensor, compare.show_tensor, compare.show_facts, (list,)),
    "hooks": Kind(compare.hooks, lambda v: show_hooks(module_hooks(v)), show_hooks, (list,)),
    "not_none": Kind(compare.not_none, lambda v: "None", lambda e: "a value"),
    "same": Kind(
        compare.same,
        lambda v: "another object",
        lambda e: f"the same object as {compare.show_other(e)}",
        (list,),
    ),
}
"""Every test a predicate may name."""
