"""Artifact: every causal LM of the installed transformers through pwcc, each in a process of its own.

Results go to ``zoo/results.json`` after every architecture; a run goes on where the last one ended. See
``docs/zoo.md``, which ``table.py`` writes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import one
from architectures import ARCHITECTURES, EXCLUDED
from records import Records

HERE: Final = Path(__file__).resolve().parent
LIMITS: Final = {"trace": 180, "compile": 1500, "load": 180}
"""Seconds after which a stage of one architecture is ended."""


def main() -> int:
    """Parse the command line, run what is missing, write the results; 1 if something does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="architectures (model types), separated by commas")
    parser.add_argument("--stage", choices=("trace", "compile", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at the same time")
    parser.add_argument("--again", action="store_true", help="run what is done, too")
    parser.add_argument("--failed", action="store_true", help="run what failed once more")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "zoo", help="cache and logs")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or list(ARCHITECTURES)
    unknown = sorted(set(chosen) - set(ARCHITECTURES))
    if unknown:
        parser.error(f"not an architecture of this transformers: {', '.join(unknown)}")
    for module in ("pwcc.compile.precompile", "torch._inductor.compile_fx"):
        importlib.import_module(module)  # once, before the forks
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.results)
    stages = ["trace"] if options.stage == "trace" else ["trace", "compile", "load"]
    todo = [name for name in chosen if options.again or records.missing(name, stages, failed=options.failed)]
    print(f"{len(chosen)} architectures, {len(todo)} to run (--again runs what is done, too)", file=sys.stderr)

    def advance(name: str) -> None:
        for stage in stages:
            if not options.again and records.passed(name, stage):
                continue
            result = in_process(stage, name, options.work)
            records.put(name, stage, result)
            shown = "ok" if result["ok"] else f"{result['reason']} ({result['where']})"
            print(f"{time.strftime('%H:%M:%S')} {name} {stage} {result['seconds']} s: {shown}", file=sys.stderr)
            if not result["ok"]:
                break

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(advance, todo))
    failed = [name for name in chosen if name not in EXCLUDED and not records.passed(name, stages[-1])]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} pass or are excluded", file=sys.stderr)
    return 1 if failed else 0


def in_process(stage: str, name: str, work: Path) -> dict[str, Any]:
    """Run one stage in a process of its own.

    A fork has everything imported already, which is what makes 200 traces affordable; ``load`` needs a
    process that never saw the compiler, so it starts Python anew.
    """
    started = time.perf_counter()
    seconds = LIMITS[stage]
    if stage == "load":
        command = [sys.executable, str(HERE / "one.py"), stage, name, str(work)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return ended(started, f"no answer within {seconds} s")
        try:
            found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return ended(started, f"exit code {done.returncode}: {done.stderr.strip()[-200:]}")
        return found
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, stage, name, work))
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            result: dict[str, Any] = receiver.recv()
        else:
            result = ended(started, f"no answer within {seconds} s")
    except EOFError:
        process.join(10)
        result = ended(started, f"the process died, exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return result


def answer(sender: Any, stage: str, name: str, work: Path) -> None:
    """Run a stage in the child and send its result; what it prints goes to its log."""
    (work / "logs").mkdir(parents=True, exist_ok=True)
    with (work / "logs" / f"{name}.{stage}.out").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sender.send(one.run_stage(stage, name, work))
        sender.close()


def ended(started: float, reason: str) -> dict[str, Any]:
    """Return the result of a stage that gave none."""
    return {"ok": False, "reason": reason, "where": None, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    sys.exit(main())
