"""Log lines and spans: what is said, to whom, and that silence costs nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from pwcc.cache import telemetry
from pwcc.cache.errors import UsageError
from pwcc.cache.telemetry import finished, parse, span


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    names = ["pwcc", *(f"pwcc.{part}" for part in telemetry.PARTS)]
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = list(logging.getLogger("pwcc").handlers)
    yield
    for logger, level in before:
        logger.setLevel(level)
    logging.getLogger("pwcc").handlers[:] = handlers


class Tracer:
    """Stands in for OpenTelemetry's: remembers the spans it was asked for."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, object], int]] = []

    def start_as_current_span(self, name: str, *, attributes: dict[str, object]) -> Any:
        import contextlib

        self.spans.append((name, attributes, 0))
        return contextlib.nullcontext()

    def start_span(self, name: str, *, start_time: int, attributes: dict[str, object]) -> Any:
        tracer = self

        class Open:
            def end(self, *, end_time: int) -> None:
                tracer.spans.append((name, attributes, end_time - start_time))

        return Open()


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    found = Tracer()
    module = ModuleType("opentelemetry.trace")
    module.get_tracer = lambda _name: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    return found


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("info", {"pwcc": logging.INFO}),
        ("WARNING, load=debug", {"pwcc": logging.WARNING, "pwcc.load": logging.DEBUG}),
    ],
)
def test_the_variable(text: str, levels: dict[str, int]) -> None:
    assert parse(text) == levels


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loud", "one of debug, info, warning, error, got 'loud'"),
        ("lod=info", "compile, load, capture, got 'lod'"),
    ],
)
def test_a_variable_that_says_nothing(text: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text)
    telemetry.configure({"PWCC_LOG": text})  # as the first span does
    assert said in caplog.text


def test_lines_go_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        telemetry.configure({"PWCC_LOG": "warning,compile=info"})
    with span("compile.trace", model="toy"):
        pass
    with span("load.bind"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert "INFO pwcc.compile: compile.trace: " in line
    assert line.endswith("s (model toy)")


def test_lines_that_the_host_writes_to_the_terminal_are_not_written_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    telemetry.configure({"PWCC_LOG": "info"})
    host = logging.StreamHandler()
    host.setLevel(logging.WARNING)
    logging.getLogger().addHandler(host)
    try:
        logging.getLogger("pwcc.load").warning("both would")
        logging.getLogger("pwcc.load").info("the host would not")
    finally:
        logging.getLogger().removeHandler(host)
    err = capsys.readouterr().err
    assert err.count("both would") == 1
    assert err.count("the host would not") == 1


def test_lines_that_the_hosts_handlers_may_drop_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure({"PWCC_LOG": "info"})
    host, program = logging.StreamHandler(), logging.getLogger("pwcc")
    host.addFilter(lambda record: not record.name.startswith("pwcc"))
    apart = logging.StreamHandler()
    logging.getLogger().addHandler(host)
    try:
        logging.getLogger("pwcc.load").info("the host drops this")
        host.filters.clear()
        program.propagate = False
        logging.getLogger("pwcc.load").info("the host never gets this")
        program.addHandler(apart)
        logging.getLogger("pwcc.load").info("a handler of its own")
    finally:
        program.propagate = True
        program.removeHandler(apart)
        logging.getLogger().removeHandler(host)
    err = capsys.readouterr().err
    assert [err.count(text) for text in ("drops this", "never gets this", "of its own")] == [1, 1, 1]


def test_nothing_is_said_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure({})
    with span("compile.trace"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_failure_is_said_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pwcc")
    with pytest.raises(ValueError, match="no"), span("compile.trace"):
        raise ValueError("no")
    assert "compile.trace failed after" in caplog.text


def test_spans_go_to_opentelemetry_where_it_is(tracer: Tracer) -> None:
    with span("compile", model="toy"):
        finished("compile.piece", 1.5, piece="p0")
    assert tracer.spans == [
        ("pwcc.compile", {"pwcc.model": "toy"}, 0),
        ("pwcc.compile.piece", {"pwcc.piece": "p0"}, 1_500_000_000),
    ]


def test_it_is_never_imported_for_this() -> None:
    code = """
import sys
from pwcc.cache import telemetry
with telemetry.span("load"):
    pass
assert "opentelemetry" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_real_api_accepts_them() -> None:
    """In a process of its own, with the SDK's exporter in memory."""
    pytest.importorskip("opentelemetry.sdk")
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pwcc.cache import telemetry
seen = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(seen))
trace.set_tracer_provider(provider)
with telemetry.span("compile", model="toy"):
    telemetry.finished("compile.piece", 2.0, piece="p0")
inner, outer = seen.get_finished_spans()
assert (inner.name, outer.name) == ("pwcc.compile.piece", "pwcc.compile"), (inner, outer)
assert inner.parent.span_id == outer.context.span_id
assert dict(outer.attributes) == {"pwcc.model": "toy"}
assert abs(inner.end_time - inner.start_time - 2_000_000_000) < 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True)
