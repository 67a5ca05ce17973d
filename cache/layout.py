"""Store: the fixed parts of a cache directory: tag, README and versioned folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, folders
from pwcc.cache.errors import CorruptEntry, NewerFormat, NotAStore, UntrustedStore
from pwcc.cache.failpoints import failpoint

VERSION: Final = "v1"
FOLDERS: Final = ("entries", "pieces", "blobs/sha256", "plans", "locks", "tmp", "quarantine")
# Every folder at a fixed place below the root, outermost first.
FIXED: Final = ("", "blobs", *FOLDERS, "pins", "costs", "tuning", "used")
TAG_NAME: Final = "CACHEDIR.TAG"
# The first line is fixed by https://bford.info/cachedir/: backup tools skip the directory.
TAG: Final = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# This directory is a pwcc cache. It can be copied, and deleted when no longer needed.\n"
)
README: Final = b"""\
This directory is a pwcc cache: PyTorch models compiled piecewise, ready to load without a compiler.

IT IS CODE. Loading an entry runs the machine code and the Python programs in it. Use one only if you
trust everybody who could write to it, as you would trust an executable.

  v1/entries/<lookup key>/<entry key>/manifest.json   one compiled model; `pwcc inspect` shows it
  v1/blobs/sha256/                                    kernels, programs and records, named by SHA-256
  v1/pieces/                                          pieces that a later compile may use again
  v1/pins/ v1/used/                                   what `pwcc gc` must keep, and when it was last used
  v1/costs/ v1/tuning/                                what an entry took to make, and what its tuning measured
  v1/plans/ v1/locks/ v1/tmp/ v1/quarantine/          working files

It may be copied anywhere as a whole (`cp -r`), read from a read-only mount, and deleted at any time
when nothing uses it: the next `pwcc compile` makes it again.
"""
# Names that a fresh file system or a racing creator may have put there.
_IGNORED: Final = {TAG_NAME, "README", VERSION, "lost+found"}
_STAGING: Final = ".pwcc-"


def check(root: Path) -> None:
    """Raise unless ``root`` is a pwcc cache directory that this version reads. Writes nothing.

    Raises:
        NotAStore: missing, not a directory, or something else's. NewerFormat: only later versions.
    """
    hint = "pass the directory that `pwcc compile --cache-dir` wrote"
    if not root.is_dir():
        what = "a file" if root.exists() else "no such directory"
        raise NotAStore(f"expected a pwcc cache directory, got {what}", where=str(root), hint=hint)
    if not _is_tagged(root):
        raise NotAStore(
            f"expected a pwcc cache directory, got one without its {TAG_NAME}", where=str(root), hint=hint
        )
    if not (root / VERSION).is_dir():
        others = sorted(path.name for path in root.glob("v[0-9]*"))
        if others:
            raise NewerFormat(
                f"expected cache format {VERSION}, got {', '.join(others)}: a newer pwcc wrote it",
                where=str(root),
            )
        raise NotAStore(f"expected a folder {VERSION} in the cache, found none", where=str(root), hint=hint)


def create(root: Path) -> None:
    """Make ``root`` a store, or complete one; several processes may do so at once. OSError passes through.

    Raises:
        NotAStore: the path is a file, or a directory that holds something else.
        UntrustedStore: see :func:`require_real`.
    """
    if root.exists() and not root.is_dir():
        raise NotAStore("expected a directory, got a file", where=str(root), hint="choose another --cache-dir")
    root.mkdir(parents=True, exist_ok=True)
    if not _is_tagged(root):
        foreign = sorted(n for n in os.listdir(root) if n not in _IGNORED and not n.startswith(_STAGING))  # noqa: PTH208
        if foreign:
            raise NotAStore(
                f"expected an empty directory or a pwcc cache, found {', '.join(foreign[:3])}",
                where=str(root),
                hint="choose another --cache-dir",
            )
        # The tag comes first: from here on the directory is recognisably ours.
        _place(root, TAG_NAME, TAG)
        failpoint("layout.tagged")
    require_real(root)
    for folder in FOLDERS:
        folders.make(root / VERSION / folder, parents=True)
    if not (root / "README").exists():
        _place(root, "README", README)
    failpoint("layout.made")


def links(root: Path) -> Iterator[str]:
    """Yield the fixed folders below ``root`` that are symbolic links, outermost first."""
    base = os.path.join(root, VERSION)  # noqa: PTH118 - a load does this: 20 microseconds for all
    for part in FIXED:
        path = os.path.join(base, part) if part else base  # noqa: PTH118
        try:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                yield path
        except OSError:
            continue


def require_real(root: Path) -> None:
    """Raise if a fixed folder below ``root`` is a symbolic link: nothing is written or removed through one.

    Raises:
        UntrustedStore: one is. ``--trust-dir`` does not lift this.
    """
    for path in links(root):
        raise UntrustedStore(
            "expected a folder, got a symbolic link",
            where=path,
            hint="put the folder itself there, or make the whole cache a link: --cache-dir may be one",
        )


def mark(root: Path) -> None:
    """Put the tag of a store back if it is gone. OSError passes through."""
    if not _is_tagged(root):
        _place(root, TAG_NAME, TAG)


def is_empty(root: Path) -> bool:
    """Tell whether nothing is there, as after a restore that found nothing. OSError passes through."""
    return not root.exists() or (root.is_dir() and not any(root.iterdir()))


def _place(root: Path, name: str, data: bytes) -> None:
    staged = root / f"{_STAGING}{os.getpid()}-{os.urandom(6).hex()}"
    try:
        atomic.write_new(staged, data)
        staged.replace(root / name)
    finally:
        staged.unlink(missing_ok=True)


def _is_tagged(root: Path) -> bool:
    try:
        descriptor = atomic.retrying(lambda: atomic.open_regular(root / TAG_NAME))
        with open(descriptor, "rb", buffering=0) as stream:  # noqa: PTH123
            head = stream.read(512)
    except (FileNotFoundError, NotADirectoryError, CorruptEntry):
        return False
    return head.startswith(TAG[:43]) and b"pwcc" in head
