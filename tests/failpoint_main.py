"""The program, or a store's writer, that kills itself at a named step: the only way to activate failpoints.

``python failpoint_main.py STEP[:N] ARGUMENT...`` runs ``pwcc ARGUMENT...`` and ends with SIGKILL when step STEP
is passed for the Nth time. Nothing in the package reads a variable or option for it.
"""

from __future__ import annotations

import os
import signal
import sys

from pwcc.cache import failpoints


def kill_at(text: str) -> None:
    """Activate one failpoint in this process."""
    name, _, count = text.partition(":")
    if name not in failpoints.POINTS:
        raise ValueError(name)
    left = int(count or 1)

    def hook(passed: str) -> None:
        nonlocal left
        if passed == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    failpoints.install(hook)


if __name__ == "__main__":
    kill_at(sys.argv[1])
    from pwcc.cli import main

    sys.exit(main(sys.argv[2:]))
