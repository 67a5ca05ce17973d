"""What tuning chose, the factors of the key, and what a host must have, as sections of a report page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from pwcc.cache.strict import Json
from pwcc.cli import report_html as html
from pwcc.cli.json_view import array, number, obj, real, scalar
from pwcc.cli.report_html import Row


def tuning_section(tuning: Mapping[str, Json]) -> str:
    """Return what tuning chose per kernel or operation, with every candidate to unfold; nothing if untuned."""
    if "problem" in tuning:
        return html.section("What tuning chose", html.bad(scalar(tuning["problem"])))
    parts: list[str] = []
    for name, value in tuning.items():
        piece = obj(value)
        choices = [obj(item) for item in array(piece.get("choices"))]
        rows = [_choice(choice) for choice in choices]
        said = f"<h3>{escape(name)}</h3><p>{number(piece.get('runs'))} timing runs</p>"
        heads = ("kernel or operation", "winner", "us", "tried", "slowest, us")
        parts.append(said + html.table(heads, rows, code=(0, 1)) + "".join(map(_candidates, choices)))
    return html.section("What tuning chose", "".join(parts)) if parts else ""


def _timed(choice: Mapping[str, Json]) -> list[tuple[str, float]]:
    found = (obj(item) for item in array(choice.get("candidates")))
    return [(scalar(item.get("config")), real(item.get("us"))) for item in found if item.get("us") is not None]


def _choice(choice: Mapping[str, Json]) -> Row:
    timed, winner = _timed(choice), scalar(choice.get("winner"))
    won = min((us for config, us in timed if config == winner), default=None)
    return (
        scalar(choice.get("name")),
        winner + (" (found by coordinate descent)" if choice.get("descent") is True else ""),
        "-" if won is None else f"{won:.2f}",
        str(len(array(choice.get("candidates"))) or "-"),
        f"{max(us for _, us in timed):.2f}" if timed else "-",
    )


def _candidates(choice: Mapping[str, Json]) -> str:
    timed, winner = _timed(choice), scalar(choice.get("winner"))
    failed = len(array(choice.get("candidates"))) - len(timed)
    if not timed:
        return ""
    rows = [
        (config, f"{us:.2f}", "winner" if config == winner else "")
        for config, us in sorted(timed, key=lambda item: item[1])
    ]
    note = f"; {failed} could not run" if failed else ""
    shown = html.table(("configuration", "us", ""), rows, code=(0,))
    return html.details(f"{scalar(choice.get('name'))}: {len(timed)} candidates{note}", shown)


def factors_section(factors: Mapping[str, Json]) -> str:
    """Return every factor of the key by group, each to unfold."""
    if not factors or "problem" in factors:
        return html.section("Factors of the key", html.bad(scalar(factors.get("problem"))))
    digests, groups = obj(factors.get("digests")), obj(factors.get("groups"))
    parts = [
        f"<details><summary>{escape(name)} <code>{escape(scalar(digest)[:12])}</code></summary>"
        f"{html.tree(groups.get(name))}</details>"
        for name, digest in digests.items()
    ]
    return html.section("Factors of the key", "".join(parts))


def host_sections(detail: Mapping[str, Json]) -> str:
    """Return requirements, traced sources and observed inputs."""
    sources = [
        (scalar(item.get("module")), scalar(item.get("path")), scalar(item.get("digest"))[:12])
        for item in map(obj, array(detail.get("sources")))
    ]
    needs = [
        (scalar(item.get("kind")), html.flat(item.get("value")))
        for item in map(obj, array(detail.get("requirements")))
    ]
    observed = [
        (scalar(item.get("kind")), scalar(item.get("name")), scalar(item.get("where")))
        for item in map(obj, array(detail.get("observed")))
        if item.get("kind") != "function"
    ]
    parts = [
        html.section("What a host must have", html.table(("requirement", "value"), needs)),
        html.section("Traced sources", html.table(("module", "path", "digest"), sources)),
    ]
    if observed:
        parts.append(html.section("Observed inputs", html.table(("kind", "name", "read at"), observed)))
    return "".join(parts)
