"""Rules of the tree that no linter knows: who may import what, and that every file says what it is for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cache", "capture", "cli", "compile")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SEAM = ROOT / "compile" / "torch_private"

# Who may import whom: dependencies point down.
BELOW = {
    "cache": {"cache"},
    "capture": {"cache", "capture", "compile"},
    "compile": {"cache", "compile"},
    "cli": {"cache", "capture", "compile", "cli"},
}

# Private names of torch outside compile/torch_private, each with its reason.
_OPERATORS = "the types of torch.ops' public attributes have no public name"
ALLOWED_PRIVATE = {
    ("compile/ops/custom_ops.py", "torch._ops"): _OPERATORS,
    ("compile/passes/fix_functionalization.py", "torch._ops"): _OPERATORS,
    ("compile/passes/noop.py", "torch._ops"): _OPERATORS,
    (
        "compile/numeric_state.py",
        "torch._C",
    ): "modes that have a setter but no public getter; absent ones are named",
    ("compile/numeric_state.py", "torch.utils._device"): "the default device has no public getter before 2.14",
    (
        "compile/rebuild.py",
        "torch._subclasses",
    ): "fake tensors have no public name, and every backend needs them",
    ("compile/runtime/externs.py", "torch.ops.inductor._mm_plus_mm"): "a registered operator, by its own name",
    ("compile/runtime/portable.py", "torch._ops"): _OPERATORS,
    ("compile/runtime/targets.py", "torch._C"): "the table of torch's own operators has no public name",
    ("compile/runtime/targets.py", "torch._ops"): _OPERATORS,
    (
        "compile/runtime/realign.py",
        "torch._foreach_copy_",
    ): "documented, underscored like all foreach functions",
    (
        "capture/buffers.py",
        "torch._foreach_copy_",
    ): "documented, underscored like all foreach functions",
    (
        "compile/sealing/profile.py",
        "torch._inductor",
    ): "which options exist; every one is detected, none is assumed",
    ("compile/segments.py", "torch._ops"): _OPERATORS,
}

# The only processes below the command line that end by themselves.
PROCESSES = {"compile/worker.py", "compile/background_worker.py"}
ENDINGS = {"print", "sys.exit", "exit", "quit", "os._exit", "sys.stdout.write", "sys.stderr.write"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), name_of(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported name in full, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def private_torch_names(tree: ast.AST) -> Iterator[str]:
    """Imports and attribute chains that begin at ``torch`` and pass a name with a leading underscore."""
    chains = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name in {*imports(tree), *(chain for chain in chains if chain)}:
        parts = name.split(".")
        if parts[0] == "torch":
            private = next(
                (i for i, p in enumerate(parts) if p.startswith("_") and not p.startswith("__")), None
            )
            if private is not None:
                yield ".".join(parts[: private + 1])


def test_no_folder_shadows_the_package() -> None:
    assert not (ROOT / "pwcc").exists()


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [name_of(path) for path in FILES if path.name in drawers] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_down(package: str) -> None:
    wrong = []
    for path in FILES:
        if path.is_relative_to(ROOT / package):
            for name in imports(parsed(path)):
                parts = name.split(".")
                if (
                    parts[0] == "pwcc"
                    and len(parts) > 1
                    and parts[1] in BELOW
                    and parts[1] not in BELOW[package]
                ):
                    wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_cache_imports_no_torch() -> None:
    heavy = ("torch", "triton", "numpy", "transformers")
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in FILES
        if path.is_relative_to(ROOT / "cache")
        for name in imports(parsed(path))
        if name.split(".")[0] in heavy
    ]
    assert wrong == []


def test_no_torch_after_every_module_of_cache() -> None:
    modules = ["pwcc." + name_of(p)[:-3].replace("/", ".").removesuffix(".__init__") for p in FILES]
    wanted = [module for module in modules if module.startswith("pwcc.cache")]
    code = (
        "import importlib, sys\n"
        f"for name in {wanted!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'triton', 'sympy', 'numpy', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_every_file_says_what_it_is_for() -> None:
    wrong = []
    for path in FILES:
        doc = ast.get_docstring(parsed(path))
        if not doc or not doc.splitlines()[0].strip().endswith((".", ":")):
            wrong.append(name_of(path))
    assert wrong == []


def test_private_torch_names_stay_behind_the_seam() -> None:
    wrong = []
    for path in FILES:
        if not path.is_relative_to(SEAM):
            names = sorted(set(private_torch_names(parsed(path))))
            wrong += [(name_of(path), name) for name in names if (name_of(path), name) not in ALLOWED_PRIVATE]
    assert wrong == []


def test_the_allowed_private_names_are_still_used() -> None:
    for file, name in ALLOWED_PRIVATE:
        assert name in set(private_torch_names(parsed(ROOT / file))), f"{file}: {name}"


def test_nothing_below_the_command_line_prints_or_exits() -> None:
    wrong = []
    for path in FILES:
        if path.is_relative_to(ROOT / "cli") or name_of(path) in PROCESSES:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and dotted(node.func) in ENDINGS:
                wrong.append(f"{name_of(path)}:{node.lineno}: {dotted(node.func)}")
    assert wrong == []


def test_the_architecture_names_every_file_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:cache|capture|cli|compile)/[\w/]+\.py)`", text))
    files = {name_of(path) for path in FILES if path.name != "__init__.py"}
    assert sorted(files - named) == [], "add a line for each to ARCHITECTURE.md"
    assert sorted(named - files) == [], "these are gone; take their lines out of ARCHITECTURE.md"
