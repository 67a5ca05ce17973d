from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc import __version__
from pwcc.cache.errors import CacheMiss, HostMismatch, PwccError
from pwcc.cache.store import Store
from pwcc.cli import failures, main
from pwcc.cli.invocation import Invocation

Run = Callable[..., subprocess.CompletedProcess[str]]
PWCC = [sys.executable, "-m", "pwcc"]
HELP = """\
Usage: pwcc [OPTIONS] COMMAND [ARGS]...

  Compile a PyTorch model once; load it elsewhere with nothing traced,
  compiled or unpickled.

Options:
  --version   Print the version.
  --debug     Show tracebacks of errors.
  -h, --help  Show this message and exit.

Commands:
  compile  Compile a model into a cache directory.
  load     Load a model from a cache directory and print the receipt.
  capture  Capture a model's graphs here and say what each size takes.
  explain  Say whether a load and a compile would hit, and why not.
  key      Print a model's lookup key and its factors; compiles nothing.
  inspect  List the entries of a cache directory, or what one entry is.
  report   Write one entry as an HTML page: pieces, bytes, seconds, kernels.
  diff     Compare two entries, factor by factor.
  env      Print the facts of this host; explain --target reads them.
  verify   Verify a cache directory, or one entry of it.
  sign     Sign entries: their manifests, which name every blob by digest.
  gc       Remove entries beyond limits, and what nothing uses.
  rm       Remove entries.
  pin      Pin entries: gc never removes them, and rm only with --force.
  export   Export entries with their signatures and blobs.
  import   Import an archive into a cache, made if needed.
  version  Print the version.
  trust    Make keys, and say whose signatures count here.

  Exit codes: 0 ok, 1 failure, 2 usage, 3 miss, 4 a match that this host lacks
  a requirement of.

"""


def test_help(run: Run) -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    # later versions of typer say "int range" where earlier ones say INTEGER RANGE; this page has neither
    assert done.stdout.strip() == HELP.strip()


COMMANDS = [line.split()[0] for line in HELP.partition("Commands:")[2].splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("command", COMMANDS[: COMMANDS.index("trust")])
def test_help_of_each_command(run: Run, command: str) -> None:
    done = run(command, "-h")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: pwcc {command} ")
    assert "--json" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_the_version(run: Run) -> None:
    assert run("--version").stdout == run("version").stdout == f"pwcc {__version__}\n"
    assert json.loads(run("version", "--json").stdout) == {"pwcc": __version__}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), ""),
        (("nothing",), "No such command 'nothing'"),
        (("inspct", "x"), "'inspect'"),
        (("compile",), "Missing option '--model'"),
        (("load", "--model", "x"), "Missing argument 'DIR'"),
        (("compile", "--model", "x", "--jobs", "0"), "--jobs"),
        (("compile", "--model", "x", "--cpu-baseline", "sse"), "is not one of 'x86-64-v2', 'x86-64-v3'"),
        (("compile", "--model", "x", "--max-tokens", "many"), "--max-tokens"),
        (("compile", "--model", "x", "--allow-unsealed"), "--allow-unsealed"),
    ],
)
def test_usage_errors_exit_2(run: Run, argv: tuple[str, ...], message: str) -> None:
    done = run(*argv)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [("--debug", "inspect"), ("inspect", "--debug")])
def test_debug_before_or_after_the_command_shows_the_traceback(
    run: Run, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    done = run(*argv, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "\nerror: expected a pwcc cache directory" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PwccError("broken", where="a.py:3", hint="mend it"), 1),
        (CacheMiss("nothing fits", reasons=["0a: eps differs"]), 3),
        (HostMismatch("not here", reasons=["0a: needs avx512f"]), 4),
    ],
)
def test_expected_errors(capsys: pytest.CaptureFixture[str], error: PwccError, code: int) -> None:
    assert failures.report(error, Invocation(json=True)) == code
    out, err = capsys.readouterr()
    assert err == f"error: {error}\n"
    found = json.loads(out)["error"]
    assert (found["type"], found["exit_code"], found["message"]) == (type(error).__name__, code, error.message)
    assert (found["where"], found["hint"]) == (error.where, error.hint)
    assert found.get("reasons") == (list(error.reasons) if isinstance(error, CacheMiss) else None)


def test_unexpected_errors_are_called_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report(RuntimeError("first\nsecond"), Invocation()) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err == "error: RuntimeError: first\nthis is a bug in pwcc: run with --debug and report what it prints\n"
    )


def test_an_unexpected_error_keeps_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("out of memory")
    error.add_note("while running pwcc entry 0a")
    failures.report(error, Invocation())
    assert capsys.readouterr().err.startswith(
        "error: RuntimeError: out of memory\nwhile running pwcc entry 0a\n"
    )


def test_a_full_disk_is_no_bug(store: Store) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with full.open("w") as sink:
        done = subprocess.run(
            [*PWCC, "inspect", store.root], stdout=sink, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_left_early(store: Store, publish: Callable[..., Path], unbuffered: str) -> None:
    for index in range(300):
        publish(f"{index:08x}")
    reader, writer = os.pipe()
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [*PWCC, "inspect", store.root, "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        os.close(writer)
        assert os.read(reader, 1) == b"{"
        os.close(reader)
        _, err = process.communicate()
    assert (process.returncode, err) == (141, "")


MODEL = """
import pathlib, time
import torch

def slow():
    pathlib.Path("building").touch()
    time.sleep(60)

def leaves():
    raise SystemExit("no thank you")
"""


def test_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    command = [*PWCC, "compile", "--model", "model.py:slow", "--cache-dir", "cache"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(600):
            if (tmp_path / "building").exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted, nothing was published"
    assert "Traceback" not in err
    assert not (tmp_path / "cache").exists()


def test_a_factory_that_ends_the_program_does_not_end_it_quietly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "quits.py").write_text(MODEL)
    assert main(["compile", "--model", f"{tmp_path}/quits.py:leaves"]) == 1
    assert capsys.readouterr().err == "no thank you\n"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["compile", "--help"], ["inspect", "{store}"]])
def test_commands_that_only_read_import_nothing_heavy(store: Store, argv: list[str]) -> None:
    argv = [item.format(store=store.root) for item in argv]
    code = (
        "import sys\nfrom pwcc.cli import main\n"
        f"assert main({argv!r}) == 0\n"
        "heavy = {'torch', 'triton', 'sympy', 'numpy', 'transformers', 'rich'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "[]\n"


def test_help_in_150_ms() -> None:
    # CPU time: the program has one thread, and other tests may keep the cores busy.
    best = 9.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*PWCC, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best <= 0.150, f"{best:.3f} s"
