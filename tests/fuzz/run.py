"""Generate models, compile each, load each in a fresh process from a moved cache, compare all with eager.

python -m tests.fuzz.run --count 300 [--start 0] [--jobs 2] [--device cpu] [--work DIR] [--result FILE]

A model is ``ok`` (cold = warm = eager), ``refused`` by a named error when it is compiled, ``wrong`` or
``broken`` (another error, a crash). What was done is kept in ``--work``, so that an interrupted run goes on.
Exit 1 if any is wrong or broken, or more than a fifth is refused.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.fuzz.generator import generate

HERE = Path(__file__).resolve().parent
CHUNK = 6
LIMIT_S = 1200
MAX_REFUSED = 0.2

Row = dict[str, object]


def main() -> int:
    """Run, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=None, help="default: a temporary folder")
    parser.add_argument("--result", type=Path, default=None, help="write a JSON summary here")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no model is begun"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pwcc-fuzz-") as temporary:
        rows = run(
            range(given.start, given.start + given.count),
            work=given.work or Path(temporary),
            device=given.device,
            jobs=given.jobs,
            budget=given.budget,
        )
    summary = summarise(rows, given.device)
    print("\n".join(lines(summary)))
    if given.result is not None:
        given.result.write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    return int(bool(summary["bad"]) or share_refused(summary) > MAX_REFUSED)


def run(
    seeds: Sequence[int], *, work: Path, device: str, jobs: int, budget: float = float("inf")
) -> dict[int, Row]:
    """Compile and load every seed; return one row each, the worse of its two verdicts."""
    work.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "fuzz_ops.py", work)
    until = time.monotonic() + budget
    chunks = [list(seeds[i : i + CHUNK]) for i in range(0, len(seeds), CHUNK)]
    rows: dict[int, Row] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for number, found in enumerate(pool.map(lambda chunk: one_chunk(chunk, work, device, until), chunks)):
            rows.update(found)
            bad = sum(row["verdict"] in ("wrong", "broken") for row in rows.values())
            print(
                f"{number + 1} of {len(chunks)} chunks, {len(rows)} models, {bad} bad",
                file=sys.stderr,
                flush=True,
            )
    return rows


def one_chunk(seeds: Sequence[int], work: Path, device: str, until: float) -> dict[int, Row]:
    """Build some models in one process, move their cache, load them in another; resume from what is there."""
    done = work / f"done-{seeds[0]}-{seeds[-1]}.json"
    if done.is_file():
        return {int(seed): row for seed, row in json.loads(done.read_text()).items()}
    if time.monotonic() > until:
        return {}
    own = work / f"chunk-{seeds[0]}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    shutil.copy(HERE / "fuzz_ops.py", own)
    rows = phase("build", seeds, own, device)
    if (own / "cache").is_dir():
        (own / "cache").rename(own / "moved")
    rows |= phase("load", [seed for seed in seeds if rows[seed]["verdict"] == "ok"], own, device)
    shutil.rmtree(own / "moved", ignore_errors=True)
    done.write_text(json.dumps(rows))
    return rows


def phase(name: str, seeds: Sequence[int], work: Path, device: str) -> dict[int, Row]:
    """Run ``one.py`` until every seed has a row; a process that dies takes the seed it was at with it."""
    rows: dict[int, Row] = {}
    waiting = list(seeds)
    while waiting:
        caches = {f"{part}_CACHE_DIR": str(work / part.lower()) for part in ("TORCHINDUCTOR", "TRITON")}
        path = os.pathsep.join([str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "tests.fuzz.one", name, str(work), device, *map(str, waiting)]
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
                cwd=HERE.parents[1],
                env={**os.environ, **caches, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            out, end = ran.stdout, f"exit {ran.returncode}: {ran.stderr.strip()[-600:]}"
        except subprocess.TimeoutExpired as error:
            out = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
            end = f"not done after {LIMIT_S} s"
        for line in out.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                rows[row.pop("seed")] = row
        waiting = [seed for seed in waiting if seed not in rows]
        if waiting:
            rows[waiting[0]] = {"phase": name, "verdict": "broken", "type": "crash", "message": end}
            waiting = waiting[1:]
    return rows


def summarise(rows: Mapping[int, Row], device: str) -> dict[str, object]:
    """Return counts by verdict, refusals by reason with their seeds, and every bad row in full."""
    import torch

    verdicts = collections.Counter(str(row["verdict"]) for row in rows.values())
    reasons: dict[str, list[int]] = {}
    for seed, row in sorted(rows.items()):
        if row["verdict"] == "refused":
            reasons.setdefault(reason(row), []).append(seed)
    some = [seed for seed, row in sorted(rows.items()) if row.get("refused_sizes")]
    return {
        "device": device,
        "torch": torch.__version__,
        "models": len(rows),
        "verdicts": dict(verdicts),
        "refusals": dict(sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))),
        "models that refuse some sizes when called": some,
        "bad": {str(s): row for s, row in sorted(rows.items()) if row["verdict"] in ("wrong", "broken")},
        "constructs": dict(
            sorted(collections.Counter(c for seed in rows for c in generate(seed).constructs).items())
        ),
    }


def reason(row: Row) -> str:
    """Return a refusal's message without names and numbers, so that equal reasons are counted as one."""
    text = re.sub(r"piece p\d+ \([^)]*\): ", "", str(row["message"]))
    text = re.sub(r"'[^']*'", "'...'", text)
    return f"{row['type']}: " + re.sub(r"\b[a-z]?\d+\b", "N", text)[:160]


def share_refused(summary: Mapping[str, object]) -> float:
    """Return the share of models that were refused."""
    verdicts, models = summary["verdicts"], summary["models"]
    if not isinstance(verdicts, dict) or not isinstance(models, int):
        raise TypeError("expected a summary")
    return float(verdicts.get("refused", 0)) / max(1, models)


def lines(summary: Mapping[str, object]) -> Iterable[str]:
    """Return a summary as text."""
    yield f"{summary['models']} models on {summary['device']}: {summary['verdicts']}"
    yield f"{share_refused(summary):.1%} refused"
    refusals, bad = summary["refusals"], summary["bad"]
    if isinstance(refusals, dict):
        for text, seeds in refusals.items():
            yield f"  {len(seeds):3} {text} (seeds {', '.join(map(str, seeds[:6]))})"
    if isinstance(bad, dict):
        for seed, row in bad.items():
            yield f"BAD {seed}: {json.dumps(row)}"


if __name__ == "__main__":
    sys.exit(main())
