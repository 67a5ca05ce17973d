"""Store: folders of a cache that are real: no folder below the root may be a symbolic link.

Else whoever placed the link would choose what a compile writes and a collection removes.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_real(path: Path | str) -> bool:
    """Return whether a folder is there, and no symbolic link to one. Never raises an OSError."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def make(path: Path, *, parents: bool = False) -> None:
    """Make a folder, with ``parents`` those above it too, unless it is there. OSError passes through.

    Raises:
        NotADirectoryError: something else is there: a file, a pipe, or a symbolic link.
    """
    try:
        path.mkdir(parents=parents)
    except FileExistsError:
        if not is_real(path) and os.path.lexists(path):
            what = "a symbolic link" if path.is_symlink() else os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, f"expected a folder, got {what}", str(path)) from None
