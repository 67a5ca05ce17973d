from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.locks import file_lock
from pwcc.cache.store import Store

HOLD = """
import sys
from pathlib import Path
from pwcc.cache.locks import file_lock
with file_lock(Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.readline()
"""


def test_another_process_waits(store: Store) -> None:
    path = store.root / "v1/locks/entry.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with pytest.raises(StoreError, match="another process held the lock"), store.lock("entry", timeout_s=0.05):
        pass
    holder.communicate("done\n", timeout=30)
    with store.lock("entry", timeout_s=5) as held:
        assert held


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with store.lock("entry") as held:
        assert not held


def test_other_errors_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="taking a lock"), file_lock(tmp_path / "file" / "x.lock", timeout_s=1):
        pass


def test_an_error_inside_releases(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.lock("entry"):
        raise ZeroDivisionError
    with store.lock("entry", timeout_s=0.1) as held:
        assert held


@pytest.mark.parametrize("name", ["../x", "", ".x", "a/b", "x" * 200])
def test_names(store: Store, name: str) -> None:
    with pytest.raises(CorruptEntry):
        store.lock(name)
