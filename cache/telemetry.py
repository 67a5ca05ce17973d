"""What the program is doing, told to whoever listens: log lines under ``pwcc`` and OpenTelemetry spans.

Log lines go to Python's ``logging``, to the loggers ``pwcc.compile``, ``pwcc.load`` and ``pwcc.capture``. A
host that configures logging sees them there; ``PWCC_LOG`` writes them to stderr:

    PWCC_LOG=info                   every line of at least this level
    PWCC_LOG=warning,load=debug     another level for one part

Spans go to the OpenTelemetry API where the process has imported it, so a process without it pays nothing. They
are named ``pwcc.compile``, ``pwcc.compile.trace``, ``pwcc.load.bind`` and so on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pwcc.cache.errors import UsageError

VARIABLE: Final = "PWCC_LOG"
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
PARTS: Final = ("compile", "load", "capture")
_ROOT: Final = "pwcc"
_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"

Attribute = str | int | float | bool


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a span's part, ``pwcc.compile`` of ``compile.trace``; the first call configures."""
    _configure_once()
    return logging.getLogger(f"{_ROOT}.{name.partition('.')[0]}")


def parse(text: str) -> dict[str, int]:
    """Return levels by logger name from the text of ``PWCC_LOG``; the program's own logger is ``pwcc``.

    Raises:
        UsageError: an unknown level or part.
    """
    levels: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        part, sign, level = item.rpartition("=")
        if sign and part not in PARTS:
            raise UsageError(f"expected {VARIABLE} to name one of {', '.join(PARTS)}, got {part!r}")
        if level.lower() not in LEVELS:
            raise UsageError(f"expected {VARIABLE} to be one of {', '.join(LEVELS)}, got {level!r}")
        levels[f"{_ROOT}.{part}" if part else _ROOT] = LEVELS[level.lower()]
    return levels


def configure(environ: Mapping[str, str]) -> None:
    """Write log lines to stderr as ``PWCC_LOG`` says; without it nothing is changed. Repeating it adds nothing.

    A text that says nothing is logged as a warning: no compile or load fails for it.
    """
    root = logging.getLogger(_ROOT)
    try:
        levels = parse(environ.get(VARIABLE, ""))
    except UsageError as error:
        root.warning("%s", error.message)
        return
    if not levels:
        return
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        handler = _Handler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@functools.cache
def _configure_once() -> None:
    configure(os.environ)


class _Handler(logging.StreamHandler[Any]):
    """Writes to what is stderr at that moment; not what the host's own handlers write to the terminal."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if any(_on_terminal(handler, record) for handler in _handlers(record.name) if handler is not self):
            return
        self.stream = sys.stderr
        super().emit(record)


def _handlers(name: str) -> Iterator[logging.Handler]:
    """Yield the handlers that a record of the logger ``name`` reaches."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _on_terminal(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Tell whether a handler of the host's, one without filters, writes ``record`` to stderr or stdout."""
    stream = getattr(handler, "stream", None)
    on_terminal = stream in (sys.stderr, sys.stdout) and not handler.filters
    return on_terminal and record.levelno >= handler.level


@contextlib.contextmanager
def span(name: str, **attributes: Attribute) -> Iterator[None]:
    """Tell of a stage while it runs; ``name`` is what follows ``pwcc.``, such as ``compile.trace``."""
    started = time.perf_counter()
    tracer = _tracer()
    entered: Any = contextlib.nullcontext()
    if tracer is not None:
        entered = tracer.start_as_current_span(f"{_ROOT}.{name}", attributes=_named(attributes))
    with entered:
        try:
            yield
        except BaseException as error:
            logger_of(name).info("%s failed after %.3f s: %s", name, time.perf_counter() - started, error)
            raise
    logger_of(name).info("%s: %.3f s%s", name, time.perf_counter() - started, _text(attributes))


def finished(name: str, seconds: float, **attributes: Attribute) -> None:
    """Tell of something that took ``seconds`` and ended now, perhaps in another process."""
    tracer = _tracer()
    if tracer is not None:
        now = time.time_ns()
        began = now - int(seconds * 1e9)
        tracer.start_span(f"{_ROOT}.{name}", start_time=began, attributes=_named(attributes)).end(end_time=now)
    logger_of(name).info("%s: %.3f s%s", name, seconds, _text(attributes))


def _tracer() -> Any:
    api: Any = sys.modules.get("opentelemetry.trace")
    return None if api is None else api.get_tracer(_ROOT)


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"{_ROOT}.{name}": value for name, value in attributes.items()}


def _text(attributes: Mapping[str, Attribute]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in attributes.items())})" if attributes else ""
