"""``pwcc export`` and ``pwcc import``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache.store import Store

Run = Callable[..., subprocess.CompletedProcess[str]]
Publish = Callable[..., Path]


def keys(root: Path) -> list[str]:
    return [ref.entry_key[:4] for ref in Store.open(root).entries()]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PWCC_LAYERS", "PWCC_REQUIRE_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)


def test_an_entry_travels_alone(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("aaaa")
    publish("bbbb")
    out, to = tmp_path / "x.tar", tmp_path / "elsewhere"
    done = run("export", "--cache-dir", store.root, "aaaa", "-o", out)
    assert done.returncode == 0
    assert done.stdout.startswith("exported 1 entry, ")
    done = run("import", out, "--cache-dir", to)
    assert done.returncode == 0
    assert done.stdout.startswith(f"aaaa{'0' * 28}  imported  ")
    assert keys(to) == ["aaaa"]
    assert "was there already" in run("import", out, "--cache-dir", to).stdout
    ours, theirs = (root / "v1/entries" / ("f" * 32) / f"aaaa{'0' * 28}" for root in (store.root, to))
    assert (ours / "manifest.json").read_bytes() == (theirs / "manifest.json").read_bytes()


def test_all_entries_as_json(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("aaaa")
    publish("bbbb")
    out = tmp_path / "x.tar.zst"
    report = json.loads(run("export", "--cache-dir", store.root, "--all", "-o", out, "--json").stdout)
    assert [key[:4] for key in report["entries"]] == ["aaaa", "bbbb"]
    assert report["tar_bytes"] > out.stat().st_size
    report = json.loads(run("import", out, "--cache-dir", tmp_path / "to", "--json").stdout)
    assert [(entry["new"], entry["same"]) for entry in report["entries"]] == [(True, True)] * 2


@pytest.mark.slow
def test_through_a_pipe(store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("aaaa")
    pwcc = [sys.executable, "-m", "pwcc"]
    made = subprocess.run(
        [*pwcc, "export", "--all", "-o", "-", "--cache-dir", store.root], check=True, capture_output=True
    )
    assert b"exported 1 entry" in made.stderr
    to = tmp_path / "to"
    subprocess.run(
        [*pwcc, "import", "-", "--cache-dir", to], check=True, input=made.stdout, capture_output=True
    )
    assert keys(to) == ["aaaa"]
    # A reader that left early ends the program quietly; the pipe is closed before the program starts writing.
    ends = os.pipe()
    os.close(ends[0])
    gone = subprocess.run(
        [*pwcc, "export", "--all", "-o", "-", "--cache-dir", store.root],
        check=False,
        stdout=ends[1],
        stderr=subprocess.PIPE,
    )
    os.close(ends[1])
    assert (gone.returncode, gone.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("-o", "x.tar"), 2, "expected the entries to export, or --all"),
        (("--all", "aaaa", "-o", "x.tar"), 2, "expected the entries to export, or --all"),
        (("--all", "-o", "x.zip"), 2, "ends in .tar or .tar.zst"),
        (("dddd", "-o", "x.tar"), 2, "no entry's key begins"),
        (("--all", "-o", "no/x.tar"), 1, "writing the archive failed"),
    ],
)
def test_what_export_refuses(
    run: Run,
    store: Store,
    publish: Publish,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    publish("aaaa")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    done = run("export", "--cache-dir", store.root, *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert list(work.iterdir()) == []


def test_json_and_the_archive_do_not_share_stdout(run: Run, store: Store, publish: Publish) -> None:
    publish("aaaa")
    done = run("export", "--cache-dir", store.root, "--all", "-o", "-", "--json")
    assert done.returncode == 2
    assert "both would go to stdout" in json.loads(done.stdout)["error"]["message"]


def test_what_import_refuses(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("aaaa")
    out = tmp_path / "x.tar"
    run("export", "--cache-dir", store.root, "aaaa", "-o", out)
    to, other = tmp_path / "to", tmp_path / "x.zip"
    other.write_bytes(b"PK" * 1000)
    for options, code, words in (
        ((tmp_path / "none.tar",), 1, "opening the archive failed"),
        ((tmp_path,), 1, "opening the archive failed"),
        ((out, "--max-size", "10"), 1, "at most 10 bytes together"),
        ((out, "--max-size", "many"), 2, "expected a size"),
        ((other,), 1, "pass a file that `pwcc export` wrote"),
    ):
        done = run("import", *options, "--cache-dir", to)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert words in done.stderr
    assert not to.exists(), "what is refused leaves nothing"


@pytest.mark.parametrize("how", ["option", "variable"])
def test_an_unsigned_archive_is_refused_where_a_signature_is_required(
    run: Run, store: Store, publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    pytest.importorskip("cryptography")
    publish("aaaa")
    out = tmp_path / "x.tar"
    run("export", "--cache-dir", store.root, "aaaa", "-o", out)
    monkeypatch.setenv("PWCC_TRUSTED_KEYS", str(tmp_path / "keys"))
    if how == "variable":
        monkeypatch.setenv("PWCC_REQUIRE_SIGNATURE", "1")
    options = ("--require-signature",) if how == "option" else ()
    done = run("import", out, "--cache-dir", tmp_path / "to", *options)
    assert done.returncode == 1
    assert "expected a signature by a trusted key" in done.stderr
    assert "pwcc trust add" in done.stderr
    assert not (tmp_path / "to").exists(), "not even an empty cache"


def test_a_layer_is_listed_and_exported(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("aaaa")
    upper = tmp_path / "upper"
    assert "aaaa00000000" in run("inspect", upper, "--layer", store.root).stdout
    assert (
        run("export", "--cache-dir", upper, "--layer", store.root, "aaaa", "-o", tmp_path / "x.tar").returncode
        == 0
    )
    assert not upper.exists()
    done = run("inspect", upper, "--layer", tmp_path / "gone")
    assert done.returncode == 1
    assert "a layer is no pwcc cache" in done.stderr


def test_layers_may_come_from_the_environment(
    run: Run, store: Store, publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("aaaa")
    monkeypatch.setenv("PWCC_LAYERS", str(store.root))
    assert "aaaa00000000" in run("inspect", tmp_path / "upper").stdout
