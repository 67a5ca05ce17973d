from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pwcc.cache.host import (
    cpu_flags,
    find_library,
    glibc_version,
    library_versions,
    mapped_libraries,
    openmp_name,
    read_host,
)
from pwcc.cache.requirements import KINDS, Requirement, unmet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_this_host_meets_what_it_states() -> None:
    host = read_host()
    stated = [
        Requirement("os", host.os),
        Requirement("machine", host.machine),
        Requirement("python_abi", host.python_abi),
    ]
    stated += [Requirement("cpu_flags", tuple(sorted(host.cpu_flags)))]
    if host.glibc:
        stated += [Requirement("glibc", host.glibc), Requirement("glibc", "2.0")]
    if host.glibcxx and host.cxxabi:
        stated += [Requirement("glibcxx", host.glibcxx), Requirement("cxxabi", host.cxxabi)]
    assert unmet(stated, host.facts()) == []
    assert host.facts().keys() <= KINDS.keys()
    assert host.python_abi.startswith(f"cpython-{sys.version_info.major}{sys.version_info.minor}")


def test_cpu_flags_of_both_architectures(tmp_path: Path) -> None:
    x86 = tmp_path / "x86"
    x86.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu_flags(x86) == {"fpu", "avx2", "fma"}
    arm = tmp_path / "arm"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert cpu_flags(arm) == {"fp", "asimd", "sve"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_mapped_libraries(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1    /usr/lib/libstdc++.so.6.0.30\n"
        "7f01-7f02 r--p 00000000 08:01 1    /usr/lib/libstdc++.so.6.0.30\n"
        "7f02-7f03 rw-p 00000000 00:00 0    [heap]\n"
        "7f03-7f04 r-xp 00000000 08:01 2    /venv with space/torch.libs/libgomp-24e2ab19.so.1\n"
        "7f04-7f05 r-xp 00000000 08:01 3    /opt/data.so/model.bin\n"
    )
    found = mapped_libraries(maps)
    assert [path.name for path in found] == ["libstdc++.so.6.0.30", "libgomp-24e2ab19.so.1"]
    assert find_library("libstdc++.so.6", found, []) == found[0]
    assert find_library("libc.so.6", found, [tmp_path]) is None
    assert mapped_libraries(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("name", "soname"),
    [
        ("libgomp-24e2ab19.so.1", "libgomp.so.1"),
        ("libgomp.so.1.0.0", "libgomp.so.1"),
        ("libgomp.so.1", "libgomp.so.1"),
        ("libiomp5.so", "libiomp5.so"),
        ("libomp.so", "libomp.so"),
        ("libm.so.6", None),
    ],
)
def test_openmp_names(name: str, soname: str | None) -> None:
    assert openmp_name(Path("/x") / name) == soname


def test_glibc_and_unreadable_library(tmp_path: Path) -> None:
    assert glibc_version() is None or glibc_version().startswith("2.")  # type: ignore[union-attr]
    (tmp_path / "libstdc++.so.6").write_bytes(b"not a library")
    assert library_versions(tmp_path / "libstdc++.so.6") == {}
    assert library_versions(tmp_path / "none") == {}
