"""Run every benchmark, sharing what they measure and build; a step that fails or hangs costs only itself.

python benchmarks/run_all.py --device cpu|cuda [--out-dir DIR] [--only STEP,...] [--quick] [--budget SECONDS]

The steps, most wanted first: cold-compile (one process), warm-start, step-time, guards, ranges, capture (on a
GPU only), dispatch, fusions (on a GPU only), cli-start, store, key (on a CPU only), and cold-compile again
with the compiles in several processes. Each step writes its tables when it ends, also when its time ran out:
rows that were not measured say so. A second run with the same --work measures only what is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU_LIMIT = 1800  # seconds of any step on a CPU, where a compile takes ten times as long
GRACE = 20  # seconds that a step gets beyond its deadline to write its tables


@dataclass(frozen=True)
class Step:
    """One benchmark script; ``limit`` in seconds on a GPU machine, whose time is scarce."""

    name: str
    script: str
    table: str
    limit: float
    options: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")


STEPS = (
    Step("cold-compile", "bench_cold_compile.py", "cold-compile", 400, ("--jobs", "1")),
    Step("warm-start", "bench_warm_start.py", "warm-start", 400),
    Step("step-time", "bench_step_time.py", "step-time", 200),
    Step("guards", "bench_guards.py", "guards", 120),
    Step("ranges", "bench_ranges.py", "ranges", 150),
    # The fake graphs of a CPU have no times that mean anything.
    Step("capture", "bench_capture.py", "decode-step", 400, devices=("cuda",)),
    Step("dispatch", "bench_dispatch.py", "dispatch", 300),
    Step("fusions", "bench_fusions.py", "fusions", 280, devices=("cuda",)),
    Step("cli-start", "bench_cli_start.py", "cli-start", 200),
    Step("store", "bench_store.py", "store", 400),
    # It reads no device, and shows its tables once.
    Step("key", "bench_key.py", "key-check", 200, devices=("cpu",)),
    Step("jobs", "bench_cold_compile.py", "cold-compile", 400),
)


def main() -> int:
    """Run the steps; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out-dir", type=Path, default=HERE / "results")
    parser.add_argument("--only", default="", metavar="STEP,...", help=", ".join(step.name for step in STEPS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeat", type=int, help="processes of each cheap way")
    parser.add_argument("--work", type=Path, help="keep measurements and builds here; removed otherwise")
    parser.add_argument("--budget", type=float, help="seconds for everything; default 560 on cuda")
    parser.add_argument("--variant", help="name in the files; default: cpu, or the GPU's model")
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="pwcc-bench-"))
    budget = given.budget or (560 if given.device == "cuda" else 2 * 3600)
    end = time.monotonic() + budget
    given.out_dir.mkdir(parents=True, exist_ok=True)
    chosen = [name.strip() for name in given.only.split(",") if name.strip()]
    endings: dict[str, str] = {}
    try:
        variant = given.variant or _variant(given.device)
        for step in STEPS:
            if given.device not in step.devices or (chosen and step.name not in chosen):
                continue
            out = given.out_dir / f"{step.table}.{variant}.json"
            endings[step.name] = _run(step, given, work.resolve(), out.resolve(), end)
    finally:
        if given.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print("\n" + "\n".join(f"{name}: {ending}" for name, ending in endings.items()))
    return 0 if all(ending.startswith("ok") for ending in endings.values()) else 1


def _run(step: Step, given: argparse.Namespace, work: Path, out: Path, end: float) -> str:
    started = time.monotonic()
    limit = min(CPU_LIMIT if given.device == "cpu" else step.limit, end - started - GRACE)
    if limit < GRACE:
        return "not run: out of time"
    command = [sys.executable, str(HERE / step.script), "--device", given.device, "--out", str(out)]
    command += ["--work", str(work), "--deadline", f"{limit:.0f}", *step.options]
    command += ["--quick"] if given.quick else []
    command += ["--repeat", str(given.repeat)] if given.repeat and step.name != "cli-start" else []
    print(f"\n## {step.name}", flush=True)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout=limit + GRACE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"ended after {limit + GRACE:.0f} s"
    return f"{'ok' if code == 0 else f'failed with {code}'}, {time.monotonic() - started:.0f} s"


def _variant(device: str) -> str:
    """Ask in another process: this one must not hold a context on the GPU that is measured."""
    source = f"import results; print(results.variant_of({device!r}))"
    done = subprocess.run([sys.executable, "-c", source], cwd=HERE, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
