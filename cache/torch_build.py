"""Artifact: which torch is installed, read from its files without importing it, for quick commands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

from pwcc.cache.host import read_host

_MAX_BYTES: Final = 64 * 1024


def installed_torch() -> str | None:
    """Return version and git hash as entries require them, such as ``2.13.0+cpu <hash>``; None if unknown."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        with Path(spec.origin).with_name("version.py").open("rb") as stream:
            text = stream.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError, ImportError):
        return None
    version = re.search(r"""^__version__ = ['"]([^'"\n]+)['"]""", text, re.MULTILINE)
    commit = re.search(r"""^git_version = ['"]([^'"\n]+)['"]""", text, re.MULTILINE)
    return f"{version[1]} {commit[1]}" if version and commit else None


def quick_facts() -> dict[str, object]:
    """Return this host's facts by requirement kind, without what only a process with torch or a GPU knows."""
    found = read_host().facts() | {"torch": installed_torch()}
    found.pop("openmp")  # those that torch brings are mapped with it
    return {kind: value for kind, value in found.items() if value}
