"""Key: whose code a frame runs: the model's own, an installed package's, Python's or the compiler's.

Decided by module name and file, never by content. An installed package (below ``site-packages``) is
"own" if the model itself comes from it.
"""

from __future__ import annotations

import enum
import functools
import os
import sysconfig
from collections.abc import Collection
from types import FrameType

TOOLING = frozenset({"torch", "torchgen", "functorch", "triton", "pwcc"})
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
IMPORTING = "<frozen importlib._bootstrap"


class Owner(enum.Enum):
    """Whose code it is."""

    OWN = "the model's own code"
    INSTALLED = "an installed package"
    STDLIB = "Python's standard library"
    TOOLING = "torch, Triton or pwcc"


def owner_of_frame(frame: FrameType, own: Collection[str]) -> Owner:
    """Return whose code ``frame`` runs; ``own`` names packages that are the model's wherever they lie."""
    name = frame.f_globals.get("__name__")
    return owner_of(name if isinstance(name, str) else "", frame.f_code.co_filename, own)


def owner_of(module: str, filename: str, own: Collection[str]) -> Owner:
    """Return whose code a module's file holds."""
    top = module.partition(".")[0]
    if top in own:
        return Owner.OWN
    return Owner.TOOLING if top in TOOLING else _by_file(filename)


@functools.lru_cache(maxsize=4096)
def _by_file(filename: str) -> Owner:
    if filename.startswith("<frozen "):
        return Owner.STDLIB
    real = os.path.realpath(filename)
    if any(f"{os.sep}{folder}{os.sep}" in path for folder in _INSTALLED for path in (filename, real)):
        return Owner.INSTALLED
    return Owner.STDLIB if real.startswith(_STDLIB) else Owner.OWN  # no file (exec, a notebook): own


def is_importing(frame: FrameType) -> bool:
    """Tell whether a frame is the import system running a module's code or looking for one."""
    code = frame.f_code
    return code.co_filename.startswith(IMPORTING) and code.co_name in (
        "_call_with_frames_removed",
        "_find_and_load",
        "_load_unlocked",
        "exec_module",
        "_fill_cache",
    )
