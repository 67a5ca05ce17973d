"""A compile's plan and report as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from pwcc.cli import units
from pwcc.cli.table import Column, facts, table

if TYPE_CHECKING:
    from pwcc.compile.report import CompilePlan, CompileReport, HitCheck

SHORT_KEY: Final = 12
_TIED: Final = "\N{NO-BREAK SPACE}"  # `wrap` breaks at ASCII spaces only


def plan_lines(plan: CompilePlan, *, width: int) -> list[str]:
    """Return the plan: totals, then one row per unique piece with its operations."""
    at = ", ".join(plan.splitting_ops) or "nothing (no splitting ops)"
    lines = [
        f"plan for {plan.model} on {plan.device}; nothing was compiled",
        *facts(
            [
                ("parameters", f"{plan.parameters:,} ({units.bytes_(plan.parameter_bytes)})"),
                ("split at", f"{at}: {units.count(plan.splits, 'split')}"),
                ("pieces", f"{len(plan.pieces)}, of which {len(plan.unique)} are unique"),
                ("variants", ", ".join(plan.variants)),
                ("size mode", plan.size_mode),
            ]
        ),
        "",
        "unique pieces",
    ]
    columns = (
        Column("PIECE", elastic=True),
        Column("DIGEST"),
        Column("USES", right=True),
        Column("OPS", right=True),
    )
    rows = [(p.name, p.digest[:SHORT_KEY], str(p.uses), str(len(p.ops))) for p in plan.unique]
    lines += table(columns, rows, width=width, indent="  ")
    for piece in plan.unique:
        lines += ["", f"  {piece.name}", *wrapped(ops_text(piece.ops), width=width, indent="    ")]
    lines += ["", "order", *wrapped(" ".join(plan.pieces), width=width, indent="  ")]
    return lines


def report_lines(report: CompileReport, *, width: int) -> list[str]:
    """Return the outcome: what the entry holds, what this run did, seconds per stage."""
    entry = report.entry_key[:SHORT_KEY]
    total = report.seconds.get("total", sum(report.seconds.values()))
    head = (
        f"hit: entry {entry}, nothing compiled ({units.seconds(total)})"
        if report.hit
        else f"compiled {report.plan.model} for {report.plan.device}: entry {entry} ({units.seconds(total)})"
    )
    lines = [head, *facts([*_contents(report), ("path", str(report.path))])]
    if report.verified is not None:
        lines += ["", *verified_lines(report.verified)]
    if report.hit:
        return lines
    stages = [(stage, f"{value:.2f}") for stage, value in report.seconds.items()]
    columns = (Column("STAGE"), Column("SECONDS", right=True))
    return [*lines, "", *table(columns, stages, width=width, indent="  ")]


def verified_lines(check: HitCheck) -> list[str]:
    """Return what ``--verify-hit`` found: one line, or each part that differs with its first lines."""
    blobs = units.count(check.compared, "blob")
    if check.ok and not check.tuned:
        return [f"verified: compiled again, all {blobs} are the same bytes"]
    if check.ok:
        return [f"verified: compiled again and tuned anew, programs and numbers agree ({blobs})"]
    lines = [f"verify FAILED: {len(check.differences)} of {blobs} differ from what was compiled again"]
    if check.retraced:
        lines.append("  the model traces to something else than when the entry was made:")
        lines += [f"    {line}" for line in check.retraced]
    for difference in check.differences:
        lines += [f"  {difference.what}", *(f"    {line}" for line in difference.lines)]
    for what, error in check.errors.items():
        lines.append(f"  {what}: the entry's numbers are off by {error:.3g} (relative)")
    return lines


def verify_error(check: HitCheck) -> str:
    """Return the error of a check that failed: what is to blame, as far as the comparison tells."""
    todo = "remove it (pwcc rm) and compile again"
    if not check.retraced:
        return f"error: the entry is not what this compile gives; {todo}"
    return (
        "error: an input changed that the key does not see, or the entry was altered: "
        f"{check.retraced[0]}; {todo}, and report what the model reads"
    )


def _contents(report: CompileReport) -> list[tuple[str, str]]:
    plan, counters = report.plan, report.counters
    found = [
        ("pieces", f"{len(plan.pieces)} ({units.count(plan.splits, 'split')})"),
        ("unique", str(len(plan.unique))),
        ("variants", f"{len(plan.variants)}: {', '.join(plan.variants)}"),
        ("kernels", str(report.kernels)),
        ("bytes", units.bytes_(report.bytes)),
    ]
    if not report.build_observed:
        found.append(("build", "unobserved: what the model's construction read is not keyed"))
    if not report.hit:
        reused = f"{counters.piece_cache_hits} from the piece cache"
        found.insert(3, ("compiled", f"{counters.compiles}, {reused}, {counters.autotunes} tuned"))
    return found


def ops_text(ops: Iterable[str]) -> str:
    """Return operations with their counts, in order of first use, for ``wrapped``: ``aten.mm x2, ...``."""
    found = Counter(ops)
    return ", ".join(op if number == 1 else f"{op}{_TIED}x{number}" for op, number in found.items()) or "none"


def wrapped(text: str, *, width: int, indent: str) -> list[str]:
    """Return ``text`` broken at spaces into indented lines; words longer than a line stay whole."""
    lines = wrap(
        text,
        width=width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIED, " ") for line in lines]
