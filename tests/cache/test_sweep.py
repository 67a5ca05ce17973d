from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pwcc.cache import owners, sweep
from pwcc.cache.store import Store

NOW = 1_800_000_000.0
DEAD = f"{owners.host_id()}-{owners.current().pid}-{owners.current().start + 1}-{'0' * 32}"
FOREIGN = f"{'ab' * 6}-1-1-{'0' * 32}"
LEGACY = "c" * 32


def make(tmp: Path, name: str, age: float, *, folder: bool = False) -> Path:
    path = tmp / name
    if folder:
        path.mkdir(parents=True)
        (path / "manifest.json").write_bytes(b"{")
    else:
        path.write_bytes(b"half a bl")
    os.utime(path, (NOW - age, NOW - age))
    return path


@pytest.mark.parametrize(
    ("name", "age", "removed"),
    [
        (DEAD, 0.0, True),
        (DEAD, -1e6, True),
        (owners.staging_name(), 1e9, False),
        (FOREIGN, 10.0, False),
        (FOREIGN, sweep.FOREIGN_AGE_S + 1, True),
        (LEGACY, 10.0, False),
        (LEGACY, sweep.FOREIGN_AGE_S + 1, True),
        # A clock was wrong: what is an hour and more in the future has no known age, but nobody holds it.
        (FOREIGN, -10.0, False),
        (FOREIGN, -sweep.FUTURE_S - 1, True),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_who_left_it_and_when(tmp_path: Path, name: str, age: float, removed: bool, folder: bool) -> None:
    path = make(tmp_path, name, age, folder=folder)
    assert sweep.sweep(tmp_path, now=NOW, remove=False).removed == ((name,) if removed else ())
    assert path.exists()
    done = sweep.sweep(tmp_path, now=NOW)
    assert done.removed == ((name,) if removed else ())
    assert done.kept == (() if removed else (name,))
    assert path.exists() is not removed


@pytest.mark.parametrize("folder", [False, True])
def test_what_another_host_holds_is_kept(tmp_path: Path, folder: bool) -> None:
    path = make(tmp_path, FOREIGN, 1e9, folder=folder)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert sweep.sweep(tmp_path, now=NOW).removed == ()
    os.close(descriptor)
    assert sweep.sweep(tmp_path, now=NOW).removed == (FOREIGN,)


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / DEAD).symlink_to(tmp_path / "kept")
    assert sweep.sweep(tmp_path / "tmp", now=NOW).removed == (DEAD,)
    assert (tmp_path / "kept" / "file").exists()


def test_the_time_is_bounded(tmp_path: Path) -> None:
    for index in range(20):
        make(tmp_path, f"{DEAD[:-2]}{index:02}", 0)
    ticks = iter(range(100))
    done = sweep.sweep(tmp_path, now=NOW, budget_s=5, clock=lambda: float(next(ticks)))
    assert not done.complete
    assert 0 < len(done.removed) < 20
    assert sweep.sweep(tmp_path, now=NOW).complete
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    assert sweep.sweep(tmp_path / "none", now=NOW) == sweep.Swept()


STAGE = """
import sys, time
from pathlib import Path
from pwcc.cache import failpoints
from pwcc.cache.store import Store
store = Store.create(Path(sys.argv[1]))
def wait(name):
    if name == "file.written":
        print("staged", flush=True)
        time.sleep(60)
failpoints.install(wait)
store.put_blob(b"x" * 1000)
"""


def test_a_living_writer_is_left_alone_and_a_dead_one_swept_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    writer = subprocess.Popen([sys.executable, "-c", STAGE, str(root)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "staged\n"
    tmp = root / "v1/tmp"
    (staged,) = tmp.iterdir()
    os.utime(staged, (0, 0))  # as old as can be
    Store.create(root)
    assert staged.exists()
    writer.send_signal(signal.SIGSTOP)  # stopped is not dead
    Store.create(root)
    assert staged.exists()
    writer.kill()
    writer.communicate()
    assert sweep.is_abandoned(staged, now=time.time())
    Store.open(root)  # a reader sweeps nothing
    assert staged.exists()
    Store.create(root)
    assert list(tmp.iterdir()) == []
