"""Key: the Python sources that a compile traced, as records that hold in any checkout, venv or home.

A file is named by its path below the directory that would be on ``sys.path`` for it: module ``a.b.c``
at ``/any/where/a/b/c.py`` is recorded as ``a/b/c.py``, a script or notebook helper by its bare name.
A serving host finds it again by joining paths, never by importing. Code without a file (``<string>``,
notebook cells) is recorded by the content of its code object; see ``code_digest.py``.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from pwcc.cache.code_digest import digest_code, find_code
from pwcc.cache.errors import CorruptEntry, FactorError
from pwcc.cache.ids import FactorDigest, factor_digest
from pwcc.cache.strict import Fields, Json, as_text

KINDS: Final = ("file", "code")
Modules = Mapping[str, types.ModuleType | None]  # sys.modules, or a test's own


@dataclass(frozen=True, order=True)
class SourceRecord:
    """One traced source.

    ``path`` is posix and relative for kind ``file``; for kind ``code`` it is the code object's
    qualified name. ``digest`` is XXH3-128 of the file's bytes, or of the code object's content.
    """

    module: str
    path: str
    digest: FactorDigest
    kind: str = "file"

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"module": self.module, "path": self.path, "digest": self.digest, "kind": self.kind}

    @classmethod
    def parse(cls, value: object, where: str) -> SourceRecord:
        """Return the record that :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        kind = fields.str_("kind")
        if kind not in KINDS:
            fields.fail("kind", f"one of {KINDS}", kind)
        path = fields.item("path", as_text)
        if kind == "file" and not is_relative(path):
            fields.fail("path", "a relative path without '..'", path)
        record = cls(fields.item("module", as_text), path, FactorDigest(fields.key("digest")), kind)
        fields.done()
        return record


@dataclass(frozen=True)
class SourceChange:
    """A recorded source that is not the same here, and why in words."""

    record: SourceRecord
    reason: str


def is_relative(path: str) -> bool:
    """Return whether ``path`` is a plain relative posix path that stays below its base."""
    parts = path.split("/")
    return "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in parts)


def relative_path(module: str, file: Path) -> str:
    """Return the path of ``file`` below the directory that makes ``module`` importable.

    A file whose location does not follow from its module's name (a script, a file loaded by path)
    is named relative to its own folder.
    """
    parts = tuple(module.split("."))
    below = file.parts[-len(parts) :]
    if len(below) == len(parts) and (*below[:-1], Path(below[-1]).stem) == parts:
        return "/".join(below)
    if file.stem == "__init__" and file.parts[-len(parts) - 1 : -1] == parts:
        return "/".join((*parts, file.name))
    return file.name


def record_file(module: str, file: Path) -> SourceRecord:
    """Return the record of one traced file.

    Raises:
        FactorError: the file cannot be read.
    """
    digest = _digest_file(os.fspath(file))
    if digest is None:
        raise FactorError(f"source of module {module} cannot be read", where=str(file))
    return SourceRecord(module, relative_path(module, file), digest)


def record_code(module: str, code: types.CodeType) -> SourceRecord:
    """Return the record of a code object that has no file."""
    return SourceRecord(module, code.co_qualname, digest_code(code), "code")


def resolve(record: SourceRecord, modules: Modules, search_path: Sequence[str]) -> Path | None:
    """Return where the recorded file lies on this host, or None. Imports nothing.

    In order: the loaded module's own ``__file__``, the loaded top-level package's ``__path__``, each
    entry of ``search_path`` (as ``sys.path``).
    """
    if record.kind != "file" or not is_relative(record.path):
        return None
    for candidate in _candidates(record, modules, search_path):
        if os.path.isfile(candidate):  # noqa: PTH113 - Path objects would double the cost of a check
            return Path(candidate)
    return None


def check(
    records: Iterable[SourceRecord],
    modules: Modules,
    search_path: Sequence[str],
    *,
    live_code: Collection[FactorDigest] = (),
) -> list[SourceChange]:
    """Return every record that is missing or different on this host.

    ``live_code`` may hold digests of code objects the caller knows to be in use (the live model's
    methods); other code records are looked up by qualified name among the loaded ``modules``.
    """
    changes = []
    for record in records:
        reason = (
            _check_file(record, modules, search_path)
            if record.kind == "file"
            else _check_code(record, modules, live_code)
        )
        if reason is not None:
            changes.append(SourceChange(record, reason))
    return changes


def _check_file(record: SourceRecord, modules: Modules, search_path: Sequence[str]) -> str | None:
    if not is_relative(record.path):
        raise CorruptEntry(f"expected a relative source path, got {record.path[:80]!r}")
    for candidate in _candidates(record, modules, search_path):
        digest = _digest_file(candidate)
        if digest is not None:
            if digest == record.digest:
                return None
            return f"{record.module}: {record.path} changed (was {record.digest[:8]}, is {digest[:8]})"
    return f"{record.module}: {record.path} is not on this host"


def _check_code(record: SourceRecord, modules: Modules, live_code: Collection[FactorDigest]) -> str | None:
    if record.digest in live_code:
        return None
    found = [digest_code(code) for code in find_code(_namespace(modules.get(record.module)), record.path)]
    if record.digest in found:
        return None
    state = "changed" if found else "is not loaded"
    return f"{record.module}: code of {record.path} {state} (was {record.digest[:8]})"


def _candidates(record: SourceRecord, modules: Modules, search_path: Sequence[str]) -> Iterator[str]:
    own = _namespace(modules.get(record.module)).get("__file__")
    # A module of that name may have come from elsewhere (__main__ is another script on every host),
    # and traced code may lie in a file other than its module's own: the recorded name decides.
    if isinstance(own, str) and ("/" + own.replace(os.sep, "/")).endswith("/" + record.path):
        yield own
    top, _, below = record.path.partition("/")
    package = _namespace(modules.get(top)).get("__path__")
    if below and isinstance(package, Iterable):  # a list, or a namespace package's own path type
        for directory in package:
            yield f"{directory}/{below}"
    for directory in search_path:
        yield f"{directory or '.'}/{record.path}"


def _namespace(module: object) -> Mapping[str, object]:
    # Never getattr: a lazy module would import on access.
    try:
        found = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _digest_file(path: str) -> FactorDigest | None:
    try:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123 - as in resolve()
            return factor_digest(stream.readall())
    except (OSError, ValueError):
        return None


def source_factors(records: Iterable[SourceRecord]) -> dict[str, str]:
    """Return the records as factors: ``module:path`` to digest.

    Raises:
        FactorError: two records of one name with different digests (a file edited during the compile).
    """
    found: dict[str, str] = {}
    for record in sorted(set(records)):
        name = f"{record.module}:{PurePosixPath(record.path)}"
        if found.setdefault(name, record.digest) != record.digest:
            raise FactorError(f"source {name} has two contents in one compile", hint="compile again")
    return found
