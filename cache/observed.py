"""Key: what a model's code was seen to read while it was built and run, as records to check again.

One record per input: an environment variable, a file, a directory's list of names, a path that was
only asked for, a module that was probed, a library of custom operators, a traced function's code, a
mode, what a function of the process returns (``process_state.py``). A record holds for a host if the same
input has the same value there. Checking imports nothing, traces nothing and runs no code of the model's.

Values of environment variables are kept in the clear when they are plain settings, by the rule of
``environment.py``, unless the name speaks of a credential; otherwise as a digest that is salted with
the entry's lookup key, so that one secret has another digest in each model's entries.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from pwcc.cache import environment
from pwcc.cache.anchors import Anchored, is_anchored, locate
from pwcc.cache.code_digest import digest_code, find_code
from pwcc.cache.errors import FactorError
from pwcc.cache.ids import factor_digest
from pwcc.cache.probes import module_present
from pwcc.cache.process_state import STATES, state_value
from pwcc.cache.strict import Fields, Json, as_str, as_text

KINDS: Final = (
    "environment",
    "file",
    "directory",
    "path",
    "module",
    "library",
    "function",
    "mode",
    "state",
    "note",
)
PLACED: Final = ("file", "directory", "path")  # their anchor is a place; see anchors.py
MAX_FILE: Final = 16 * 1024 * 1024
"""A longer file is weights or a vocabulary: known by its length, not by its content."""
MAX_LIBRARY: Final = 1024 * 1024 * 1024
_SECRET_NAMES: Final = ("*KEY*", "*PASS*", "*AUTH*", "*TOKEN*", "*SECRET*", "*CREDENTIAL*")


@dataclass(frozen=True, slots=True)
class ObservedInput:
    """One input.

    ``name`` is a variable, a path below ``anchor``, a module, a library's file name, a function's
    qualified name in the module ``anchor``, or a mode. ``value`` is what it was; None means that it was
    not there. ``where`` is the line that read it, ``file.py:line``, or empty.
    """

    kind: str
    name: str
    value: str | None
    anchor: str = ""
    where: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "name": self.name,
            "value": self.value,
            "anchor": self.anchor,
            "where": self.where,
        }

    @classmethod
    def parse(cls, value: object, where: str) -> ObservedInput:
        """Return the record that :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        kind = fields.str_("kind")
        if kind not in KINDS:
            fields.fail("kind", f"one of {KINDS}", kind)
        found = cls(
            kind=kind,
            name=fields.item("name", as_text),
            value=fields.opt_item("value", as_str),
            anchor=fields.item("anchor", as_str),
            where=fields.item("where", as_str),
        )
        fields.done()
        if kind in PLACED and not is_anchored(found.anchor, found.name):
            fields.fail("name", "a path below a known anchor", f"{found.anchor}: {found.name}")
        if kind == "library" and "/" in found.name:
            fields.fail("name", "a file name", found.name)
        if kind == "state" and found.name not in STATES:
            fields.fail("name", "a function that pwcc knows", found.name)
        return found

    @property
    def factor(self) -> tuple[str, str]:
        """The group and name of this input's factor; a function's code has none, its source has one."""
        if self.kind in ("environment", "mode", "state"):
            kind = "" if self.kind == "environment" else f"{self.kind} "
            return "environment", f"{kind}{self.name} (observed)"
        anchor = f"{self.anchor}:" if self.anchor else ""
        return "sources", f"{self.kind}:{anchor}{self.name}"

    def __str__(self) -> str:
        line = f" (read at {self.where})" if self.where else ""
        if self.kind in PLACED:
            return f"{self.kind} {Anchored(self.anchor, self.name)}{line}"
        said = {"environment": "environment variable", "function": "code of", "state": "value of"}.get(
            self.kind, self.kind
        )
        home = f"{self.anchor}:" if self.kind == "function" else ""
        return f"{said} {home}{self.name}{line}"


def sort_key(record: ObservedInput) -> tuple[str, str, str]:
    """Return the order of records in an entry."""
    return record.kind, record.anchor, record.name


def factors(records: Iterable[ObservedInput]) -> dict[str, dict[str, str | None]]:
    """Return the records as factors, by group and name."""
    found: dict[str, dict[str, str | None]] = {"environment": {}, "sources": {}}
    for record in records:
        if record.kind not in ("function", "note"):
            group, name = record.factor
            found[group][name] = record.value
    return found


def is_observed_factor(name: str) -> bool:
    """Tell whether a factor of the environment group came from watching the model's code."""
    return name.endswith(" (observed)")


def changes(
    records: Sequence[ObservedInput],
    *,
    salt: str,
    environ: Mapping[str, str],
    modules: Mapping[str, object],
    libraries: Iterable[str] = (),
) -> list[tuple[ObservedInput, str]]:
    """Return each input that is not what it was, with a sentence; empty means that all hold.

    Args:
        records: of one entry.
        salt: the entry's lookup key.
        environ: this process's variables.
        modules: this process's modules.
        libraries: paths of the operator libraries that are loaded here.
    """
    tag = code_tag()
    compiled_under = sorted({other for record in records if (other := _other_optimization(record, tag))})
    by_name = {os.path.basename(path): path for path in libraries}  # noqa: PTH119
    found: list[tuple[ObservedInput, str]] = []
    if compiled_under:
        level = ObservedInput("mode", "python optimization", compiled_under[0])
        here = str(sys.flags.optimize)
        said = (
            f"Python's optimization level (-O, PYTHONOPTIMIZE): compiled with {compiled_under[0]}, now {here}"
        )
        found.append((level, f"{said}, which decides over assert and __debug__ in the model's code"))
    for record in records:
        if record.kind == "function":
            if function_changed(record, tag, modules):
                said = "its module is loaded in another version, or it was replaced in this process"
                found.append((record, f"{record} is not what was compiled: {said}"))
            continue
        if record.kind in ("mode", "note"):  # a call checks modes; a note asks for nothing
            continue
        if record.kind == "environment":
            now = environment_value(record.name, environ.get(record.name), salt)
        elif record.kind == "module":
            now = "present" if module_present(record.name, modules) else None
        elif record.kind == "state":
            now = state_value(record.name, salt, modules)
        elif record.kind == "library":
            now = library_value(by_name.get(record.name))
        else:
            now = place_value(record.kind, locate(record.anchor, record.name, modules))
        if now != record.value:
            found.append((record, f"{record}: compiled with {_shown(record.value)}, now {_shown(now)}"))
    return found


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value[:20] if value.startswith("digest:") else repr(value)


def is_credential(name: str) -> bool:
    """Tell whether a name, of a variable or an attribute, speaks of a credential."""
    return any(fnmatchcase(name.upper(), pattern) for pattern in _SECRET_NAMES)


def is_clear(name: str, value: str) -> bool:
    """Tell whether a variable's value may be kept and shown as it is."""
    return not is_credential(name) and environment.shown_of(name, value) == value


def environment_value(name: str, value: str | None, salt: str) -> str | None:
    """Return what an entry keeps of a variable: None, a plain setting, or a salted digest."""
    if value is None:
        return None
    if is_clear(name, value):
        return value
    text = os.fsencode(f"pwcc observed 1\0{salt}\0{name}\0{value}")
    return f"digest:{factor_digest(text)}"


def place_value(kind: str, path: str | None) -> str | None:
    """Return what an entry keeps of a file's content, a directory's names, or what kind of thing lies there."""
    if path is None:
        return None
    if kind == "file":
        return _file_value(path, MAX_FILE)
    try:
        if kind == "directory":
            names = "\0".join(sorted(os.listdir(path)))  # noqa: PTH208
            return f"digest:{factor_digest(os.fsencode(names))}"
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return "directory" if stat.S_ISDIR(mode) else "file"


def library_value(path: str | None) -> str | None:
    """Return what an entry keeps of an operator library's file."""
    return None if path is None else _file_value(path, MAX_LIBRARY)


def _file_value(path: str, limit: int) -> str | None:
    try:
        # Not blocking: an entry from elsewhere may name a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    with open(descriptor, "rb", buffering=0) as stream:  # noqa: PTH123
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return "not a regular file"
        if facts.st_size > limit:
            return f"{facts.st_size} bytes"
        try:
            return f"digest:{factor_digest(stream.readall())}"
        except OSError:
            return None


def code_tag() -> str:
    """Return the name of this Python's byte code: digests of code are comparable only under one."""
    return f"{sys.implementation.cache_tag}.{sys.flags.optimize}"


def _other_optimization(record: ObservedInput, tag: str) -> str:
    """Return the optimization level that a function was compiled under, if only that differs here."""
    kept, _, _ = (record.value or "").partition(":")
    python, _, level = kept.rpartition(".")
    same_python = record.kind == "function" and python == tag.rpartition(".")[0]
    return level if same_python and level != tag.rpartition(".")[2] else ""


def function_changed(record: ObservedInput, tag: str, modules: Mapping[str, object]) -> bool:
    """Tell whether a traced function is loaded here and is another one.

    A module that is not loaded, or another Python's byte code, tells nothing: the file's digest does.
    """
    kept_tag, _, digest = (record.value or "").partition(":")
    if kept_tag != tag:
        return False
    try:
        namespace = object.__getattribute__(modules.get(record.anchor), "__dict__")
    except AttributeError:
        return False
    try:
        return digest not in [digest_code(code) for code in find_code(namespace, record.name)]
    except FactorError:
        return True
