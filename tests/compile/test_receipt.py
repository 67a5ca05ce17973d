import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pwcc.compile.receipt import COMPILER_ROOTS, LoadObserver, LoadReceipt, is_compiler_module

COUNTERS = (
    "dynamo_frames",
    "inductor_compiles",
    "triton_compiles",
    "autotune_runs",
    "processes_started",
    "files_written",
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def observe(directory: Path, body: str, *, before: str = "", after: str = "") -> dict[str, Any]:
    """Run ``body`` in an observer in a fresh process, with private caches; return the receipt."""
    script = "\n".join(
        (
            "import json, os, sys",
            textwrap.dedent(before),
            "from pwcc.compile.receipt import LoadObserver",
            "with LoadObserver() as observer:",
            textwrap.indent(textwrap.dedent(body).strip() or "pass", "    "),
            "receipt = observer.receipt(entry_key='key')",
            textwrap.dedent(after),
            "print(json.dumps(receipt.to_json()))",
        )
    )
    # a file, since Triton wants the source of a kernel; -B, so that bytecode caches depend on no earlier run
    program = directory / "program.py"
    program.write_text(script)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-B", str(program)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def only(**expected: int) -> dict[str, int]:
    return {**dict.fromkeys(COUNTERS, 0), **expected}


def counted(receipt: dict[str, Any]) -> dict[str, int]:
    return {name: receipt[name] for name in COUNTERS}


def compilers(receipt: dict[str, Any]) -> tuple[int, ...]:
    return tuple(receipt[name] for name in COUNTERS[:4])


def measure(action: Callable[[], object]) -> LoadReceipt:
    with LoadObserver() as observer:
        action()
    return observer.receipt(entry_key="key")


# A clean window


@pytest.mark.parametrize("before", ["", "import torch", "import torch._dynamo, torch._inductor.config, sympy"])
def test_a_clean_window_counts_nothing(tmp_path: Path, before: str) -> None:
    receipt = observe(tmp_path, "sum(range(10))", before=before)
    assert counted(receipt) == only()
    assert receipt["clean"] is True
    assert (receipt["modules_added"], receipt["modules_total"], receipt["evidence"]) == ([], 0, [])


def test_it_needs_neither_torch_nor_a_compiler(tmp_path: Path) -> None:
    receipt = observe(tmp_path, "assert not {'torch', 'triton', 'sympy'} & set(sys.modules)")
    assert receipt["clean"] is True


def test_importing_torch_in_the_window_is_no_compiler(tmp_path: Path) -> None:
    receipt = observe(tmp_path, "import torch\ntorch.ones(2) + 1")
    assert receipt["modules_total"] > 100
    assert receipt["modules_added"] == []
    assert compilers(receipt) == (0, 0, 0, 0)


# Imports


def test_an_imported_compiler_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "sympy").mkdir()
    (tmp_path / "sympy" / "__init__.py").write_text("")
    receipt = observe(tmp_path, "import sympy, decimal", before=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert counted(receipt) == only()
    assert receipt["modules_added"] == ["sympy"]
    assert receipt["modules_total"] >= 2
    assert receipt["clean"] is False


def test_the_real_sympy_is_named(tmp_path: Path) -> None:
    receipt = observe(tmp_path, "import sympy", before="import torch")
    assert "sympy" in receipt["modules_added"]
    assert all(name.split(".")[0] == "sympy" for name in receipt["modules_added"])


def test_a_compiler_module_that_is_only_asked_for_is_evidence(tmp_path: Path) -> None:
    receipt = observe(tmp_path, "import importlib.util\nimportlib.util.find_spec('sympy')")
    assert receipt["clean"] is True
    assert receipt["evidence"] == ["asked for module sympy"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((root, True) for root in COMPILER_ROOTS),
        ("torch._dynamo.utils", True),
        ("torch", False),
        ("torch._dynamo_x", False),
        ("triton_kernels", False),
    ],
)
def test_compiler_modules(name: str, expected: bool) -> None:
    assert is_compiler_module(name) is expected


# Processes

FORK = "child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)"
SPAWN = "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("subprocess.Popen(['true']).wait()", 1),
        ("subprocess.Popen(['/bin/true'], close_fds=False).wait()", 1),  # goes on to posix_spawn
        ("import pathlib\nsubprocess.run([pathlib.Path('/bin/true')], close_fds=False)", 1),
        (f"subprocess.Popen(['true']).wait()\n{SPAWN}", 2),
        ("subprocess.run('true; true', shell=True)", 1),
        ("import contextlib\nwith contextlib.suppress(OSError): subprocess.run(['/no/such/program'])", 1),
        (FORK, 1),
        (SPAWN, 1),
        ("os.system('true')", 1),
        ("os.spawnv(os.P_WAIT, '/bin/true', ['true'])", 1),
    ],
)
def test_a_started_process_is_counted(tmp_path: Path, body: str, count: int) -> None:
    receipt = observe(tmp_path, body, before="import subprocess")
    assert counted(receipt) == only(processes_started=count)
    assert receipt["clean"] is False
    assert len(receipt["evidence"]) == count


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="the kernel lists no children")
def test_a_process_without_an_audit_event_is_counted(tmp_path: Path) -> None:
    # multiprocessing's spawn starts its processes through this
    receipt = observe(
        tmp_path,
        "child = multiprocessing.util.spawnv_passfds(b'/bin/sleep', [b'/bin/sleep', b'9'], ())",
        before="import multiprocessing.util",
        after="os.kill(child, 9)\nos.waitpid(child, 0)",
    )
    assert counted(receipt) == only(processes_started=1)
    assert receipt["evidence"][0].startswith("child process ")


# Files


def _open(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def _rename(path: Path) -> None:
    path.rename(path.with_name("renamed"))


@pytest.mark.parametrize(
    "action",
    [
        lambda path: path.write_text("x"),
        lambda path: path.open("a").close(),
        lambda path: path.open("r+").close(),
        lambda path: os.close(os.open(os.fsencode(path), os.O_WRONLY)),
        _open,
        _rename,
        lambda path: path.with_name("new").mkdir(),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o600),
        os.utime,
        lambda path: os.truncate(path, 0),
        lambda path: path.with_name("link").symlink_to("x"),
        lambda path: path.with_name("link").hardlink_to(path),
        lambda path: sqlite3.connect(path).close(),
        lambda path: [path.write_text("x"), path.write_text("y"), path.unlink()],
    ],
)
def test_a_changed_file_is_counted(tmp_path: Path, action: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    receipt = measure(lambda: action(path))
    assert counted(receipt.to_json()) == only(files_written=1)
    assert receipt.evidence[0].startswith(f"wrote {tmp_path}")
    assert not receipt.is_clean


def test_an_attempt_to_write_is_counted(tmp_path: Path) -> None:
    def attempt() -> None:
        with contextlib.suppress(OSError):
            (tmp_path / "missing" / "file").write_text("x")

    assert measure(attempt).files_written == 1


def _memory_file() -> None:
    descriptor = os.memfd_create("memory")
    os.write(descriptor, b"data")
    os.ftruncate(descriptor, 2)
    Path(f"/proc/self/fd/{descriptor}").open("r+b").close()
    os.fdopen(descriptor, "wb").close()


@pytest.mark.parametrize(
    "action",
    [
        lambda path: path.read_text(),
        lambda path: os.close(os.open(path, os.O_RDONLY)),
        lambda path: list(path.parent.iterdir()),
        lambda path: Path(os.devnull).write_text("x"),
        lambda path: sqlite3.connect(":memory:").close(),
        lambda path: _memory_file(),
    ],
)
def test_what_writes_no_file_is_not_counted(tmp_path: Path, action: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    receipt = measure(lambda: action(path))
    assert counted(receipt.to_json()) == only()
    assert receipt.is_clean


def test_bytecode_caches_are_counted_apart(tmp_path: Path) -> None:
    (tmp_path / "fresh.py").write_text("")
    receipt = observe(
        tmp_path,
        "import fresh",
        before=f"sys.path.insert(0, {str(tmp_path)!r})\nsys.dont_write_bytecode = False",
    )
    assert list((tmp_path / "__pycache__").iterdir())
    assert counted(receipt) == only()
    assert receipt["bytecode_files"] == 1
    assert receipt["clean"] is True


def test_a_name_that_does_not_print_is_escaped(tmp_path: Path) -> None:
    receipt = measure(lambda: (tmp_path / "a\nb\udcff").write_text("x"))
    assert receipt.files_written == 1
    assert r"a\nb\udcff" in receipt.evidence[0]
    json.dumps(receipt.to_json(), ensure_ascii=False).encode()


# Compilers. Each once with the compiler loaded before, once with it loaded in the window.

DYNAMO = "import torch, torch._dynamo"
TRACE = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))"
CAPTURE = """
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    with get_metrics_context(), dynamo_timed("trace"):
        convert_frame.fullgraph_capture(lambda x: x + 1, (torch.ones(2),), {})
"""
BENCH = """
    from torch._inductor.runtime.benchmarking import benchmarker
    benchmarker.benchmark_cpu(lambda: None, warmup=0, rep=0)
"""
BENCH_OUTER = BENCH.replace("benchmark_cpu(lambda: None,", "benchmark(lambda: None, (), {}, device='cpu',")
MODES = pytest.mark.parametrize("loaded", ["before", "meanwhile"])


def observe_compiler(directory: Path, body: str, loader: str, loaded: str, **more: str) -> dict[str, Any]:
    body = textwrap.dedent(body)
    if loaded == "before":
        return observe(directory, body, before=loader, **more)
    return observe(directory, f"{loader}\n{body}", **more)


@MODES
@pytest.mark.parametrize("body", [TRACE, CAPTURE])
def test_a_dynamo_frame_is_counted(tmp_path: Path, body: str, loaded: str) -> None:
    receipt = observe_compiler(tmp_path, body, DYNAMO, loaded)
    assert compilers(receipt) == (1, 0, 0, 0)
    assert receipt["clean"] is False


@pytest.mark.parametrize("body", [f"{TRACE}\ntorch._dynamo.reset()", f"torch._dynamo.reset()\n{TRACE}"])
def test_a_reset_hides_no_dynamo_frame(tmp_path: Path, body: str) -> None:
    receipt = observe(tmp_path, body, before=f"{DYNAMO}\n{TRACE}")
    assert compilers(receipt) == (1, 0, 0, 0)


def test_cleared_counters_hide_no_dynamo_frame(tmp_path: Path) -> None:
    clear = "torch._dynamo.utils.counters.clear()\ntorch._dynamo.reset()"
    receipt = observe(tmp_path, f"{TRACE}\n{clear}\n{TRACE}", before=f"{DYNAMO}\n{TRACE}")
    assert compilers(receipt) == (2, 0, 0, 0)


def test_earlier_work_is_not_counted(tmp_path: Path) -> None:
    receipt = observe(tmp_path, "pass", before=f"{DYNAMO}\n{TRACE}\n{textwrap.dedent(BENCH)}")
    assert receipt["clean"] is True


def test_a_recompiled_frame_is_counted_again(tmp_path: Path) -> None:
    body = "for value in (torch.ones(2), torch.ones(2, 2), 1.5): function(value)"
    before = f"{DYNAMO}\nfunction = torch.compile(lambda x: torch.ones(2) + x, backend='eager')"
    receipt = observe(tmp_path, body, before=before)
    assert compilers(receipt) == (3, 0, 0, 0)


def test_dynamo_does_not_see_the_hook_afterwards(tmp_path: Path) -> None:
    check = f"{TRACE}\nassert torch._dynamo.utils.counters['frames']['total'] == 1"
    receipt = observe(tmp_path, "pass", before=DYNAMO, after=check)
    assert receipt["clean"] is True


@MODES
@pytest.mark.parametrize("body", [BENCH, BENCH_OUTER])
def test_an_autotune_run_is_counted(tmp_path: Path, body: str, loaded: str) -> None:
    receipt = observe_compiler(
        tmp_path, body, "import torch, torch._inductor.runtime.benchmarking, torch._dynamo.utils", loaded
    )
    assert compilers(receipt) == (0, 0, 0, 1)
    assert receipt["clean"] is False


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("caches", [True, False])
def test_an_inductor_compile_is_counted(tmp_path: Path, caches: bool, loaded: str) -> None:
    body = f"""
        import torch._inductor.config
        torch._inductor.config.force_disable_caches = {not caches}
        torch.compile(lambda x: x.cos() + 1)(torch.ones(2))
    """
    receipt = observe_compiler(tmp_path, body, f"{DYNAMO}\nimport torch._inductor.compile_fx", loaded)
    assert compilers(receipt) == (1, 1, 0, 0)
    assert receipt["files_written"] > 0
    assert receipt["clean"] is False


@pytest.mark.slow
def test_a_graph_from_inductors_cache_is_counted(tmp_path: Path) -> None:
    body = "torch.compile(function)(torch.ones(2))"
    before = f"{DYNAMO}\nfunction = lambda x: x.cos() + 1\n{body}"
    receipt = observe(tmp_path, f"torch._dynamo.reset()\n{body}", before=before)
    assert compilers(receipt) == (1, 1, 0, 0)


KERNEL = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(p):
    tl.store(p, 1)

def build():
    triton.compile(ASTSource(kernel, {"p": "*i32"}), target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.slow
@needs_triton
@MODES
def test_a_triton_compile_is_counted(tmp_path: Path, loaded: str) -> None:
    # the second one comes from Triton's cache
    receipt = observe_compiler(tmp_path, "build()\nbuild()", KERNEL, loaded)
    assert compilers(receipt) == (0, 0, 1, 0)
    assert receipt["clean"] is False


FAKE_TRITON = """
    import types
    heard = []
    def theirs(**event): heard.append(event["cache_hit"])
    knobs = types.ModuleType("triton.knobs")
    knobs.compilation = types.SimpleNamespace(listener=theirs)
    sys.modules["triton.knobs"] = knobs
"""


def test_a_former_listener_hears_on_and_is_put_back(tmp_path: Path) -> None:
    receipt = observe(
        tmp_path,
        """
        assert knobs.compilation.listener is not theirs
        knobs.compilation.listener(cache_hit=True)
        knobs.compilation.listener(cache_hit=False)
        """,
        before=FAKE_TRITON,
        after="assert knobs.compilation.listener is theirs and heard == [True, False]",
    )
    assert compilers(receipt) == (0, 0, 1, 0)


def test_a_listener_put_in_front_of_ours_stays(tmp_path: Path) -> None:
    receipt = observe(
        tmp_path,
        """
        ours = knobs.compilation.listener
        front = lambda **event: ours(**event)
        knobs.compilation.listener = front
        knobs.compilation.listener(cache_hit=False)
        """,
        before=FAKE_TRITON,
        after="""
            assert knobs.compilation.listener is front
            with LoadObserver() as second:
                knobs.compilation.listener(cache_hit=False)
            assert knobs.compilation.listener is front
            assert second.receipt(entry_key="").triton_compiles == 1
            assert observer.receipt(entry_key="").triton_compiles == 1
            assert heard == [False, False]
        """,
    )
    assert compilers(receipt) == (0, 0, 1, 0)


# Observers


def test_nested_observers_each_count(tmp_path: Path) -> None:
    with LoadObserver() as outer:
        (tmp_path / "a").write_text("x")
        with LoadObserver() as inner:
            (tmp_path / "b").write_text("x")
        (tmp_path / "c").write_text("x")
    (tmp_path / "d").write_text("x")
    assert inner.receipt(entry_key="").files_written == 1
    assert outer.receipt(entry_key="").files_written == 3


def test_observers_end_in_any_order(tmp_path: Path) -> None:
    finders = list(sys.meta_path)
    first, second = LoadObserver(), LoadObserver()
    first.__enter__()
    second.__enter__()
    (tmp_path / "a").write_text("x")
    first.__exit__(None, None, None)
    (tmp_path / "b").write_text("x")
    second.__exit__(None, None, None)
    assert (first.receipt(entry_key="").files_written, second.receipt(entry_key="").files_written) == (1, 2)
    assert sys.meta_path == finders


def test_concurrent_observers_and_the_name_of_another_thread(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)
    receipts: list[LoadReceipt] = []

    def work(number: int) -> None:
        with LoadObserver() as observer:
            barrier.wait()
            (tmp_path / str(number)).write_text("x")
            barrier.wait()
            receipts.append(observer.receipt(entry_key=str(number)))
            barrier.wait()

    threads = [threading.Thread(target=work, args=(number,), name=f"worker-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [receipt.files_written for receipt in receipts] == [4] * 4
    for receipt in receipts:
        here = f"wrote {tmp_path / receipt.entry_key}"
        others = {
            f"wrote {tmp_path / str(n)} [thread worker-{n}]" for n in range(4) if str(n) != receipt.entry_key
        }
        assert set(receipt.evidence) == {here, *others}


def test_a_thread_that_has_ended_is_told_apart(tmp_path: Path) -> None:
    def write() -> None:
        thread = threading.Thread(target=(tmp_path / "a").write_text, args=("x",))
        thread.start()
        thread.join()

    assert measure(write).evidence == (f"wrote {tmp_path / 'a'} [ended thread]",)


def test_an_error_leaves_no_hook_active(tmp_path: Path) -> None:
    finders = list(sys.meta_path)
    observer = LoadObserver()

    def fail() -> None:
        with observer, observer.step("fails"):
            (tmp_path / "a").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (tmp_path / "b").write_text("x")
    assert sys.meta_path == finders
    receipt = observer.receipt(entry_key="")
    assert receipt.files_written == 1
    assert list(receipt.steps_ms) == ["fails"]


def test_a_receipt_of_a_running_block_is_what_was_so_far(tmp_path: Path) -> None:
    with LoadObserver() as observer:
        assert observer.receipt(entry_key="").is_clean
        (tmp_path / "a").write_text("x")
        assert observer.receipt(entry_key="").files_written == 1


def test_an_observer_measures_one_block() -> None:
    observer = LoadObserver()
    with pytest.raises(RuntimeError, match="was entered"):
        observer.receipt(entry_key="")
    with observer:
        pass
    with pytest.raises(RuntimeError, match="new LoadObserver"):
        observer.__enter__()


def test_a_process_that_refuses_audit_hooks_gets_no_clean_receipt(tmp_path: Path) -> None:
    before = """
        def refuse(event, arguments):
            if event == "sys.addaudithook":
                raise RuntimeError("no more hooks")
        sys.addaudithook(refuse)
    """
    receipt = observe(tmp_path, "pass", before=before)
    assert (receipt["audited"], receipt["clean"]) == (False, False)
    assert counted(receipt) == only()


# The receipt


def test_steps_keep_their_order_and_add_up() -> None:
    times = iter([0.0, 1.0, 1.5, 2.0, 2.25, 3.0, 3.125, 4.0])
    with LoadObserver(clock=lambda: next(times)) as observer:
        for name in ("lookup", "blobs", "lookup"):
            with observer.step(name):
                pass
    receipt = observer.receipt(entry_key="key")
    assert list(receipt.steps_ms.items()) == [("lookup", 625.0), ("blobs", 250.0)]
    assert receipt.total_ms == 4000.0


def receipt_of(**changes: Any) -> LoadReceipt:
    values: dict[str, Any] = {
        **dict.fromkeys(COUNTERS, 0),
        "modules_added": (),
        "modules_total": 7,
        "bytecode_files": 0,
        "audited": True,
        "entry_key": "abc",
        "blobs": 5,
        "bytes": 1234,
        "variants": 2,
        "pieces": 3,
        "steps_ms": {"lookup": 1.23456, "blobs": 2.0},
        "total_ms": 3.45678,
    }
    return LoadReceipt(**{**values, **changes})


def test_json() -> None:
    assert json.loads(json.dumps(receipt_of().to_json())) == {
        "clean": True,
        **only(),
        "modules_added": [],
        "modules_total": 7,
        "bytecode_files": 0,
        "audited": True,
        "entry_key": "abc",
        "blobs": 5,
        "bytes": 1234,
        "variants": 2,
        "pieces": 3,
        "steps_ms": {"lookup": 1.235, "blobs": 2.0},
        "total_ms": 3.457,
        "evidence": [],
        "damaged": [],
    }


def test_lines() -> None:
    assert receipt_of().lines() == (
        "3 pieces, 2 variants, 5 blobs, 1234 bytes",
        "dynamo frames 0, inductor compiles 0, triton compiles 0, autotune runs 0, "
        "processes started 0, files written 0",
        "modules added 7, none of a compiler",
        "3.5 ms: lookup 1.2, blobs 2.0",
    )
    dirty = receipt_of(modules_added=("sympy",), files_written=1, audited=False, evidence=("wrote x",)).lines()
    assert "files written 1" in dirty[1]
    assert dirty[2] == "modules added 7, 1 of a compiler"
    assert dirty[4:] == (
        "processes and files not measured: this process refuses audit hooks",
        "counted: wrote x",
    )


@pytest.mark.parametrize(
    "changes", [{"modules_added": ("sympy",)}, {"audited": False}, *({name: 1} for name in COUNTERS)]
)
def test_anything_counted_is_not_clean(changes: dict[str, Any]) -> None:
    assert receipt_of().is_clean
    assert not receipt_of(**changes).is_clean
