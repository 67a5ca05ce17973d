"""Key: the file ``pwcc.toml``, in which a site says which environment variables are factors.

::

    [environment]
    include = ["MYAPP_*"]
    exclude = ["TORCHINDUCTOR_DEBUG_*"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pwcc.cache.errors import UsageError
from pwcc.cache.policy import Policy

CONFIG_NAME: Final = "pwcc.toml"
MAX_CONFIG_BYTES: Final = 64 * 1024


def find_config(given: Path | None, folders: Sequence[Path]) -> Path | None:
    """Return the configuration file to use: the given one, else the first ``pwcc.toml`` of ``folders``.

    Raises:
        UsageError: the given file does not exist.
    """
    if given is not None:
        if not given.is_file():
            raise UsageError(f"no such file: {str(given)!r}", hint="--config names a pwcc.toml")
        return given
    return next((path for folder in folders if (path := folder / CONFIG_NAME).is_file()), None)


def read_config(path: Path) -> Policy:
    """Return the policy of a ``pwcc.toml``: its table ``[environment]`` with ``include`` and ``exclude``.

    Raises:
        UsageError: not TOML, over 64 KiB, an unknown table or key, or a value of another type.
    """
    where = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise UsageError(f"expected at most {MAX_CONFIG_BYTES} bytes", where=where)
        found = tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(f"reading failed: {error.strerror}", where=where) from error
    except ValueError as error:
        raise UsageError(f"expected TOML, got {error}", where=where) from None
    _known(found, ("environment",), "", where)
    table = found.get("environment", {})
    if not isinstance(table, dict):
        raise UsageError("expected a table [environment]", where=where)
    _known(table, ("include", "exclude"), "environment.", where)
    for name, patterns in table.items():
        if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
            raise UsageError(f"environment.{name}: expected a list of names, got {patterns!r:.80}", where=where)
    try:
        return Policy.of(include=table.get("include", ()), exclude=table.get("exclude", ()))
    except UsageError as error:
        error.where = where
        raise


def _known(table: Mapping[str, object], names: Sequence[str], prefix: str, where: str) -> None:
    unknown = sorted(set(table) - set(names))
    if unknown:
        expected = " and ".join(prefix + name for name in names)
        raise UsageError(f"unknown key {prefix}{unknown[0]}", where=where, hint=f"known: {expected}")
