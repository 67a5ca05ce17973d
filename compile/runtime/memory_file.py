"""Artifact: bytes as a file that the loader and the driver can open, without a file on disk.

A kernel must be mapped from the very bytes that were hashed. Both dlopen and cuModuleLoad want a path,
so the bytes go into an anonymous memory file that is sealed against writing before its path is used.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; required where vm.memfd_noexec=2, unknown before
_count = itertools.count()


@contextmanager
def memory_file(data: bytes, name: str) -> Iterator[str]:
    """Yield a path that opens to exactly ``data`` for as long as the context lasts.

    No two paths of a process are equal: dlopen returns the library that it loaded under the same path
    before, even when the descriptor behind it was closed and given out again.

    Raises:
        OSError: the kernel refuses a memory file, or ``/proc`` is not mounted.
    """
    descriptor = _create(name)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield _unique_path(descriptor)
    finally:
        os.close(descriptor)


def _create(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _unique_path(descriptor: int) -> str:
    """Spell ``/proc/self/fd/N`` in a new way each time: a number written in ``/.`` and ``//``."""
    digits = f"{next(_count):b}".replace("1", "/.").replace("0", "//")
    return f"/proc/self/fd{digits}/{descriptor}"
