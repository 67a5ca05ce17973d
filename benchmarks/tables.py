"""Write the tables of README.md and docs/*.md from benchmarks/results/*.json.

python benchmarks/tables.py            write them
python benchmarks/tables.py --check    exit 1 if they are not up to date

A table NAME lies between the lines ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; it shows every file
results/NAME.VARIANT.json in order of VARIANT.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from results import FOLDER, Result

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def main() -> int:
    """Write or check the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = 0
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = path.read_text()
        new = with_tables(old, FOLDER)
        if old == new:
            continue
        if check:
            name = path.relative_to(ROOT)
            print(f"{name}: benchmark tables are not up to date; run benchmarks/tables.py", file=sys.stderr)
            stale = 1
        else:
            path.write_text(new)
    return stale


def with_tables(text: str, folder: Path) -> str:
    """Return ``text`` with what lies between its markers made anew."""

    def table(match: re.Match[str]) -> str:
        paths = sorted(folder.glob(f"{match[2]}.*.json"))
        body = "\n".join(as_markdown(Result.read(path)) for path in paths) or "Not measured yet.\n"
        return f"{match[1]}{body}{match[3]}"

    return MARKED.sub(table, text)


def as_markdown(result: Result) -> str:
    """Return one result as a Markdown table with its machine and command below."""
    lines = [
        "| " + " | ".join(result.columns) + " |",
        "|" + "|".join(" --- " for _ in result.columns) + "|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in result.rows),
        "",
        f"{result.note} " if result.note else "",
    ]
    facts = ", ".join(
        value if key in ("cpu", "gpu", "os") else f"{key} {value}" for key, value in result.machine.items()
    )
    lines[-1] += f"*{facts}; `{result.command}`*"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
