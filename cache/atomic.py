"""Store: files that appear whole or not at all, and operating-system errors with advice.

Everything is written below ``v1/tmp``, flushed, and renamed into place on the same file system.
File modes follow the umask (0666 and 0777 before it), so that a group or the world may read a cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pwcc.cache.errors import StoreError

_ADVICE: Final = {
    errno.ENOSPC: "free some space, or choose another --cache-dir",
    errno.EDQUOT: "free some of your quota, or choose another --cache-dir",
    errno.EACCES: "check the owner and mode of the directory, or choose another --cache-dir",
    errno.EPERM: "check the owner and mode of the directory, or choose another --cache-dir",
    errno.EROFS: "the file system is read-only: it can serve, but choose another --cache-dir to compile",
    errno.ENAMETOOLONG: "choose a shorter --cache-dir",
    errno.EXDEV: "the cache must lie on one file system: remove mount points below it",
    errno.ENOTDIR: "a part of the path is a file; choose another --cache-dir",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
# Directories cannot be flushed on some network and FUSE file systems; the rename is still atomic there.
_NO_DIRECTORY_FSYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}


@contextlib.contextmanager
def os_errors(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError that names ``what``, the file and a next step."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        code = errno.errorcode.get(error.errno or 0, "OSError")
        raise StoreError(
            f"{what} failed: {reason} ({code})",
            where=str(error.filename or path),
            hint=_ADVICE.get(error.errno or 0),
        ) from error


def write_new(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data`` and flush it to the device. OSError passes through."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_replace(path: Path, data: bytes, *, tmp: Path) -> None:
    """Put ``data`` at ``path`` by writing a new file below ``tmp`` and renaming it over. OSError passes."""
    staged = tmp / uuid.uuid4().hex
    try:
        write_new(staged, data)
        os.replace(staged, path)  # noqa: PTH105 - one seam for tests to break
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise


def fsync_directory(path: Path) -> None:
    """Flush the names in a directory, where the file system can. OSError passes through."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staging_directory(tmp: Path) -> Iterator[Path]:
    """Yield a new directory below ``tmp``; what is left of it afterwards is removed."""
    staged = tmp / uuid.uuid4().hex
    staged.mkdir()
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)
