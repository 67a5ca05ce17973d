"""One decode step over a paged KV cache, by every way, against the memory floor; and what capturing costs.

python benchmarks/bench_capture.py --device cpu|cuda [--quick | --smoke] [--only WAY,...] [--deadline S]
                                   [--out-dir DIR] [--work DIR]

Each way runs in a process of its own. With --work, a second run measures only what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lab
from lab import Job, Lab, Model, Outcome
from results import variant_of

SCRIPT = Path(__file__).resolve().parent / "decode_ways.py"
SIZES = (1, 8, 64)
TUNED_SIZES = (1,)  # tuning a size costs half a minute
EAGER, COMPILED, REDUCED = "eager", "torch.compile", "torch.compile, reduce-overhead"
PLAIN, TUNED, FLOOR, COST = "pwcc", "pwcc autotune", "floor", "capture cost"
# In the order of what is wanted most, should time run out.
WAYS = (FLOOR, PLAIN, COST, TUNED, REDUCED, EAGER, COMPILED)
MODES = ("NONE", "PIECEWISE", "FULL")
OVER_FULL, OVER_FLOOR, CAPTURE_S, CAPTURE_MIB = 1.05, 1.15, 2.0, 600  # the budgets
STEP_NOTE = (
    "Milliseconds of a decode step, the device waited for after blocks of steps, medians; in brackets the "
    "host's own time to issue one step to an idle device. {context} tokens of context per sequence, paged KV "
    "cache, random weights; padding, copies into static buffers and routing counted. Floor: every weight that "
    "a step reads ({read} GB), once, at the bandwidth of a device-to-device copy, {bandwidth} TB/s here. "
    "torch.compile: static shapes for every size, so that its code is as special as pwcc's; "
    "every way has pwcc's attention kernel."
)
COST_NOTE = (
    "Capturing {sizes} sizes from {largest} down to 1, after loading. MiB: what the driver has less of "
    "afterwards."
)


def main() -> None:
    """Measure, and write the results."""
    parser = lab.options(__doc__ or "", repeat=1)
    parser.add_argument("--smoke", dest="quick", action="store_true", help="the same as --quick")
    parser.add_argument("--out-dir", type=Path, help="write all tables here")
    given = parser.parse_args()
    if given.out_dir is not None:
        given.out = given.out_dir / f"decode-step.{variant_of(given.device)}.json"
    steps: list[Sequence[str]] = []
    costs: list[Sequence[str]] = []
    budgets: list[Sequence[str]] = []
    data: dict[str, object] = {}
    note, cost_note = STEP_NOTE, COST_NOTE
    with lab.laboratory(given, SCRIPT) as room:
        for model in lab.models(given)[:1]:
            runs = measure(given, room, model)
            steps += step_rows(model, runs)
            costs += cost_rows(model, runs)
            budgets += budget_rows(runs)
            data[model.label] = lab.raw({name: [outcome] for name, outcome in runs.items()})
            note, cost_note = notes(runs)
    columns = ("model", "way", *(f"batch {n}" for n in SIZES), "batch 1, to the floor", "same tokens as eager")
    lab.publish(given, "decode-step", columns, steps, note=note, data=data)
    columns = ("model", "mode", "sizes", "graphs", "seconds", "MiB")
    lab.publish(given, "capture-cost", columns, costs, note=cost_note, data={}, first=False)
    columns = ("budget", "measured", "allowed", "kept")
    lab.publish(given, "capture-budgets", columns, budgets, note="", data={}, first=False)


def measure(given: argparse.Namespace, room: Lab, model: Model) -> dict[str, Outcome]:
    """Measure every way that is asked for; torch.compile only where asked for by name in a quick run."""
    runs: dict[str, Outcome] = {}
    for name in WAYS:
        slow = name in (REDUCED, COMPILED) or (name == TUNED and given.device == "cpu")
        if not lab.wanted(given, name) or (given.quick and slow and not given.only):
            continue
        runs[name] = room.measure(job(given, room, model, name))
    return runs


def job(given: argparse.Namespace, room: Lab, model: Model, name: str) -> Job:
    """Return a way's job, after whatever it needs was built."""
    plain = Job("", model, given.device, sizes=SIZES[:1] if given.quick else SIZES)
    if name == FLOOR:
        return dataclasses.replace(plain, way=FLOOR)
    if name in (EAGER, COMPILED, REDUCED):
        plain = dataclasses.replace(plain, store=built(room, plain, "plain"))  # for its attention kernel
    if name in (COMPILED, REDUCED):
        # Both in one set of caches: what the second finds there only shortens its compile.
        turn = "default" if name == COMPILED else "reduce-overhead"
        return dataclasses.replace(plain, way="decode torch.compile", turn=turn, caches="decode-caches")
    if name == EAGER:
        return dataclasses.replace(plain, way="decode eager")
    turn = "tuned" if name == TUNED else "plain"
    plain = dataclasses.replace(plain, sizes=TUNED_SIZES if name == TUNED else plain.sizes)
    store = built(room, plain, turn)
    return dataclasses.replace(plain, way=COST if name == COST else "decode pwcc", turn=turn, store=store)


def built(room: Lab, job: Job, turn: str) -> str:
    """Compile the entry that others load, and return its store."""
    store = f"decode-store-{turn}"
    room.measure(dataclasses.replace(job, way="pwcc compile", turn=turn, store=store, jobs=1))
    return store


def notes(runs: Mapping[str, Outcome]) -> tuple[str, str]:
    """Return the notes below the tables, with this run's figures."""
    floor = runs.get(FLOOR, Outcome({}))
    step = STEP_NOTE.format(
        context=128,
        read=lab.show(floor.seconds("read_bytes"), 3, 1e-9),
        bandwidth=lab.show(floor.seconds("bandwidth"), 3, 1e-12),
    )
    one = next((cost for _, cost in costs_of(runs) if "failure" not in cost), {})
    return step, COST_NOTE.format(sizes=one.get("sizes", "the"), largest=one.get("largest", "the largest"))


def steps_of(runs: Mapping[str, Outcome]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield way, steps by batch, and failure: pwcc's modes each as a way."""
    for name in (EAGER, COMPILED, REDUCED, PLAIN, TUNED):
        outcome = runs.get(name)
        if outcome is None:
            continue
        if name not in (PLAIN, TUNED) or outcome.failure:
            yield name, cast(Mapping[str, Any], outcome.values.get("steps", {})), outcome.failure
            continue
        for mode in MODES:
            found = cast(Mapping[str, Any], outcome.values.get(mode, {}))
            yield f"{name} {mode}", found.get("steps", {}), str(found.get("failure", ""))


def step_rows(model: Model, runs: Mapping[str, Outcome]) -> list[Sequence[str]]:
    """Return one row a way, the floor last."""
    reference = next((steps for name, steps, _ in steps_of(runs) if name == EAGER), {})
    floor = runs.get(FLOOR, Outcome({})).seconds("floor_ms")
    rows: list[Sequence[str]] = []
    for name, steps, failure in steps_of(runs):
        cells = [_cell(steps.get(str(n))) for n in SIZES]
        if not steps:
            cells[0] = failure or "-"
        to_floor = lab.times(lab.ratio(_ms(steps, 1), floor))
        rows.append((model.label, name, *cells, to_floor, _same(steps, reference)))
    rows.append((model.label, "floor", *[lab.show(floor)] * len(SIZES), "1.0 x", ""))
    return rows


def _cell(step: Mapping[str, float] | None) -> str:
    return "-" if step is None else f"{lab.show(step['step_ms'])} ({lab.show(step['issue_ms'])})"


def _ms(steps: Mapping[str, Any], n: int) -> float | None:
    return steps[str(n)]["step_ms"] if str(n) in steps else None


def _same(steps: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """How many sequences' next tokens are eager's, and how far the logits' norm is off."""
    both = [n for n in steps if n in reference]
    if not both:
        return "-"
    pairs = [p for n in both for p in zip(steps[n]["tokens"], reference[n]["tokens"], strict=True)]
    off = max(abs(steps[n]["norm"] / reference[n]["norm"] - 1) for n in both)
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}, norm {off:.1e} off"


def costs_of(runs: Mapping[str, Outcome]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield mode and cost."""
    for name, found in runs.get(COST, Outcome({})).values.items():
        yield name, cast(Mapping[str, Any], found)


def cost_rows(model: Model, runs: Mapping[str, Outcome]) -> list[Sequence[str]]:
    """Return one row a mode."""
    rows: list[Sequence[str]] = []
    for name, cost in costs_of(runs):
        if "failure" in cost:
            rows.append((model.label, name, "", "", cost["failure"], ""))
            continue
        graphs = sum(total["graphs"] for total in cost["report"]["totals"].values())
        mib = lab.show(cost["driver_bytes"] / 2**20)
        rows.append((model.label, name, str(cost["sizes"]), str(graphs), lab.show(cost["seconds"]), mib))
    return rows


def budget_rows(runs: Mapping[str, Outcome]) -> list[Sequence[str]]:
    """Return every budget of capture, and whether this run keeps it."""
    found = {name: steps for name, steps, _ in steps_of(runs)}
    floor = runs.get(FLOOR, Outcome({})).seconds("floor_ms")
    rows: list[Sequence[str]] = []

    def row(what: str, value: float | None, limit: float, unit: str) -> None:
        kept = "-" if value is None else "yes" if value <= limit else "no"
        rows.append((what, f"{lab.show(value)} {unit}", f"{lab.show(limit)} {unit}", kept))

    for n in SIZES:
        full = _ms(found.get(f"{PLAIN} FULL", {}), n)
        row(
            f"FULL to torch.compile reduce-overhead, batch {n}",
            lab.ratio(full, _ms(found.get(REDUCED, {}), n)),
            1.0,
            "x",
        )
    full = _ms(found.get(f"{PLAIN} FULL", {}), 1)
    pieces = _ms(found.get(f"{PLAIN} PIECEWISE", {}), 1)
    row("PIECEWISE to FULL, batch 1", lab.ratio(pieces, full), OVER_FULL, "x")
    tuned = _ms(found.get(f"{TUNED} FULL", {}), 1)
    row("FULL with autotune to the floor, batch 1", lab.ratio(tuned, floor), OVER_FLOOR, "x")
    cost = dict(costs_of(runs)).get("PIECEWISE", {})
    row("capture, PIECEWISE, time", cost.get("seconds"), CAPTURE_S, "s")
    taken = cost.get("driver_bytes")
    row("capture, PIECEWISE, memory", None if taken is None else taken / 2**20, CAPTURE_MIB, "MiB")
    return rows


if __name__ == "__main__":
    main()
