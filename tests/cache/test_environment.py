from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pwcc.cache.environment import (
    EXCLUDED,
    READ,
    environment_factors,
    exclusion,
    is_factor,
    shown,
    shown_of,
)


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCHINDUCTOR_FREEZING",
        "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS",
        "TORCH_COMPILE_DYNAMIC_SOURCES",
        "TRITON_F32_DEFAULT",
        "TRITON_DISABLE_LINE_INFO",
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_WORKSPACE_CONFIG",
        "OMP_NUM_THREADS",
        "MKL_CBWR",
        "ATEN_CPU_CAPABILITY",
        "DISABLE_PTXAS_OPT",
        "TORCHINDUCTOR_CPP_MARCH",
    ],
)
def test_variables_that_change_code(name: str) -> None:
    assert is_factor(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "USER",
        "HF_TOKEN",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
        "CUDA_HOME",
        "CUDA_VISIBLE_DEVICES",
        "TORCH_LOGS",
        "TORCH_LOGS_OUT",
        "TORCHINDUCTOR_REDIS_PORT",
        "TORCHINDUCTOR_REDIS_PASSWORD",
        "TORCH_COMPILE_JOB_ID",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LOCAL_RANK",
        "MASTER_PORT",
        "PWCC_LOG",
    ],
)
def test_variables_left_out(name: str) -> None:
    assert not is_factor(name)


def test_the_log_is_left_out_whatever_a_site_reads() -> None:
    found = exclusion("PWCC_LOG")
    assert found is not None
    assert "logging" in found.reason


def test_every_line_has_a_reason_and_is_unique() -> None:
    for table in (READ, EXCLUDED):
        assert all(pattern.reason for pattern in table)
        assert len({pattern.glob for pattern in table}) == len(table)
    found = exclusion("CUDA_HOME")
    assert found is not None
    assert "location" in found.reason


@pytest.mark.parametrize("value", ["", "1", "max-autotune", "0,1;2", ":4096:8", "sm_90", "granularity=fine"])
def test_plain_settings_stay_readable(value: str) -> None:
    assert shown(value) == value


@pytest.mark.parametrize(
    "value", ["/home/someone/x", "a@b", "x" * 80, "ghp_0123456789abcdefghijKLMN", "a\nb", "\udcff"]
)
def test_what_may_be_secret_is_digested(value: str) -> None:
    assert shown(value).startswith("digest:")
    assert value not in shown(value)
    assert shown(value) != shown(value + "x")


def test_factors_are_sorted_and_filtered() -> None:
    environ = {"TRITON_X": "1", "HOME": "/root", "OMP_NUM_THREADS": "2"}
    assert list(environment_factors(environ)) == ["OMP_NUM_THREADS", "TRITON_X"]


def test_import_reads_no_environment() -> None:
    code = (
        "import os, sys\n"
        "class Never(dict):\n"
        "    def __getitem__(self, k): raise SystemExit('read ' + str(k))\n"
        "    get = __getitem__\n"
        "import re, mmap, platform, sysconfig, fnmatch, dataclasses, pathlib, json, xxhash\n"
        "os.environ = Never()\n"
        "import pwcc.cache.environment, pwcc.cache.host, pwcc.cache.inspection\n"
        "assert 'torch' not in sys.modules and 'filelock' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Completeness: every variable that the installed compilers read in Python is decided by one of the two tables

READS = re.compile(
    r"""(?:os\.environ(?:\.get|\.pop|\.setdefault)?[(\[]|os\.getenv\(|env_name_(?:force|default)\s*=\s*\[?)"""
    r"""\s*["']([A-Z][A-Z0-9_]{2,})["']"""
)
KNOBS = re.compile(r"env_\w+\(\s*[\"']([A-Z][A-Z0-9_]{2,})[\"']")

# Read by them, matched by no table, and no factor: each with the reason.
ELSEWHERE = {
    "CC": "a compiler's path; its version is a compiler factor",
    "CXX": "a compiler's path; its version is a compiler factor",
    "CUDACXX": "a compiler's path; the CUDA version is a compiler factor",
    "PATH": "a location",
    "LD_LIBRARY_PATH": "a location",
    "LD_PRELOAD": "which libraries a process has, not what is compiled",
    "CONDA_PREFIX": "a location",
    "CONDA_EXE": "a location",
    "VIRTUAL_ENV": "a location",
    "PROGRAMFILES": "a location, Windows",
    "SYSTEMROOT": "a location, Windows",
    "CI": "changes no code",
    "USER": "an identity",
    "MAX_JOBS": "how many compilers run at once",
    "LOCAL_RANK": "an identity",
    "LOCAL_WORLD_SIZE": "an identity",
    "ROLE_RANK": "an identity",
    "RANK": "an identity",
    "WORLD_SIZE": "an identity",
    "MAST_HPC_JOB_NAME": "an identity",
    "ROCR_VISIBLE_DEVICES": "an identity",
    "PT2_COMPILE_ID_PREFIX": "a name in logs",
    "LOG_TLPARSE": "logging",
    "LOG_AUTOTUNE_RESULTS": "logging",
    "USE_IR_LOC": "line information, switched off by the sealing profile",
    "FX_GRAPH_SHOW_DEVICE": "drawings of graphs",
    "FX_GRAPH_SHOW_META": "drawings of graphs",
    "FX_GRAPH_SHOW_STRIDE": "drawings of graphs",
    "DUMP_AOTI_MINIFIER": "dumps",
    "DISABLE_SUBPROCESS": "how compile work is scheduled",
    "BENCHMARK_USE_DEV_SHM": "where a benchmark keeps its files",
    "DISABLE_CUPTI_LAZY_REINIT": "the profiler",
    "TEARDOWN_CUPTI": "the profiler",
    "VCT": "the profiler",
    "TVM_SCHEDULER": "a backend of Dynamo that pwcc does not use",
    "JAX_PLATFORMS": "a backend that pwcc does not use",
}
FOLDERS = (
    ("torch", ("_inductor", "_dynamo", "_functorch", "_higher_order_ops", "fx", "compiler", "_subclasses")),
    ("triton", ("knobs.py", "backends", "compiler", "runtime")),
)


def read_variables() -> Iterator[tuple[str, str]]:
    for package, parts in FOLDERS:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root = Path(spec.submodule_search_locations[0])
        for part in parts:
            files = [root / part] if part.endswith(".py") else sorted((root / part).rglob("*.py"))
            for file in files:
                if file.is_file():
                    for name in {*READS.findall(text := file.read_text()), *KNOBS.findall(text)}:
                        yield name, f"{file.relative_to(root.parent)}"


def test_every_variable_that_the_compilers_read_is_decided() -> None:
    found = dict(read_variables())
    assert len(found) > 200  # else the patterns above find nothing
    decided = {name for name in found if is_factor(name) or exclusion(name) is not None or name in ELSEWHERE}
    assert {name: place for name, place in found.items() if name not in decided} == {}
    assert [name for name in ELSEWHERE if is_factor(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "TRITON_SERVICE_HOST",
        "TRITON_SERVICE_PORT_HTTP",
        "TRITON_PORT",
        "TRITON_PORT_8000_TCP",
        "TORCH_PORT_53_UDP_ADDR",
        "CUDA_WORKER_POD_NAME",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
        "CUDA_DRIVER_VERSION",
    ],
)
def test_what_an_orchestrator_or_an_image_sets_is_no_factor(name: str) -> None:
    found = exclusion(name)
    assert found is not None
    assert not is_factor(name)


def test_a_credential_is_digested_even_when_it_is_short() -> None:
    assert shown_of("TORCHINDUCTOR_X", "abc") == "abc"
    assert shown_of("TORCHINDUCTOR_X_TOKEN", "abc").startswith("digest:")
