"""Store: files that appear whole or not at all, and operating-system errors with advice.

Everything is written below ``v1/tmp``, flushed, and renamed into place on the same file system. A
temporary name tells its owner, and the owner holds a lock on the file or folder itself while it works
(:mod:`pwcc.cache.sweep` removes what no owner holds). File modes follow the umask (0666 and 0777 before
it) and groups the folder's setgid bit, so that a group or the world may read a cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from pwcc.cache import owners
from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.failpoints import failpoint

T = TypeVar("T")

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
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.EBUSY: "something else uses the file, such as a mount below the cache; try again",
    errno.ESTALE: "the network file system lost the file: mount it again, or try again",
    errno.EIO: "the device or network failed to read or write: check it, then run pwcc verify",
    errno.ENOENT: "the directory was removed while it was used; try again",
}
# Directories cannot be flushed on some network and FUSE file systems; the rename is still atomic there.
_NO_DIRECTORY_FSYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
# What network file systems answer once and not again.
_PASSING: Final = {errno.EBUSY, errno.ESTALE}
_PAUSES_S: Final = (0.02, 0.2)
# Never follow a link that somebody placed in a cache, nor wait for the writer of a named pipe.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def os_errors(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError that names ``what``, the file and a next step."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        code = errno.errorcode.get(error.errno or 0, "OSError")
        place = str(error.filename or path)
        raise StoreError(
            f"{what} failed: {reason} ({code}{_mode(place) if error.errno == errno.EACCES else ''})",
            where=place,
            hint=_ADVICE.get(error.errno or 0),
        ) from error


def _mode(place: str) -> str:
    try:
        found = os.stat(place)  # noqa: PTH116
    except OSError:
        return ""
    return f": mode {stat.S_IMODE(found.st_mode):04o}, user id {found.st_uid}, group id {found.st_gid}"


def retrying(call: Callable[[], T]) -> T:
    """Return ``call()``; try again, twice, where the error is one that passes (EBUSY, ESTALE)."""
    for pause in _PAUSES_S:
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            time.sleep(pause)
    return call()


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. OSError passes through.

    Raises:
        CorruptEntry: it is a symbolic link, a folder, a pipe or a device.
    """
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise CorruptEntry("expected a regular file, got a link or socket", where=str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptEntry("expected a regular file, got a folder, pipe or device", where=str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a regular file of at most ``max_bytes``. OSError passes through.

    Raises:
        CorruptEntry: it is larger, or no regular file.
    """

    def read() -> bytes:
        with open(open_regular(path), "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise CorruptEntry(f"expected at most {max_bytes} bytes, got {size}", where=str(path))
            data = stream.read(size + 1) or b""
            while len(data) <= max_bytes and (more := stream.read(max_bytes + 1 - len(data))):
                data += more
        if len(data) > max_bytes:
            raise CorruptEntry(f"expected at most {max_bytes} bytes, got more", where=str(path))
        return data

    return retrying(read)


def write_new(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data`` and flush it to the device. OSError passes through."""
    os.close(_write_new(path, data))


def _write_new(path: Path, data: bytes) -> int:
    """Create and flush a file; return its descriptor, on which this process holds a lock."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        hold_lock(descriptor)
        failpoint("file.created")
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        failpoint("file.written")
        os.fsync(descriptor)
        failpoint("file.flushed")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hold_lock(descriptor: int) -> None:
    """Lock an open file or folder for as long as it is open, where the file system can: it has an owner."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_replace(path: Path, data: bytes, *, tmp: Path) -> None:
    """Put ``data`` at ``path`` by writing a new file below ``tmp`` and renaming it over. OSError passes."""
    staged = tmp / owners.staging_name()
    try:
        descriptor = _write_new(staged, data)
        try:
            retrying(lambda: os.replace(staged, path))  # noqa: PTH105 - one seam for tests to break
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise
    failpoint("file.renamed")


def rename_new(staged: Path, path: Path) -> bool:
    """Rename a folder to a name that must not be taken; return whether it was free. OSError passes."""
    try:
        retrying(lambda: os.rename(staged, path))  # noqa: PTH104 - one seam for tests to break
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def fsync_directory(path: Path) -> None:
    """Flush the names in a directory, where the file system can. OSError passes through, a link is one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
    staged = tmp / owners.staging_name()
    staged.mkdir()
    descriptor = -1
    try:
        descriptor = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        hold_lock(descriptor)
        yield staged
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        shutil.rmtree(staged, ignore_errors=True)
