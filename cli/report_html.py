"""Pieces of HTML that a report page is made of; every text that they are given is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pwcc.cache.strict import Json
from pwcc.cli.json_view import scalar
from pwcc.cli.report_style import colour

Row = Sequence[str]
_SHORT = 20  # characters of a cell that is not broken into lines


def section(title: str, body: str) -> str:
    """Return a section; ``body`` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a list of definitions."""
    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in rows) + "</dl>"


def bars(rows: Sequence[tuple[str, float, str]], *, colours: Sequence[int] = ()) -> str:
    """Return a bar per row, as long as its share of the sum of all; ``colours`` are those of pieces."""
    total = sum(value for _, value, _ in rows) or 1.0
    lines = (
        f'<tr><th>{escape(name)}</th><td class="bar"><span style="width:{100 * value / total:.1f}%;'
        f'background:{colour(shade)}"></span></td><td>{escape(shown)}</td>'
        f"<td>{100 * value / total:.0f} %</td></tr>"
        for (name, value, shown), shade in zip(rows, colours or [0] * len(rows), strict=True)
    )
    return f'<table class="bars">{"".join(lines)}</table>'


def table(heads: Row, rows: Sequence[Row], *, code: Sequence[int] = ()) -> str:
    """Return a table, or nothing without rows; the columns ``code`` are names in a program's own words."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(_cell(cell, i in code) for i, cell in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str, is_code: bool) -> str:
    shown = f"<code>{escape(text)}</code>" if is_code else escape(text)
    return f'<td class="short">{shown}</td>' if len(text) <= _SHORT else f"<td>{shown}</td>"


def details(summary: str, body: str) -> str:
    """Return something to unfold; ``body`` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def bad(text: str) -> str:
    """Return a paragraph that says what is wrong."""
    return f'<p class="bad">{escape(text)}</p>'


def tree(value: Json) -> str:
    """Return nested data as a list of lists."""
    if isinstance(value, dict) and value:
        items = "".join(f"<li><b>{escape(str(name))}</b> {tree(item)}</li>" for name, item in value.items())
        return f"<ul>{items}</ul>"
    return escape(flat(value))


def flat(value: Json) -> str:
    """Return a value as one line of text, not escaped."""
    if isinstance(value, list):
        return ", ".join(flat(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {flat(item)}" for name, item in value.items()) or "none"
    return scalar(value)


def dot(index: int) -> str:
    """Return a small square in the colour of a piece."""
    return f'<span class="dot" style="background:{colour(index)}"></span>'
