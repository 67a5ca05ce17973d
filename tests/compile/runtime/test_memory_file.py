"""Memory files: exactly the bytes, sealed, and never the same path twice."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from pwcc.compile.runtime.memory_file import memory_file


def test_holds_the_bytes_and_closes() -> None:
    data = os.urandom(1 << 20)
    with memory_file(data, "kernel") as path:
        assert Path(path).read_bytes() == data
    assert not Path(path).exists() or Path(path).read_bytes() != data


def test_cannot_be_written_once_it_has_a_path() -> None:
    with memory_file(b"abc", "kernel") as path:
        with pytest.raises(PermissionError):
            os.pwrite(os.open(path, os.O_RDWR), b"x", 0)
        seals = fcntl.fcntl(int(path.rsplit("/", 1)[1]), fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_WRITE
        assert seals & fcntl.F_SEAL_SEAL


def test_paths_differ_although_descriptors_repeat() -> None:
    paths = []
    for index in range(200):
        with memory_file(bytes([index]), "kernel") as path:
            assert Path(path).read_bytes() == bytes([index])
            paths.append(path)
    assert len(set(paths)) == len(paths)
    assert len({path.rsplit("/", 1)[1] for path in paths}) < len(paths)


def test_leaves_no_descriptor_behind() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(RuntimeError), memory_file(b"x", "kernel"):
            raise RuntimeError
    assert len(list(Path("/proc/self/fd").iterdir())) == before
