"""The whole of pwcc in one run: compile here, copy the cache, load it where nothing could be compiled.

python examples/demo.py        (or `make demo`)

Compiles llama-tiny into demo-out/A, copies that to demo-out/B, deletes A, makes B read-only, and loads B in
a fresh process that has no compiler on PATH, CC and CXX pointing nowhere and empty compiler caches. Exits
non-zero at the first thing that is not as promised.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "demo-out"
PWCC = [sys.executable, "-m", "pwcc"]
COUNTED = (
    "dynamo_frames",
    "inductor_compiles",
    "triton_compiles",
    "autotune_runs",
    "processes_started",
    "files_written",
)
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ptxas", "ld", "as")


def main() -> int:
    """Run the demo; return 0 if everything was as promised."""
    build, serve = OUT / "A", OUT / "B"
    remove(OUT)
    OUT.mkdir()

    say("compile llama-tiny into demo-out/A")
    command = [
        "compile",
        "--model",
        "llama-tiny",
        "--sizes",
        "1,2,4,8",
        "--device",
        "cpu",
        "--cache-dir",
        str(build),
    ]
    start = time.perf_counter()
    run(command, dict(os.environ))
    first = time.perf_counter() - start

    say("compile it again: a hit")
    again = json.loads(run([*command, "--json"], dict(os.environ)))
    expect(again["hit"] is True, "the second compile must be a hit")
    expect(again["counters"]["compiles"] == 0, "a hit must compile nothing")

    say("copy A to B, delete A, make B read-only")
    shutil.copytree(build, serve)
    remove(build)
    before = listing(serve)
    set_writable(serve, False)

    say("load B with no compiler in reach")
    env = without_compilers()
    run(["inspect", str(serve)], env)
    start = time.perf_counter()
    answer = json.loads(
        run(["load", str(serve), "--model", "llama-tiny", "--device", "cpu", "--check", "--json"], env)
    )
    second = time.perf_counter() - start
    run(["load", str(serve), "--model", "llama-tiny", "--device", "cpu", "--check"], env)

    check, receipt = answer["check"], answer["receipt"]
    expect(answer["entry"] == again["entry_key"], "the loaded entry must be the compiled one")
    for name, value in counts(receipt):
        expect(value == 0, f"the load's {name} must be 0, got {value}")
    expect(check["ok"] is True, f"the numbers must agree with eager: {check}")
    expect(not any((OUT / "caches").glob("*/*")), "the compiler caches must stay empty")
    expect(listing(serve) == before, "the cache directory must stay as it was")

    say("a model that differs only in its eps must miss")
    run(["load", str(serve), "--model", "llama-tiny", "--device", "cpu", "--arg", "eps=0.001"], env, code=3)

    set_writable(serve, True)
    say(f"ok: {first:.1f} s to compile, {second:.1f} s to start Python, build the model, load and check it")
    return 0


def without_compilers() -> dict[str, str]:
    """Return an environment in which nothing can be compiled, and a compiler's caches would be seen."""
    tools = OUT / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH", "TRITON", "CUDA_HOME"))
    }
    env |= {"PATH": str(tools), "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        env[name] = str(OUT / "caches" / name.lower())
        Path(env[name]).mkdir(parents=True)
    found = [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]
    expect(not found, f"PATH must hold no compiler, found {found}")
    return env


def run(arguments: list[str], env: dict[str, str], *, code: int = 0) -> str:
    """Run pwcc, show what it prints, and return its stdout; its exit code must be ``code``."""
    print("$ pwcc " + " ".join(arguments), flush=True)
    done = subprocess.run([*PWCC, *arguments], check=False, env=env, text=True, stdout=subprocess.PIPE, cwd=OUT)
    if "--json" not in arguments:
        print(done.stdout, end="", flush=True)
    expect(done.returncode == code, f"exit code {code} expected, got {done.returncode}")
    return done.stdout


def counts(receipt: dict[str, Any]) -> list[tuple[str, int]]:
    """Return what a receipt counts of the things that a load must never do."""
    expect(receipt["clean"] is True, f"the load must be clean: {receipt}")
    return [*((name, receipt[name]) for name in COUNTED), ("modules_added", len(receipt["modules_added"]))]


def listing(root: Path) -> list[tuple[str, int, int]]:
    """Return every path below ``root`` with its size and time of last change."""
    found = [
        (str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns)
        for p in root.rglob("*")
        if p.is_file()
    ]
    return sorted(found)


def set_writable(root: Path, writable: bool) -> None:
    """Give or take the write permission of everything below ``root``."""
    for path in [*root.rglob("*"), root]:
        mode = path.stat().st_mode
        path.chmod(mode | stat.S_IWUSR if writable else mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


def remove(path: Path) -> None:
    """Delete a directory tree, a read-only one too."""
    if path.exists():
        set_writable(path, True)
        shutil.rmtree(path)


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}", flush=True)


def expect(holds: bool, text: str) -> None:
    """End the demo unless ``holds``."""
    if not holds:
        print(f"demo FAILED: {text}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
