"""Measurements in fresh processes: each in its own empty compiler caches, kept only where asked, each once.

A :class:`Lab` runs a script of ways (``ways.py``, ``decode_ways.py``) once per measurement. Benchmarks that
share a work directory share its measurements and what they built, so that figures compared with each other
come from one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from results import Result, machine_facts, variant_of

import pwcc

WAYS = Path(__file__).resolve().parent / "ways.py"
# Read by the compilers; a value of the caller's would measure something else.
STRIPPED = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "TORCH_TRACE", "PWCC_")
UNMEASURED = "not measured"  # starts failures that a later run may not have
ROOM = 400  # characters of a failure that are kept


@dataclass(frozen=True)
class Model:
    """A built-in model and its arguments; ``label`` names it in tables."""

    label: str
    preset: str
    args: Mapping[str, object] = field(default_factory=dict)


TINY = Model("llama-tiny (4 x 128)", "llama-tiny")
MIDDLE = Model(
    "llama (12 x 512)",
    "llama-tiny",
    {"layers": 12, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192},
)
LARGE = Model("llama-8b, bf16", "llama-8b")


@dataclass(frozen=True)
class Job:
    """One way to measure; ``store`` and ``artifacts`` name what an earlier job built, or this one builds.

    ``caches`` names compiler caches that outlive the process; None is empty ones of its own.
    """

    way: str
    model: Model
    device: str
    caches: str | None = None
    store: str | None = None
    artifacts: str | None = None
    sizes: tuple[int, ...] = ()
    jobs: int | None = None
    turn: str = ""  # tells apart jobs that differ only in what ran before them

    @property
    def key(self) -> str:
        """A text that is equal for equal jobs."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Outcome:
    """What one process measured, or why it did not."""

    values: Mapping[str, object]
    failure: str = ""

    def seconds(self, name: str) -> float | None:
        """Return a figure, or None where it was not measured."""
        value = self.values.get(name)
        return float(value) if isinstance(value, (int, float)) else None


class Lab:
    """Runs measurements under ``root``; one that was made there is not made again.

    No process is started after ``deadline`` seconds, and one that runs then is ended.
    """

    def __init__(
        self, root: Path, *, limit: float = 400, deadline: float = float("inf"), script: Path = WAYS
    ) -> None:
        self._root = root
        self._script = script
        self._limit = limit
        self._end = time.monotonic() + deadline
        self._memo = root / "measured.json"
        self._known: dict[str, list[dict[str, object]]] = {}
        root.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self._known = json.loads(self._memo.read_text())

    def measure(self, job: Job, number: int = 0) -> Outcome:
        """Return the measurement ``number`` of a job: one that is there, or a new one."""
        done = self._known.setdefault(job.key, [])
        if number < len(done):
            return Outcome(**done[number])  # type: ignore[arg-type]
        if number == 0 and job.way != "prime":
            # Reads every library once: bytecode and page cache are warm for whoever is measured first.
            self.measure(Job("prime", job.model, job.device))
        outcome = self._run(job)
        print(f"# {job.way} {job.model.label}: {outcome.failure or _brief(outcome.values)}", flush=True)
        if outcome.failure.startswith(UNMEASURED):
            return outcome
        done.append(asdict(outcome))
        self._memo.write_text(json.dumps(self._known, indent=1))
        return outcome

    def _run(self, job: Job) -> Outcome:
        left = self._end - time.monotonic()
        if left < 5:
            return Outcome({}, f"{UNMEASURED}: out of time")
        for needed, way in ((job.store, "pwcc compile"), (job.artifacts, "aot build")):
            if needed and job.way != way and not (self._root / needed).is_dir():
                return Outcome({}, f"{UNMEASURED}: {way} failed")
        with self._directories(job.caches) as caches, tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, str(self._script), json.dumps(asdict(job))],
                cwd=self._root,
                env=_environment(caches),
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
            try:
                answer, _ = process.communicate(timeout=min(self._limit, left))
            except subprocess.TimeoutExpired:
                _end(process)
                late = (
                    f"{UNMEASURED}: out of time" if left < self._limit else f"longer than {self._limit:.0f} s"
                )
                return Outcome({}, late)
            if process.returncode == 0:
                return Outcome(json.loads(answer))
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            print("\n".join(lines[-25:]), file=sys.stderr, flush=True)
            return Outcome({}, f"failed: {lines[-1] if lines else process.returncode}"[:ROOM])

    @contextmanager
    def _directories(self, name: str | None) -> Iterator[Path]:
        if name is not None:
            yield self._root / name
            return
        with tempfile.TemporaryDirectory(dir=self._root, prefix="own-", ignore_cleanup_errors=True) as own:
            yield Path(own)


def _environment(caches: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(STRIPPED)}
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TMPDIR": "tmp"}
    for variable, folder in places.items():
        (caches / folder).mkdir(parents=True, exist_ok=True)
        env[variable] = str((caches / folder).resolve())
    # absolute, since the process runs in the work directory
    found = [str(Path(pwcc.__file__).resolve().parent.parent), *map(os.path.abspath, _python_path())]
    return env | {"PYTHONPATH": os.pathsep.join(found)}


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started: it leads a process group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _brief(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float))


# --- what every script does with it ----------------------------------------------------------------


def options(description: str, *, repeat: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small and once; writes only to --out")
    parser.add_argument("--out", type=Path, help="write the first table here, others beside it")
    parser.add_argument("--only", default="", metavar="A,B", help="measure only ways whose name holds A or B")
    parser.add_argument("--work", type=Path, help="folder of measurements that several scripts share")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds; keep what is done then")
    parser.add_argument("--repeat", type=int, default=repeat, help="processes of each cheap way")
    return parser


@contextmanager
def laboratory(given: argparse.Namespace, script: Path = WAYS) -> Iterator[Lab]:
    """Yield a lab in ``--work``, or in a folder that is removed at the end; ``script`` holds its ways."""
    if given.work is not None:
        yield Lab(given.work.resolve(), deadline=given.deadline, script=script)
        return
    folder = Path(tempfile.mkdtemp(prefix="pwcc-bench-"))
    try:
        yield Lab(folder, deadline=given.deadline, script=script)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def models(given: argparse.Namespace) -> tuple[Model, ...]:
    """Return the models that a device is measured with."""
    if given.device == "cpu":
        return (TINY,) if given.quick else (TINY, MIDDLE)
    return (TINY,) if given.quick else (LARGE,)


def wanted(given: argparse.Namespace, name: str) -> bool:
    """Tell whether ``--only`` asks for a way."""
    parts = [part.strip() for part in given.only.split(",") if part.strip()]
    return not parts or any(part in name for part in parts)


def publish(
    given: argparse.Namespace,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    note: str,
    data: Mapping[str, object],
    first: bool = True,
) -> None:
    """Print one table, and write it where the options say."""
    script = Path(sys.argv[0]).name
    result = Result(
        name=name,
        variant=variant_of(given.device),
        columns=columns,
        rows=rows,
        command=f"python benchmarks/{script} --device {given.device}" + (" --quick" if given.quick else ""),
        note=note,
        machine=machine_facts(given.device),
        data=data,
    )
    if given.out is not None:
        result.write(given.out if first else given.out.parent / result.path.name)
    elif not given.quick:
        result.write()
    print(result.text())


def median(outcomes: Sequence[Outcome], name: str) -> float | None:
    """Return the median of a figure over processes, None where none measured it."""
    values = [value for outcome in outcomes if (value := outcome.seconds(name)) is not None]
    return statistics.median(values) if values else None


def failure(outcomes: Sequence[Outcome]) -> str:
    """Return the first failure's text, or nothing."""
    return next((outcome.failure for outcome in outcomes if outcome.failure), "")


def show(value: float | None, digits: int = 3, scale: float = 1.0) -> str:
    """Return a figure with ``digits`` significant digits and never an exponent."""
    if value is None:
        return "-"
    value *= scale
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if whole >= digits:
        return f"{value:,.0f}"
    places = digits - whole
    if whole == 0:
        while value and abs(value) < 10 ** -(places - digits + 1) and places < 6:
            places += 1
    return f"{value:.{places}f}"


def ratio(value: float | None, to: float | None) -> float | None:
    """Return ``value / to`` where both were measured."""
    return value / to if value is not None and to else None


def times(value: float | None) -> str:
    """Return a ratio as text."""
    return "-" if value is None else f"{show(value, 2)} x"


def raw(runs: Mapping[str, Sequence[Outcome]], rename: Callable[[str], str] = str) -> dict[str, object]:
    """Return every measurement for a result's ``data``."""
    return {
        rename(name): [o.values if not o.failure else {"failure": o.failure} for o in outcomes]
        for name, outcomes in runs.items()
    }
