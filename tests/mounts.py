"""Small file systems of their own, for tests of what only a real one does. Needs the right to mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """Yield a new tmpfs at ``place``; skip the test where this process may not mount."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    try:
        done = subprocess.run(command, check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
