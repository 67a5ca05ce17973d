from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pwcc.cache import elf
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.requirements import (
    KINDS,
    Requirement,
    highest,
    library_requirements,
    merge,
    symbol_versions,
    unmet,
)

FACTS: dict[str, object] = {
    "os": "linux",
    "machine": "x86_64",
    "byte_order": "little",
    "python_abi": "cpython-311",
    "cpu_flags": frozenset({"avx2", "fma"}),
    "glibc": "2.36",
    "glibcxx": "3.4.30",
    "cxxabi": "1.3.13",
    "openmp": frozenset({"libgomp.so.1"}),
    "torch": "2.13.0+cpu abc",
    "cuda_capability": "9.0",
    "cuda_device_name": "NVIDIA H200",
    "cuda_version": "13.0",
}


@pytest.mark.parametrize(
    ("requirement", "line"),
    [
        (Requirement("os", "linux"), None),
        (Requirement("machine", "aarch64"), "machine: expected aarch64, got x86_64"),
        (Requirement("python_abi", "cpython-312"), "python_abi: expected cpython-312, got cpython-311"),
        (Requirement("cpu_flags", ("avx2", "fma")), None),
        (Requirement("cpu_flags", ("avx2", "avx512f")), "cpu_flags: expected avx2 avx512f, missing avx512f"),
        (Requirement("glibc", "2.4"), None),
        (Requirement("glibc", "2.38"), "glibc: expected 2.38 or newer, got 2.36"),
        (Requirement("glibcxx", "3.4.9"), None),
        (Requirement("glibcxx", "3.4.32"), "glibcxx: expected 3.4.32 or newer, got 3.4.30"),
        (Requirement("cuda_capability", "9.0"), None),
        (Requirement("cuda_capability", "8.0"), "cuda_capability: expected 8.0, got 9.0"),
        (Requirement("cuda_version", "12.8"), None),
        (Requirement("openmp", ("libgomp.so.1",)), None),
        (Requirement("glibc", "banana"), "glibc: expected banana or newer, got 2.36"),
        (Requirement("warp_size", "32"), "warp_size: unknown requirement 32 (from a newer pwcc?)"),
    ],
)
def test_one_line_each(requirement: Requirement, line: str | None) -> None:
    assert unmet([requirement], FACTS) == ([] if line is None else [line])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_missing_fact_is_unmet(kind: str) -> None:
    assert len(unmet([Requirement(kind, "1.0")], {})) == 1


def test_round_trip_and_hostile_forms() -> None:
    for requirement in (Requirement("os", "linux"), Requirement("cpu_flags", ("a", "b"))):
        assert Requirement.parse(requirement.to_json(), "test") == requirement
    for value in (None, {}, {"kind": "os"}, {"kind": "../x", "value": "y"}, {"kind": "os", "value": 1}):
        with pytest.raises(CorruptEntry):
            Requirement.parse(value, "test")
    with pytest.raises(CorruptEntry):
        Requirement.parse({"kind": "os", "value": "\x1b[2J"}, "test")
    with pytest.raises(CorruptEntry):
        Requirement.parse({"kind": "cpu_flags", "value": ["x"] * 513}, "test")


def test_highest_compares_numbers_not_text() -> None:
    names = [
        "GLIBC_2.4",
        "GLIBC_2.34",
        "GLIBC_PRIVATE",
        "GLIBCXX_3.4.9",
        "GLIBCXX_3.4.30",
        "CXXABI_1.3",
        "CXXABI_TM_1",
    ]
    assert highest(names) == {"glibc": "2.34", "glibcxx": "3.4.30", "cxxabi": "1.3"}


def test_merge() -> None:
    merged = merge(
        [
            Requirement("glibc", "2.4"),
            Requirement("glibc", "2.34"),
            Requirement("cpu_flags", ("fma",)),
            Requirement("cpu_flags", ("avx2",)),
            Requirement("os", "linux"),
            Requirement("os", "linux"),
        ]
    )
    assert merged == (
        Requirement("cpu_flags", ("avx2", "fma")),
        Requirement("glibc", "2.34"),
        Requirement("os", "linux"),
    )
    with pytest.raises(CorruptEntry, match="both required"):
        merge([Requirement("os", "linux"), Requirement("os", "darwin")])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("so")
    source = folder / "k.cpp"
    source.write_text(
        '#include <string>\n#include <omp.h>\nextern "C" double f(const char* s)'
        " { std::string t(s); t += s; return double(t.size()) * omp_get_max_threads(); }\n"
    )
    command = [
        "g++",
        "-shared",
        "-fPIC",
        "-fopenmp",
        "-Wl,-rpath,/opt/lib",
        str(source),
        "-o",
        str(folder / "k.so"),
    ]
    subprocess.run(command, check=True)
    return (folder / "k.so").read_bytes()


def test_a_real_library(library: bytes) -> None:
    versions = symbol_versions(library)
    assert versions["glibc"].startswith("2.")
    assert versions["glibcxx"].startswith("3.4")
    assert library_requirements(library) == tuple(Requirement(k, v) for k, v in sorted(versions.items()))
    assert "libstdc++.so.6" in elf.needed_libraries(library)
    assert "libgomp.so.1" in elf.needed_libraries(library)
    assert elf.run_paths(library) == ["/opt/lib"]
    assert elf.defined_versions(library) == set()


def test_agrees_with_objdump(library: bytes, tmp_path: Path) -> None:
    if not shutil.which("objdump"):
        pytest.skip("needs objdump")
    path = tmp_path / "k.so"
    path.write_bytes(library)
    text = subprocess.run(["objdump", "-p", str(path)], check=True, capture_output=True, text=True).stdout
    section = text.partition("Version References:")[2]
    stated = {line.split()[3] for line in section.splitlines() if line.startswith("    0x")}
    assert elf.needed_versions(library) == stated


def test_truncated_and_damaged_libraries(library: bytes) -> None:
    for cut in (0, 4, 5, 63, 64, len(library) // 2, len(library) - 1):
        with pytest.raises(CorruptEntry):
            symbol_versions(library[:cut])
    for offset in range(0, 64):
        damaged = bytearray(library)
        damaged[offset] ^= 0xFF
        try:
            symbol_versions(bytes(damaged))
        except CorruptEntry:
            continue


@pytest.mark.parametrize("data", [b"", b"MZ", b"\x7fELF\x01" + b"\0" * 100, b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_forged_bytes(data: bytes) -> None:
    with pytest.raises(CorruptEntry):
        symbol_versions(data)
