"""The sealing profile sets only what this torch's Inductor has, and the driver what must come last."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from pwcc.cache.errors import PieceCompileError, UsageError
from pwcc.compile.sealing import profile
from pwcc.compile.sealing.driver import write_driver
from pwcc.compile.sealing.profile import cpu_profile, cpu_target, cuda_profile, known_options


def test_profiles_hold_known_options_only(tmp_path: Path) -> None:
    options = cpu_profile("native", driver=tmp_path / "g++")
    assert options["cpp.cxx"] == (None, str(tmp_path / "g++"))
    assert options["graph_partition"] is False
    assert options["cpp.dynamic_threads"] is True
    tuned, plain = cuda_profile(autotune=True), cuda_profile(autotune=False)
    assert plain.items() <= tuned.items()
    assert set(tuned) - set(plain) >= {"max_autotune", "coordinate_descent_tuning"}
    assert plain["strict_static_triton_launcher"] is True
    assert known_options({"no_such_option": 1, "cpp.no_such_option": 1}) == {}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 levels")
def test_named_levels() -> None:
    assert cpu_target("x86-64-v3").march == "x86-64-v3"
    assert set(cpu_target("x86-64-v3").cpu_flags) < set(cpu_target("x86-64-v4").cpu_flags)
    assert cpu_target("native").cpu_flags


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 levels")
@pytest.mark.parametrize(
    ("flags", "capability", "settled"),
    [
        (("avx2", "avx512f"), "AVX512", True),
        (("avx2", "avx512f"), "AVX2", False),  # an old build of torch, or ATEN_CPU_CAPABILITY
        (("avx2",), "AVX2", True),
        (("sse4_2",), "DEFAULT", False),
    ],
)
def test_inductor_probes_vectors_only_where_torch_itself_does_not_use_them(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], capability: str, settled: bool
) -> None:
    monkeypatch.setattr(profile, "_host_code_flags", lambda: flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu_profile("native").get("cpp.vec_isa_ok") is (True if settled else None)
    assert ("cpp.vec_isa_ok" in cpu_profile("x86-64-v4")) == (capability == "AVX512")


@pytest.mark.skipif(platform.machine() == "x86_64", reason="elsewhere only 'native' is known")
def test_other_machines_know_native_only() -> None:
    with pytest.raises(UsageError):
        cpu_target("x86-64-v3")


def test_the_driver_appends_its_flags(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\nfor a in "$@"; do echo "$a"; done\n')
    fake.chmod(0o700)
    driver = write_driver(
        tmp_path / "bin", march="x86-64-v3", path_prefixes=["/a b", "/a b/c"], compiler=str(fake)
    )
    assert driver.name == "g++"
    lines = subprocess.run(
        [driver, "x.cpp", "-march=native"], capture_output=True, text=True, check=True
    ).stdout
    assert lines.splitlines()[:3] == ["x.cpp", "-march=native", "-march=x86-64-v3"]
    # the last map that matches wins in gcc, so the longest prefix stands last
    assert lines.splitlines()[-2:] == ["-ffile-prefix-map=/a b=.", "-ffile-prefix-map=/a b/c=."]


def test_no_compiler_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(PieceCompileError, match="no-such-compiler"):
        write_driver(tmp_path, march="native", path_prefixes=[], compiler="no-such-compiler")
