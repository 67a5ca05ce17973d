"""Serve: the engine's counts in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from serving.engine import Load

GAUGES = {
    "waiting": "Requests that wait.",
    "running": "Requests that hold KV blocks.",
    "free_blocks": "KV blocks that no request holds.",
    "total_blocks": "KV blocks.",
}
COUNTERS = {
    "steps": "Model steps.",
    "preempted": "Requests that gave their KV blocks up to another.",
    "refused": "Requests that found the queue full.",
    "prompt_tokens": "Prompt tokens computed.",
    "generated_tokens": "Tokens generated.",
}


def engine_metrics(load: Load) -> str:
    """Return one family per count; requests by how they ended."""
    return "\n".join(_lines(load)) + "\n"


def receipt_metrics(**seconds: float) -> str:
    """Return ``pwcc_serve_<name>_seconds`` gauges, such as what load and capture took."""
    return "".join(
        f"# HELP pwcc_serve_{name}_seconds Seconds that this step of the start took.\n"
        f"# TYPE pwcc_serve_{name}_seconds gauge\npwcc_serve_{name}_seconds {value:.6f}\n"
        for name, value in seconds.items()
    )


def _lines(load: Load) -> Iterator[str]:
    for names, kind, ending in ((GAUGES, "gauge", ""), (COUNTERS, "counter", "_total")):
        for name, text in names.items():
            full = f"pwcc_serve_{name}{ending}"
            yield f"# HELP {full} {text}"
            yield f"# TYPE {full} {kind}"
            yield f"{full} {getattr(load, name)}"
    yield "# HELP pwcc_serve_requests_total Requests by how they ended."
    yield "# TYPE pwcc_serve_requests_total counter"
    for reason, count in sorted(load.finished.items()):
        yield f'pwcc_serve_requests_total{{reason="{reason}"}} {count}'
