"""Compile, copy, lock, and load where nothing could be compiled: the promise of the README, as processes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, Machine, Warm

pytestmark = pytest.mark.slow

ZERO = (
    "dynamo_frames",
    "inductor_compiles",
    "triton_compiles",
    "autotune_runs",
    "processes_started",
    "files_written",
    "bytecode_files",
)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user of the machine may enter; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="pwcc-test-"))
    path.chmod(0o755)
    yield path
    for folder in [path, *(p for p in path.rglob("*") if p.is_dir() and not p.is_symlink())]:
        folder.chmod(0o755)
    shutil.rmtree(path)


def without_write(root: Path) -> Path:
    """``chmod -R a-w``, readable by all."""
    for path in [*root.rglob("*"), root]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return root


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {p: p.stat() for p in [root, *root.rglob("*")]}
    return {str(p.relative_to(root)): (s.st_mode, s.st_size, s.st_mtime_ns) for p, s in found.items()}


def another_user() -> list[str]:
    """Run the child as another user where this one may: permissions do not bind root.

    It may read everything, since the interpreter can lie in a home that others may not enter.
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        return []
    reads = "-all,+dac_read_search"
    who = ["--reuid=65534", "--regid=65534", "--clear-groups"]
    return [setpriv, *who, f"--bounding-set={reads}", f"--inh-caps={reads}", f"--ambient-caps={reads}"]


def serve(warm: Warm, public: Path, **env: str) -> dict[str, Any]:
    """``cp -r A B; rm -rf A; chmod -R a-w B``, then load B on a bare machine as somebody else."""
    build, away = public / "A", public / "far/away/B"
    warm.copy(build)
    shutil.copytree(build, away)
    shutil.rmtree(build)
    without_write(away)
    host = Machine.make(public / "host", "lampwick", bare=True)
    for part in ("home", "tmp", "work", "caches"):
        host.folder(part).chmod(0o777)
    before = snapshot(away)
    answer = host.pwcc_json("load", away, *warm.model, "--check", code=0, through=another_user(), **env)
    assert snapshot(away) == before
    for part in ("home", "tmp", "work", "caches"):
        assert list(host.folder(part).rglob("*")) == [], part
    return answer


def expect_clean(answer: dict[str, Any], warm: Warm) -> None:
    receipt, check = answer["receipt"], answer["check"]
    assert answer["entry"] == warm.report["entry_key"]
    assert {name: receipt[name] for name in ZERO} == dict.fromkeys(ZERO, 0), receipt["evidence"]
    assert receipt["modules_added"] == []
    assert receipt["audited"] is True
    assert receipt["clean"] is True
    assert check["ok"] is True
    assert check["rows"]
    for row in check["rows"]:
        assert row["error"] <= row["tolerance"], row


def test_llama_loads_elsewhere(llama: Warm, public: Path) -> None:
    answer = serve(llama, public)
    expect_clean(answer, llama)
    assert (answer["receipt"]["pieces"], answer["receipt"]["variants"]) == (3, 3)
    compared = {(row["what"], row["size"]) for row in answer["check"]["rows"]}
    kinds = [("dynamic", 64), ("static", 1), ("static", 2)]
    assert compared >= {(f"piece {piece} {kind}", size) for piece in range(3) for kind, size in kinds}
    assert {size for what, size in compared if what == "model against eager"} == {1, 2, 3, 17}


@pytest.mark.hf
def test_a_hugging_face_directory_loads_elsewhere(qwen3: Warm, public: Path) -> None:
    directory = public / "model"
    shutil.copytree(qwen3.model[1], directory)
    directory.chmod(0o755)
    moved = Warm(qwen3.root, qwen3.machine, ("--model", str(directory), "--device", "cpu"), (), qwen3.report)
    expect_clean(serve(moved, public), qwen3)


def test_a_model_file_loads_elsewhere(decoder: Warm, public: Path) -> None:
    shutil.copy(REPOSITORY / "examples/tiny_decoder.py", public / "tiny_decoder.py")
    model = ("--model", f"{public / 'tiny_decoder.py'}:factory", *decoder.model[2:])
    moved = Warm(decoder.root, decoder.machine, model, (), decoder.report)
    expect_clean(serve(moved, public), decoder)


def test_another_installation_of_pwcc_loads_it(llama: Warm, public: Path) -> None:
    """The model's sources are pwcc's own here: they lie elsewhere, as in an image with a venv of its own."""
    shutil.copytree(REPOSITORY / "src/pwcc", public / "site/pwcc", ignore=shutil.ignore_patterns("__pycache__"))
    host = Machine.make(public / "prober", "figaro")
    found = host.run("-c", "import pwcc; print(pwcc.__file__)", PYTHONPATH=str(public / "site")).stdout.strip()
    assert found == str(public / "site/pwcc/__init__.py")
    expect_clean(serve(llama, public, PYTHONPATH=str(public / "site")), llama)


SERVER = """
import json, sys
import torch
import pwcc
from pwcc.compile.models.llama import Llama, LlamaConfig

ROOTS = ("torch._dynamo", "torch._inductor", "triton", "sympy")
def compilers():
    return sorted(n for n in sys.modules if any(n == r or n.startswith(r + ".") for r in ROOTS))

torch.manual_seed(0)
model = Llama(LlamaConfig(layers=2)).eval()
before = compilers()
compiled = pwcc.load(model, cache_dir=sys.argv[1])
loaded = compilers()
differ = 0.0
with torch.no_grad():
    for size in (1, 2, 3, 50):
        ids, positions = torch.arange(size) * 11 % 512, torch.arange(size)
        differ = max(differ, (compiled(ids, positions) - model(ids, positions)).abs().max().item())
print(json.dumps({"before": before, "loaded": loaded, "called": compilers(), "differ": differ,
                  "receipt": compiled.receipt.to_json()}))
"""


def test_a_server_that_builds_its_own_model_imports_no_compiler(llama: Warm, tmp_path: Path) -> None:
    """Not even before the load: constructing the reference model needs none of it."""
    host = Machine.make(tmp_path, "lampwick", bare=True)
    answer = json.loads(host.run("-W", "error", "-c", SERVER, llama.root).stdout)
    assert answer["before"] == []
    assert answer["loaded"] == []
    assert answer["called"] == []
    assert answer["differ"] < 1e-5
    assert answer["receipt"]["clean"] is True


def test_the_command_line_builds_llama_without_a_compiler(llama: Warm, tmp_path: Path) -> None:
    """Initialisers on the meta device would import Dynamo, before the load but in the time to first token."""
    host = Machine.make(tmp_path, "lampwick", bare=True)
    done = host.run("-X", "importtime", "-m", "pwcc", "load", llama.root, *llama.model)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    roots = ("torch._dynamo", "torch._inductor", "triton", "sympy")
    assert "torch" in imported
    assert [name for name in imported if name.startswith(roots)] == []


def test_the_cache_may_be_read_by_the_group_of_the_umask(llama: Warm) -> None:
    """Files follow the umask, so that a cache that CI wrote can be served by another user."""
    umask = os.umask(0)
    os.umask(umask)
    modes = {
        stat.S_IMODE(path.stat().st_mode) for path in (llama.root / "v1/blobs").rglob("*") if path.is_file()
    }
    assert modes == {0o666 & ~umask}
