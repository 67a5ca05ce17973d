"""The seam to torch's structured trace, which TORCH_TRACE writes and tlparse reads.

Run on torch 2.13.0+cpu. Private name used: ``torch._logging.trace_structured``, which does nothing unless
something listens; without it (or if it changes) nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import _logging


def artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a text to the trace; ``payload`` is called only if somebody listens."""
    write = getattr(_logging, "trace_structured", None)
    if write is not None:
        write("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)
