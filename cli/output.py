"""Data to stdout, words to stderr; a reader that left early ends the program quietly.

Text from a cache may hold anything, and a terminal obeys control characters: they are shown, not sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, Final, TextIO

import typer

from pwcc.cache.strict import Json

BROKEN_PIPE: Final = 141  # what a shell reports for a program that SIGPIPE ended
# An unbuffered stream (PYTHONUNBUFFERED) takes part of one large write and forgets the rest without an error.
_CHUNK: Final = 32768


def data(lines: Iterable[str]) -> None:
    """Print lines of text to stdout."""
    _write(sys.stdout, "".join(f"{visible(line)}\n" for line in lines))


def data_json(value: Mapping[str, Json]) -> None:
    """Print one JSON object to stdout, indented and in ASCII."""
    _write(sys.stdout, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def binary() -> Iterator[BinaryIO]:
    """Yield stdout for bytes; a reader that left early ends the program quietly, as for text."""
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        abandon(sys.stdout)
        raise typer.Exit(BROKEN_PIPE) from None


def word(text: str) -> None:
    """Print one message, of one line or more, to stderr."""
    _write(sys.stderr, "\n".join(map(visible, text.split("\n"))) + "\n")


def visible(text: str) -> str:
    """Return one line with its control, formatting and unpaired surrogate characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def width() -> int:
    """Return how many columns text may take: the terminal's (or ``COLUMNS``), 80 where there is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _write(stream: TextIO, text: str) -> None:
    try:
        for start in range(0, len(text), _CHUNK):
            stream.write(text[start : start + _CHUNK])
        stream.flush()
    except BrokenPipeError:
        abandon(stream)
        raise typer.Exit(BROKEN_PIPE) from None


def abandon(stream: TextIO) -> None:
    """Send what is still buffered for a closed pipe nowhere, so that the interpreter's exit stays silent."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, stream.fileno())
    os.close(sink)


def replace_unencodable(*streams: TextIO) -> None:
    """Let a terminal that lacks a character show ``?`` instead of failing the command."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if callable(reconfigure):
            reconfigure(errors="replace")
