"""Store: who could have written an entry. A cache is code, so it is loaded only from those that are trusted.

Trusted without a word are root (an image's read-only cache) and the user who loads. A folder or manifest
of anybody else, or one that everybody may write, is a concern; a group's write permission is not, since
somebody gave it on purpose. Blobs need no check: the manifest names them by digest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pwcc.cache import layout
from pwcc.cache.errors import UntrustedStore

VARIABLE: Final = "PWCC_TRUST_DIR"
_ROOT: Final = 0


def is_trusted_by_name(root: Path, environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether ``PWCC_TRUST_DIR`` names the cache: ``1`` for every one, or folders, separated by ``:``."""
    value = (os.environ if environ is None else environ).get(VARIABLE, "")
    if value == "1":
        return True
    real = os.path.realpath(root)
    return any(part and os.path.realpath(part) == real for part in value.split(os.pathsep))


def require(root: Path, *, trust: bool = False, environ: Mapping[str, str] | None = None) -> bool:
    """Raise unless the cache ``root`` is of somebody who is trusted; return whether it was trusted by name.

    Raises:
        UntrustedStore: the folder or its fixed parts are of others, or could have been changed by them; or,
            trusted or not, a fixed part is a symbolic link.
    """
    layout.require_real(root)
    if trust or is_trusted_by_name(root, environ):
        return True
    found = next(concerns(root), None)
    if found is not None:
        raise UntrustedStore(
            f"expected a cache that only you or root can write, got {found}",
            where=str(root),
            hint="loading runs its code: if you trust who could write it, pass --trust-dir "
            f"(trust_dir=True, {VARIABLE}={root})",
        )
    return False


def concerns(root: Path, *, user: int | None = None) -> Iterator[str]:
    """Yield what speaks against loading from the cache ``root``, outermost first."""
    me = os.geteuid() if user is None else user
    real = Path(os.path.realpath(root))
    # Who may write a parent can put another cache there, but only one that is then theirs and refused.
    for path in (real, *(real / layout.VERSION / part for part in layout.FIXED)):
        found = _concern(path, me)
        if found:
            yield found


def entry_concern(entry: Path, manifest: Path, *, user: int | None = None) -> str | None:
    """Return what speaks against loading one entry of a trusted cache, or None."""
    me = os.geteuid() if user is None else user
    return next(filter(None, (_concern(path, me) for path in (entry.parent, entry, manifest))), None)


def _concern(path: Path, me: int) -> str | None:
    try:
        found = path.lstat()
    except OSError:
        return None  # what is not there is not loaded
    if stat.S_ISLNK(found.st_mode):
        return f"a symbolic link: {path}"
    if found.st_uid not in (_ROOT, me):
        return f"{path} of user id {found.st_uid} (you are {me})"
    writable = found.st_mode & stat.S_IWOTH
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if writable and not sticky:
        return f"{path}, which everybody may write (mode {stat.S_IMODE(found.st_mode):04o})"
    return None
