"""Key: what a trace took from the environment and must not be readable in an entry, hidden or refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.cache.observed import is_clear, is_credential
from pwcc.compile.runtime.portable import Json
from pwcc.compile.runtime.predicates import Predicate
from pwcc.compile.runtime.secrets import HIDEABLE, SHORTEST, hidden

SHORTEST_PART = 4
"""A text of this length on that lies in a secret (a password in a URL) is one too."""
HINT = "keep it out of what forward reads: look at it when the model is built, and keep what follows from it"


class Secrets:
    """Values of observed variables that are no plain settings, and names that speak of a credential.

    Args:
        variables: the names of the variables that the model's code was seen to read.
    """

    def __init__(self, variables: Iterable[str]) -> None:
        read = {name: os.environ.get(name) or "" for name in variables}
        values = {value for name, value in read.items() if value and not is_clear(name, value)}
        self._values = tuple(sorted(values | {value.strip() for value in values} - {""}))

    def hide(self, predicates: Iterable[Predicate], salt: str) -> list[Predicate]:
        """Return the predicates, those that hold a secret with its digest instead; ``salt`` is the lookup key.

        Raises:
            UnsealableError: a secret where no digest can stand for it: the key of a dictionary on the way.
        """
        return [self._hidden(predicate, salt) for predicate in predicates]

    def _hidden(self, predicate: Predicate, salt: str) -> Predicate:
        rule = predicate.rule
        names = [str(step[1]) for step in rule.steps if len(step) == 2]
        texts = list(_items(rule.value) if rule.test == "keys" else _texts(rule.value))
        if rule.test in HIDEABLE:
            by_name = rule.test in ("is", "base") and texts and any(map(is_credential, names))
            number = isinstance(rule.value, int) and str(rule.value) in self._values
            if by_name or number or any(map(self._tells, texts)):
                return replace(
                    predicate, rule=replace(rule, test="secret", value=hidden(rule.test, rule.value, salt))
                )
            texts = []
        if any(map(self._holds, [*names, *texts])):
            raise UnsealableError(
                "the compiled code would depend on a secret of the environment by name",
                where=rule.where,
                hint=HINT,
            )
        return predicate

    def require_none_in(self, graphs: Sequence[fx.Graph]) -> None:
        """Refuse a graph with a secret among its constants.

        Raises:
            UnsealableError: see above.
        """
        for graph in graphs:
            for node in graph.nodes:
                for text in _constants([node.args, node.kwargs]):
                    if self._holds(text):
                        raise UnsealableError(
                            f"a constant of the operation {node.target} is a secret of the environment",
                            hint=HINT,
                        )

    def require_none_among(self, values: Iterable[object]) -> None:
        """Refuse a secret among the values that a call of ``forward`` is compared with.

        Raises:
            UnsealableError: see above.
        """
        if any(self._holds(text) for value in values for text in _constants(value)):
            raise UnsealableError(
                "the default of a parameter of forward is a secret of the environment", hint=HINT
            )

    def _holds(self, text: str) -> bool:
        return any(text == value or (len(value) >= SHORTEST and value in text) for value in self._values)

    def _tells(self, text: str) -> bool:
        part = len(text) >= SHORTEST_PART
        return self._holds(text) or (part and any(text in value for value in self._values))


def _constants(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _constants(item)


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts in a described value, and its bytes as text; names of classes and the like are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value[:1] == ["bytes"]:
        yield bytes.fromhex(str(value[1])).decode(errors="replace")
    elif isinstance(value, list) and value and value[0] in _TAGGED:
        for item in value[1:]:
            yield from _items(item)


def _items(value: Json) -> Iterator[str]:
    """Yield the texts of a described value, or of a list of such: of items, or of pairs."""
    plain = isinstance(value, list) and (not value or isinstance(value[0], list) or value[0] not in _ALL_TAGS)
    for item in value if isinstance(value, list) and plain else [value]:
        yield from _items(item) if isinstance(item, list) and item is not value else _texts(item)


_TAGGED = ("tuple", "list", "size", "set", "frozenset", "dict", "slice", "enum", "numpy", "str", "int")
_ALL_TAGS = (
    *_TAGGED,
    *("bytes", "float", "complex", "range", "ellipsis", "device", "code", "function", "method", "class"),
    *("module", "torch", "operator", "builtin", "unportable"),
)
