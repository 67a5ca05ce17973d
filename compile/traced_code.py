"""Key: the code objects that a trace entered: which module each is from, what belongs to it, is it current."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType

from torch import nn

from pwcc.cache.code_digest import digest_code
from pwcc.cache.errors import TraceError
from pwcc.cache.ids import FactorDigest, factor_digest
from pwcc.cache.sources import SourceRecord
from pwcc.compile.build_factors import is_covered, is_generated, module_names, owner_of_code
from pwcc.compile.guard_table import is_compiler_module

RESTART = "restart the process that builds the model, then compile again"
MAX_DEPTH = 16


class TracedCode:
    """Traced code objects with their modules.

    Args:
        codes: what the trace entered; the standard library's and generated functions are left out.
    """

    def __init__(self, codes: Iterable[CodeType]) -> None:
        names = module_names()
        self._homes: dict[CodeType, str] = {}
        for code in dict.fromkeys(codes):
            if not code.co_filename.startswith("<frozen") and not is_generated(code):
                home = names.get(os.path.realpath(code.co_filename))
                if home is None and not os.path.isfile(code.co_filename):  # noqa: PTH113
                    home = owner_of_code(code)
                self._homes[code] = home or ""

    def functions(self) -> list[tuple[CodeType, str]]:
        """Return code objects with the name of their module; torch's are among them."""
        return [
            (code, home)
            for code, home in self._homes.items()
            if home and not _is_python(code) and not is_compiler_module(home)
        ]

    def own(self) -> list[tuple[CodeType, Mapping[str, object]]]:
        """Return the code that is neither torch's nor Python's, with its module's namespace."""
        return [
            (code, vars(sys.modules[home]) if home in sys.modules else {})
            for code, home in self._homes.items()
            if not is_covered(os.path.realpath(code.co_filename))
        ]

    @property
    def modules(self) -> list[str]:
        """The modules of :meth:`own`, sorted."""
        return sorted(
            {
                home
                for code, home in self._homes.items()
                if home and not is_covered(os.path.realpath(code.co_filename))
            }
        )

    def related(self, model: nn.Module) -> list[CodeType]:
        """Return code that stands behind traced functions: what decorators wrapped or close over."""
        namespaces: list[Mapping[str, object]] = [
            vars(sys.modules[name]) for name in self.modules if name in sys.modules
        ]
        namespaces += [vars(base) for kind in {type(m) for m in model.modules()} for base in kind.__mro__]
        found: dict[CodeType, None] = {}
        for namespace in namespaces:
            for value in list(namespace.values()):
                codes = list(_codes(value, 0))
                if any(code in self._homes for code in codes):
                    found.update(dict.fromkeys(codes))
        return [code for code in found if code not in self._homes]


def _is_python(code: CodeType) -> bool:
    real = os.path.realpath(code.co_filename)
    return is_covered(real) and f"{os.sep}torch{os.sep}" not in real


def _codes(value: object, depth: int) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions it wraps or closes over."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        for accessor in (value.fget, value.fset):
            yield from _codes(accessor, depth + 1)
    if depth > MAX_DEPTH or not isinstance(value, FunctionType):
        return
    yield value.__code__
    held = [value.__dict__.get("__wrapped__")]
    for cell in value.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for inner in held:
        if inner is not value:
            yield from _codes(inner, depth + 1)


def require_current(codes: Iterable[tuple[CodeType, str]], records: Sequence[SourceRecord]) -> None:
    """Refuse code that is not what its file holds now, or whose file changed since it was recorded.

    A file that was saved after its module was imported would be recorded with its new content, and the
    entry would serve the old code under the new name. Modules that an import hook rewrote (their loader is
    not Python's own) cannot be compared with their text.

    Raises:
        TraceError: the function and its file.
    """
    recorded = {(record.module, os.path.basename(record.path)): record.digest for record in records}  # noqa: PTH119
    texts: dict[str, tuple[FactorDigest, Mapping[str, Collection[FactorDigest]]] | None] = {}
    for code, home in codes:
        file = code.co_filename
        if not home or is_covered(os.path.realpath(file)):
            continue
        if file not in texts:
            texts[file] = _current(file) if _is_plain(sys.modules.get(home)) else None
        text = texts[file]
        if text is None:
            continue
        digest, functions = text
        name = os.path.basename(file)  # noqa: PTH119
        known = recorded.get((home, name), digest)
        if known != digest or digest_code(code) not in functions.get(code.co_qualname, ()):
            raise TraceError(
                f"{name} was changed after {home} was imported: {code.co_qualname} is not what the file holds",
                where=f"{name}:{code.co_firstlineno}",
                hint=RESTART,
            )


def _is_plain(module: types.ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    return type(getattr(spec, "loader", None)) is SourceFileLoader


def _current(file: str) -> tuple[FactorDigest, Mapping[str, Collection[FactorDigest]]] | None:
    """Return the digests of a file and of every function in it, by qualified name."""
    try:
        with open(file, "rb") as stream:  # noqa: PTH123
            data = stream.read()
    except OSError:
        return None
    found: dict[str, set[FactorDigest]] = {}
    try:
        with warnings.catch_warnings(action="ignore"):
            whole = compile(data, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return factor_digest(data), {}
    waiting = [whole]
    while waiting:
        for const in waiting.pop().co_consts:
            if isinstance(const, CodeType):
                found.setdefault(const.co_qualname, set()).add(digest_code(const))
                waiting.append(const)
    return factor_digest(data), found
