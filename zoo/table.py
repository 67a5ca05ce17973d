"""Key: ``docs/zoo.md``, written from ``zoo/results.json`` and from what ``zoo/gpu.py`` found on a GPU.

python zoo/table.py            write the table
python zoo/table.py --check    exit 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from architectures import ARCHITECTURES, EXCLUDED

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE.parent / "docs" / "zoo.md"
GPU_RESULTS: Final = HERE.parent / "benchmarks" / "results" / "zoo.h200.json"
START, END = "<!-- zoo -->\n", "<!-- /zoo -->\n"
GPU_START, GPU_END = "<!-- zoo-gpu -->\n", "<!-- /zoo-gpu -->\n"
GPU_FIGURES: Final = ("pieces", "kernels", "load_ms", "error", "eager_error")
GPU_HEAD: Final = (
    "| architecture | shapes of | pieces | kernels | load ms | error | transformers' own | result |"
)
STAGES: Final = ("trace", "compile", "load")
HEAD: Final = (
    "| architecture | class | graphs | pieces | unique | sealed | max error | seconds | decodes | result |"
)

Stages = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture: ``passed`` by all stages, ``excluded`` from the denominator, or failed at a stage."""

    name: str
    passed: bool
    excluded: bool
    cells: tuple[str, ...]


def row(name: str, stages: Stages) -> Row:
    """Return the row of an architecture; one that was not run says so."""
    merged: dict[str, Any] = {}
    for stage in STAGES:
        merged |= stages.get(stage, {})
    passed = all(stages.get(stage, {}).get("ok") for stage in STAGES)
    excluded = not passed and name in EXCLUDED
    errors = [merged[key] for key in ("eager_error", "cold_error", "warm_error") if key in merged]
    seconds = sum(result.get("seconds", 0) for result in stages.values())
    cells = (
        name,
        ARCHITECTURES.get(name, ""),
        *(str(merged.get(key, "")) for key in ("graphs", "pieces", "unique")),
        f"{merged['sealed']} %" if "sealed" in merged else "",
        f"{max(errors):.1e}" if errors else "",
        f"{seconds:.0f}" if stages else "",
        str(merged.get("decodes", "")),
        outcome(name, stages, passed=passed),
    )
    return Row(name, passed, excluded, cells)


def outcome(name: str, stages: Stages, *, passed: bool) -> str:
    """Say in words how an architecture fared."""
    if passed:
        return "passes"
    reason = f"excluded: {EXCLUDED[name].value}" if name in EXCLUDED else ""
    for stage in STAGES:
        result = stages.get(stage)
        if result is not None and not result["ok"]:
            where = f" (`{str(result['where']).partition(': ')[0]}`)" if result["where"] else ""
            return f"{reason}{'; ' if reason else ''}{stage}: {result['reason']}{where}"
    if reason:
        return reason
    done = [stage for stage in STAGES if stage in stages]
    return f"{done[-1]} passes; {STAGES[len(done)]} not run yet" if done else "not run yet"


def page(document: Mapping[str, Any], text: str) -> str:
    """Return ``text`` with the part between its marks made anew from the results."""
    found = document["architectures"]
    rows = [row(name, found.get(name, {})) for name in ARCHITECTURES]
    counted = [one for one in rows if not one.excluded]
    passed = sum(one.passed for one in counted)
    share = 100 * passed / len(counted)
    lines = [
        f"transformers {document['transformers']}, torch {document['torch']}: {len(rows)} architectures, "
        f"{len(rows) - len(counted)} excluded, {passed} of the other {len(counted)} pass ({share:.0f} %).",
        "",
        HEAD,
        "|" + " --- |" * (HEAD.count("|") - 1),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in one.cells) + " |" for one in rows),
        "",
    ]
    return between(text, START, "\n".join(lines), END)


def gpu_page(document: Mapping[str, Any], text: str) -> str:
    """Return ``text`` with its part about the GPU made anew from the results of ``gpu.py``."""
    rows = []
    for name, found in document["architectures"].items():
        merged = {**found["compile"], **found.get("load", {})}
        passed = bool(found.get("load", {}).get("ok"))
        cells = (name, found["checkpoint"], *(merged.get(key, "") for key in GPU_FIGURES))
        rows.append((passed, *cells, "passes" if passed else merged["reason"]))
    lines = [
        f"{document['machine']}, torch {document['torch']}, transformers {document['transformers']}, bfloat16: "
        f"{sum(passed for passed, *_ in rows)} of {len(rows)} pass.",
        "",
        GPU_HEAD,
        "|" + " --- |" * (GPU_HEAD.count("|") - 1),
        *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for _, *cells in rows),
        "",
    ]
    return between(text, GPU_START, "\n".join(lines), GPU_END)


def between(text: str, start: str, part: str, end: str) -> str:
    """Return ``text`` with ``part`` between its two marks."""
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return before + start + part + end + after


def main() -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = page(json.loads(options.results.read_text()), old)
    new = gpu_page(json.loads(GPU_RESULTS.read_text()), new)
    if options.check and old != new:
        print("docs/zoo.md is not up to date; run zoo/table.py", file=sys.stderr)
        return 1
    if not options.check:
        PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
