"""Compiling from nothing: pwcc from trace to published entry, beside torch.compile's first calls.

python benchmarks/bench_cold_compile.py --device cpu|cuda [--quick] [--only WAY,...] [--jobs 1,2]

torch.compile compiles the whole model when it is first called and again for one token, so its cost is that of
both calls: what a server pays before every size is served.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import cast

import bench_warm_start as warm
import lab
from lab import Job, Model, Outcome

FIRST, BOTH = "torch.compile, first call", "torch.compile, first call and first call with 1 token"
DYNAMIC = "pwcc compile, one dynamic range"
BUDGET = "1/3"
NOTE = (
    "Seconds from a built model, weights on the device, in a fresh process with empty caches, imports counted. "
    "torch.compile: fullgraph, dimension 0 marked dynamic. pwcc: trace to published entry, numerics checked "
    f"against eager; budget for one dynamic range: {BUDGET} of torch.compile's two calls. "
    "{cores} cores; one process each."
)


def main() -> None:
    """Measure, and write the result."""
    parser = lab.options(__doc__ or "", repeat=1)
    parser.add_argument("--jobs", default="", metavar="1,2", help="compile processes to compare with --sizes")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    jobs = [int(part) for part in given.jobs.split(",") if part] or _jobs(given.quick, cores)
    rows: list[Sequence[str]] = []
    data: dict[str, object] = {}
    sizes = warm.sizes(given)
    with lab.laboratory(given) as room:
        for model in lab.models(given):
            ways = {BOTH: warm.cold(given, model), DYNAMIC: dynamic(given, model)}
            for count in jobs:
                name = f"pwcc compile --sizes {','.join(map(str, sizes))} --jobs {count}"
                ways[name] = parallel(given, model, count)
            runs = {name: [room.measure(job)] for name, job in ways.items() if lab.wanted(given, name)}
            rows += table(model, runs)
            data[model.label] = lab.raw(runs)
    columns = ("model", "way", "seconds", "of torch.compile", "trace, s", "compile, s", "compiles")
    lab.publish(given, "cold-compile", columns, rows, note=NOTE.format(cores=cores), data=data)


def _jobs(quick: bool, cores: int) -> list[int]:
    if quick:
        return [1]
    return [1, 2] if cores < 4 else [1, 4]


def dynamic(given: argparse.Namespace, model: Model) -> Job:
    """Return the compile without static sizes."""
    return Job("pwcc compile", model, given.device, store=f"dynamic-{warm.place(model)}")


def parallel(given: argparse.Namespace, model: Model, jobs: int) -> Job:
    """Return the compile with static sizes in this many processes."""
    if jobs == 1:
        return warm.built(given, model)
    store = f"jobs-{jobs}-{warm.place(model)}"
    return Job("pwcc compile", model, given.device, store=store, sizes=warm.sizes(given), jobs=jobs)


def table(model: Model, runs: Mapping[str, Sequence[Outcome]]) -> list[Sequence[str]]:
    """Return one row a way; torch.compile has two."""
    both = lab.median(runs.get(BOTH, ()), "both_s")
    rows: list[Sequence[str]] = []
    for name, outcomes in runs.items():
        if name == BOTH and both is not None:
            first = lab.median(outcomes, "first_s")
            rows.append((model.label, FIRST, lab.show(first), lab.show(lab.ratio(first, both), 2), "", "", ""))
        seconds = lab.median(outcomes, "both_s" if name == BOTH else "compile_s")
        values = outcomes[0].values
        stages = cast(Mapping[str, float], values.get("stages_s", {}))
        counters = cast(Mapping[str, int], values.get("counters", {}))
        rows.append(
            (
                model.label,
                name,
                lab.show(seconds) if seconds is not None else lab.failure(outcomes),
                lab.show(lab.ratio(seconds, both), 2),
                lab.show(stages.get("trace")) if stages else "",
                lab.show(stages.get("compile")) if stages else "",
                str(counters.get("compiles", "")),
            )
        )
    return rows


if __name__ == "__main__":
    main()
