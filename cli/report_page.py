"""One entry as one HTML file: pieces as a picture, where bytes and seconds went, kernels, factors.

The page is made from the JSON of ``inspect ENTRY``. It needs no network and no script; everything that comes
from the entry is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from pwcc.cache.strict import Json
from pwcc.cli import report_html as html
from pwcc.cli import units
from pwcc.cli.json_view import array, number, obj, scalar, variant_text
from pwcc.cli.report_costs import bytes_section, seconds_section
from pwcc.cli.report_facts import factors_section, host_sections, tuning_section
from pwcc.cli.report_pieces import attention_section, pieces_section, records
from pwcc.cli.report_style import STYLE, colour, shade_of


def page(detail: Mapping[str, Json]) -> str:
    """Return the whole document."""
    model = obj(detail.get("model"))
    title = f"{scalar(model.get('identity'))} {scalar(detail.get('entry_key'))[:12]}"
    programs = [obj(item) for item in array(detail.get("programs"))]
    body = [
        _head(detail, model),
        *(_program(index, program) for index, program in enumerate(programs)),
        bytes_section(detail),
        seconds_section(obj(detail.get("costs"))),
        *(pieces_section(index, program, detail) for index, program in enumerate(programs)),
        attention_section(detail),
        tuning_section(obj(detail.get("tuning"))),
        factors_section(obj(detail.get("factors"))),
        host_sections(detail),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>pwcc: {escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _head(detail: Mapping[str, Json], model: Mapping[str, Json]) -> str:
    device = obj(detail.get("device"))
    low, high = [*array(detail.get("tokens")), None, None][:2]
    sealed = [obj(record.get("record")) for record in records(detail)]
    args = " ".join(f"{name}={scalar(value)}" for name, value in obj(model.get("args")).items())
    facts = [
        ("model", f"{scalar(model.get('identity'))} {args}".strip()),
        ("entry", scalar(detail.get("entry_key"))),
        ("lookup", scalar(detail.get("lookup_key"))),
        (
            "parameters",
            f"{number(model.get('parameters')):,} ({units.bytes_(number(model.get('parameter_bytes')))}), "
            f"{scalar(model.get('dtype'))}; none of them is stored",
        ),
        ("device", " ".join(scalar(device[key]) for key in ("type", "name", "capability") if device.get(key))),
        ("torch", scalar(detail.get("torch"))),
        ("tokens", f"{scalar(low)} to {scalar(high)}"),
        ("static sizes", ", ".join(scalar(size) for size in array(detail.get("sizes"))) or "none"),
        ("ranges", ", ".join("-".join(map(scalar, array(r))) for r in array(detail.get("ranges"))) or "none"),
        ("tuned", scalar(detail.get("tuned"))),
        ("sealed", f"{sum('problem' not in item for item in sealed)} of {len(sealed)} piece records"),
        ("bytes", f"{units.bytes_(number(detail.get('bytes')))} in {len(obj(detail.get('blobs')))} blobs"),
        ("signatures", str(len(array(detail.get("signatures"))) or "none")),
        ("made by", f"pwcc {scalar(detail.get('pwcc_version'))}"),
    ]
    missing = array(detail.get("missing_blobs"))
    warning = html.bad(f"{len(missing)} blobs are missing: this entry cannot be loaded") if missing else ""
    return f"<h1>{escape(scalar(model.get('identity')))}</h1>{warning}{html.facts(facts)}"


def _program(index: int, program: Mapping[str, Json]) -> str:
    """Draw a program: one box per call in order, equal pieces in one colour."""
    unique = [obj(item) for item in array(program.get("unique"))]
    steps = [obj(item) for item in array(program.get("steps"))]
    low, high = [*array(program.get("tokens")), None, None][:2]
    variants = [variant_text(item) for item in array(program.get("variants"))]
    legend = "".join(
        f"<li>{html.dot(shade_of(scalar(item.get('name')), position))}{escape(scalar(item.get('name')))}: "
        f"{units.count(len(array(item.get('ops'))), 'operation')}, "
        f"{units.count(number(item.get('positions')), 'use')}</li>"
        for position, item in enumerate(unique)
    )
    problem = next((scalar(step["problem"]) for step in steps if "problem" in step), None)
    boxes = "".join(_box(index, step, unique) for step in steps if "problem" not in step)
    return html.section(
        f"Program {index}: {scalar(low)} to {scalar(high)} tokens",
        f"<p>{units.count(len(array(program.get('pieces'))), 'piece')}, {len(unique)} different, cut at "
        f"{units.count(number(program.get('splits')), 'splitting operation')}.</p>"
        f'<ul class="chips">{"".join(f"<li>{escape(text)}</li>" for text in variants)}</ul>'
        + (html.bad(f"the order of its calls: {problem}") if problem else f'<div class="flow">{boxes}</div>')
        + f'<ul class="legend">{legend}</ul>',
    )


def _box(index: int, step: Mapping[str, Json], unique: list[Mapping[str, Json]]) -> str:
    piece, name = step.get("piece"), scalar(step.get("name"))
    if not isinstance(piece, int) or piece >= len(unique):
        short = name.rpartition("::")[2]
        return f'<span class="cut" title="{escape(name)}, called eagerly">{escape(short)}</span>'
    shown = scalar(unique[piece].get("name"))
    about = (
        f"{shown}: {units.count(len(array(unique[piece].get('ops'))), 'operation')}, "
        f"used {scalar(unique[piece].get('positions'))} times"
    )
    link, shade = escape(f"#program-{index}-{shown}"), colour(shade_of(shown, piece))
    return (
        f'<a class="piece" href="{link}" style="background:{shade}" title="{escape(about)}">{escape(shown)}</a>'
    )
