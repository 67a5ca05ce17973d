"""No command that looks after a cache executes, imports, unpickles or maps anything that lies in it.

A cache is filled with payloads under the names that Python, the linker and our own programs look for, and the
commands run inside it. An audit hook sees what the interpreter compiles, executes, imports and maps; a marker
file would say that a payload ran all the same.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import strict
from pwcc.cache.ids import BlobDigest, EntryKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.signing_keys import PrivateKey
from pwcc.cache.store import Store

pytestmark = pytest.mark.slow

NAMES = (
    "stitch.py", "piece.py", "json.py", "typing.py", "torch.py", "typer.py", "filelock.py", "safetensors.py",
    "cryptography.py", "platformdirs.py", "zstandard.py", "rich.py", "kernel.py", "conftest.py", "setup.py",
    "sitecustomize.py", "usercustomize.py", "__init__.py", "__main__.py", "pwcc/__init__.py", "pwcc/cli.py",
)  # fmt: skip


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


@pytest.fixture
def trap(tmp_path: Path, store: Store, toy: Manifest) -> tuple[Path, Path]:
    """A cache of two entries whose blobs, records and folders hold payloads; the marker they would leave."""
    marker = tmp_path / "executed"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    blobs: dict[BlobDigest, int] = dict(toy.blobs)

    def put(data: bytes) -> BlobDigest:
        blobs[store.put_blob(data)] = len(data)
        return store.put_blob(data)

    program = replace(toy.programs[0], stitch=put(code.encode()), calling=put(pickle.dumps(Payload(marker))))
    poisoned = replace(
        toy, programs=(program,), blobs={}, numerics=put(pickle.dumps([Payload(marker)], protocol=0))
    )
    for prefix in ("aaaa", "bbbb"):
        entry = replace(poisoned, entry_key=EntryKey(prefix.ljust(32, "0")), blobs=blobs)
        store.publish(entry)
    extension = Path(sys.modules["_hashlib"].__file__ or "") if "_hashlib" in sys.modules else None
    shared = extension.read_bytes() if extension and extension.exists() else b"\x7fELF"
    folders = [path for path in (store.root, *store.root.rglob("*")) if path.is_dir()]
    for folder in folders:
        for name in NAMES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(code)
        (folder / "evil.pth").write_text("import " + code.partition("import ")[2])
        for name in ("kernel.so", "_json.cpython-311-x86_64-linux-gnu.so", "libgomp.so.1", "libcrypto.so.3"):
            (folder / name).write_bytes(shared)
        (folder / "plan.pkl").write_bytes(pickle.dumps(Payload(marker)))
        (folder / "pwcc.toml").write_text('[environment]\ninclude = ["X"]\n')
    return store.root, marker


WATCHED = """
import json, os, sys
root = os.path.realpath(sys.argv[1])
seen = []
EVENTS = ("compile", "exec", "import", "ctypes.dlopen", "marshal.load", "pickle.find_class",
          "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
def inside(value):
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    if not isinstance(value, str) or len(value) > 4000 or "\\0" in value or not os.path.exists(value):
        return False
    return os.path.realpath(value).startswith(root + os.sep)
def hook(event, arguments):
    if event in EVENTS:
        values = [getattr(a, "co_filename", a) for a in arguments]
        bad = event.startswith(("pickle", "subprocess", "os.")) or any(inside(v) for v in values[:2])
        if event == "import" and values[1] is None:
            bad = False
        if bad:
            seen.append([event, [str(v)[:200] for v in values[:2]]])
sys.addaudithook(hook)
from pwcc.cli import main
codes = []
for argv in json.loads(sys.argv[2]):
    codes.append(main(argv))
print()
print(json.dumps({"seen": seen, "codes": codes, "torch": "torch" in sys.modules,
                  "path": [p for p in sys.path if p in ("", ".") or inside(p) or os.path.realpath(p) == root]}))
"""


def commands(tmp_path: Path) -> list[tuple[list[str], set[int]]]:
    """Every command that needs no model, and the exit codes that are fine: entries are odd, not all damaged."""
    archive = str(tmp_path / "e.tar")
    key = str(tmp_path / "key.pem")
    here = ["--cache-dir", "."]
    return [
        (["inspect", "."], {0}),
        (["inspect", ".", "aaaa"], {0}),
        (["inspect", ".", "aaaa", "--json"], {0}),
        (["inspect", ".", "aaaa", "--full"], {0}),
        (["report", ".", "aaaa", "-o", str(tmp_path / "report.html")], {0}),
        (["verify", "."], set(range(256)) - {2, 3, 4}),
        (["verify", "aaaa", *here, "--json"], set(range(256)) - {2, 3, 4}),
        (["diff", "aaaa", "bbbb", *here], {0, 1}),
        (["sign", "aaaa", *here, "--key", key], {0}),
        (["trust", "ls"], {0}),
        (["pin", "aaaa", *here], {0}),
        (["export", "aaaa", *here, "-o", archive], {0}),
        (["import", archive, *here], {0}),
        (["import", archive, "--cache-dir", str(tmp_path / "other")], {0}),
        (["gc", *here, "--dry-run"], {0}),
        (["gc", *here, "--keep-last", "1", "--max-size", "1"], {0}),
        (["rm", "aaaa", *here, "--force"], {0}),
        (["verify", ".", "--repair"], set(range(256)) - {2, 3, 4}),
    ]


def test_looking_after_a_cache_runs_nothing_of_it(trap: tuple[Path, Path], tmp_path: Path) -> None:
    root, marker = trap
    PrivateKey.generate().write(tmp_path / "key.pem")
    asked = commands(tmp_path)
    script = [sys.executable, "-P", "-c", textwrap.dedent(WATCHED)]
    done = subprocess.run(
        [*script, str(root), json.dumps([argv for argv, _ in asked])],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["seen"] == []
    assert told["torch"] is False
    assert told["path"] == []
    for (argv, fine), code in zip(asked, told["codes"], strict=True):
        assert code in fine, (argv, code, done.stderr[-3000:])
    assert not marker.exists()


@pytest.mark.parametrize("argv", [("inspect", "."), ("verify", "."), ("gc", "--dry-run", "--cache-dir", ".")])
def test_the_program_started_inside_a_cache_imports_nothing_of_it(
    trap: tuple[Path, Path], argv: tuple[str, ...]
) -> None:
    """As a person would: ``cd CACHE; pwcc inspect .``: the working folder is not on the path."""
    root, marker = trap
    program = Path(sys.executable).with_name("pwcc")
    if not program.exists():
        pytest.skip("the program is not installed beside this interpreter")
    done = subprocess.run([program, *argv], cwd=root, capture_output=True, text=True, check=False, timeout=100)
    assert "Traceback" not in done.stderr
    assert "bbbb" in done.stdout or argv[0] != "inspect"
    assert not marker.exists()


def test_the_hook_would_see_a_payload(trap: tuple[Path, Path], tmp_path: Path) -> None:
    """The test above can fail: an import from the cache is seen, and leaves the marker."""
    root, marker = trap
    code = textwrap.dedent(WATCHED).replace(
        "from pwcc.cli import main", "import pickle; sys.path.insert(0, root); import stitch; main = len"
    )
    code = code.replace("codes = []", "codes = []; pickle.load(open('plan.pkl', 'rb'))")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(root), "[]"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert {event for event, _ in told["seen"]} >= {"exec", "pickle.find_class"}
    assert marker.exists()
    assert strict.MAX_BYTES


def test_workers_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cd CACHE; pwcc compile`` starts them there; ``-m`` alone would look for modules there first."""
    from pwcc.compile.workers import python

    (tmp_path / "typing.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    done = subprocess.run([*python(), "-m", "pwcc", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:5]) == (0, "pwcc "), done.stderr
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "-P" not in python(), "a tree that is imported from there is found by the workers too"
