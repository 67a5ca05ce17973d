"""Store: named steps at which a test may stop or kill the process; nothing in the package can activate them.

No environment variable, option or file turns them on. A test's own launcher calls :func:`install` and then
the program (``tests/failpoint_main.py``), so that no stray variable can end a process that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# In the order in which a compile reaches them; `file.*` once per file that is written.
POINTS: Final = (
    "layout.tagged",
    "layout.made",
    "compile.locked",
    "compile.traced",
    "compile.compiled",
    "file.created",
    "file.written",
    "file.flushed",
    "file.renamed",
    "publish.staged",
    "publish.checked",
    "publish.written",
    "publish.quarantined",
    "publish.renamed",
    "publish.flushed",
    "compile.published",
)

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Call ``hook`` with the name of every step that this process passes; None ends that. For tests."""
    global _hook  # noqa: PLW0603 - one per process, so that a step costs one comparison
    _hook = hook


def failpoint(name: str) -> None:
    """Pass the step ``name``, one of :data:`POINTS`."""
    if _hook is not None:
        _hook(name)
