"""Several processes that want the same entry: who compiles, who waits, and what is said meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pwcc.cache.errors import LockTimeout, MissingBlob
from pwcc.cache.store import Store
from pwcc.compile import turns
from pwcc.compile.report import Progress
from pwcc.compile.turns import keeping_up, taking_turns

KEY = "ab" * 16
HOLD = """
import sys
from pathlib import Path
from pwcc.cache.store import Store
with Store.open(Path(sys.argv[1])).lock(sys.argv[2]) as held:
    print(held, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


@pytest.fixture
def holder(store: Store) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store.root), KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def test_nobody_is_in_the_way(store: Store) -> None:
    said: list[Progress] = []
    with taking_turns(store, KEY, said.append, timeout_s=None) as locked:
        assert locked
    assert said == []


def test_waiting_says_for_whom_and_ends_in_time(
    store: Store, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SILENCE_S", 0.05)
    monkeypatch.setattr(turns, "REPORT_S", 0.05)
    said: list[Progress] = []
    with (
        pytest.raises(LockTimeout, match=f"longer than 0.4 s \\(process {holder.pid}, for ") as caught,
        taking_turns(store, KEY, said.append, timeout_s=0.4),
    ):
        pass
    assert "--lock-timeout" in str(caught.value)
    assert len(said) >= 2
    assert all(event.stage == "lock" and f"process {holder.pid}" in event.detail for event in said)
    with pytest.raises(LockTimeout), taking_turns(store, KEY, said.append, timeout_s=0):
        pass


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_a_holder_that_ends_blocks_nobody(
    store: Store, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(turns, "SILENCE_S", 0.05)

    def tell(_: Progress) -> None:
        if end == "dies":
            holder.kill()
        else:
            assert holder.stdin is not None
            holder.stdin.write("done\n")
            holder.stdin.flush()

    with taking_turns(store, KEY, tell, timeout_s=30) as locked:
        assert locked
        found = store.lock_holder(KEY)
        assert found is not None
        assert found.owner.pid == os.getpid()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_no_locks_is_said_and_no_obstacle(store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with taking_turns(store, KEY, lambda _: None, timeout_s=None) as locked:
        assert not locked


def test_a_cache_that_is_emptied_meanwhile_is_filled_again() -> None:
    said: list[Progress] = []
    tries: list[None] = []

    def compile_() -> str:
        tries.append(None)
        if len(tries) < 3:
            raise MissingBlob("expected blob 00, found none")
        return "done"

    assert keeping_up(compile_, said.append) == "done"
    assert [event.detail.rpartition(", ")[2] for event in said] == ["1 of 2", "2 of 2"]
    tries.clear()

    def never() -> str:
        tries.append(None)
        raise MissingBlob("expected blob 00, found none")

    with pytest.raises(MissingBlob):
        keeping_up(never, said.append)
    assert len(tries) == 3
