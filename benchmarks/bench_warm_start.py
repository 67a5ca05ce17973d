"""From a built model to its first output in a fresh process, by every way that promises a warm start.

python benchmarks/bench_warm_start.py --device cpu|cuda [--quick] [--only WAY,...] [--repeat N]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import lab
from lab import Job, Lab, Model, Outcome

SIZES = (1, 2, 4, 8)
LOAD_MS, KEY_MS, FASTER = 50, 30, 60  # the budgets
KEY_STEPS = ("lookup", "candidates", "eligibility")
EAGER, PWCC = "eager", "pwcc load"
AOT_EMPTY, AOT_KEPT = "AOTCompiledArtifact, empty caches", "AOTCompiledArtifact, kept caches"
COLD, WARM = "torch.compile, empty caches", "torch.compile, kept caches"
WAYS = (EAGER, COLD, WARM, AOT_EMPTY, AOT_KEPT, PWCC)
NOTE = (
    "From a built model, weights on the device, in a fresh process; what a way imports counts. The first call "
    "has 16 tokens. AOTCompiledArtifact: the same {unique} unique pieces, dynamic variant only, saved by "
    "`standalone_compile(aot=True)`, in the same stitched program; pwcc: the dynamic variant and static ones "
    "for {sizes}. Medians of {repeat} processes, of one where compiling is measured."
)


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=3).parse_args()
    repeat = 1 if given.quick else given.repeat
    rows: list[Sequence[str]] = []
    parts: list[Sequence[str]] = []
    data: dict[str, object] = {}
    with lab.laboratory(given) as room:
        for model in lab.models(given):
            runs = measure(given, room, model, repeat)
            rows += table(model, runs)
            parts += steps(model, runs)
            data[model.label] = lab.raw(runs)
    note = NOTE.format(unique=3, sizes=", ".join(map(str, sizes(given))), repeat=repeat)
    heads = ("model", "way", "loaded, s", "first output, s", "loaded, to pwcc", "first output, to pwcc")
    lab.publish(given, "warm-start", heads, rows, note=note, data=data)
    note = (
        "One call of `pwcc.load`: key check, digests of everything read, binding; the steps by its receipt. "
        f"Medians of {repeat} processes."
    )
    lab.publish(
        given,
        "load-steps",
        ("model", "part of the load", "measured", "budget"),
        parts,
        note=note,
        data={},
        first=False,
    )


def sizes(given: argparse.Namespace) -> tuple[int, ...]:
    """Return the sizes with a static variant."""
    return SIZES[:2] if given.quick else SIZES


def measure(
    given: argparse.Namespace, room: Lab, model: Model, repeat: int, names: Sequence[str] = ()
) -> dict[str, list[Outcome]]:
    """Build what is loaded, then measure every way, or those of ``names``, in turns."""
    asked = [name for name in names or WAYS if lab.wanted(given, name)]
    kept, artifacts = f"aot-caches-{place(model)}", f"artifacts-{place(model)}"
    if PWCC in asked:
        room.measure(built(given, model))
    if WARM in asked:
        room.measure(cold(given, model))
    if AOT_KEPT in asked or AOT_EMPTY in asked:
        room.measure(Job("aot build", model, given.device, caches=kept, artifacts=artifacts))
    ways = {
        EAGER: Job("eager", model, given.device),
        COLD: cold(given, model),
        WARM: dataclasses.replace(cold(given, model), turn="warm"),
        AOT_EMPTY: Job("aot load", model, given.device, artifacts=artifacts),
        AOT_KEPT: Job("aot load", model, given.device, artifacts=artifacts, caches=kept),
        PWCC: Job(PWCC, model, given.device, store=built(given, model).store),
    }
    runs: dict[str, list[Outcome]] = {name: [] for name in asked}
    for number in range(repeat):
        for name, outcomes in runs.items():
            # cold compiles once; on a GPU machine, whose time is scarce, other slow ways as well
            once = name == COLD or (given.device == "cuda" and name != PWCC)
            if number == 0 or not once:
                outcomes.append(room.measure(ways[name], number))
    return runs


def built(given: argparse.Namespace, model: Model) -> Job:
    """Return the compile that makes the store to load from; the cold-compile benchmark measures the same."""
    store = f"store-{place(model)}"
    return Job("pwcc compile", model, given.device, store=store, sizes=sizes(given), jobs=1)


def cold(given: argparse.Namespace, model: Model) -> Job:
    """Return ``torch.compile`` with empty caches, which are kept for the warm one."""
    return Job("torch.compile", model, given.device, caches=f"compile-caches-{place(model)}")


def place(model: Model) -> str:
    """Return a name for what is built from a model."""
    return f"{model.preset}-{len(model.args)}"


def table(model: Model, runs: Mapping[str, Sequence[Outcome]]) -> list[Sequence[str]]:
    """Return one row a way."""
    ours = runs.get(PWCC, [])
    loaded, first = lab.median(ours, "loaded_s"), lab.median(ours, "first_s")
    norm = lab.median(runs.get(EAGER, []), "norm")
    rows: list[Sequence[str]] = []
    for name, outcomes in runs.items():
        own_loaded, own_first = lab.median(outcomes, "loaded_s"), lab.median(outcomes, "first_s")
        own_norm = lab.median(outcomes, "norm")
        wrong = norm and own_norm and abs(own_norm / norm - 1) > 0.02
        rows.append(
            (
                model.label,
                name + (" (another answer than eager!)" if wrong else ""),
                lab.show(own_loaded),
                lab.show(own_first) if own_first is not None else lab.failure(outcomes) or "-",
                lab.times(lab.ratio(own_loaded, loaded)),
                lab.times(lab.ratio(own_first, first)),
            )
        )
    return rows


def steps(model: Model, runs: Mapping[str, Sequence[Outcome]]) -> list[Sequence[str]]:
    """Return the parts of a load and its budgets."""
    ours = [outcome for outcome in runs.get(PWCC, ()) if not outcome.failure]
    if not ours:
        return [(model.label, "load", lab.failure(runs.get(PWCC, ())) or "-", "")]
    split = [Outcome(cast(Any, outcome.values["steps_ms"])) for outcome in ours]
    key = [Outcome({"key": sum(o.seconds(name) or 0 for name in KEY_STEPS)}) for o in split]
    rows: list[Sequence[str]] = [
        (model.label, name, f"{lab.show(lab.median(split, name))} ms", "")
        for name in cast(Mapping[str, float], ours[0].values["steps_ms"])
    ]
    total = lab.median(ours, "load_ms")
    rows.append((model.label, "key check: " + " + ".join(KEY_STEPS), _ms(key, "key"), f"{KEY_MS} ms"))
    rows.append((model.label, "whole load, by its receipt", f"{lab.show(total)} ms", ""))
    rows.append((model.label, "Python's garbage collector as it returns", _ms(ours, "collector_ms"), ""))
    whole = lab.median(ours, "call_s")
    rows.append(
        (model.label, "the call, as its caller sees it", f"{lab.show(whole, 3, 1e3)} ms", f"{LOAD_MS} ms")
    )
    for name in (AOT_EMPTY, AOT_KEPT):
        theirs = lab.median(runs.get(name, ()), "call_s")
        least = f"at least {FASTER} x" if name == AOT_EMPTY else ""
        rows.append((model.label, f"{name}, imports left out", lab.times(lab.ratio(theirs, whole)), least))
    if not all(outcome.values["clean"] for outcome in ours):
        rows.append((model.label, "receipt", "NOT CLEAN", "clean"))
    return rows


def _ms(outcomes: Sequence[Outcome], name: str) -> str:
    return f"{lab.show(lab.median(outcomes, name))} ms"


if __name__ == "__main__":
    main()
