"""The decode kernels under Triton's interpreter, in a process of its own: it is chosen at import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "fixtures" / "programs" / "interpret_decode.py"


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    ran = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in ran.stderr:
        pytest.skip("the interpreter of Triton 3.6 needs NumPy below 2.4")
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_every_form_agrees_with_the_reference(errors: dict[str, dict[str, Any]]) -> None:
    assert len(errors) == 48
    wrong = {name: found for name, found in errors.items() if not found["error"] < 1e-5}
    assert not wrong


def test_keys_and_values_are_stored_in_the_cache_as_the_reference_stores_them(
    errors: dict[str, dict[str, Any]],
) -> None:
    assert all(found["stored"] for found in errors.values())


def test_padding_rows_get_finite_values(errors: dict[str, dict[str, Any]]) -> None:
    assert all(found["finite"] for found in errors.values())
