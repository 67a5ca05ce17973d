"""A piece that Inductor really compiled: sealed, loaded without a compiler, the same bytes from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pwcc.cache.errors import UnsealableError
from pwcc.cache.sealed import CppKernel, SealedPiece
from pwcc.compile.sealing.builder_paths import builder_paths, refuse_builder_paths

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def build(out: Path) -> Path:
    subprocess.run([sys.executable, str(HERE / "build_piece.py"), str(out)], check=True, timeout=300)
    return out


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("one") / "out")


def record_of(out: Path) -> SealedPiece:
    return SealedPiece.from_bytes((out / (out / "record").read_text()).read_bytes(), where="piece.json")


def test_loads_in_a_bare_process_and_agrees_bit_by_bit(sealed: Path, tmp_path: Path) -> None:
    bare = {
        "PATH": "/nonexistent",
        "CC": "/nonexistent/cc",
        "CXX": "/nonexistent/c++",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }
    result = subprocess.run(
        [sys.executable, str(HERE / "load_piece.py"), str(sealed)],
        env=bare,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(result.stdout)
    assert all(report["equal"]), report
    assert report["loaded"] == report["kernels"] == len(record_of(sealed).kernels) > 0
    assert report["events"] == []
    assert report["environment"] is True
    assert report["heavy"] == []
    assert list(tmp_path.iterdir()) == []


def test_another_directory_gives_the_same_bytes(sealed: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "a" / "much" / "longer" / "path" / "out")
    assert (again / "record").read_text() == (sealed / "record").read_text()


def test_record_says_what_the_piece_needs(sealed: Path) -> None:
    record = record_of(sealed)
    assert record.outputs == 2
    assert record.mutated == (2,)
    assert record.externs == ("mm",)
    assert any(name.startswith("aten::sort") for name in record.fallbacks)
    assert all(isinstance(kernel, CppKernel) and kernel.arg_types for kernel in record.kernels)
    kinds = {requirement.kind for requirement in record.requirements}
    assert {"cpu_flags", "glibc", "glibcxx", "cxxabi", "openmp"} <= kinds


def test_nothing_of_the_builder_is_in_any_blob(sealed: Path) -> None:
    for blob in record_of(sealed).blobs:
        refuse_builder_paths((sealed / blob).read_bytes(), builder_paths([str(sealed)]), what=blob, hint="")


def test_a_builder_path_is_refused_by_name() -> None:
    with pytest.raises(UnsealableError, match=r"kernel 'k', got '/home/someone/x\.h'"):
        refuse_builder_paths(b"\0/home/someone/x.h\0", ["/home/someone"], what="kernel 'k'", hint="")
