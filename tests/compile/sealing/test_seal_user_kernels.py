"""A model's own Triton kernels, traced and sealed as sm_90 cubins without a GPU; nothing is launched."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("kernels") / "out"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.compile.sealing.build_user_kernels", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def launched(report: dict[str, Any], model: str) -> dict[str, dict[str, Any]]:
    """The launches in a model's canonical graph, by kernel."""
    nodes = [node for node in report[model]["graph"]["nodes"] if node[1].endswith("user_kernels.launch")]
    arguments = [dict(node[3]["dict"]) for node in nodes]
    return {given["kernel"].rpartition(":")[2]: given for given in arguments}


def test_the_graph_names_kernels_constants_and_grids(report: dict[str, Any]) -> None:
    found = launched(report, "Launches")
    assert found["shift"]["kernel"] == "tests.compile.user_kernels:shift"
    assert found["shift"]["constants"] == {"dict": [["BLOCK", 64]]}
    assert found["shift"]["grid"] == [{"tuple": [{"s": "(63 + 8*s0) // 64"}, 1, 1]}]
    assert [grid["tuple"][0]["s"] for grid in found["tuned"]["grid"]] == [
        "(63 + 8*s0) // 64",
        "(127 + 8*s0) // 128",
    ]
    assert len({given["digest"] for given in found.values()}) == 2


def test_what_a_kernel_writes_is_known(report: dict[str, Any]) -> None:
    assert launched(report, "Launches")["shift"]["written"] == ["out_ptr"]
    assert report["Launches"]["arguments written"] == []
    assert report["Counts"]["written"] == ["state"]


def test_the_sources_behind_them_are_known(report: dict[str, Any]) -> None:
    assert report["Launches"]["codes"] == ["doubled", "shift", "tuned"]  # doubled is another module's


def test_a_kernel_of_the_forward_is_a_predicate_by_name_and_source(report: dict[str, Any]) -> None:
    for model, names in {"Launches": ("shift", "tuned"), "Counts": ("increment",)}.items():
        guards = report[model]["guards"]
        for name in names:
            wanted = f"globals.{name}: is kernel tests.compile.user_kernels:{name} with source "
            assert [line for line in guards if line.startswith(wanted)], guards


@pytest.mark.parametrize(("model", "kernels"), [("Launches", {"shift_0", "tuned_1"}), ("Looked", {"shift_0"})])
def test_kernels_are_sealed_with_their_grids(report: dict[str, Any], model: str, kernels: set[str]) -> None:
    found = report[model]
    assert kernels <= found["kernels"].keys()
    assert all(found["cubins"][name] > 1000 for name in kernels)
    assert "def shift_0(x_ptr, out_ptr, count, _grid_0, _grid_1, _grid_2, _stream):" in found["program"]
    compile(found["program"], "piece.py", "exec")
    if "tuned_1" in kernels:
        config, grid = found["kernels"]["tuned_1"]
        assert (
            config == "BLOCK=128 num_stages=3 num_warps=4"
        )  # the configuration that the pretended tuning left
        assert grid[0] == "(127 + 8*_launcher_s0) // 128"


def test_no_path_of_the_builder(report: dict[str, Any]) -> None:
    assert report["leaks"] == []
