"""Key: what is wrapped while a model's code is watched: the environment, ``os.stat``, imports, module probes.

``os.environ``'s class is changed, not the object: every alias of it is covered. Nothing of torch's is.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Protocol

_ENVIRON: Any = type(os.environ)


class Watcher(Protocol):
    """What is told of reads; ``frame`` is the one that reads."""

    def variable(self, key: object, frame: FrameType | None) -> None:
        """A variable is read."""

    def variable_written(self, key: object, changed: bool, frame: FrameType | None) -> None:
        """A variable is written; ``changed`` tells that it had another value."""

    def survey(self, frame: FrameType | None) -> None:
        """The environment is iterated over or counted."""

    def asked(self, path: object, frame: FrameType | None) -> None:
        """A path's existence or kind is asked for."""

    def probed(self, name: str, frame: FrameType | None) -> None:
        """A module's existence is asked for, or it is imported by name."""

    def imported(self, name: str, namespace: object, frame: FrameType | None) -> None:
        """An ``import`` statement runs."""


# Patches are for the process, so what is watching is one tuple per process as well.
_lock = threading.RLock()
_active: tuple[Watcher, ...] = ()
_before: dict[str, ModuleType] = {}
_restore: list[Callable[[], None]] = []
_wrappers: dict[int, object] = {}


def watch(watcher: Watcher) -> None:
    """Tell ``watcher`` of every read from now on."""
    global _active, _before  # noqa: PLW0603 - see above
    with _lock:
        if not _active:
            _before = dict(sys.modules)
            _patch_environment()
            _patch_functions()
        _active = (*_active, watcher)


def unwatch(watcher: Watcher) -> None:
    """Tell ``watcher`` no more; after the last one everything is as it was."""
    global _active, _before  # noqa: PLW0603 - see above
    with _lock:
        _active = tuple(kept for kept in _active if kept is not watcher)
        if not _active:
            while _restore:
                _restore.pop()()
            _give_back()
            _wrappers.clear()
            _before = {}


def was_loaded(module: ModuleType) -> bool:
    """Tell whether a module had been imported before the active watchers began."""
    return _before.get(module.__name__) is module


def _patch_environment() -> None:
    get, iterate, length = _ENVIRON.__getitem__, _ENVIRON.__iter__, _ENVIRON.__len__
    put, remove = _ENVIRON.__setitem__, _ENVIRON.__delitem__

    def getitem(self: Any, key: Any) -> Any:
        for watcher in _active:
            watcher.variable(key, sys._getframe(1))
        return get(self, key)

    def setitem(self: Any, key: Any, value: Any) -> None:
        before = self._data.get(self.encodekey(key)) if isinstance(key, (str, bytes)) else None
        put(self, key, value)
        after = self._data.get(self.encodekey(key))
        for watcher in _active:
            watcher.variable_written(key, before is not None and before != after, sys._getframe(1))

    def delitem(self: Any, key: Any) -> None:
        remove(self, key)
        for watcher in _active:
            watcher.variable_written(key, True, sys._getframe(1))

    def iterator(self: Any) -> Any:
        for watcher in _active:
            watcher.survey(sys._getframe(1))
        return iterate(self)

    def count(self: Any) -> int:
        for watcher in _active:
            watcher.survey(sys._getframe(1))
        return int(length(self))

    for name, wrapper in {
        "__getitem__": getitem,
        "__setitem__": setitem,
        "__delitem__": delitem,
        "__iter__": iterator,
        "__len__": count,
    }.items():
        _replace(_ENVIRON, name, wrapper)


def _patch_functions() -> None:
    stat, importing = os.stat, builtins.__import__
    find_spec, import_module = importlib.util.find_spec, importlib.import_module

    def asking(path: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _active:
            watcher.asked(path, sys._getframe(1))
        return stat(path, *args, **kwargs)

    def statement(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        if level == 0:
            for watcher in _active:
                watcher.imported(name, globals, sys._getframe(1))
        return importing(name, globals, locals, fromlist, level)

    def finding(name: str, package: str | None = None) -> Any:
        if not name.startswith("."):
            for watcher in _active:
                watcher.probed(name, sys._getframe(1))
        return find_spec(name, package)

    def module(name: str, package: str | None = None) -> ModuleType:
        if not name.startswith("."):
            for watcher in _active:
                watcher.probed(name, sys._getframe(1))
        return import_module(name, package)

    _replace(os, "stat", asking)
    _replace(builtins, "__import__", statement)
    _replace(importlib.util, "find_spec", finding)
    _replace(importlib, "import_module", module)


def _replace(owner: Any, name: str, wrapper: object) -> None:
    original = getattr(owner, name)
    _wrappers[id(wrapper)] = original
    setattr(owner, name, wrapper)
    _restore.append(lambda: setattr(owner, name, original))


def _give_back() -> None:
    """Give modules that took a wrapper by name (``from os import stat``) what they asked for."""
    for name, module in list(sys.modules.items()):
        if _before.get(name) is module:
            continue
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict):
            for key, value in list(namespace.items()):
                if id(value) in _wrappers:
                    namespace[key] = _wrappers[id(value)]
