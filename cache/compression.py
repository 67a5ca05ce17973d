"""Store: zstd around an archive, through the ``zstd`` extra; memory is bounded whatever the stream says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Final, Protocol

from pwcc.cache.archive import Reader
from pwcc.cache.errors import CorruptEntry, UsageError, install

MAGIC: Final = b"\x28\xb5\x2f\xfd"
LEVEL: Final = 10
MAX_WINDOW: Final = 2**27  # bytes of memory that a stream may ask for; `zstd --long` needs these


class Writer(Protocol):
    """Where an archive's bytes go."""

    def write(self, data: bytes, /) -> object:
        """Write all of ``data``."""
        ...


@contextlib.contextmanager
def compressed(sink: Writer) -> Iterator[Writer]:
    """Yield a writer whose bytes arrive at ``sink`` compressed; the end is written when the block ends well.

    The same bytes give the same bytes, for one version of ``zstandard``.

    Raises:
        UsageError: ``zstandard`` is not installed.
    """
    zstd = _zstandard()
    compressor = zstd.ZstdCompressor(level=LEVEL, write_checksum=True, threads=0).compressobj()

    class Compressing:
        def write(self, data: bytes, /) -> object:
            return sink.write(compressor.compress(data))

    yield Compressing()
    sink.write(compressor.flush())


def plain(stream: Reader, *, where: str) -> Reader:
    """Return a reader of the archive in ``stream``, which is decompressed if it begins as zstd does.

    Raises:
        UsageError: it is compressed, and ``zstandard`` is not installed.
    """
    head = b""
    while len(head) < len(MAGIC) and (more := stream.read(len(MAGIC) - len(head))):
        head += more
    joined = _Joined(head, stream)
    return _Decompressed(joined, where) if head == MAGIC else joined


class _Joined:
    """What was read already, and then the rest."""

    def __init__(self, head: bytes, stream: Reader) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        if not self._head:
            return self._stream.read(size)
        data, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
        return data


class _Decompressed:
    """Reads through zstd, as many bytes as are asked for and no more; frames follow one another."""

    def __init__(self, stream: Reader, where: str) -> None:
        zstd = _zstandard()
        self._where = where
        self._error = zstd.ZstdError
        decompressor = zstd.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._stream = decompressor.stream_reader(stream, read_size=65536, read_across_frames=True)

    def read(self, size: int, /) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except self._error as error:
            raise CorruptEntry(
                f"expected a zstd stream, got {error}",
                where=self._where,
                hint="the file was damaged: copy or export it again",
            ) from None
        return data


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise UsageError(
            "zstd needs the package 'zstandard', which is not installed",
            hint=f"{install('zstd')}; or use a plain .tar",
        ) from None
    return zstandard
