"""One entry in full, as text. It shows data of any shape: the JSON of ``inspect ENTRY --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from pwcc.cache.strict import Json
from pwcc.cli import units
from pwcc.cli.json_view import array, number, obj, scalar, variant_text
from pwcc.cli.report_view import ops_text, wrapped
from pwcc.cli.table import Column, facts, table
from pwcc.cli.tuning_view import tuning_lines


def entry_lines(detail: Mapping[str, Json], *, width: int) -> list[str]:
    """Return every section of ``cache.inspection.detail``'s answer as lines of at most ``width``."""
    lines = facts(head(detail), indent="")
    for name in (
        "signatures",
        "requirements",
        "programs",
        "decode_attention",
        "tuning",
        "sources",
        "observed",
        "factors",
        "predicates",
        "numerics",
    ):
        lines += ["", *_section(name, detail.get(name), width)]
    return [*lines, *missing_lines(detail, width)]


def missing_lines(detail: Mapping[str, Json], width: int) -> list[str]:
    """Return the warning about blobs that are not there, or nothing."""
    missing = detail.get("missing_blobs")
    if not missing:
        return []
    return ["", "MISSING BLOBS (this entry cannot be loaded)", *outline(missing, width=width, indent="  ")]


def head(detail: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return what an entry is: names and values."""
    model, device = obj(detail.get("model")), obj(detail.get("device"))
    low, high = [*array(detail.get("tokens")), None, None][:2]
    args = " ".join(f"{key}={scalar(value)}" for key, value in obj(model.get("args")).items())
    return [
        ("entry", scalar(detail.get("entry_key"))),
        ("lookup", scalar(detail.get("lookup_key"))),
        ("model", f"{scalar(model.get('identity'))} {args}".rstrip()),
        (
            "parameters",
            f"{number(model.get('parameters')):,} ({units.bytes_(number(model.get('parameter_bytes')))})",
        ),
        ("dtype", scalar(model.get("dtype"))),
        (
            "device",
            " ".join(scalar(device.get(key)) for key in ("type", "name", "capability") if device.get(key)),
        ),
        ("torch", scalar(detail.get("torch"))),
        ("tokens", f"{scalar(low)} to {scalar(high)}"),
        ("ranges", _spans(detail.get("ranges"))),
        ("sizes", units.sizes(tuple(size for size in array(detail.get("sizes")) if isinstance(size, int)))),
        ("profile", scalar(detail.get("profile"))),
        ("tag", scalar(detail.get("tag"))),
        ("tuned", scalar(detail.get("tuned"))),
        ("build observed", scalar(detail.get("build_observed"))),
        ("bytes", f"{units.bytes_(number(detail.get('bytes')))} in {len(obj(detail.get('blobs')))} blobs"),
        ("pwcc", f"{scalar(detail.get('pwcc_version'))}, manifest schema {scalar(detail.get('schema'))}"),
    ]


def _spans(ranges: Json) -> str:
    return ", ".join("-".join(scalar(end) for end in array(span)) for span in array(ranges)) or "none"


def _section(name: str, value: Json, width: int) -> list[str]:
    if name == "requirements":
        rows = [obj(item) for item in array(value)]
        return [name, *outline({scalar(r.get("kind")): r.get("value") for r in rows}, width=width, indent="  ")]
    if name == "signatures":
        return signature_lines({name: value}, width)
    if name == "decode_attention":
        return _attention([obj(item) for item in array(value)], width)
    if name == "programs":
        return [line for number, item in enumerate(array(value)) for line in _program(number, obj(item), width)]
    if name == "tuning":
        return tuning_lines(obj(value), width=width)
    if name == "sources":
        return _sources([obj(item) for item in array(value)], width)
    if name == "observed":
        return _observed([obj(item) for item in array(value)], width)
    if name == "factors":
        return _factors(obj(value), width)
    if name == "numerics" and (measured := _numerics_rows(obj(value))):
        return [
            "numerics: relative error against float32 eager",
            *table(_NUMERICS, measured, width=width, indent="  "),
        ]
    return [name, *outline(value, width=width, indent="  ")]


def signature_lines(detail: Mapping[str, Json], width: int) -> list[str]:
    """Return one line per signature: whether it is valid, by which key, and what is known of that."""
    found = [_signature(obj(item)) for item in array(detail.get("signatures"))]
    texts = (line for text in found or ["none"] for line in wrapped(text, width=width, indent="  "))
    return ["signatures", *texts]


def _signature(state: Mapping[str, Json]) -> str:
    valid = state.get("valid")
    verdict = "not verified" if valid is None else "valid" if valid is True else "NOT VALID"
    known = f"trusted as {scalar(state.get('name'))}" if state.get("trusted") is True else "not trusted here"
    problem = f" ({scalar(state.get('problem'))})" if state.get("problem") else ""
    return f"{verdict}, by {scalar(state.get('key'))}, {known}{problem}"


def _program(number: int, program: Mapping[str, Json], width: int) -> list[str]:
    tokens = " to ".join(scalar(item) for item in array(program.get("tokens")))
    unique = [obj(item) for item in array(program.get("unique"))]
    lines = [
        f"program {number}: {tokens} tokens, {len(array(program.get('pieces')))} pieces, "
        f"{scalar(program.get('splits'))} splits"
    ]
    variants = ", ".join(variant_text(item) for item in array(program.get("variants")))
    lines += wrapped(f"variants: {variants}", width=width, indent="  ")
    columns = (
        Column("PIECE", elastic=True),
        Column("DIGEST"),
        Column("USES", right=True),
        Column("OPS", right=True),
    )
    rows = [
        (
            scalar(p.get("name")),
            scalar(p.get("digest"))[:12],
            scalar(p.get("positions")),
            str(len(array(p.get("ops")))),
        )
        for p in unique
    ]
    lines += table(columns, rows, width=width, indent="  ")
    for piece in unique:
        lines += ["", f"  {scalar(piece.get('name'))}"]
        lines += wrapped(ops_text(scalar(op) for op in array(piece.get("ops"))), width=width, indent="    ")
        for record in array(piece.get("records")):
            lines += _record(obj(record), width)
    return lines


def _record(record: Mapping[str, Json], width: int) -> list[str]:
    sealed = obj(record.get("record"))
    parts = [
        f"{scalar(k.get('name'))} ({scalar(k.get('kind'))})" for k in map(obj, array(record.get("kernels")))
    ]
    handles = [*array(sealed.get("externs")), *array(sealed.get("fallbacks"))]
    text = f"{variant_text(record.get('variant'))}: kernels {', '.join(parts) or 'none'}"
    if handles:
        text += f"; calls {', '.join(scalar(item) for item in handles)}"
    counts = [obj(item) for item in array(sealed.get("passes"))]
    if counts:
        text += "; passes " + ", ".join(f"{scalar(c.get('name'))} {scalar(c.get('matches'))}" for c in counts)
    if "problem" in sealed:
        text = f"{variant_text(record.get('variant'))}: unreadable: {scalar(sealed['problem'])}"
    return wrap(text, width, initial_indent="    ", subsequent_indent="      ", break_long_words=False)


def _attention(kernels: Sequence[Mapping[str, Json]], width: int) -> list[str]:
    lines = ["decode attention" + ("" if kernels else ": no kernel of its own")]
    for kernel in kernels:
        form = ("dtype", "heads", "kv_heads", "head_dim", "window", "softcap", "sinks")
        said = ", ".join(f"{name} {scalar(kernel.get(name))}" for name in form)
        names = ", ".join(scalar(obj(item).get("name")) for item in array(kernel.get("kernels")))
        lines += wrapped(f"{said}: kernels {names or 'none'}", width=width, indent="  ")
    return lines


def _sources(records: Sequence[Mapping[str, Json]], width: int) -> list[str]:
    columns = (Column("MODULE", elastic=True), Column("PATH", elastic=True), Column("DIGEST"))
    rows = [(scalar(r.get("module")), scalar(r.get("path")), scalar(r.get("digest"))[:12]) for r in records]
    return ["sources", *table(columns, rows, width=width, indent="  ")]


def _observed(records: Sequence[Mapping[str, Json]], width: int) -> list[str]:
    """Return one row per input that the model's code was seen to read; traced functions are only counted."""
    columns = (
        Column("KIND"),
        Column("NAME", elastic=True),
        Column("VALUE", elastic=True),
        Column("READ AT", elastic=True),
    )
    functions = sum(r.get("kind") == "function" for r in records)
    rows = [
        (
            scalar(r.get("kind")),
            ":".join(part for part in (str(r.get("anchor") or ""), scalar(r.get("name"))) if part),
            "not there" if r.get("value") is None else scalar(r.get("value")),
            scalar(r.get("where")),
        )
        for r in records
        if r.get("kind") != "function"
    ]
    head = f"observed: {len(rows)} inputs, the code of {functions} functions"
    return [head, *table(columns, rows, width=width, indent="  ")] if rows else [head]


_NUMERICS = (
    Column("PROGRAM", right=True),
    Column("VARIANT", right=True),
    Column("PIECE", right=True),
    Column("SIZE", right=True),
    Column("EAGER", right=True),
    Column("COMPILED", right=True),
    Column("SEALED", right=True),
    Column("TOLERANCE", right=True),
)


def _numerics_rows(numerics: Mapping[str, Json]) -> list[tuple[str, ...]]:
    """One row per program, variant, unique piece and size, numbered as in the sections above."""
    return [
        (str(p), str(v), str(u), *(scalar(obj(row).get(k)) for k in _MEASURES))
        for p, program in enumerate(array(numerics.get("programs")))
        for v, variant in enumerate(array(obj(program).get("variants")))
        for u, piece in enumerate(array(variant))
        for row in array(piece)
    ]


_MEASURES = ("size", "eager", "compiled", "sealed", "tolerance")


def _factors(factors: Mapping[str, Json], width: int) -> list[str]:
    if "problem" in factors:
        return ["factors", f"  unreadable: {scalar(factors['problem'])}"]
    groups, digests = obj(factors.get("groups")), obj(factors.get("digests"))
    lines: list[str] = []
    for name, digest in digests.items():
        lines += [
            f"factors: {name} ({scalar(digest)[:12]})",
            *outline(groups.get(name), width=width, indent="  "),
        ]
    return lines


def outline(value: Json, *, width: int, indent: str) -> list[str]:
    """Return nested data as indented ``name: value`` lines; long values are wrapped, none is cut."""
    if isinstance(value, dict) and value:
        lines = []
        for key, item in value.items():
            if _is_flat(item):
                lines += wrap(
                    f"{key}: {_flat(item)}",
                    width,
                    initial_indent=indent,
                    subsequent_indent=indent + "    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            else:
                lines += [f"{indent}{key}:", *outline(item, width=width, indent=indent + "  ")]
        return lines
    if isinstance(value, list) and value and not _is_flat(value):
        return [line for item in value for line in _list_item(item, width, indent)]
    return wrapped(_flat(value), width=width, indent=indent) or [f"{indent}none"]


def _list_item(item: Json, width: int, indent: str) -> list[str]:
    if isinstance(item, dict) and all(_is_flat(part) for part in item.values()):
        text = "- " + ", ".join(f"{key} {_flat(part)}" for key, part in item.items())
        return wrap(
            text, width, initial_indent=indent, subsequent_indent=indent + "    ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return [f"{indent}-", *outline(item, width=width, indent=indent + "  ")]


def _is_flat(value: Json) -> bool:
    if isinstance(value, list):
        return all(not isinstance(item, list | dict) for item in value)
    return not isinstance(value, dict) or not value


def _flat(value: Json) -> str:
    if isinstance(value, list):
        return " ".join(scalar(item) for item in value) or "none"
    return "none" if isinstance(value, dict) else scalar(value)
