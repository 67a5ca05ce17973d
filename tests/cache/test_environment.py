from __future__ import annotations

import subprocess
import sys

import pytest

from pwcc.cache.environment import EXCLUDED, READ, environment_factors, exclusion, is_factor, shown


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
    ],
)
def test_variables_left_out(name: str) -> None:
    assert not is_factor(name)


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
