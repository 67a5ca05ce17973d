"""One entry in short, as text: what it is, its programs, and counts of what ``--full`` lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from pwcc.cache.strict import Json
from pwcc.cli import units
from pwcc.cli.entry_view import head, missing_lines, signature_lines
from pwcc.cli.json_view import array, number, obj, real, scalar, variant_text
from pwcc.cli.report_view import wrapped
from pwcc.cli.table import Column, facts, table

MORE: Final = "--full lists all of it, --json as data; pwcc report writes a page about it"
_PIECES: Final = (
    Column("PIECE", elastic=True),
    Column("DIGEST"),
    Column("USES", right=True),
    Column("OPS", right=True),
    Column("KERNELS", right=True),
    Column("PASSES (MATCHES)", elastic=True),
)


def summary_lines(detail: Mapping[str, Json], *, width: int) -> list[str]:
    """Return what ``inspect ENTRY`` says unless asked for everything, as lines of at most ``width``."""
    lines = [*facts(head(detail), indent=""), "", *signature_lines(detail, width)]
    for index, program in enumerate(array(detail.get("programs"))):
        lines += ["", *_program(index, obj(program), width)]
    lines.append("")
    for name, text in _counts(detail):
        lines += wrapped(f"{name}: {text}", width=width, indent="")
    return [*lines, *missing_lines(detail, width), "", *wrapped(MORE, width=width, indent="")]


def _program(index: int, program: Mapping[str, Json], width: int) -> list[str]:
    tokens = " to ".join(scalar(item) for item in array(program.get("tokens")))
    variants = ", ".join(variant_text(item) for item in array(program.get("variants")))
    pieces = units.count(len(array(program.get("pieces"))), "piece")
    splits = units.count(number(program.get("splits")), "split")
    rows = [_piece(obj(piece)) for piece in array(program.get("unique"))]
    return [
        f"program {index}: {tokens} tokens, {pieces}, {splits}",
        *wrapped(f"variants: {variants}", width=width, indent="  "),
        *table(_PIECES, rows, width=width, indent="  "),
    ]


def _piece(piece: Mapping[str, Json]) -> tuple[str, ...]:
    records = [obj(record) for record in array(piece.get("records"))]
    matches: Counter[str] = Counter()
    for record in records:
        for count in map(obj, array(obj(record.get("record")).get("passes"))):
            matches[scalar(count.get("name"))] += number(count.get("matches"))
    return (
        scalar(piece.get("name")),
        scalar(piece.get("digest"))[:12],
        scalar(piece.get("positions")),
        str(len(array(piece.get("ops")))),
        str(sum(len(array(record.get("kernels"))) for record in records)),
        ", ".join(f"{name} {count}" for name, count in matches.items()) or "-",
    )


def _counts(detail: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return a line for each part that is long in full."""
    found = [
        ("requirements", _kinds(array(detail.get("requirements")))),
        ("predicates", _predicates(obj(detail.get("predicates")))),
        ("factors", _factors(obj(detail.get("factors")))),
        ("sources", units.count(len(array(detail.get("sources"))), "traced file")),
        ("observed", _kinds(array(detail.get("observed")))),
        ("numerics", _numerics(obj(detail.get("numerics")))),
        ("tuning", _tuning(detail.get("tuning"))),
    ]
    if attention := array(detail.get("decode_attention")):
        found.append(("decode attention", units.count(len(attention), "kernel")))
    return found


def _kinds(records: Sequence[Json]) -> str:
    kinds = Counter(scalar(obj(record).get("kind")) for record in records)
    return _listed(len(records), [name if n == 1 else f"{name} x{n}" for name, n in kinds.items()])


def _listed(count: int, names: Sequence[str]) -> str:
    return f"{count} ({', '.join(names)})" if count else "none"


def _predicates(predicates: Mapping[str, Json]) -> str:
    if "problem" in predicates:
        return f"unreadable: {scalar(predicates['problem'])}"
    return units.count(len(array(predicates.get("rules"))), "rule")


def _factors(factors: Mapping[str, Json]) -> str:
    if "problem" in factors:
        return f"unreadable: {scalar(factors['problem'])}"
    groups = obj(factors.get("groups"))
    counts = {name: _leaves(groups.get(name)) for name in obj(factors.get("digests"))}
    return _listed(sum(counts.values()), [f"{name} {count}" for name, count in counts.items() if count])


def _leaves(value: Json) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, dict) else 1


def _numerics(numerics: Mapping[str, Json]) -> str:
    rows = [
        obj(row)
        for program in map(obj, array(numerics.get("programs")))
        for variant in array(program.get("variants"))
        for piece in array(variant)
        for row in array(piece)
    ]
    if not rows:
        return "none"
    worst = max(real(row.get("sealed")) for row in rows)
    return f"{units.count(len(rows), 'check')} against float32 eager, largest relative error {worst:.3g}"


def _tuning(tuning: Json) -> str:
    pieces = obj(tuning)
    if "problem" in pieces:
        return f"unreadable: {scalar(pieces['problem'])}"
    if not pieces:
        return "none, or the results did not travel with the entry"
    choices = sum(len(array(obj(piece).get("choices"))) for piece in pieces.values())
    runs = sum(number(obj(piece).get("runs")) for piece in pieces.values())
    return f"{units.count(choices, 'choice')} in {units.count(runs, 'timing run')}"
