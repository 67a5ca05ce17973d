"""Key: a site's own word on environment variables, beside the two tables of :mod:`pwcc.cache.environment`.

In this order: a name that the site excludes is no factor, one that it includes is, and the tables decide
on the rest. The policy is itself a factor of an entry. What it includes is stored in the manifest with its
values, so a serving host compares them without any configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from pwcc.cache import environment
from pwcc.cache.environment import EXCLUDED, READ, Pattern
from pwcc.cache.errors import UsageError
from pwcc.cache.strict import Fields, Json, as_str, as_text

_PATTERN = re.compile(r"[A-Za-z0-9_*.\-]{1,200}")
_SITE: Final = "the site's policy"
_UNKNOWN: Final = "no table names it: a factor only if the model's code is seen to read it"


@dataclass(frozen=True)
class Policy:
    """Name patterns that a site includes and excludes; ``*`` is any characters. Build with :meth:`of`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, *, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> Policy:
        """Return the policy, sorted, each pattern once.

        Raises:
            UsageError: something that is no variable's name or pattern, a pattern that matches every
                variable, or one that is both included and excluded.
        """
        lists = (tuple(sorted(set(include))), tuple(sorted(set(exclude))))
        for pattern in (*lists[0], *lists[1]):
            if not _PATTERN.fullmatch(pattern):
                raise UsageError(f"expected a variable's name, or a pattern with *, got {pattern[:80]!r}")
            if not pattern.strip("*"):
                raise UsageError(
                    f"the pattern {pattern!r} matches every variable",
                    hint="name the variables: HOME, PWD and job ids differ on every host",
                )
        both = sorted(set(lists[0]) & set(lists[1]))
        if both:
            raise UsageError(f"{both[0]} is both included and excluded", hint="say one of the two")
        return cls(*lists)

    def __add__(self, other: Policy) -> Policy:
        """Return both policies together."""
        return Policy.of(include=self.include + other.include, exclude=self.exclude + other.exclude)

    @cached_property
    def _tables(self) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
        include, exclude = (
            tuple(Pattern(glob, _SITE) for glob in globs) for globs in (self.include, self.exclude)
        )
        return include, exclude

    def includes(self, name: str) -> bool:
        """Return whether the site made a variable of this name a factor."""
        include, exclude = self._tables
        return bool(
            include
            and environment.matches(include, name)
            and not (exclude and environment.matches(exclude, name))
        )

    def is_factor(self, name: str) -> bool:
        """Return whether a variable of this name is part of a key."""
        _, exclude = self._tables
        if exclude and environment.matches(exclude, name):
            return False
        return self.includes(name) or environment.is_factor(name)

    def factors(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that are factors, by name; values as :func:`environment.shown_of` has them."""
        names = sorted(name for name in environ if self.is_factor(name))
        return {name: environment.shown_of(name, environ[name]) for name in names}

    def included(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return those factors that are there by the site's word: what a serving host compares."""
        names = sorted(name for name in environ if self.includes(name)) if self.include else []
        return {name: environment.shown_of(name, environ[name]) for name in names}

    def decide(self, name: str) -> tuple[bool, str, str]:
        """Return whether a name is a factor, the pattern that decides, and the reason."""
        include, exclude = self._tables
        for table, answer in ((exclude, False), (include, True), (EXCLUDED, False), (READ, True)):
            found = environment.match(table, name)
            if found is not None:
                return answer, found.glob, found.reason
        return False, "", _UNKNOWN

    def __str__(self) -> str:
        sides = (("include", self.include), ("exclude", self.exclude))
        return ", ".join(f"{name} {' '.join(globs)}" for name, globs in sides if globs) or "no site policy"

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"include": list(self.include), "exclude": list(self.exclude)}


@dataclass(frozen=True)
class SiteEnvironment:
    """What an entry records of a site's policy: the policy, and the values of what it included."""

    policy: Policy
    values: Mapping[str, str]

    @classmethod
    def record(cls, policy: Policy, environ: Mapping[str, str]) -> SiteEnvironment:
        """Return what an entry made now holds."""
        return cls(policy, policy.included(environ))

    def changes(self, environ: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
        """Return ``(name, recorded, now)`` of every included variable that differs; None is absent."""
        if not self.policy.include:
            return []
        then, now = self.values, self.policy.included(environ)
        return [
            (name, then.get(name), now.get(name))
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {**self.policy.to_json(), "values": dict(self.values)}

    @classmethod
    def parse(cls, value: object, where: str) -> SiteEnvironment:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        lists = [fields.list_(name, as_text, max_items=1_000) for name in ("include", "exclude")]
        values = fields.mapping("values", as_str, max_items=10_000)
        fields.done()
        try:
            return cls(Policy.of(include=lists[0], exclude=lists[1]), values)
        except UsageError as error:
            fields.fail("include", "patterns of variable names", error.message)


TABLES_ONLY: Final = Policy()
NO_SITE: Final = SiteEnvironment(TABLES_ONLY, {})
