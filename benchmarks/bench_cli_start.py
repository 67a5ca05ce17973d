"""How long the commands take that import no torch: whole processes, from fork to exit.

python benchmarks/bench_cli_start.py [--quick] [--repeat 20]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lab
from many_entries import fill

ENTRIES = 1000
BUDGETS_MS = {"pwcc --help": 150, "pwcc --version": 150, f"pwcc inspect ({ENTRIES:,} entries)": 300}


def main() -> None:
    """Measure, and write the result."""
    given = lab.options(__doc__ or "", repeat=20).parse_args()
    if given.device != "cpu":
        print("bench_cli_start: the same on every device; nothing to do")
        return
    repeat = 3 if given.quick else given.repeat
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "cache"
        fill(store, ENTRIES, own_blobs=0)
        commands = {
            **{
                name: ([sys.executable, "-m", "pwcc", *argv], budget)
                for (name, budget), argv in zip(
                    BUDGETS_MS.items(), (["--help"], ["--version"], ["inspect", str(store)]), strict=True
                )
            },
            "python -c pass": ([sys.executable, "-c", "pass"], None),
            "python -c 'import torch'": ([sys.executable, "-c", "import torch"], None),
        }
        taken: dict[str, list[float]] = {name: [] for name in commands if lab.wanted(given, name)}
        for number in range(repeat + 1):  # in turns, so that a busy spell of the machine hits all alike
            for name, values in taken.items():
                milliseconds = measure(commands[name][0])
                if number:  # the first run warms bytecode and page cache
                    values.append(milliseconds)
    rows = [
        (f"`{name}`", f"{min(values):.0f}", f"{statistics.median(values):.0f}", str(commands[name][1] or ""))
        for name, values in taken.items()
    ]
    columns = ("command", "best ms", "median ms", "budget ms")
    note = f"Whole processes, from fork to exit, {repeat} times in turns."
    lab.publish(given, "cli-start", columns, rows, note=note, data={"milliseconds": taken})


def measure(command: list[str]) -> float:
    """Return the milliseconds of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1000


if __name__ == "__main__":
    main()
