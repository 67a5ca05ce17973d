"""What a user installs: the wheel, the sdist and the editable install hold exactly what they should."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import pwcc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cache", "capture", "cli", "compile")
PREFIX = f"pwcc-{pwcc.__version__}"
# What the sdist takes besides the packages: folders in full, then files.
FOLDERS = (".ci", "benchmarks", "docs", "examples", "src/pwcc", "tests", "zoo")
FILES = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
)
LEFT_OVER = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis")


def files_below(folder: str) -> Iterator[str]:
    """Every file of a folder of the repository, links to folders left out, as a posix path from the root."""
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and not any(part in LEFT_OVER for part in path.parts):
            yield path.relative_to(ROOT).as_posix()


def sources() -> list[str]:
    return [name for package in PACKAGES for name in files_below(package) if name.endswith(".py")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist of a copy of the tree without its .git: only our own rules decide what goes in."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"
    ignore = shutil.ignore_patterns(*LEFT_OVER, ".git", ".venv", "build", "dist", "demo-out", ".coverage*")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--sdist",
        "--wheel",
        "--outdir",
        str(folder / "dist"),
    ]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def wheel_of(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_packages_hold_only_python() -> None:
    """Anything else would need a rule of its own in pyproject.toml and here."""
    others = [name for package in PACKAGES for name in files_below(package) if not name.endswith(".py")]
    assert others == []


def test_the_wheel_holds_the_four_packages_and_nothing_else(built: Path) -> None:
    info = f"{PREFIX}.dist-info"
    expected = [
        *(f"pwcc/{name}" for name in sources()),
        "pwcc/__init__.py",
        "pwcc/__main__.py",
        "pwcc/py.typed",
        f"{info}/METADATA",
        f"{info}/RECORD",
        f"{info}/WHEEL",
        f"{info}/entry_points.txt",
        f"{info}/licenses/LICENSE",
    ]
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        assert sorted(wheel.namelist()) == sorted(expected)
        assert b"pwcc = pwcc.cli:main" in wheel.read(f"{info}/entry_points.txt")
        metadata = wheel.read(f"{info}/METADATA").decode()
        for name in sources():
            assert wheel.read(f"pwcc/{name}") == (ROOT / name).read_bytes()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"Version: {pwcc.__version__}" in metadata


def test_the_sdist_holds_what_is_needed_to_work_on_it(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = [member.name.removeprefix(f"{PREFIX}/") for member in sdist.getmembers()]
    links = [f"src/pwcc/{package}" for package in PACKAGES]
    expected = {*sources(), *FILES, ".gitignore", "PKG-INFO"}
    expected |= {name for folder in FOLDERS for name in files_below(folder)}
    found = {name for name in names if not any(name == link or name.startswith(f"{link}/") for link in links)}
    assert found == expected


def test_the_wheel_of_an_sdist_is_the_same(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        sdist.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist")]
    subprocess.run([*command, str(tmp_path / PREFIX)], check=True, capture_output=True)
    with zipfile.ZipFile(wheel_of(tmp_path / "dist")) as one, zipfile.ZipFile(wheel_of(built)) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_the_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target)]
    subprocess.run([*install, str(wheel_of(built))], check=True, capture_output=True)
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "import pwcc, pwcc.cli\n"
        "for module in (pwcc, pwcc.cli):\n"
        "    assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__\n"
        "sys.exit(pwcc.cli.main(['--version']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"pwcc {pwcc.__version__}\n"


def test_hints_to_install_name_extras_that_exist_and_no_package_of_an_index() -> None:
    extras = set(importlib.metadata.metadata("pwcc").get_all("Provides-Extra") or ())
    texts = {name: (ROOT / name).read_text() for name in [*sources(), "examples/serve.py", "README.md"]}
    used = {
        (name, extra)
        for name, text in texts.items()
        for extra in re.findall(r'install\(["\'](\w+)["\']\)', text)
    }
    assert {extra for _, extra in used} == {"depyf", "hf", "serve", "sign", "zstd"}
    assert {"depyf", "hf", "serve", "sign", "zstd"} <= extras
    assert [name for name, text in texts.items() if "pwcc[" in text] == []
    said = [name for name in sources() if "pip install" in texts[name]]
    assert said == ["cache/errors.py"]
    assert set(re.findall(r"pip install\s+'\.\[(\w+)\]'", texts["README.md"])) <= extras


def test_this_environment_has_the_tree_itself() -> None:
    """Editable: ``src`` is on the path, and its links make the installed shape of the tree's own files."""
    if Path(pwcc.__file__) != ROOT / "src" / "pwcc" / "__init__.py":
        pytest.skip("pwcc is not installed in editable form here")
    assert importlib.metadata.version("pwcc") == pwcc.__version__
    found = sorted(
        path.name for path in (ROOT / "src" / "pwcc").iterdir() if not path.name.startswith((".", "__py"))
    )
    assert found == sorted([*PACKAGES, "__init__.py", "__main__.py", "py.typed"])
    for package in PACKAGES:
        link = ROOT / "src" / "pwcc" / package
        assert link.readlink() == Path("../..") / package
        assert link.resolve() == ROOT / package
