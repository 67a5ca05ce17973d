"""The options that say which environment variables are factors, shared by the commands that make a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pwcc.cache.policy import Policy

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A pwcc.toml. Default: ./pwcc.toml, else the user's configuration."
    ),
]
EnvIncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env-include", metavar="NAME", help="A variable, or a pattern with *, that is a factor; repeat it."
    ),
]
EnvExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env-exclude", metavar="NAME", help="A variable, or a pattern with *, that is no factor; repeat it."
    ),
]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The site's policy, and what the user adds to it."""

    config: ConfigOption = None
    env_include: EnvIncludeOption = None
    env_exclude: EnvExcludeOption = None


def given_policy(include: Sequence[str] | None, exclude: Sequence[str] | None) -> Policy | None:
    """Return the policy that the options alone say; None without any: a load takes each entry's own."""
    from pwcc.cache.policy import Policy

    return Policy.of(include=include or (), exclude=exclude or ()) if include or exclude else None


def site_policy(given: PolicyOptions) -> Policy:
    """Return the site's policy: the configuration file's, and what the options add.

    The file is the given one, else ``pwcc.toml`` in the working directory, else the user's.

    Raises:
        UsageError: a file that does not exist or holds something else; a bad pattern.
    """
    import platformdirs

    from pwcc.cache.policy import TABLES_ONLY, Policy
    from pwcc.cache.site_config import find_config, read_config

    path = find_config(given.config, (Path(), platformdirs.user_config_path("pwcc")))
    base = TABLES_ONLY if path is None else read_config(path)
    return base + Policy.of(include=given.env_include or (), exclude=given.env_exclude or ())
