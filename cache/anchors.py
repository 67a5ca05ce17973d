"""Key: the names of files that a model's code read, as names that hold in any checkout or home.

A file is named by an anchor and a posix path below it:

- ``cwd``: below the working directory, because the code named it by a relative path
- ``module:NAME``: beside the file of a loaded module, or up to two folders above that
- ``home``: below the user's home directory
- ``absolute``: by its absolute path, when nothing else fits; such a name is bound to one host

A host finds the file again by joining paths; nothing is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MODULE: Final = "module:"
ANCHORS: Final = ("cwd", "home", "absolute")
MAX_UP: Final = 2  # a package's configuration often lies beside the package, seldom further away


@dataclass(frozen=True, slots=True)
class Anchored:
    """A file's anchor and its path below it."""

    anchor: str
    path: str

    @property
    def host_bound(self) -> bool:
        """Whether the name means something on this host only."""
        return self.anchor == "absolute"

    def __str__(self) -> str:
        if self.anchor.startswith(MODULE):
            return f"{self.path} beside module {self.anchor.removeprefix(MODULE)}"
        return {"cwd": self.path, "home": f"~/{self.path}"}.get(self.anchor, self.path)


def is_anchored(anchor: str, path: str) -> bool:
    """Return whether the two may stand in an entry: a known anchor, and a path that stays near it."""
    if not path or "\0" in path or "\\" in path:
        return False
    if anchor == "absolute":
        return path.startswith("/") and ".." not in path.split("/")
    parts = path.split("/")
    while anchor.startswith(MODULE) and parts[:1] == [".."] and len(path.split("/")) - len(parts) < MAX_UP:
        parts = parts[1:]
    if path == ".":
        return anchor in ("cwd", "home") or anchor.startswith(MODULE)
    known = anchor in ("cwd", "home") or (anchor.startswith(MODULE) and anchor != MODULE)
    return known and all(part not in ("", ".", "..") for part in parts)


def anchored(given: str, *, cwd: str, home: str, module: str, module_file: str | None) -> Anchored:
    """Name a file.

    Args:
        given: the path as the code gave it.
        cwd: the working directory at that moment.
        home: the user's home directory.
        module: the name of the module whose code read it.
        module_file: that module's file, None if it has none.
    """
    whole = os.path.normpath(os.path.join(cwd, given))  # noqa: PTH118 - text, not files
    if not os.path.isabs(given):  # noqa: PTH117
        below = _below(whole, cwd)
        if below is not None:
            return Anchored("cwd", below)
    if module_file is not None:
        folder = os.path.dirname(os.path.abspath(module_file))  # noqa: PTH100, PTH120
        for up in range(MAX_UP + 1):
            if folder in (os.sep, home):
                break
            below = _below(whole, folder)
            if below is not None:
                path = "/".join([*[".."] * up, *([] if below == "." and up else [below])])
                if is_anchored(MODULE + module, path):
                    return Anchored(MODULE + module, path)
            folder = os.path.dirname(folder)  # noqa: PTH120
    below = _below(whole, home)
    return Anchored("absolute", whole) if below is None else Anchored("home", below)


def _below(path: str, folder: str) -> str | None:
    if path == folder:
        return "."
    start = folder.rstrip(os.sep) + os.sep
    return path.removeprefix(start) if path.startswith(start) else None


def locate(anchor: str, path: str, modules: Mapping[str, object]) -> str | None:
    """Return where an anchored file would lie on this host, or None without its module."""
    if anchor == "absolute":
        return path
    if anchor == "cwd":
        return path
    if anchor == "home":
        return os.path.join(os.path.expanduser("~"), path)  # noqa: PTH111, PTH118
    module = modules.get(anchor.removeprefix(MODULE))
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return None
    if not isinstance(file, str):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(file)), path))  # noqa: PTH100, PTH118, PTH120
