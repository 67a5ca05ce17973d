"""Artifact: what the compiled code takes for granted of the live model, checked once at load.

A :class:`PredicateSet` is the portable form of Dynamo's guards (``compile/predicates.py`` makes it).
Equal submodules share one entry: a group is a list of roots and the rules that hold for each of them,
so 32 equal layers cost one set of rules on disk and one loop here.

Form, as JSON: ``{"schema": 1, "rules": [[steps, test, value, source line], ...],
"groups": [[roots, rule numbers], ...]}``. It is never evaluated: paths are steps (``paths.py``), values
are described data (``portable.py``), tests are names (``checks.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.checks import CHECKS
from pwcc.compile.runtime.comparisons import Check
from pwcc.compile.runtime.paths import (
    LOST,
    MAX_STEPS,
    Absent,
    Getter,
    Roots,
    Step,
    getter,
    parse_root,
    parse_step,
    show_path,
)
from pwcc.compile.runtime.portable import Json
from pwcc.compile.runtime.secrets import concealed

SCHEMA = 1
MAX_RULES = 200_000  # a 128-layer decoder has under 400 distinct rules
MAX_PREDICATES = 1_000_000  # rules times roots, each checked at a load; that decoder has some 50,000
MAX_BYTES = 16 * 1024 * 1024
DEFAULT_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Violation:
    """One predicate that the live model does not meet."""

    path: str
    expected: str
    got: str
    where: str = ""
    """The line whose tracing relied on it, as ``file.py:line``, or empty."""

    def __str__(self) -> str:
        line = f" (relied on at {self.where})" if self.where else ""
        return f"{self.path}: compiled with {self.expected}, found {self.got}{line}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A test on the value that ``steps`` lead to from some root."""

    steps: tuple[Step, ...]
    test: str
    value: Json
    where: str = ""

    def to_json(self) -> list[Json]:
        """Return the stored form."""
        return [[list(step) for step in self.steps], self.test, self.value, self.where]


@dataclass(frozen=True, slots=True)
class Predicate:
    """A rule at one root."""

    root: str
    rule: Rule


@dataclass(frozen=True, slots=True)
class _Group:
    roots: tuple[str, ...]
    rules: tuple[int, ...]


class PredicateSet:
    """All predicates of one entry, grouped; build with :meth:`of`, read with :meth:`from_json`."""

    def __init__(self, rules: Sequence[Rule], groups: Sequence[_Group]) -> None:
        self._rules = tuple(rules)
        self._groups = tuple(groups)
        self._ready: list[tuple[Getter, Check]] = [
            (getter(rule.steps), CHECKS[rule.test].ready(rule.value)) for rule in self._rules
        ]

    def __len__(self) -> int:
        return sum(len(group.roots) * len(group.rules) for group in self._groups)

    @property
    def distinct_rules(self) -> int:
        """How many rules are stored, after sharing."""
        return len(self._rules)

    @classmethod
    def of(cls, predicates: Iterable[Predicate]) -> PredicateSet:
        """Group predicates: each rule once, and rules with the same roots together. Order-free."""
        roots_of: dict[bytes, set[str]] = {}
        rule_of: dict[bytes, Rule] = {}
        for predicate in predicates:
            name = strict.canonical(predicate.rule.to_json())
            rule_of[name] = predicate.rule
            roots_of.setdefault(name, set()).add(predicate.root)
        names = sorted(rule_of)
        shared: dict[tuple[str, ...], list[int]] = {}
        for number, name in enumerate(names):
            shared.setdefault(tuple(sorted(roots_of[name])), []).append(number)
        groups = [_Group(roots, tuple(numbers)) for roots, numbers in sorted(shared.items())]
        return cls([rule_of[name] for name in names], groups)

    def to_json(self) -> bytes:
        """Return the stored form: same predicates, same bytes."""
        return strict.canonical(
            {
                "schema": SCHEMA,
                "rules": [rule.to_json() for rule in self._rules],
                "groups": [[list(group.roots), list(group.rules)] for group in self._groups],
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str = "predicates") -> PredicateSet:
        """Read the stored form.

        Raises:
            CorruptEntry: over 16 MiB, an unknown schema, step, test or root, or a value of the wrong form.
        """
        fields = strict.Fields(strict.loads(data, where=where, max_bytes=MAX_BYTES), where)
        fields.int_("schema", low=SCHEMA, high=SCHEMA)
        rules = fields.list_("rules", _parse_rule, max_items=MAX_RULES)

        def parse_group(value: object, where: str) -> _Group:
            roots, numbers = _pair(value, where)
            return _Group(
                tuple(parse_root(root, where) for root in _list(roots, where)),
                tuple(_number(number, len(rules), where) for number in _list(numbers, where)),
            )

        groups = fields.list_("groups", parse_group, max_items=MAX_RULES)
        fields.done()
        if sum(len(group.roots) * len(group.rules) for group in groups) > MAX_PREDICATES:
            raise CorruptEntry(f"expected at most {MAX_PREDICATES} predicates", where=where)
        return cls(rules, groups)

    def lines(self) -> list[str]:
        """Return every predicate as text, in stored order: where, and what must hold there."""
        return [
            f"{show_path(root, rule.steps)}: {rule.test} {CHECKS[rule.test].expected(rule.value)}"
            for group in self._groups
            for root in group.roots
            for rule in map(self._rules.__getitem__, group.rules)
        ]

    def check(
        self,
        model: nn.Module,
        modules: Mapping[str, ModuleType] | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
    ) -> list[Violation]:
        """Return what does not hold on ``model``, at most ``limit`` of it; empty means all holds.

        ``modules`` are the imported Python modules (default ``sys.modules``); none is imported here. A
        root that is absent gives one violation, whatever hangs from it.
        """
        roots = Roots(model, sys.modules if modules is None else modules)
        found: list[Violation] = []
        ready = self._ready
        lost: set[str] = set()
        for group in self._groups:
            rules = [(*ready[number], number) for number in group.rules]
            for root in group.roots:
                try:
                    base = roots.resolve(root)
                except Absent as error:
                    if root not in lost:
                        lost.add(root)
                        where = self._rules[group.rules[0]].where if group.rules else ""
                        path = show_path(root, (), namespace=roots.namespace)
                        found.append(Violation(path, "it present", str(error), where))
                    continue
                for get, holds, number in rules:
                    rule = self._rules[number]
                    kind = CHECKS[rule.test]
                    expected = ""
                    try:
                        value = get(base)
                        if holds(value, roots):
                            continue
                        if kind.contrast is None:
                            got = kind.got(value)
                        else:
                            expected, got = kind.contrast(rule.value, value)
                    except (*LOST, Absent) as error:
                        got = f"nothing ({type(error).__name__}: {error})"
                    path = show_path(root, rule.steps, namespace=roots.namespace)
                    wanted = expected or kind.expected(rule.value)
                    found.append(Violation(path, wanted, concealed(got), rule.where))
                if len(found) >= limit:
                    return found[:limit]
        return found[:limit]


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list) or len(value) > MAX_RULES:
        raise CorruptEntry("expected a list", where=where)
    return value


def _pair(value: object, where: str) -> tuple[object, object]:
    found = _list(value, where)
    if len(found) != 2:
        raise CorruptEntry("expected a pair", where=where)
    return found[0], found[1]


def _number(value: object, count: int, where: str) -> int:
    number = strict.as_int(value, where)
    if not 0 <= number < count:
        raise CorruptEntry(f"expected the number of a rule under {count}, got {number}", where=where)
    return number


def _parse_rule(value: object, where: str) -> Rule:
    found = _list(value, where)
    if len(found) != 4:
        raise CorruptEntry("expected [steps, test, value, source line]", where=where)
    steps = _list(found[0], where)
    test = strict.as_str(found[1], where)
    if len(steps) > MAX_STEPS or test not in CHECKS:
        got = strict.shown(test)
        raise CorruptEntry(f"expected at most {MAX_STEPS} steps and a known test, got {got}", where=where)
    expected: Json = found[2]  # type: ignore[assignment]  # just parsed from JSON
    CHECKS[test].validate(expected, where)
    return Rule(
        tuple(parse_step(step, where) for step in steps), test, expected, strict.as_str(found[3], where)
    )
