from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache import last_use, pins
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store

Run = Callable[..., subprocess.CompletedProcess[str]]
Publish = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PWCC_MAX_SIZE", raising=False)


@pytest.fixture
def three(publish: Publish) -> list[Path]:
    """Three entries of one lookup key; the first was used longest ago."""
    paths = [publish(prefix) for prefix in ("aaaa1111", "bbbb2222", "cccc3333")]
    for days, path in zip((30, 20, 10), paths, strict=True):
        then = time.time() - days * 86400 - 60
        os.utime(path / "manifest.json", (then, then))
    return paths


def keys(store: Store) -> list[str]:
    return [ref.entry_key[:4] for ref in store.entries()]


def test_a_dry_run_names_what_would_go_and_why(run: Run, store: Store, three: list[Path]) -> None:
    done = run("gc", "--cache-dir", store.root, "--max-age", "15d", "--dry-run")
    assert done.returncode == 0
    own = [sum(p.stat().st_size for p in path.iterdir()) for path in three]  # all blobs are shared
    size = f"{own[0] / 1000:.1f} kB"
    assert done.stdout.splitlines()[:3] == [
        "ENTRY         USED   FREES  WHY",
        f"aaaa11110000  30 d  {size}  last used 30 d ago",
        f"bbbb22220000  20 d  {size}  last used 20 d ago",
    ]
    total = f"{(own[0] + own[1]) / 1000:.1f} kB"
    assert f"would remove 2 entries, 0 piece records and 0 blobs: {total}" in done.stdout
    assert "in 1 entry" in done.stdout
    assert keys(store) == ["aaaa", "bbbb", "cccc"]


def test_limits_are_carried_out(run: Run, store: Store, three: list[Path]) -> None:
    assert run("gc", "--cache-dir", store.root, "--keep-last", "2").stdout.startswith("ENTRY")
    assert keys(store) == ["bbbb", "cccc"]
    done = run("gc", "--cache-dir", store.root, "--max-size", "0", "--grace", "0s", "--json")
    report = json.loads(done.stdout)
    assert [entry["reason"] for entry in report["entries"]] == [
        "over the size limit; last used 20 d ago",
        "over the size limit; last used 10 d ago",
    ]
    assert (report["removed_entries"], report["bytes_after"], report["waiting_files"]) == (2, 0, 0)
    assert keys(store) == []


def test_what_is_unused_but_young_is_told(run: Run, store: Store, three: list[Path]) -> None:
    done = run("gc", "--cache-dir", store.root, "--max-size", "0")
    assert "removed 3 entries, 0 piece records and 0 blobs" in done.stdout
    assert "unused, but younger than 5 min and so kept for now: " in done.stdout
    assert re.search(r"^note: still \d+\.\d kB over the limit: files too new to collect", done.stderr)


def test_the_size_limit_may_come_from_the_environment(
    run: Run, store: Store, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWCC_MAX_SIZE", "0")
    monkeypatch.setenv("PWCC_CACHE_DIR", str(store.root))
    assert run("gc", "--max-size", "1G").stdout.startswith("removed 0 entries")
    run("gc")
    assert keys(store) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-size", "10X"), "expected a size such as 10G, 1.5GB or 512MiB, got '10X'"),
        (("--max-age", "30"), "expected an age such as 90s, 15min, 12h, 30d or 2w, got '30'"),
        (("--keep-last", "-1"), "keep-last"),
    ],
)
def test_bad_limits_are_usage_errors(run: Run, store: Store, options: tuple[str, str], words: str) -> None:
    done = run("gc", "--cache-dir", store.root, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_directory_that_is_no_cache_is_not_touched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    done = run("gc", "--cache-dir", tmp_path, "--max-size", "0")
    assert done.returncode == 1
    assert "expected a pwcc cache directory" in done.stderr
    assert (tmp_path / "precious").read_text() == "x"


# rm


def test_rm_removes_what_is_named(run: Run, store: Store, three: list[Path]) -> None:
    done = run("rm", "--cache-dir", store.root, "aaaa", "CCCC3333", "aaaa1")
    assert done.returncode == 0
    assert "removed 2 entries" in done.stdout
    assert keys(store) == ["bbbb"]


def test_rm_is_all_or_nothing(run: Run, store: Store, three: list[Path]) -> None:
    for bad, words in (("dddd", "no entry's key begins"), ("a", "at least 4 hex digits")):
        done = run("rm", "--cache-dir", store.root, "aaaa", bad)
        assert done.returncode == 2
        assert words in done.stderr
    assert keys(store) == ["aaaa", "bbbb", "cccc"]


def test_an_ambiguous_prefix_lists_the_entries(run: Run, store: Store, publish: Publish) -> None:
    publish("abcd1")
    publish("abcd2")
    done = run("rm", "--cache-dir", store.root, "abcd")
    assert done.returncode == 2
    assert "2 entries' keys begin with 'abcd': abcd10000000, abcd20000000" in done.stderr
    assert len(keys(store)) == 2


def test_a_pinned_entry_needs_force(run: Run, store: Store, three: list[Path]) -> None:
    assert run("pin", "--cache-dir", store.root, "aaaa", "--note", "release 7").returncode == 0
    done = run("rm", "--cache-dir", store.root, "bbbb", "aaaa")
    assert done.returncode == 1  # well said, and refused: no usage error
    assert "is pinned: release 7" in done.stderr
    assert keys(store) == ["aaaa", "bbbb", "cccc"]
    assert run("rm", "--cache-dir", store.root, "bbbb", "aaaa", "--force").returncode == 0
    assert keys(store) == ["cccc"]
    assert pins.pinned(store) == frozenset()


def test_an_entry_in_use_needs_force(run: Run, store: Store, three: list[Path]) -> None:
    ref = next(store.entries())
    held = store.hold(ref)
    done = run("rm", "--cache-dir", store.root, "aaaa")
    assert done.returncode == 1
    assert "a process uses entry aaaa" in done.stderr
    assert run("rm", "--cache-dir", store.root, "aaaa", "--force").returncode == 0
    assert keys(store) == ["bbbb", "cccc"]
    assert held is not None


def test_rm_dry_run(run: Run, store: Store, three: list[Path]) -> None:
    assert "would remove 1 entry" in run("rm", "--cache-dir", store.root, "aaaa", "--dry-run").stdout
    assert len(keys(store)) == 3


# pin


def test_pins_are_set_listed_and_removed(run: Run, store: Store, three: list[Path]) -> None:
    at = ("--cache-dir", store.root)
    assert run("pin", *at, "aaaa", "bbbb").stdout == f"pinned aaaa1111{'0' * 24}\npinned bbbb2222{'0' * 24}\n"
    run("pin", *at, "aaaa", "--note", "release 7")
    assert run("pin", *at, "--list").stdout == (f"aaaa1111{'0' * 24}  release 7\nbbbb2222{'0' * 24}\n")
    listed = json.loads(run("pin", *at, "--list", "--json").stdout)
    assert listed["pins"][0] == {"entry_key": f"aaaa1111{'0' * 24}", "note": "release 7", "present": True}
    run("gc", *at, "--max-size", "0")
    assert keys(store) == ["aaaa", "bbbb"]
    assert run("pin", *at, "bbbb", "--remove").stdout == f"unpinned bbbb2222{'0' * 24}\n"
    assert "were not pinned" in run("pin", *at, "bbbb", "--remove").stderr
    run("gc", *at, "--max-size", "0")
    assert keys(store) == ["aaaa"]


@pytest.mark.parametrize(
    "options",
    [(), ("aaaa", "--list"), ("--remove",), ("--remove", "--list"), ("aaaa", "--remove", "--note", "x")],
)
def test_options_of_pin_that_do_not_go_together(
    run: Run, store: Store, three: list[Path], options: tuple[str, ...]
) -> None:
    assert run("pin", "--cache-dir", store.root, *options).returncode == 2
    assert pins.pinned(store) == frozenset()


def test_no_command_that_keeps_house_imports_torch_or_writes_where_it_only_looks(
    store: Store, toy: Manifest
) -> None:
    store.publish(toy)
    last_use.stamp(store, toy.entry_key)
    code = (
        "import sys; from pwcc.cli import main; from pathlib import Path\n"
        f"root = {str(store.root)!r}\n"
        "tree = lambda: sorted((str(p), p.stat().st_mtime_ns) for p in Path(root).rglob('*'))\n"
        "before = tree()\n"
        "looks = ['gc', '--dry-run', '--max-size', '0'], ['rm', '00000000', '--dry-run'], ['pin', '--list']\n"
        "for argv in looks:\n"
        "    assert main([*argv, '--cache-dir', root]) == 0, argv\n"
        "assert tree() == before\n"
        "assert main(['pin', '0000', '--cache-dir', root]) == 0\n"
        "assert main(['gc', '--max-size', '0', '--cache-dir', root]) == 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ))
    assert len(keys(store)) == 1
