"""Artifact: the directories of the building machine, whose paths must not occur in anything sealed."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from pwcc.cache.errors import UnsealableError


def builder_paths(extra: Iterable[str] = ()) -> tuple[str, ...]:
    """Return this process's interpreter, package, home, temporary and working directories, and ``extra``.

    Longest first, real paths included. Roots as short as ``/`` or ``/usr`` say nothing about a builder
    and are left out.
    """
    found = {
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("purelib"),
        tempfile.gettempdir(),
        str(Path.home()),
        str(Path.cwd()),
        *extra,
    }
    found |= {os.path.realpath(path) for path in found}
    common = {"/", "/usr", "/usr/local", "/opt"}
    return tuple(sorted(found - common, key=lambda path: (-len(path), path)))


def refuse_builder_paths(data: bytes, paths: Sequence[str], *, what: str, hint: str) -> None:
    """Refuse bytes that name a directory of the builder.

    Raises:
        UnsealableError: names what holds the path, the path, and how to avoid it.
    """
    for path in paths:
        needle = path.encode() + b"/"
        at = data.find(needle)
        if at >= 0:
            tail = data[at : at + 200].split(b"\0")[0].split(b"\n")[0]
            raise UnsealableError(
                f"expected no path of the building machine in {what}, got {tail.decode(errors='replace')!r}",
                hint=hint,
            )
