"""Where an entry's bytes are and where the seconds of its compile went, as sections of a report page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pwcc.cache.strict import Json
from pwcc.cli import report_html as html
from pwcc.cli import units
from pwcc.cli.json_view import array, number, obj, real, scalar
from pwcc.cli.report_pieces import records
from pwcc.cli.report_style import shade_of


def bytes_section(detail: Mapping[str, Json]) -> str:
    """Return bytes by what they hold, the largest first."""
    blobs = {name: number(size) for name, size in obj(detail.get("blobs")).items()}
    kinds: dict[str, str] = {}
    for record in records(detail):
        kinds[scalar(record.get("blob"))] = "piece records"
        for kernel in array(record.get("kernels")):
            kinds[scalar(obj(kernel).get("blob"))] = "kernels"
        sealed = obj(record.get("record"))
        for name, kind in (("program", "piece programs"), ("constants", "constants")):
            if isinstance(sealed.get(name), str):
                kinds[str(sealed[name])] = kind
        kinds[scalar(obj(sealed.get("code")).get("blob"))] = "piece programs, as byte code"
    for program in map(obj, array(detail.get("programs"))):
        kinds[scalar(program.get("stitch"))] = "stitched programs"
    sums: Counter[str] = Counter()
    for name, size in blobs.items():
        sums[kinds.get(name, "keys, guards, numerics and other records")] += size
    rows = [(kind, float(size), units.bytes_(size)) for kind, size in sums.most_common()]
    return html.section("Where the bytes are", html.bars(rows))


def seconds_section(costs: Mapping[str, Json]) -> str:
    """Return seconds by stage, and by piece and variant; nothing is known of an entry that was copied alone."""
    if not costs:
        note = "The seconds of its compile are kept beside an entry, not in it; they are not here."
        return html.section("Where the seconds went", f"<p>{note}</p>")
    if "problem" in costs:
        return html.section("Where the seconds went", html.bad(scalar(costs["problem"])))
    taken = obj(costs.get("stages"))
    stages = [name for name in (*_STAGES, *sorted(taken)) if name in taken and name not in ("total", "tune")]
    rows = [(name, real(taken[name]), f"{real(taken[name]):.2f} s") for name in dict.fromkeys(stages)]
    pieces = [(name, obj(cost)) for name, cost in obj(costs.get("pieces")).items()]
    shares = [(name, *_piece_cost(cost)) for name, cost in pieces]
    jobs = number(costs.get("jobs"))
    at_once = "one after the other" if jobs == 1 else f"in {jobs} processes at once"
    return html.section(
        "Where the seconds went",
        f"<p>{real(taken.get('total')):.1f} s in all; pieces {at_once}.</p>"
        f"{html.bars(rows)}<h3>Pieces</h3>{html.bars(shares, colours=[shade_of(name) for name, _ in pieces])}",
    )


_STAGES = ("trace", "split", "compile", "publish")


def _piece_cost(cost: Mapping[str, Json]) -> tuple[float, str]:
    compiled, first_run = real(cost.get("compile_s")), real(cost.get("tune_s"))
    if compiled + first_run == 0:
        return 0.0, "from the piece cache"
    return compiled + first_run, f"{compiled:.2f} s + first run {first_run:.2f} s"
