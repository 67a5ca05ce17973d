"""Key: the ordered, named factors that a key is made of, their digests, and how two trees differ.

A factor is a name and a JSON value. Factors lie in four groups; within a group they are sorted by
name, so the order in which a caller finds them never matters. Names and values are length-delimited
before they are hashed: ``("ab", "c")`` and ``("a", "bc")`` have different digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, FactorError, NewerFormat
from pwcc.cache.ids import EntryKey, FactorDigest, LookupKey, factor_digest
from pwcc.cache.strict import Json

GROUPS: Final = ("environment", "configuration", "sources", "compiler")
SCHEMA: Final = 1
MAX_VALUE_DEPTH: Final = 48  # leaves room for the tree's own levels below strict.MAX_DEPTH

MAX_SHOWN: Final = 60  # characters of a value in a message


class Absent(Enum):
    """The one value that stands for "this factor does not exist" in a :class:`FactorChange`."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True)
class Factor:
    """One named, normalised value."""

    name: str
    value: Json


@dataclass(frozen=True)
class FactorChange:
    """One difference between two trees; ``path`` reads ``group/name.key[index]``."""

    path: str
    before: Json | Absent
    after: Json | Absent

    def __str__(self) -> str:
        before, after = (
            "nothing" if v is ABSENT or v is None else _short(v) for v in (self.before, self.after)
        )
        return f"{self.path}: built with {before}, now {after}"


@dataclass(frozen=True)
class FactorTree:
    """All factors of one key, by group. Build it with :meth:`of`; same factors, same digest."""

    environment: tuple[Factor, ...] = ()
    configuration: tuple[Factor, ...] = ()
    sources: tuple[Factor, ...] = ()
    compiler: tuple[Factor, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        environment: Mapping[str, object] | None = None,
        configuration: Mapping[str, object] | None = None,
        sources: Mapping[str, object] | None = None,
        compiler: Mapping[str, object] | None = None,
    ) -> FactorTree:
        """Normalise the values and return the tree.

        Values may be None, bool, int (64 bits), finite float, str, and lists, tuples, sets of strings
        and string-keyed mappings of these; subclasses (enums of str or int, ``torch.__version__``)
        are reduced to their plain value.

        Raises:
            FactorError: any other value (functions, classes, objects with addresses, NaN), by name.
        """
        return cls(
            environment=_factors("environment", environment or {}),
            configuration=_factors("configuration", configuration or {}),
            sources=_factors("sources", sources or {}),
            compiler=_factors("compiler", compiler or {}),
        )

    def groups(self) -> Iterator[tuple[str, tuple[Factor, ...]]]:
        """Yield ``(group name, factors)`` in the order that the digest uses."""
        yield "environment", self.environment
        yield "configuration", self.configuration
        yield "sources", self.sources
        yield "compiler", self.compiler

    def group_digests(self) -> dict[str, FactorDigest]:
        """Return the digest of each group, to see at once where two trees differ."""
        return {name: _group_digest(name, factors) for name, factors in self.groups()}

    def digest(self) -> FactorDigest:
        """Return the XXH3-128 of the four group digests."""
        return self._digest("tree")

    def _digest(self, purpose: str) -> FactorDigest:
        # The purpose separates key kinds: an entry key never equals the lookup key of the same tree.
        parts = [_part(f"pwcc {purpose} {SCHEMA}", b"")]
        parts += [_part(name, digest.encode()) for name, digest in self.group_digests().items()]
        return factor_digest(b"".join(parts))

    def to_json(self) -> dict[str, Json]:
        """Return the tree as one JSON object: ``schema`` and an object of name to value per group."""
        found: dict[str, Json] = {"schema": SCHEMA}
        for name, factors in self.groups():
            found[name] = {factor.name: factor.value for factor in factors}
        return found

    @classmethod
    def from_json(cls, value: object, *, where: str = "factors") -> FactorTree:
        """Return the tree that :meth:`to_json` wrote, ``value`` being what ``strict.loads`` returned.

        Raises:
            NewerFormat: a later schema. CorruptEntry: anything else that is not such a tree.
        """
        fields = strict.Fields(value, where)
        schema = fields.int_("schema", low=1)
        if schema > SCHEMA:
            raise NewerFormat(
                f"expected factor schema {SCHEMA}, got {schema}: a newer pwcc wrote it", where=where
            )
        groups = {name: fields.mapping(name, strict.as_json) for name in GROUPS}
        fields.done()
        try:
            return cls.of(**groups)
        except FactorError as error:
            raise CorruptEntry(error.message[:500], where=where) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def entry_key(tree: FactorTree) -> EntryKey:
    """Return the build key of ``tree``: 32 hex digits, everything that went in."""
    return EntryKey(tree._digest("entry"))


def lookup_key(tree: FactorTree) -> LookupKey:
    """Return the lookup key of ``tree``: 32 hex digits, only what a serving host knows from torch alone."""
    return LookupKey(tree._digest("lookup"))


def normalise(value: object, *, name: str) -> Json:
    """Return ``value`` as plain JSON data.

    Raises:
        FactorError: it has no stable form; the message names the factor and the place inside it.
    """
    return _normalise(value, name, 0)


def diff(before: FactorTree, after: FactorTree) -> list[FactorChange]:
    """Return every difference in group and name order; nested objects and lists are compared inside."""
    changes: list[FactorChange] = []
    for (group, old), (_, new) in zip(before.groups(), after.groups(), strict=True):
        a = {factor.name: factor.value for factor in old}
        b = {factor.name: factor.value for factor in new}
        for name in sorted(a.keys() | b.keys()):
            changes += _diff(f"{group}/{name}", a.get(name, ABSENT), b.get(name, ABSENT))
    return changes


def _diff(path: str, a: Json | Absent, b: Json | Absent) -> list[FactorChange]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [c for key in keys for c in _diff(f"{path}.{key}", a.get(key, ABSENT), b.get(key, ABSENT))]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [c for index, (x, y) in pairs for c in _diff(f"{path}[{index}]", x, y)]
    # 1, 1.0 and True are equal in Python, but their JSON, and so the key, differs.
    same = a is b or (a is not ABSENT and b is not ABSENT and strict.canonical(a) == strict.canonical(b))
    return [] if same else [FactorChange(path, a, b)]


def _factors(group: str, values: Mapping[str, object]) -> tuple[Factor, ...]:
    found = []
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise FactorError(f"expected a factor name in group {group}, got {name!r}")
        found.append(Factor(_text(name, f"{group}/{name!r}"), _normalise(value, f"{group}/{name}", 0)))
    return tuple(sorted(found, key=lambda factor: factor.name))


def _normalise(value: object, name: str, depth: int) -> Json:
    if depth > MAX_VALUE_DEPTH:
        raise FactorError(f"factor {name}: expected at most {MAX_VALUE_DEPTH} nested levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise FactorError(f"factor {name}: expected an integer of 64 bits, got one of {value.bit_length()}")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FactorError(
                f"factor {name}: expected a finite number, got {value}", hint="pass it as a string"
            )
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_normalise(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)) and all(isinstance(item, str) for item in value):
        return [_text(item, name) for item in sorted(cast("set[str]", value))]
    if isinstance(value, Mapping):
        return _normalise_mapping(value, name, depth)
    raise FactorError(
        f"factor {name}: expected None, bool, int, float, str, or lists and mappings of them, "
        f"got {type(value).__module__}.{type(value).__qualname__}",
        hint="an object's text may hold an address; pass the facts that identify it instead",
    )


def _normalise_mapping(value: Mapping[object, object], name: str, depth: int) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise FactorError(f"factor {name}: expected string keys, got {type(key).__name__}")
        found[_text(key, name)] = _normalise(item, f"{name}.{key}", depth + 1)
    return found


def _text(value: str, name: str) -> str:
    text = str.__str__(value)  # drops subclasses: StrEnum members, torch.__version__
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FactorError(f"factor {name}: expected text, got undecodable bytes {text[:80]!r}") from None
    return text


def _group_digest(group: str, factors: tuple[Factor, ...]) -> FactorDigest:
    parts = [_part(group, str(len(factors)).encode())]
    parts += [_part(factor.name, strict.canonical(factor.value)) for factor in factors]
    return factor_digest(b"".join(parts))


def _part(name: str, value: bytes) -> bytes:
    label = name.encode()
    return len(label).to_bytes(8, "little") + label + len(value).to_bytes(8, "little") + value
