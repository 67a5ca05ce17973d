"""Key: one thing that differs between what an entry records and what is here, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pwcc.cache.factors import ABSENT, Absent, FactorChange
from pwcc.cache.strict import Json

MAX_SHOWN: Final = 3  # differences that a miss message spells out; `pwcc explain` shows all
MAX_TEXT: Final = 400  # characters of one difference in a miss message
UNSIGNED: Final = "choice/signature"  # the path of an entry that lacks a required signature
_MODES: Final = "compiler/numeric state."
_MODES_HEAD: Final = "global modes differ: "


@dataclass(frozen=True)
class Difference:
    """One difference: ``path`` names it, ``reason`` says in one line what was recorded and what is here.

    ``path`` begins with its group: ``environment/``, ``configuration/``, ``sources/``, ``compiler/``,
    ``model/``, ``predicate/``, ``requirement/``, ``entry/`` (files) or ``choice/`` (another was asked for).
    ``host`` tells that another host could serve the entry: the model is not at fault.
    """

    path: str
    reason: str
    host: bool = False

    @property
    def group(self) -> str:
        """The part of the path before the first slash."""
        return self.path.partition("/")[0]

    def line(self) -> str:
        """Return the reason, after the path unless the reason begins with it."""
        name = self.path.partition("/")[2]
        known = self.reason.startswith((self.path, name)) or self.group in ("choice", "entry")
        return printable(self.reason if known else f"{self.path}: {self.reason}")

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"path": self.path, "reason": self.reason, "host": self.host, "advice": advice(self.path)}


def of_change(change: FactorChange) -> Difference:
    """Return a factor's change as a difference."""
    if change.path.startswith(_MODES):
        name = change.path.removeprefix(_MODES)
        then, now = (None if v is ABSENT else v for v in (change.before, change.after))
        return Difference(change.path, f"{_MODES_HEAD}{name}: compiled with {then!r}, now {now!r}")
    if _is_digest(change.before) and _is_digest(change.after):
        return Difference(change.path, f"{change.path}: its digest differs (the value is not recorded)")
    return Difference(change.path, str(change))


def _is_digest(value: Json | Absent) -> bool:
    return isinstance(value, str) and value.startswith("digest:")


_POLICY: Final = "use the same pwcc.toml and --env-include/--env-exclude, or compile"
_ADVICE: Final = (
    ("environment/state ", "put the process into the state it had, or compile in this one"),
    ("environment/", "set the variable as it was, or compile with it; exclude it if it changes no code"),
    ("configuration/model arguments", "pass the same --arg, or compile with these"),
    ("configuration/environment policy", _POLICY),
    ("configuration/", "pass the same options, or compile with these"),
    ("sources/", "deploy the sources that were compiled, or compile again"),
    ("predicate/", "build the model as it was compiled, or compile this one"),
    ("model/", "build the model as it was compiled, or compile this one"),
    ("requirement/", "serve on a host that meets it, or compile on a host like this one"),
    (_MODES, "set the mode as it was at the compile, or compile under this one"),
    ("compiler/", "use the same build here, or compile with this one"),
    ("choice/environment policy", _POLICY),
    ("choice/profile", "ask for the profile that it has, or compile with this one"),
    (UNSIGNED, "sign it: pwcc sign; or trust its signer's key: pwcc trust add"),
    ("entry/", "pwcc verify tells what is damaged; compile again to replace it"),
)


def advice(path: str) -> str:
    """Return what to do about a difference of this path, in one line; empty where the reason says it."""
    return next((text for start, text in _ADVICE if path.startswith(start)), "")


def all_advice(found: Iterable[Difference]) -> tuple[str, ...]:
    """Return the advice for differences, each line once, in their order."""
    return tuple(dict.fromkeys(text for item in found if (text := advice(item.path))))


def said(found: Sequence[Difference], *, limit: int = MAX_SHOWN) -> str:
    """Return differences as one bounded line: the first few, and how many more there are."""
    shown: list[str] = []
    for item in found[:limit]:
        known = any(reason.startswith(_MODES_HEAD) for reason in shown)  # say shared words once
        shown.append(_cut(item.reason.removeprefix(_MODES_HEAD) if known else item.reason))
    more = len(found) - limit
    return "; ".join(shown) + (f" (and {more} more: pwcc explain)" if more > 0 else "")


def printable(text: str) -> str:
    """Return text from a cache or a host's record without the control characters that a terminal obeys."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def only_the_host(found: Sequence[Difference]) -> bool:
    """Return whether nothing but the host keeps an entry from serving.

    Global modes count as the host's where the host itself differs: their defaults go with the build.
    """
    rest = [item for item in found if not item.host]
    return len(rest) < len(found) and all(item.path.startswith(_MODES) for item in rest)
