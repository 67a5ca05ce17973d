"""Artifact: how a decorated module is compiled: the levels, one configuration, and where it comes from.

No torch is imported here: a configuration may be set before. A field that nobody set is None; what is in
force is the first that is set of: the decorator's arguments, the context around the module's construction
(or its first call, where there was none), :func:`configure`, the environment, the default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pwcc.cache.errors import UsageError
from pwcc.cache.policy import Policy
from pwcc.cache.switches import Switches

LEVEL_VARIABLE: Final = "PWCC_LEVEL"

Mode = Literal["load", "load-or-compile"]
FirstCall = Literal["eager", "wait"]


class CompileLevel(IntEnum):
    """How much is done to a decorated module; PIECEWISE is the product, the others are for comparison."""

    NO_COMPILATION = 0
    """The module as it is."""
    DYNAMO_AS_IS = 1
    """``torch.compile`` as it is, with its guards, in memory; no cache."""
    DYNAMO_ONCE = 2
    """One trace, compiled whole in this process; calls run the code that Dynamo wrote, without guards."""
    PIECEWISE = 3
    """Sealed pieces from the cache."""

    @classmethod
    def of(cls, value: int | str) -> CompileLevel:
        """Return a level by number or by name, in any case.

        Raises:
            UsageError: there is no such level.
        """
        text = str(int(value)) if isinstance(value, int) else value.strip()
        for level in cls:
            if text in (str(level.value), level.name, level.name.lower()):
                return level
        known = ", ".join(f"{level.value} ({level.name})" for level in cls)
        raise UsageError(f"expected a compile level of {known}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """One configuration; None is "not set". See :func:`pwcc.precompile` for the options of a compile.

    ``mode``: ``load`` never compiles, a miss is an error of the first call; ``load-or-compile`` (default)
    compiles what is missing. ``first_call``: what serves while nothing is compiled yet: ``eager`` (default)
    answers eagerly and compiles in a process beside this one; ``wait`` compiles the dynamic variant in the
    first call. Static variants (``sizes``) are always compiled behind.
    """

    level: CompileLevel | int | str | None = None
    mode: Mode | None = None
    first_call: FirstCall | None = None
    cache_dir: str | Path | None = None
    sizes: Sequence[int] | None = None
    ranges: Sequence[tuple[int, int]] | None = None
    allow_gaps: bool | None = None
    max_tokens: int | None = None
    splitting_ops: Sequence[str] | None = None
    passes: str | Sequence[str] | None = None
    custom_ops: str | Sequence[str] | None = None
    autotune: bool | None = None
    autotune_from: str | None = None
    cpu_baseline: str | None = None
    jobs: int | None = None
    profile: str | None = None
    tag: str | None = None
    policy: Policy | None = None
    layers: Sequence[str | Path] | None = None
    require_signature: bool | None = None
    trust_dir: bool | None = None
    lock_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.level is not None:
            object.__setattr__(self, "level", CompileLevel.of(self.level))
        for name, known in (("mode", get_args(Mode)), ("first_call", get_args(FirstCall))):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(f"expected {name} to be {' or '.join(map(repr, known))}, got {value!r}")
        for name in ("sizes", "splitting_ops", "layers"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"expected {name} to be a sequence, got the text {value!r}")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if self.ranges is not None:
            object.__setattr__(self, "ranges", tuple((low, high) for low, high in self.ranges))

    def over(self, below: CompileConfig) -> CompileConfig:
        """Return this configuration, with what it does not set taken from ``below``."""
        return replace(below, **self.given())

    def given(self, *names: str) -> dict[str, Any]:
        """Return the fields that are set, by name; of ``names`` only, where some are given."""
        wanted = names or tuple(field.name for field in fields(self))
        return {name: value for name in wanted if (value := getattr(self, name)) is not None}

    def compile_options(self) -> dict[str, Any]:
        """Return what a compile is asked for, without static sizes: options of ``pwcc.precompile``."""
        names = [f.name for f in fields(self) if f.name not in ("level", "mode", "first_call", "sizes")]
        return self.given(*names)

    def load_options(self) -> dict[str, Any]:
        """Return the options of ``pwcc.load``."""
        return self.given("cache_dir", "profile", "tag", "policy", "layers", "require_signature", "trust_dir")


DEFAULTS: Final = CompileConfig(
    level=CompileLevel.PIECEWISE, mode="load-or-compile", first_call="eager", sizes=(), max_tokens=8192
)

_context: ContextVar[CompileConfig | None] = ContextVar("pwcc_compile_config", default=None)
_process: list[CompileConfig] = [CompileConfig()]


def configure(config: CompileConfig | None = None, /, **options: Any) -> CompileConfig:
    """Set the process's configuration and return it; without arguments, take it back.

    It replaces what an earlier call set. Modules whose first call is over keep theirs.

    Raises:
        UsageError: an unknown option, or a value that is none of the option's.
    """
    _process[0] = _made(config, options)
    return _process[0]


@contextmanager
def compile_config(config: CompileConfig | None = None, /, **options: Any) -> Iterator[CompileConfig]:
    """Set a configuration for modules that are built, or first called, in the block; blocks nest.

    It is the context's (thread's, task's) own. What it does not set comes from the block around it.

    Raises:
        UsageError: as :func:`configure`.
    """
    made = _made(config, options).over(_context.get() or CompileConfig())
    token = _context.set(made)
    try:
        yield made
    finally:
        _context.reset(token)


def context_config() -> CompileConfig | None:
    """Return the configuration of the block that is entered, if any."""
    return _context.get()


def current_config(
    argument: CompileConfig | None = None,
    context: CompileConfig | None = None,
    environ: Mapping[str, str] = os.environ,
) -> CompileConfig:
    """Return what is in force: argument over context over process over environment over default.

    Raises:
        UsageError: ``PWCC_LEVEL`` or a switch has a value that it cannot have.
    """
    around = context or context_config() or CompileConfig()
    return (
        (argument or CompileConfig()).over(around).over(_process[0]).over(_environment(environ)).over(DEFAULTS)
    )


def in_force(config: CompileConfig, switches: Switches) -> CompileConfig:
    """Return a configuration as the switches change it: PWCC_DISABLE to level 1, PWCC_FROZEN to ``load``."""
    if switches.disable and CompileLevel.of(config.level or 0) > CompileLevel.DYNAMO_AS_IS:
        config = replace(config, level=CompileLevel.DYNAMO_AS_IS)
    return replace(config, mode="load") if switches.frozen else config


def _environment(environ: Mapping[str, str]) -> CompileConfig:
    text = environ.get(LEVEL_VARIABLE, "").strip()
    return CompileConfig(level=CompileLevel.of(text)) if text else CompileConfig()


def _made(config: CompileConfig | None, options: Mapping[str, Any]) -> CompileConfig:
    known = [field.name for field in fields(CompileConfig)]
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option {name!r}", hint=f"expected one of {', '.join(known)}")
    given = CompileConfig(**options)
    return given if config is None else given.over(config)
