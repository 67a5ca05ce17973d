"""Store: which process a temporary file or a lock belongs to, and whether that process still runs.

An owner is written as ``<host>-<pid>-<start>``: a digest of the running kernel's identity and the process
namespace, the process id, and its start in clock ticks since boot, so that a process id that was given out
again is another owner. Neither a host's nor a user's name is in it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

_PATTERN = re.compile(r"([0-9a-f]{12})-(\d{1,10})-(\d{1,20})")


@dataclass(frozen=True)
class Owner:
    """One process on one host; ``start`` is 0 where the system does not tell it."""

    host: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.start}"

    @property
    def is_local(self) -> bool:
        """Whether the process is of this host, so that it can be looked for."""
        return self.host == host_id()

    def is_alive(self) -> bool | None:
        """Return whether the process still runs; None for one of another host."""
        if not self.is_local:
            return None
        return _exists(self.pid) and self.start in (0, _start(self.pid))


def parse(text: str) -> Owner | None:
    """Return the owner that ``text`` begins with, None where it begins with none."""
    found = _PATTERN.match(text)
    return None if found is None else Owner(found[1], int(found[2]), int(found[3]))


def current() -> Owner:
    """Return this process as an owner."""
    return _current(os.getpid())


def staging_name() -> str:
    """Return a new name for a temporary file: its owner and a random number (pids alone repeat over hosts)."""
    return f"{current()}-{uuid.uuid4().hex}"


@functools.cache
def host_id() -> str:
    """Return 12 hex digits that name this running kernel and process namespace."""
    parts = [_read("/proc/sys/kernel/random/boot_id") or platform.node()]
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - no file, its text is what is wanted
    except OSError:
        parts.append("")
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:12]


@functools.lru_cache(maxsize=2)  # a fork is another process
def _current(pid: int) -> Owner:
    return Owner(host_id(), pid, _start(pid))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a number beyond what the system has
        return Path(f"/proc/{pid}").exists()
    except OverflowError:
        return False
    return True


def _start(pid: int) -> int:
    """Return the 22nd field of a process' stat; the second may hold spaces and parentheses."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    try:
        return int(fields[19])
    except (IndexError, ValueError):
        return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
