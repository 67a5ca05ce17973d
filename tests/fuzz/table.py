"""Write ``docs/fuzz.md`` from ``results.json``: how generated models fared, and what was refused, by reason.

python -m tests.fuzz.table [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
DOCUMENT = HERE.parents[1] / "docs" / "fuzz.md"
SHOWN = 8


def main() -> int:
    """Write the document, or with ``--check`` say whether it is what would be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = document(json.loads(RESULTS.read_text()))
    if parser.parse_args().check:
        return int(DOCUMENT.read_text() != text)
    DOCUMENT.write_text(text)
    return 0


def document(summary: dict[str, Any]) -> str:
    """Return the text for a summary of ``run.py``."""
    verdicts = summary["verdicts"]
    counted = ", ".join(f"{number} {name}" for name, number in sorted(verdicts.items()))
    rows = [
        f"| {reason.replace('|', '/')} | {len(seeds)} | {', '.join(map(str, seeds[:SHOWN]))} |"
        for reason, seeds in summary["refusals"].items()
    ]
    bad = [f"- model {seed}: {row['verdict']}: {row['message']}" for seed, row in summary["bad"].items()]
    lines = [
        "# Generated models",
        "",
        "`make fuzz` writes small random modules as Python source: two to seven constructs a model out of "
        f"{len(summary['constructs'])} kinds (tuples, views, sizes, cuts, regions, state, arguments, results), "
        "chosen by a seed; one in twenty is drawn from those marked rare, which are refused or served for some "
        "sizes only. Each is compiled, loaded from a moved cache in a fresh process, and called eight "
        "times with different token counts. Results, their types and shared memory, arguments and buffers must "
        "equal eager's, cold and warm, or the compile must refuse the model by a named error. "
        "`tests/fuzz/generator.py` holds the constructs; "
        "`python -m tests.fuzz.run --start SEED --count 1 --work DIR` runs one again.",
        "",
        f"Of {summary['models']} models on {summary['device']}, torch {summary['torch']}: {counted}.",
        "",
        "| refused because | models | seeds |",
        "| --- | --- | --- |",
        *rows,
        "",
        *(["Wrong or broken:", "", *bad, ""] if bad else []),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
