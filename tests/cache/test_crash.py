"""A real process, killed at every named step; then the store must be whole, and the next writer succeed."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pwcc.cache import failpoints
from pwcc.cache.findings import Kind
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.cache.verify import verify

ROOT = Path(__file__).resolve().parents[2]
LATER = 10.0 * 86400

BUILD = """
import sys
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
from failpoint_main import kill_at
from conftest import put_blobs
from pwcc.cache.ids import PieceKey
from pwcc.cache.store import Store
kill_at(sys.argv[2])
store = Store.create(Path(sys.argv[1]))
manifest = put_blobs(store)
store.put_piece(PieceKey("a" * 32), b'{{"blobs":{{}}}}')
store.publish(manifest)
""".format(tests=str(ROOT / "tests"), here=str(Path(__file__).parent))

STORE_POINTS = [point for point in failpoints.POINTS if not point.startswith("compile.")]


def build(root: Path, point: str) -> int:
    done = subprocess.run([sys.executable, "-c", BUILD, str(root), point], check=False, capture_output=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


@pytest.mark.parametrize("point", [*STORE_POINTS, "file.written:9", "file.renamed:14", "file.created:18"])
def test_killed_at_each_step(tmp_path: Path, point: str) -> None:
    root = tmp_path / "cache"
    if point == "publish.quarantined":  # passed only where a damaged entry is in the way
        assert build(root, "publish.quarantined") == 0
        (ref,) = Store.open(root).entries()
        ref.manifest.write_bytes(b"{}")
    assert build(root, point) == -signal.SIGKILL
    left = list((root / "v1/tmp").iterdir()) if (root / "v1/tmp").exists() else []
    visible = list(Store(root).entries())
    assert bool(visible) is (point in ("publish.renamed", "publish.flushed"))
    if (root / "v1").exists():
        found = verify(Store.open(root), now=time.time() + LATER)
        assert {finding.kind for finding in found.findings} <= {Kind.LEFTOVER}
    assert build(root, "publish.quarantined") == 0  # what it left does not stand in the way, and is swept
    store = Store.open(root)
    assert not any(path.exists() for path in left)
    assert list((root / "v1/tmp").iterdir()) == []
    assert len(list(store.entries())) == 1
    assert verify(store, now=time.time() + LATER).exit_code == 0


def calls() -> Iterator[tuple[str, str]]:
    for folder in ("cache", "compile", "cli", "capture"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == "failpoint"
                ):
                    (argument,) = node.args
                    assert isinstance(argument, ast.Constant)
                    assert isinstance(argument.value, str)
                    yield path.name, argument.value


def test_every_step_is_listed_and_passed() -> None:
    assert sorted(name for _, name in calls()) == sorted(failpoints.POINTS)


def test_no_variable_and_no_code_of_the_package_activates_a_step() -> None:
    for folder in ("cache", "compile", "cli", "capture"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "failpoints.install" not in path.read_text(), path
    module = ast.parse((ROOT / "cache/failpoints.py").read_bytes())
    imported = {node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "typing"}  # it reads nothing from outside
    assert not any(isinstance(node, ast.Import) for node in ast.walk(module))
    assert failpoints._hook is None


def test_a_step_costs_nothing_and_a_hook_sees_it() -> None:
    seen: list[str] = []
    failpoints.failpoint("file.created")
    failpoints.install(seen.append)
    try:
        failpoints.failpoint("file.created")
    finally:
        failpoints.install(None)
    failpoints.failpoint("file.created")
    assert seen == ["file.created"]


def test_a_stopped_writer_shows_nothing(tmp_path: Path, manifest: Manifest) -> None:
    """Between the manifest's bytes and its name: a reader sees the old state."""
    root = tmp_path / "stopped"
    script = BUILD.replace("kill_at(sys.argv[2])", STOP)
    writer = subprocess.Popen([sys.executable, "-c", script, str(root), "x"])
    deadline = time.monotonic() + 60
    while _state(writer.pid) not in "TZ" and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        store = Store.open(root)
        assert any((path / "manifest.json").exists() for path in (root / "v1/tmp").iterdir())
        assert list(store.entries()) == []
        assert store.candidates(manifest.lookup_key) == []
    finally:
        writer.send_signal(signal.SIGCONT)
    assert writer.wait(timeout=60) == 0
    assert len(list(store.entries())) == 1


STOP = """
import os, signal
from pwcc.cache import failpoints
failpoints.install(lambda name: os.kill(os.getpid(), signal.SIGSTOP) if name == "publish.written" else None)
"""


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Many at once

WORKER = f"""
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import put_blobs
from pwcc.cache.store import Store
root, rounds = Path(sys.argv[1]), int(sys.argv[2])
builds = loads = 0
print("ready", flush=True)
for number in range(rounds):
    sys.stdin.readline()
    store = Store.create(root / str(number))
    key = "ab" * 16
    with store.lock(key, timeout_s=60) as held:
        assert held
        entries = list(store.entries())
        if entries:
            manifest = store.read_manifest(entries[0])
            assert all(store.read_blob(digest) is not None for digest in manifest.blobs)
            loads += 1
        else:
            assert store.publish(put_blobs(store)).won
            builds += 1
    print(json.dumps([builds, loads]), flush=True)
"""


@pytest.mark.slow
def test_sixteen_processes_on_a_cold_key_twenty_times(tmp_path: Path) -> None:
    """One builds, fifteen load; exactly one entry, no leftovers, every time."""
    rounds = 20
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(16)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for number in range(rounds):
            for worker in workers:  # a barrier: all wait for this line
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            answers = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
            assert sum(builds for builds, _ in answers) == number + 1
            assert sum(loads for _, loads in answers) == 15 * (number + 1)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    for number in range(rounds):
        store = Store.open(tmp_path / str(number))
        assert len(list(store.entries())) == 1
        assert list((store.root / "v1/tmp").iterdir()) == []
        assert verify(store, now=time.time() + LATER).exit_code == 0


REWRITE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import put_blobs
from pwcc.cache.store import Store
store = Store.create(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    store.publish(put_blobs(store, name="toy%d" % (number % 7)))
    for ref in list(store.entries())[:-1]:
        store.quarantine(ref, "test", is_damaged=lambda ref: True)
"""


def test_readers_see_whole_entries_while_a_writer_publishes_and_removes(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    store = Store.create(root)
    (root / "v1/tmp/half-written").write_bytes(b"{")  # of another tool: never read
    writer = subprocess.Popen([sys.executable, "-c", REWRITE, str(root), "60"])
    seen = 0
    try:
        while writer.poll() is None:
            for ref in store.entries():
                try:
                    manifest = store.read_manifest(ref)
                except Exception:
                    assert not ref.manifest.exists()  # removed between listing and reading: never damaged
                    continue
                assert all(store.read_blob(digest) is not None for digest in manifest.blobs)
                seen += 1
    finally:
        writer.kill()
        assert writer.wait() in (0, -signal.SIGKILL)
    assert seen > 20


def test_equal_process_ids_on_two_hosts_do_not_meet(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from pwcc.cache import owners

    monkeypatch.setattr(os, "getpid", lambda: 4711)
    names = {owners.staging_name() for _ in range(1000)}
    assert len(names) == 1000
