"""Key: whether a Python module could be imported here, found out without importing it or its parents."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import cast


def module_present(name: str, modules: Mapping[str, object]) -> bool:
    """Return whether ``import name`` would find something.

    A module that is loaded counts; so does one that a finder of ``sys.meta_path`` finds (editable
    installs have finders of their own). Finders of pwcc's own are left out: they only watch.
    """
    if name in modules:
        return modules[name] is not None  # None: imports of this name were switched off
    search: Sequence[str] | None = None
    whole = ""
    for part in name.split("."):
        whole = f"{whole}.{part}" if whole else part
        loaded = modules.get(whole)
        if loaded is not None:
            search = _locations(loaded)
        else:
            spec = _spec(whole, search)
            if spec is None:
                return False
            search = cast("Sequence[str] | None", getattr(spec, "submodule_search_locations", None))
        if search is None and whole != name:
            return False
    return True


def _locations(module: object) -> list[str] | None:
    try:
        found = object.__getattribute__(module, "__dict__").get("__path__")
    except AttributeError:
        return None
    return None if found is None else [str(path) for path in found]


def _spec(name: str, search: Sequence[str] | None) -> object:
    finders: list[object] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("pwcc.")
    ]
    for finder in finders or [PathFinder]:
        spec: object = None
        with contextlib.suppress(Exception):  # a finder of the user's; one that fails finds nothing
            spec = cast("PathFinder", finder).find_spec(name, search)
        if spec is not None:
            return spec
    return None
