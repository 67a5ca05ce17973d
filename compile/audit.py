"""Serve the Key noun: one audit hook for the process, which is silent while nobody listens.

A hook cannot be taken back. Its ``__call__`` is a C function while nobody listens: Dynamo would count the
frame of a Python one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import ClassVar, Final, cast

Listener = Callable[[str, tuple[object, ...]], object]
_IGNORE: Final = cast("Listener", {}.get)  # any C function that takes two arguments and never raises


class _Hook:
    __call__: ClassVar[Listener] = _IGNORE


_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()
_installed: list[_Hook] = []


def _notice(event: str, arguments: tuple[object, ...]) -> None:
    for listener in _listeners:
        listener(event, arguments)


def listen(listener: Listener) -> None:
    """Send audit events of this process to ``listener``, which must not raise."""
    global _listeners  # noqa: PLW0603 - a hook is for the process
    with _lock:
        _listeners = (*_listeners, listener)
        _Hook.__call__ = staticmethod(_notice)
        if not _installed:
            _installed.append(_Hook())
            sys.addaudithook(cast("Listener", _installed[0]))


def unlisten(listener: Listener) -> None:
    """Send no more events to ``listener``."""
    global _listeners  # noqa: PLW0603 - see above
    with _lock:
        _listeners = tuple(kept for kept in _listeners if kept is not listener)
        if not _listeners:
            _Hook.__call__ = _IGNORE
