"""In-place operators as a server has them, and graphs of them as Inductor's passes see them."""

from __future__ import annotations

import torch
from torch import Tensor


def _store(k: Tensor, cache: Tensor, at: int) -> None:
    cache[at : at + k.shape[0]] = k


def _mix(q: Tensor, cache: Tensor, out: Tensor) -> None:
    out.copy_(q + cache.sum((0, 1)))


def _register() -> torch.library.Library | None:
    """``pwccpass::store`` writes a cache, ``pwccpass::mix`` reads one and writes ``out``."""
    if hasattr(torch.ops.pwccpass, "mix"):
        return None
    library = torch.library.Library("pwccpass", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, kernel in (
        ("store(Tensor k, Tensor(a!) cache, int at) -> ()", _store),
        ("mix(Tensor q, Tensor cache, Tensor(a!) out) -> ()", _mix),
    ):
        library.define(schema)  # type: ignore[no-untyped-call]
        library.impl(schema.partition("(")[0], kernel, "CPU")  # type: ignore[no-untyped-call]
        library.impl(schema.partition("(")[0], lambda *_: None, "Meta")  # type: ignore[no-untyped-call]
    return library


_library = globals().get("_library") or _register()
