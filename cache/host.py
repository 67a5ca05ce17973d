"""Artifact: the facts about this host that recorded requirements are compared with.

Read from files and the C library alone: no process is started, and torch is not needed.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pwcc.cache import elf
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.requirements import highest

LIBRARY_FOLDERS: Final = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")
_LIBSTDCXX: Final = "libstdc++.so.6"
_MAX_CPUINFO: Final = 64 * 1024  # the first processor's block; a file of 256 processors exceeds 400 KiB


@dataclass(frozen=True)
class HostFacts:
    """What this process runs on. None or an empty set where the host does not say.

    ``cpu_flags`` are the names of /proc/cpuinfo for the first processor (x86 ``flags``, Arm
    ``Features``); ``glibcxx`` and ``cxxabi`` are the highest versions that the C++ runtime of this
    process, or the one the loader would find, defines; ``openmp`` the OpenMP runtimes mapped now.
    """

    os: str
    machine: str
    byte_order: str
    python_abi: str
    glibc: str | None
    glibcxx: str | None
    cxxabi: str | None
    cpu_flags: frozenset[str]
    openmp: frozenset[str]

    def facts(self) -> dict[str, object]:
        """Return the facts by requirement kind, for ``requirements.unmet``."""
        return {
            "os": self.os,
            "machine": self.machine,
            "byte_order": self.byte_order,
            "python_abi": self.python_abi,
            "glibc": self.glibc,
            "glibcxx": self.glibcxx,
            "cxxabi": self.cxxabi,
            "cpu_flags": self.cpu_flags,
            "openmp": self.openmp,
        }


def read_host(*, maps: Path = Path("/proc/self/maps"), cpuinfo: Path = Path("/proc/cpuinfo")) -> HostFacts:
    """Return this host's facts.

    Call it when torch is imported, so that the C++ runtime found is the one in use. Libraries are
    read once per file; a call costs about 1 ms in a process with torch.
    """
    mapped = mapped_libraries(maps)
    runtime = find_library(_LIBSTDCXX, mapped, default_folders())
    versions = library_versions(runtime) if runtime else {}
    return HostFacts(
        os=sys.platform,
        machine=platform.machine(),
        byte_order=sys.byteorder,
        python_abi=python_abi(),
        glibc=glibc_version(),
        glibcxx=versions.get("glibcxx"),
        cxxabi=versions.get("cxxabi"),
        cpu_flags=cpu_flags(cpuinfo),
        openmp=frozenset(name for path in mapped if (name := openmp_name(path))),
    )


def python_abi() -> str:
    """Return implementation and ABI of the interpreter, such as ``cpython-311`` or ``cpython-313t``."""
    implementation = sys.implementation.name
    flags = sysconfig.get_config_var("ABIFLAGS") or ""
    return f"{implementation}-{sys.version_info.major}{sys.version_info.minor}{flags}"


def glibc_version() -> str | None:
    """Return the running C library's version, such as ``2.36``; None when it is not glibc."""
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return None
    return number if name == "glibc" and number else None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the first processor's feature names; empty when the file does not exist."""
    try:
        with cpuinfo.open("rb") as stream:
            head = stream.read(_MAX_CPUINFO)
    except OSError:
        return frozenset()
    found = re.search(rb"^(?:flags|Features)[ \t]*:(.*)$", head, re.MULTILINE)
    return frozenset(found[1].decode("ascii", "replace").split()) if found else frozenset()


def mapped_libraries(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """Return the shared objects mapped into this process, in address order, each once."""
    try:
        text = maps.read_bytes()
    except OSError:
        return []
    found = re.findall(rb" (/[^\n]*\.so[^\n/]*)$", text, re.MULTILINE)
    return [Path(os.fsdecode(name)) for name in dict.fromkeys(found)]


def default_folders() -> list[Path]:
    """Return the loader's usual folders, the multiarch ones first."""
    triplet = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    folders = [Path(folder) for folder in LIBRARY_FOLDERS]
    return [*(folder / triplet for folder in folders[:2]), *folders]


def find_library(name: str, mapped: Iterable[Path], folders: Sequence[Path]) -> Path | None:
    """Return the library ``name`` (a soname): the mapped one, else the first in ``folders``."""
    for path in mapped:
        if path.name == name or path.name.startswith(name + "."):
            return path
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def openmp_name(path: Path) -> str | None:
    """Return the soname if ``path`` is an OpenMP runtime.

    Wheels bundle it under a hashed name (``libgomp-a34b3233.so.1``): that is the same soname here.
    """
    found = re.fullmatch(r"(libgomp|libomp|libiomp5)(?:-[0-9a-f]{6,})?(\.so(?:\.\d+)?)[.\d]*", path.name)
    return f"{found[1]}{found[2]}" if found else None


@cache
def library_versions(path: Path) -> dict[str, str]:
    """Return the highest ``glibcxx`` and ``cxxabi`` that a library defines; empty when unreadable."""
    try:
        return highest(elf.defined_versions(path.read_bytes(), where=str(path)))
    except (OSError, CorruptEntry):
        return {}
