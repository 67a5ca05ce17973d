"""Artifact: a compiler driver that keeps the building machine out of the objects it makes.

Inductor has no option for extra compiler flags, and 2.11 none for the target CPU (it always appends
``-march=native``). It does take the compiler's path. So a two-line script of the same name as the real
compiler (Inductor tells gcc from clang by the name) runs it with the flags that must come last.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from pwcc.cache.errors import PieceCompileError


def write_driver(
    directory: Path, *, march: str, path_prefixes: Sequence[str], compiler: str | None = None
) -> Path:
    """Write the driver into ``directory`` and return its path.

    ``march`` overrides what came before; every path that starts with one of ``path_prefixes`` is written
    as relative (``-ffile-prefix-map``); debug information, symbol tables and build ids are left out, so
    the same source gives the same object in another directory.

    Raises:
        PieceCompileError: no C++ compiler on PATH.
    """
    name = compiler or os.environ.get("CXX") or "g++"
    real = shutil.which(name)
    if real is None:
        raise PieceCompileError(f"expected a C++ compiler {name!r} on PATH, got none", hint="install g++")
    flags = [
        f"-march={march}",
        "-g0",
        "-s",
        "-Wl,--build-id=none",
        # Inductor names a source by a digest that covers absolute paths; checks in its headers hold __FILE__.
        "-Wno-builtin-macro-redefined",
        '-D__FILE__="kernel.cpp"',
        *(f"-ffile-prefix-map={prefix}=." for prefix in sorted(set(path_prefixes), key=len)),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    driver = directory / Path(name).name
    # TMPDIR: a compiler that is killed leaves its intermediate files behind.
    own = shlex.quote(str(directory))
    text = (
        f'#!/bin/sh\nexport TMPDIR={own}\nexec {shlex.quote(real)} "$@" {" ".join(map(shlex.quote, flags))}\n'
    )
    if not driver.is_file() or driver.read_text() != text:
        staged = driver.with_suffix(f".{os.getpid()}")  # another worker may be running it
        staged.write_text(text)
        staged.chmod(0o700)
        staged.replace(driver)
    return driver
