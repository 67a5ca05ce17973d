"""Graph: Python's cyclic collector, held still while graphs are captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_frozen(*, collect: bool = True) -> Iterator[None]:
    """Collect once, then freeze and disable the collector; afterwards put it back as it was.

    A collection in the middle of a capture may free device memory or unload a kernel, which is not permitted
    there, and one per graph is most of a slow capture. A process that had frozen objects keeps them frozen.
    Without ``collect`` the collector only stands still, for a short capture in a running server.
    """
    running, frozen = gc.isenabled(), gc.get_freeze_count()
    if collect:
        gc.collect()
    gc.disable()
    freezes = collect and not frozen
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if running:
            gc.enable()
