"""Key: the switches of the environment that turn the cache off, renew it or freeze it; no key holds them.

``PWCC_DISABLE=1``: no cache is read or written; decorated modules run by ``torch.compile`` as it is.
``PWCC_RECACHE=1``: every compile ignores what a cache holds, pieces too, and replaces it.
``PWCC_FROZEN=1``: nothing is compiled; what is not there is a miss. At most one of them may be on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pwcc.cache.errors import CacheDisabled, UsageError

DISABLE: Final = "PWCC_DISABLE"
RECACHE: Final = "PWCC_RECACHE"
FROZEN: Final = "PWCC_FROZEN"

_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("", "0", "false", "no", "off")


def is_on(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a switch is on; unset, empty, ``0``, ``false``, ``no`` and ``off`` are off.

    Raises:
        UsageError: it is set to something else than a yes or a no.
    """
    value = environ.get(name, "")
    word = value.strip().lower()
    if word not in (*_ON, *_OFF):
        raise UsageError(
            f"expected {name} to be 1 or 0, got {value[:80]!r}", hint=f"unset it, or set {name}=1 for yes"
        )
    return word in _ON


@dataclass(frozen=True)
class Switches:
    """Which switches are on. Build with :meth:`read`."""

    disable: bool = False
    recache: bool = False
    frozen: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, *, frozen: bool = False) -> Switches:
        """Read the switches; ``frozen`` is the caller's own ``--frozen``, which counts like the variable.

        Raises:
            UsageError: a value that is neither yes nor no, or two switches that contradict each other.
        """
        found = cls(is_on(DISABLE, environ), is_on(RECACHE, environ), is_on(FROZEN, environ))
        names = [name for name, on in found.to_json().items() if on]
        if frozen:
            names = ["--frozen" if name == FROZEN else name for name in names]
            names += [] if found.frozen else ["--frozen"]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} contradict each other", hint="use one of them")
        return cls(found.disable, found.recache, found.frozen or frozen)

    def require_cache(self, what: str) -> None:
        """Refuse to use a cache where ``PWCC_DISABLE`` turned it off; ``what`` names the use.

        Raises:
            CacheDisabled: it is off.
        """
        if self.disable:
            raise CacheDisabled(
                f"{DISABLE} is on, so no cache is read or written: {what} has nothing to work with",
                hint=f"unset {DISABLE}; modules under pwcc.support_compile run by torch.compile meanwhile",
            )

    def to_json(self) -> dict[str, bool]:
        """Return every switch by the name of its variable."""
        return {DISABLE: self.disable, RECACHE: self.recache, FROZEN: self.frozen}
