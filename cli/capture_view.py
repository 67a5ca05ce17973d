"""A capture's report as text: totals, then what every size took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from pwcc.cli import units
from pwcc.cli.table import Column, facts, table

if TYPE_CHECKING:
    from pwcc.capture.plan import CapturePlan, Measured
    from pwcc.capture.report import CaptureReport, MemoryEstimate

SHORT_KEY: Final = 12
_COLUMNS: Final = (
    Column("MODE"),
    Column("BATCH"),
    Column("SIZE", right=True),
    Column("GRAPHS", right=True),
    Column("NODES", right=True),
    Column("SECONDS", right=True),
    Column("MiB", right=True),
)


def capture_lines(
    plan: CapturePlan, report: CaptureReport, estimate: MemoryEstimate, *, saved: str, width: int
) -> list[str]:
    """Return head, facts and one row per recording, the largest first, with a total per mode."""
    sizes = [row.measured.size for row in report.rows if row.error is None]
    lines = [
        f"captured entry {plan.entry_key[:SHORT_KEY]} with the {report.backend} backend: "
        f"{units.count(len(set(sizes)), 'size')} ({units.seconds(report.seconds)})"
    ]
    mode = plan.mode.value
    known = [
        ("mode", mode if plan.mode is plan.requested else f"{mode}, asked for {plan.requested.value}"),
        ("sizes", _wrapped(units.sizes(plan.sizes), width)),
        ("memory", f"{mib(report.bytes)} MiB, estimated {mib(estimate.total_bytes)} MiB"),
        ("dropped", _wrapped(units.sizes(report.dropped), width) if report.dropped else ""),
        ("on first use", _wrapped(units.sizes(report.pending), width) if report.pending else ""),
        ("plan", saved),
    ]
    lines += facts([(name, value) for name, value in known if value])
    rows = list(_rows(report))
    return [*lines, "", *table(_COLUMNS, rows, width=width, indent="  ")] if rows else lines


def failure_lines(report: CaptureReport) -> list[str]:
    """Return one line per recording that was given up."""
    return [
        f"{row.measured.mode.value} {row.measured.size}: not captured, {row.error}" for row in report.failed
    ]


def mib(count: int) -> str:
    """Return bytes as MiB, the unit in which graphs are counted; one digit below 100."""
    value = count / 2**20
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _rows(report: CaptureReport) -> Iterator[Sequence[str]]:
    for row in report.rows:
        if row.error is None:
            measured = row.measured
            yield _row(measured, "decode" if measured.uniform_decode else "any", str(measured.size))
    for total in report.totals().values():
        yield _row(total, "total", "")


def _row(measured: Measured, batch: str, size: str) -> tuple[str, ...]:
    nodes = "-" if measured.nodes is None else f"{measured.nodes:,}"
    took = f"{measured.seconds:.3f}"
    return (measured.mode.value, batch, size, str(measured.graphs), nodes, took, mib(measured.bytes))


def _wrapped(text: str, width: int) -> str:
    """Break a long list of sizes under its name."""
    indent = "\n" + " " * 16
    return indent.join(wrap(text.replace(",", ", "), max(20, width - 16))).replace(", ", ",")
