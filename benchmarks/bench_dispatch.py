"""What it costs to reach compiled code: a call with Dynamo's guards, without them, and past Dynamo.

python benchmarks/bench_dispatch.py --device cpu|cuda [--quick] [--only WAY,...]
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import lab
from lab import Outcome

SCRIPT = Path(__file__).resolve().parent / "dispatch_ways.py"
ALONE = "graph alone"
WAYS = ("torch.compile", "no guards", "level 2", "level 3")
NOTE = (
    "Host microseconds of a call above the compiled graph alone (its own time in the third column), medians "
    "of calls in turns in one process, under no_grad; the model has many parameters and next to no compute, "
    "one fused kernel. No guards: torch.compile with skip_all_guards_unsafe. Level 2 and 3: "
    "pwcc.support_compile, by the code object that Dynamo wrote, and from the cache; both check every argument."
)


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=3).parse_args()
    layers = (16,) if given.quick else (16, 64, 256)
    rows: list[Sequence[str]] = []
    data: dict[str, object] = {}
    with lab.laboratory(given, SCRIPT) as room:
        for count in layers:
            model = lab.Model(f"{count} layers", "stack", {"layers": count})
            job = lab.Job("dispatch", model, given.device)
            outcomes = [room.measure(job, number) for number in range(1 if given.quick else given.repeat)]
            rows.append(row(model.label, outcomes))
            data[model.label] = [o.values if not o.failure else {"failure": o.failure} for o in outcomes]
    columns = ("model", "guards", ALONE, *WAYS, "guards to level 3")
    lab.publish(given, "dispatch", columns, rows, note=NOTE, data=data)


def row(label: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table row: what each way adds to the graph alone, medians over processes."""
    measured = [o for o in outcomes if "calls" in o.values]
    if not measured:
        return [label, lab.failure(outcomes) or "-", *["-"] * (len(WAYS) + 2)]
    added = {name: statistics.median(above(o)[name] for o in measured) for name in (*WAYS, ALONE)}
    return [
        label,
        str(measured[0].values["guards"]),
        f"{lab.show(added[ALONE])} us",
        *(f"+{lab.show(added[name])} us" for name in WAYS),
        lab.times(lab.ratio(added["torch.compile"], added["level 3"])),
    ]


def above(outcome: Outcome) -> dict[str, float]:
    """Return each way's microseconds above the graph alone, and the graph's own."""
    calls = cast(Mapping[str, Mapping[str, float]], outcome.values["calls"])
    floor = calls[ALONE]["us"]
    return {ALONE: floor, **{name: calls[name]["us"] - floor for name in WAYS}}


if __name__ == "__main__":
    main()
