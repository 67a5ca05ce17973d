"""Move one entry a hundred times and serve it each time from a fresh process: all must hit.

python benchmarks/relocations.py [--count 100] [--seed 1] [--no-write]

A copy of examples/tiny_decoder.py is compiled once, for any AVX2 CPU. Then, each time, cache and model file
move to a place of random depth and names, and a process loads the entry: another HOME, TMPDIR, user, working
directory, hash seed and directories of the compilers, no compiler on PATH, and noise of the kinds that a
scheduler, a container or a shell leaves in an environment. Its answer is compared with eager's. Exit code 1
unless all hit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from results import Result, machine_facts

MODEL = Path(__file__).resolve().parent.parent / "examples" / "tiny_decoder.py"
OPTIONS = ("--device", "cpu", "--sizes", "2", "--cpu-baseline", "x86-64-v3")
STRIPPED = ("TORCHINDUCTOR_", "TORCH_", "TRITON_", "PWCC_", "OMP_")
NOISE = (
    "HOSTNAME", "PORT", "MASTER_ADDR", "MASTER_PORT", "POD_IP", "POD_NAME", "NODE_NAME", "SLURM_JOB_ID",
    "SLURM_NODEID", "SLURM_PROCID", "TERM", "SSH_CONNECTION", "SSH_AUTH_SOCK", "WORKER_ID", "RUN_ID", "OLDPWD",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "KUBERNETES_SERVICE_HOST", "LANG",
    "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "TORCH_LOGS_OUT", "VIRTUAL_ENV", "CI_JOB_ID",
)  # fmt: skip
SERVE = """
import json, sys, time
import torch
import pwcc
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.input_values import make_inputs
from pwcc.compile.inputs import input_specs
model = build(ModelRef.parse(sys.argv[1] + ":factory"), weights="random").module
started = time.perf_counter()
compiled = pwcc.load(model, cache_dir=sys.argv[2])
took = time.perf_counter() - started
rows = compiled.check(lambda n: make_inputs(input_specs(model), n, device="cpu"))
print(json.dumps([compiled.manifest.entry_key, compiled.receipt.is_clean, rows.ok, took]))
"""


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what changes code."""
    return {name: value for name, value in os.environ.items() if not name.startswith(STRIPPED)}


def compile_once(root: Path) -> str:
    """Compile the model into ``root / cache`` and return its entry key."""
    (root / "model").mkdir()
    model = shutil.copy(MODEL, root / "model")
    command = [sys.executable, "-m", "pwcc", "compile", "--model", f"{model}:factory", *OPTIONS, "--json"]
    done = subprocess.run(
        [*command, "--cache-dir", str(root / "cache")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    return str(json.loads(done.stdout)["entry_key"])


def serve(place: Path, draw: random.Random) -> tuple[str, bool, bool, float] | str:
    """Serve what lies at ``place`` as somebody else; return entry, clean, right and seconds, or the failure."""
    folders = {
        name: place / f"{name}-{draw.randrange(10**6)}" for name in ("home", "tmp", "work", "bin", "caches")
    }
    for folder in folders.values():
        folder.mkdir()
    user = f"user{draw.randrange(10**6)}"
    env = clean_environment()
    env |= {
        name: f"{draw.random()}{uuid.UUID(int=draw.getrandbits(128)).hex}" for name in draw.sample(NOISE, 12)
    }
    env |= {
        "HOME": str(folders["home"]),
        "TMPDIR": str(folders["tmp"]),
        "PATH": str(folders["bin"]),
        "TORCHINDUCTOR_CACHE_DIR": str(folders["caches"]),
        "TRITON_CACHE_DIR": str(folders["caches"]),
        "USER": user,
        "LOGNAME": user,
        "PYTHONHASHSEED": str(draw.randrange(2**32)),
        f"NOISE_{draw.randrange(10**9)}": user,
    }
    done = subprocess.run(
        [sys.executable, "-B", "-c", SERVE, str(place / "model" / MODEL.name), str(place / "cache")],
        check=False,
        capture_output=True,
        text=True,
        env=env,
        cwd=folders["work"],
    )
    if done.returncode:
        return done.stderr.strip()[-600:]
    entry, clean, right, took = json.loads(done.stdout)
    return str(entry), bool(clean), bool(right), float(took)


def main() -> int:
    """Relocate and report; return 1 unless every process hit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-write", action="store_true", help="Do not write the result file.")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    started, times, failures = time.monotonic(), [], []
    with tempfile.TemporaryDirectory(prefix="pwcc-relocations-") as folder:
        place = Path(folder)
        wanted = compile_once(place)
        for number in range(options.count):
            depth = draw.randint(1, 4)
            parts = (
                "".join(draw.choices("abcdefgh -_.", k=draw.randint(2, 24))).strip(" .") or "x"
                for _ in range(depth)
            )
            moved = Path(folder, f"{number}", *parts)
            moved.mkdir(parents=True)
            for name in ("cache", "model"):
                (place / name).rename(moved / name)
            place = moved
            found = serve(place, draw)
            if isinstance(found, tuple) and found[:3] == (wanted, True, True):
                times.append(found[3])
            else:
                failures.append(f"relocation {number}: {found}")
                print(failures[-1], file=sys.stderr)
            print(f"{len(times)} of {number + 1} hit", file=sys.stderr)
    times.sort()
    median = f"{1000 * times[len(times) // 2]:.0f}" if times else "none"
    result = Result(
        name="relocations",
        variant="cpu",
        columns=("relocations", "hits", "clean and right", "median load ms"),
        rows=((str(options.count), str(len(times)), str(len(times)), median),),
        command="python benchmarks/relocations.py",
        note="A process each: random path, HOME, user, cwd, hash seed, environment; no compiler on PATH.",
        machine=machine_facts("cpu"),
        data={
            "load_s": times,
            "failures": failures,
            "wall_s": time.monotonic() - started,
            "seed": options.seed,
        },
    )
    print(result.text())
    if not options.no_write:
        result.write()
    return 0 if len(times) == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
