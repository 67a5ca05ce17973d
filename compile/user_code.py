"""Serve the Key noun: import the user's model file or module, and say where in it something failed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from pwcc.cache.errors import ModelError, UsageError

FILE_MODULE_PREFIX = "pwcc_user."
"""Where model files go whose own name belongs to another module of this process."""


@contextmanager
def importable(directory: Path) -> Iterator[None]:
    """Let imports find ``directory`` during the block, after everything else, so it shadows nothing."""
    entry = str(directory)
    added = entry not in sys.path
    if added:
        sys.path.append(entry)
    try:
        yield
    finally:
        if added and entry in sys.path:
            sys.path.remove(entry)


def import_file(path: Path) -> ModuleType:
    """Import a model file under its own name and leave it in ``sys.modules``, as a server that imports it does.

    An entry then fits the model whichever way the server imports the file's module. A file whose name is
    another module's becomes ``pwcc_user.<stem>``, and a second one of that stem gets its content digest
    behind the name: neither replaces the other, and no absolute path enters a name. The same file,
    unchanged, is imported once.
    Raise ``ModelError`` with the file and line if the import fails.
    """
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    stem = path.stem if path.stem.isidentifier() else "m_" + hashlib.sha256(path.stem.encode()).hexdigest()[:8]
    name = stem if _is_free(stem, path) else FILE_MODULE_PREFIX + stem
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_from(loaded, path):
        name = f"{name}_{digest[:8]}"
        loaded = sys.modules.get(name)
    if loaded is not None and _is_from(loaded, path) and getattr(loaded, "__pwcc_digest__", None) == digest:
        return loaded
    _ensure_parent_package()
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"expected a Python file, got {path.name!r}")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__pwcc_digest__"] = digest
    sys.modules[name] = module
    try:
        with importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, Exception):
            raise failed_in_user_code(f"importing {path.name} failed", error) from error
        raise
    return module


def _is_free(stem: str, path: Path) -> bool:
    """Tell whether ``import <stem>`` would give this file or nothing."""
    loaded = sys.modules.get(stem)
    if loaded is not None:
        return _is_from(loaded, path)
    try:
        with importable(path.parent):
            spec = importlib.util.find_spec(stem)
    except (ImportError, ValueError):
        return False
    return spec is None or (spec.origin is not None and Path(spec.origin).resolve() == path.resolve())


def _is_from(module: ModuleType, path: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and Path(origin).resolve() == path.resolve()


def _ensure_parent_package() -> None:
    parent = FILE_MODULE_PREFIX.removesuffix(".")
    if parent not in sys.modules:
        package = ModuleType(parent, "Model files that pwcc imported by path.")
        package.__path__ = []
        sys.modules[parent] = package


def import_module(name: str, *, directory: Path) -> ModuleType:
    """Import a dotted module, also from ``directory`` (the user's working directory).

    Raise ``UsageError`` if there is no such module, ``ModelError`` with file and line if its code fails.
    """
    try:
        with importable(directory):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(
                f"no module named {error.name!r}", hint="run from its parent folder, or install it"
            ) from error
        raise failed_in_user_code(f"importing {name} failed", error) from error
    except Exception as error:
        raise failed_in_user_code(f"importing {name} failed", error) from error


def failed_in_user_code(what: str, error: Exception) -> ModelError:
    """Return a ``ModelError`` that carries the exception's text and the user's line that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return ModelError(f"{what}: {text[-1] if text else type(error).__name__}", where=user_location(error))


def user_location(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame that is neither a library's nor pwcc's, else the innermost.

    A file below the working directory is shown relative to it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    pwcc = f"{Path(__file__).resolve().parent}{os.sep}"
    base = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), "<")
    installed = (*base, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    foreign = [f for f in frames if not str(Path(f.filename).resolve()).startswith(pwcc)]
    # The stdlib folder holds site-packages, so a user's installed package is told apart second.
    own = [f for f in foreign if not f.filename.startswith(installed)]
    frame = (own or [f for f in foreign if not f.filename.startswith(base[1:])] or frames)[-1]
    return f"{_shown(frame.filename)}:{frame.lineno}"


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
