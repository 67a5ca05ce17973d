"""One step of the model without CUDA graphs, and what a stitched program costs beyond its pieces.

python benchmarks/bench_step_time.py --device cpu|cuda [--quick] [--only WAY,...]
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import cast

import bench_warm_start as warm
import lab
from lab import Outcome

WAYS = (warm.EAGER, warm.WARM, warm.PWCC)
BUDGET_US = 10
STEP_NOTE = (
    "Microseconds of a call, the device waited for after blocks of calls, medians; in brackets the host's own "
    "time to issue one call to an idle device. Attention outside every piece, dense, without a KV cache. "
    "pwcc runs static variants where compiled ({sizes} tokens), torch.compile own code for 1 token. No CUDA "
    "graphs; on a CPU one thread."
)
CALL_NOTE = (
    "Host time. Stitched over bare: the stitched program less the same piece and attention calls in a loop, "
    f"alternating, medians, a piece; budget {BUDGET_US} us (noise where pieces take long). "
    "Empty: the program over pieces that do nothing. "
    "Binder: arguments and sizes checked. Whole call: the compiled model's call less the loop."
)


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=3).parse_args()
    repeat = 1 if given.quick else given.repeat
    steps: list[Sequence[str]] = []
    calls: list[Sequence[str]] = []
    data: dict[str, object] = {}
    with lab.laboratory(given) as room:
        for model in lab.models(given):
            runs = warm.measure(given, room, model, repeat, WAYS)
            steps += step_rows(model.label, runs)
            calls += call_rows(model.label, runs.get(warm.PWCC, []))
            data[model.label] = {
                name: [{key: o.values.get(key) for key in ("steps", "overhead")} for o in outcomes]
                for name, outcomes in runs.items()
            }
    note = STEP_NOTE.format(sizes=", ".join(map(str, warm.sizes(given))))
    columns = ("model", "tokens", "eager", "torch.compile", "pwcc", "pwcc to torch.compile", "pwcc to eager")
    lab.publish(given, "step-time", columns, steps, note=note, data=data)
    columns = ("model", "tokens", "pieces", "stitched over bare", "empty", "Binder", "whole call")
    lab.publish(given, "call-overhead", columns, calls, note=CALL_NOTE, data={}, first=False)


def step_rows(label: str, runs: Mapping[str, Sequence[Outcome]]) -> list[Sequence[str]]:
    """Return one row a number of tokens."""
    found = {name: medians(outcomes, "steps") for name, outcomes in runs.items()}
    rows: list[Sequence[str]] = []
    for tokens in dict.fromkeys(count for steps in found.values() for count in steps):
        taken = {name: steps[tokens]["step_us"] for name, steps in found.items() if tokens in steps}
        cells = [
            f"{lab.show(taken[name])} ({lab.show(found[name][tokens]['issue_us'])})" if name in taken else "-"
            for name in WAYS
        ]
        ours = taken.get(warm.PWCC)
        against = [lab.show(lab.ratio(ours, taken.get(name)), 2) for name in (warm.WARM, warm.EAGER)]
        rows.append((label, tokens, *cells, *against))
    missing = "; ".join(f"{name}: {lab.failure(o)}" for name, o in runs.items() if lab.failure(o))
    return rows if not missing else [*rows, (label, missing, "", "", "", "", "")]


def call_rows(label: str, outcomes: Sequence[Outcome]) -> list[Sequence[str]]:
    """Return what a call costs beside the pieces, one row a number of tokens."""
    return [
        (
            label,
            tokens,
            str(int(cost["pieces"])),
            f"{lab.show(cost['over_bare_per_piece_us'])} us",
            f"{lab.show(cost['empty_stitch_per_piece_us'])} us",
            f"{lab.show(cost['binder_us'])} us",
            f"{lab.show(cost['call_over_bare_us'])} us",
        )
        for tokens, cost in medians(outcomes, "overhead").items()
    ]


def medians(outcomes: Sequence[Outcome], name: str) -> dict[str, dict[str, float]]:
    """Return a measurement of two levels, each figure the median of the processes that have it."""
    measured = [cast(Mapping[str, Mapping[str, float]], o.values[name]) for o in outcomes if name in o.values]
    if not measured:
        return {}
    return {
        tokens: {key: statistics.median(one[tokens][key] for one in measured) for key in figures}
        for tokens, figures in measured[0].items()
    }


if __name__ == "__main__":
    main()
