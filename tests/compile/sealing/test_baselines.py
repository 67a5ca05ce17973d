"""CPU baselines: code for one holds no instruction beyond it, gives eager's numbers, and is the same bytes."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pwcc
from pwcc.cache import strict
from pwcc.cache.errors import HostMismatch, UsageError
from pwcc.cache.host import cpu_flags
from pwcc.cache.requirements import unmet
from pwcc.cache.sealed import CppKernel, SealedPiece
from pwcc.cache.store import Store
from pwcc.compile import request
from pwcc.compile.sealing.profile import Baseline, cpu_profile, cpu_target
from pwcc.compile.torch_private.inductor_cpp import vector_isa_flags

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="baselines are levels of x86-64"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]
LEVELS: tuple[Baseline, ...] = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
HERE = cpu_flags()
BUILDABLE = [level for level in LEVELS if set(cpu_target(level).cpu_flags) <= HERE]
# what of an instruction says that it is beyond a level: VEX and EVEX have v-names and wider registers
BEYOND = {
    "x86-64-v2": re.compile(
        r"%[yz]mm|\tv[a-z]|\t(?:andn|bextr|bls|mulx|sarx|shlx|shrx|rorx|pext|pdep|lzcnt|tzcnt)"
    ),
    "x86-64-v3": re.compile(r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b"),
    "x86-64-v4": re.compile(r"\tvp?dp|\t(?:tdp|tile)|\tvcvtne2?ps2bf16|\tvp(?:compress|expand)[bw]\b"),
}


class Mixed(nn.Module):
    """Pointwise functions, a reduction in each direction, a product and half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.softmax(F.silu(self.lin(x)) + torch.tanh(x).cos(), -1)
        half = (y * 3).bfloat16() + 1
        return y * x.abs().sqrt() + half.float() + torch.erf(x).sum(0, keepdim=True)


@pytest.mark.parametrize("level", LEVELS)
def test_vectors_of_each_level(level: Baseline) -> None:
    from torch._inductor import config

    if level not in BUILDABLE:
        pytest.skip(f"this machine is below {level}")
    profile = cpu_profile(level)
    assert profile["cpp.dynamic_threads"] is True
    with config.patch({name: profile[name] for name in ("cpp.simdlen", "cpp.vec_isa_ok") if name in profile}):
        flags = set(vector_isa_flags())
    assert flags.isdisjoint({"-mavx2", "-mavx512f"}) if level == "x86-64-v2" else flags
    assert ("-mavx512f" in flags) == (level == "x86-64-v4")


def test_levels_contain_each_other() -> None:
    two, three, four = (set(cpu_target(level).cpu_flags) for level in LEVELS)
    assert two < three < four
    assert not any(flag.startswith("avx") for flag in two)
    assert "avx2" in three
    assert not any(flag.startswith("avx512") for flag in three)


@pytest.mark.parametrize("level", LEVELS)
def test_a_host_below_a_level_is_told_what_it_lacks(level: Baseline, tmp_path: Path) -> None:
    from pwcc.cache.requirements import Requirement

    needed = Requirement("cpu_flags", cpu_target(level).cpu_flags)
    lower = {"x86-64-v2": ("sse4_2", "ssse3"), "x86-64-v3": ("avx2", "fma"), "x86-64-v4": ("avx512vl",)}[level]
    faked = tmp_path / "cpuinfo"
    faked.write_text("processor\t: 0\nflags\t\t: fpu " + " ".join(cpu_target(level).cpu_flags) + "\n")
    assert unmet([needed], {"cpu_flags": cpu_flags(faked)}) == []
    faked.write_text("flags : " + " ".join(set(cpu_target(level).cpu_flags) - set(lower)) + "\n")
    (line,) = unmet([needed], {"cpu_flags": cpu_flags(faked)})
    assert line.endswith(f"missing {' '.join(lower)}")


def test_a_builder_below_a_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "cpu_flags", lambda: frozenset(cpu_target("x86-64-v3").cpu_flags))
    request._require_builder("x86-64-v3")
    with pytest.raises(
        UsageError, match=r"at least x86-64-v4 to compile for it, this one lacks avx512bw avx512cd"
    ):
        request._require_builder("x86-64-v4")
    with pytest.raises(UsageError, match="expected a CPU baseline of"):
        request._require_builder("x86-64-v5")


def test_builders_of_one_baseline_share_the_lookup_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the key of the build tells them apart: the numbers that an entry records were measured there."""
    from pwcc.compile import build_factors
    from pwcc.compile.load import lookup
    from pwcc.compile.target import target_of

    model, target = Mixed().eval(), target_of("cpu")
    seen = []
    for capability in ("AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        seen.append((lookup(model, target, None), build_factors.compiler_factors(target)))
    (one, wide), (other, narrow) = seen
    assert one == other
    assert {name for name in wide if wide[name] != narrow[name]} == {"cpu capability"}


def entry(root: Path, level: str) -> Any:
    report = pwcc.precompile(
        Mixed().eval(),
        cache_dir=root,
        inputs=["x:float32[n,48]"],
        splitting_ops=[],
        max_tokens=64,
        cpu_baseline=level,
    )
    assert not report.hit
    return report


@pytest.mark.slow
@pytest.mark.parametrize("level", BUILDABLE)
def test_compiled_for_a_level(level: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = entry(tmp_path / "one", level)
    model = Mixed().eval()
    loaded = pwcc.load(model, cache_dir=tmp_path / "one")
    for size in (1, 2, 33):
        x = torch.randn(size, 48)
        with torch.no_grad():
            assert torch.allclose(loaded(x), model(x), atol=3e-2)  # fused, bfloat16 is rounded once
    assert all(row.ok for row in loaded.check().rows)

    (required,) = [item for item in loaded.manifest.requirements if item.kind == "cpu_flags"]
    assert required.value == tuple(sorted(cpu_target(level).cpu_flags))
    kinds = {item.kind for item in loaded.manifest.requirements}
    assert kinds >= {"glibc", "machine", "os", "python_abi", "openmp"}

    objects = list(shared_objects(tmp_path / "one", loaded.manifest))
    assert objects
    for data in objects:
        text = disassembly(data, tmp_path)
        found = [line for line in text.splitlines() if BEYOND[level].search(line)]
        assert not found, found[:5]
        assert level == "x86-64-v2" or re.search("%ymm" if level == "x86-64-v3" else "%zmm", text)

    if level == "x86-64-v2":  # the others' bytes are compared in tests/key
        again = entry(tmp_path / "two", level)
        assert again.entry_key == report.entry_key
        assert (again.path / "manifest.json").read_bytes() == (report.path / "manifest.json").read_bytes()

    from pwcc.compile import target

    facts = {**dict(target.host_facts(target.target_of("cpu"))), "cpu_flags": frozenset({"fpu"})}
    monkeypatch.setattr("pwcc.compile.load.host_facts", lambda _: facts)
    with pytest.raises(HostMismatch, match=r"cpu_flags: expected .* missing .*popcnt"):
        pwcc.load(model, cache_dir=tmp_path / "one")


def shared_objects(root: Path, manifest: Any) -> list[bytes]:
    store = Store.open(root)
    records = [
        SealedPiece.from_bytes(store.read_blob(digest), where="piece") for digest in manifest.piece_records()
    ]
    kernels = {kernel.blob for record in records for kernel in record.kernels if isinstance(kernel, CppKernel)}
    assert strict.canonical(sorted(kernels))
    return [store.read_blob(digest) for digest in kernels]


def disassembly(data: bytes, tmp_path: Path) -> str:
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    file = tmp_path / "kernel.so"
    file.write_bytes(data)
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", file], capture_output=True, text=True, check=True
    )
    return done.stdout
