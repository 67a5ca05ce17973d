"""A program that changes a cache and kills itself just before its nth change of a name: a real crash.

``python killed.py N gc ROOT`` or ``python killed.py N import ROOT FILE``. It ends with 0 when it changes
fewer names than that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pwcc.cache.gc import collect
from pwcc.cache.importing import import_stream
from pwcc.cache.retention import Limits
from pwcc.cache.store import Store

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}


def main(left: int, what: str, root: Path, *rest: str) -> None:
    store = Store.open(root)

    def hook(event: str, _arguments: object) -> None:
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if what == "gc":
        collect(store, Limits(keep_last=1), now=time.time() + 10 * 86400, grace_s=0)
    else:
        with Path(rest[0]).open("rb") as stream:
            import_stream(store, stream, where=rest[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
