"""The pieces of a program and the attention kernels of an entry, as sections of a report page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from pwcc.cache.strict import Json
from pwcc.cli import report_html as html
from pwcc.cli import units
from pwcc.cli.json_view import array, number, obj, scalar, variant_text
from pwcc.cli.report_html import Row
from pwcc.cli.report_style import shade_of


def records(detail: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    """Return every piece record of an entry: of pieces by variant, then of attention."""
    pieces = [
        obj(record)
        for program in map(obj, array(detail.get("programs")))
        for piece in map(obj, array(program.get("unique")))
        for record in array(piece.get("records"))
    ]
    return [*pieces, *map(obj, array(detail.get("decode_attention")))]


def pieces_section(index: int, program: Mapping[str, Json], detail: Mapping[str, Json]) -> str:
    """Return what each different piece of a program does, takes, and was compiled to, variant by variant."""
    sizes = {name: number(size) for name, size in obj(detail.get("blobs")).items()}
    measured = _numerics(detail, index)
    parts: list[str] = []
    for position, piece in enumerate(map(obj, array(program.get("unique")))):
        name = scalar(piece.get("name"))
        ops = [scalar(op) for op in array(piece.get("ops"))]
        chips = "".join(
            f"<li>{escape(op)}{f' &times;{count}' if count > 1 else ''}</li>"
            for op, count in ((op, len(list(group))) for op, group in groupby(ops))
        )
        found = [obj(item) for item in array(piece.get("records"))]
        parts.append(
            f'<article id="{escape(f"program-{index}-{name}")}">'
            f"<h3>{html.dot(shade_of(name, position))}{escape(name)}</h3>"
            f"<p>graph {escape(scalar(piece.get('digest'))[:12])}, {units.count(len(ops), 'operation')}, "
            f"{units.count(number(piece.get('positions')), 'use')}</p>"
            f"{_variants(found, sizes)}"
            f'<details><summary>operations in order</summary><ol class="ops">{chips}</ol></details>'
            f"{_inputs(found)}{_kernels(found, sizes)}{_measured(measured.get(position, ()))}</article>"
        )
    return html.section(f"Pieces of program {index}", "".join(parts))


def attention_section(detail: Mapping[str, Json]) -> str:
    """Return the attention kernels that an entry of a GPU holds, nothing of another."""
    found = [obj(item) for item in array(detail.get("decode_attention"))]
    if not found:
        return ""
    sizes = {name: number(size) for name, size in obj(detail.get("blobs")).items()}
    rows = [
        (
            scalar(item.get("dtype")),
            *(scalar(item.get(key)) for key in ("heads", "kv_heads", "head_dim", "window", "softcap", "sinks")),
        )
        for item in found
    ]
    heads = ("dtype", "heads", "KV heads", "head dim", "window", "softcap", "sinks")
    return html.section(
        "Attention of decode steps",
        "<p>Kernels that answer one new token per sequence; other calls take the operation's own way.</p>"
        + html.table(heads, rows)
        + _kernels(found, sizes),
    )


def _variants(found: Sequence[Mapping[str, Json]], sizes: Mapping[str, int]) -> str:
    """Return one row per variant: kernels, bytes, calls outside kernels, and a column per pass."""
    passes = list(dict.fromkeys(name for record in found for name in _matches(record)))
    rows: list[Row] = []
    for record in found:
        sealed = _sealed(record)
        if "problem" in sealed:
            rows.append((_variant(record), scalar(sealed["problem"]), *([""] * (2 + len(passes)))))
            continue
        kernels = [obj(item) for item in array(record.get("kernels"))]
        calls = [scalar(item) for item in (*array(sealed.get("externs")), *array(sealed.get("fallbacks")))]
        matches = _matches(record)
        size = sum({blob: sizes.get(blob, 0) for blob in (scalar(k.get("blob")) for k in kernels)}.values())
        rows.append(
            (
                _variant(record),
                str(len(kernels)),
                units.bytes_(size),
                ", ".join(calls) or "none",
                *(matches.get(name, "-") for name in passes),
            )
        )
    heads = ("variant", "kernels", "bytes", "calls", *(f"matches of {name}" for name in passes))
    return html.table(heads, rows)


def _kernels(found: Sequence[Mapping[str, Json]], sizes: Mapping[str, int]) -> str:
    rows = [(_variant(record), obj(kernel)) for record in found for kernel in array(record.get("kernels"))]
    if not rows:
        return ""
    triton = [(variant, kernel) for variant, kernel in rows if kernel.get("kind") == "triton"]
    other = [(variant, kernel) for variant, kernel in rows if kernel.get("kind") != "triton"]
    parts = [
        html.table(
            ("variant", "Triton kernel", "bytes", *_LAUNCH, "configuration"),
            [(variant, *_triton(kernel, sizes)) for variant, kernel in triton],
            code=(1, 3, 8),
        ),
        html.table(
            ("variant", "kernel", "kind", "bytes"),
            [(variant, *_other(kernel, sizes)) for variant, kernel in other],
            code=(1,),
        ),
    ]
    return html.details(units.count(len(rows), "kernel"), "".join(parts))


_LAUNCH = ("grid", "warps", "shared", "registers", "spills")


def _other(kernel: Mapping[str, Json], sizes: Mapping[str, int]) -> Row:
    size = sizes.get(scalar(kernel.get("blob")), 0)
    return scalar(kernel.get("name")), scalar(kernel.get("kind")), units.bytes_(size)


def _triton(kernel: Mapping[str, Json], sizes: Mapping[str, int]) -> Iterator[str]:
    yield scalar(kernel.get("name"))
    yield units.bytes_(sizes.get(scalar(kernel.get("blob")), 0))
    yield " x ".join(scalar(part) for part in array(kernel.get("grid")))
    yield scalar(kernel.get("num_warps"))
    yield f"{number(kernel.get('shared')):,} B"
    for key in ("registers", "spills"):
        known = number(kernel.get(key))
        yield "-" if known < 0 else str(known)
    yield scalar(kernel.get("config"))


def _sealed(record: Mapping[str, Json]) -> Mapping[str, Json]:
    return obj(record.get("record"))


def _matches(record: Mapping[str, Json]) -> dict[str, str]:
    """Return how often each pass matched, by its name."""
    passes = map(obj, array(_sealed(record).get("passes")))
    return {scalar(item.get("name")): scalar(item.get("matches")) for item in passes}


def _variant(record: Mapping[str, Json]) -> str:
    return variant_text(record["variant"]) if "variant" in record else scalar(record.get("dtype"))


def _measured(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return html.details("relative error against float32 eager", html.table(_HEADS, rows))


_HEADS = ("variant", "tokens", "eager", "compiled", "sealed", "tolerance")


def _numerics(detail: Mapping[str, Json], index: int) -> dict[int, list[Row]]:
    """Return rows of relative errors against float32 eager, by unique piece."""
    programs = array(obj(detail.get("numerics")).get("programs"))
    found: dict[int, list[Row]] = {}
    if index >= len(programs):
        return found
    variants = [variant_text(v) for v in array(obj(array(detail.get("programs"))[index]).get("variants"))]
    for name, pieces in zip(variants, array(obj(programs[index]).get("variants")), strict=False):
        for position, rows in enumerate(array(pieces)):
            for row in map(obj, array(rows)):
                measured = [
                    scalar(row.get(key)) for key in ("size", "eager", "compiled", "sealed", "tolerance")
                ]
                found.setdefault(position, []).append([name, *measured])
    return found


def _inputs(records: Sequence[Mapping[str, Json]]) -> str:
    if not records:
        return ""
    rows: list[Row] = []
    for place, item in enumerate(map(obj, array(obj(records[0].get("record")).get("inputs")))):
        shape = "[" + ", ".join(scalar(size) for size in array(item.get("shape"))) + "]"
        shown = (
            f"{scalar(item.get('dtype'))}{shape}" if item.get("kind") == "tensor" else scalar(item.get("value"))
        )
        rows.append((str(place), scalar(item.get("kind")), shown))
    return html.details(units.count(len(rows), "input"), html.table(("#", "kind", "shape or value"), rows))
