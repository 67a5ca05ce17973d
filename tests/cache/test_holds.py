from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pwcc.cache import holds
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store

HOLD = """
import sys
from pathlib import Path
from pwcc.cache import holds
mark = holds.hold(Path(sys.argv[1]))
print(mark.is_marked, flush=True)
sys.stdin.readline()
"""


def test_another_process_sees_the_mark_until_its_holder_ends(store: Store, manifest: Manifest) -> None:
    path = store.publish(manifest).path
    assert holds.is_held(path) is False
    reader = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "True\n"
    assert holds.is_held(path) is True
    mine = holds.hold(path)  # readers share
    assert mine is not None
    assert mine.is_marked
    reader.kill()
    reader.communicate()
    assert holds.is_held(path) is True
    del mine
    gc.collect()
    assert holds.is_held(path) is False


def test_one_descriptor_per_entry(store: Store, manifest: Manifest) -> None:
    path = store.publish(manifest).path
    first = holds.hold(path)
    assert all(holds.hold(path) is first for _ in range(1000))
    assert first is not None


def test_descriptors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MAX_HOLDS", len(holds._holds) + 2)
    paths = [tmp_path / str(index) for index in range(3)]
    for path in paths:
        path.mkdir()
    first, second, third = [holds.hold(path) for path in paths]
    assert first is not None
    assert second is not None
    assert third is None
    del first
    gc.collect()
    assert holds.hold(paths[2]) is not None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_no_locks_no_mark_and_no_error(
    store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = store.publish(manifest).path

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    mark = holds.hold(path)
    assert mark is not None
    assert not mark.is_marked
    assert holds.is_held(path) is None


def test_what_cannot_be_opened_is_not_held(tmp_path: Path) -> None:
    assert holds.hold(tmp_path / "none") is None
    assert holds.is_held(tmp_path / "none") is False
    (tmp_path / "file").write_text("")
    assert holds.hold(tmp_path / "file") is None
    (tmp_path / "link").symlink_to(tmp_path)
    assert holds.hold(tmp_path / "link") is None
