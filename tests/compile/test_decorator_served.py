"""Decorated modules served by compiled code: behind, waited for, loaded, at every level; what goes wrong."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pwcc
from pwcc.cache.errors import (
    ArgumentError,
    ModelError,
    PieceCompileError,
    PwccError,
    SizeError,
    UnsealableError,
)
from pwcc.compile.background import Background
from pwcc.compile.call import STATE
from pwcc.compile.compiled_model import CompiledModel
from pwcc.compile.decorator_phase import Phase
from pwcc.compile.levels import configure
from tests.compile.decorated import Affine, Decorated, DecoratedOuter, Once, Rebinding, Stock
from tests.conftest import Machine

pytestmark = [
    pytest.mark.slow,
    # what Inductor's own modules say while they are imported
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    configure()


def x_of(size: int) -> torch.Tensor:
    return torch.arange(size * 8.0).reshape(size, 8)


def state_of(module: nn.Module) -> pwcc.CompileState:
    return pwcc.compile_state(module)


def agrees(module: nn.Module, *sizes: int) -> bool:
    return all(torch.allclose(module(x_of(n)), Affine()(x_of(n))) for n in sizes)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, pwcc.CompileState]]]:
    """A cache that a background compile filled while calls were answered, and what was seen meanwhile."""
    cache = tmp_path_factory.mktemp("served") / "cache"
    seen: list[tuple[float, pwcc.CompileState]] = []
    configure(cache_dir=cache, sizes=(2,))
    module = Decorated().eval()
    with torch.no_grad():
        before = None
        while before is not Phase.SERVING:
            started = time.monotonic()
            assert agrees(module, 1, 2, 3)
            took = time.monotonic() - started
            state = state_of(module)
            if state.phase is not before:
                seen.append((took, state))
            before = state.phase
            assert before is not Phase.FAILED, state.error
            time.sleep(0.05)
    configure()
    return cache, seen


def test_calls_are_answered_while_variants_compile_behind_them(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]],
) -> None:
    _, seen = served
    phases = [state.phase for _, state in seen]
    assert phases[0] is Phase.COMPILING
    assert phases[-1] is Phase.SERVING
    assert phases == sorted(phases, key=list(Phase).index)
    assert not seen[0][1].is_compiled
    assert (seen[-1][1].is_compiled, seen[-1][1].sizes) == (True, (2,))
    dynamic = [state for _, state in seen if state.phase is Phase.FILLING]
    assert all(state.is_compiled and state.sizes == () for state in dynamic)
    assert max(took for took, _ in seen) < 20, "a call waited for a compile"


def test_another_module_loads_what_is_there_and_compiles_nothing(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]], tmp_path: Path
) -> None:
    configure(cache_dir=served[0], sizes=(2,))
    module = Decorated().eval()
    assert agrees(module, 1, 2, 3, 64)
    state = state_of(module)
    assert (state.phase, state.entry, state.sizes) == (Phase.SERVING, served[1][-1][1].entry, (2,))
    assert vars(module)[STATE].run.receipt.is_clean
    with pytest.raises(SizeError, match=r"outside the compiled range \[1, 64\]"):
        module(x_of(65))
    with pytest.raises(ArgumentError, match="'mask' was None at the first call and is a value now"):
        module(x_of(3), torch.ones(3))
    with pytest.raises(ArgumentError, match="'x' was a value at the first call and is None now"):
        module(None)

    module.scale.copy_(torch.ones(8))  # in place
    assert torch.allclose(module(x_of(3)), module.forward(x_of(3)))
    module.load_state_dict({"scale": torch.full((8,), 5.0), "shift": torch.zeros(8)}, assign=True)
    module.requires_grad_(False)
    assert torch.allclose(module(x_of(3)), 5 * x_of(3))

    module.scale.data = torch.full((8,), 7.0)
    pwcc.rebind(module)
    assert torch.allclose(module(x_of(3)), 7 * x_of(3))
    module.scale.data = torch.full((8,), 5.0)

    configure(cache_dir=served[0], mode="load")
    module.to(torch.float32)
    assert state_of(module).phase is Phase.NEW
    assert torch.allclose(module(x_of(3)), 5 * x_of(3))
    module.double()
    with pytest.raises(pwcc.CacheMiss):
        module(x_of(3).double())


def test_the_dispatch_enters_no_frame_of_dynamo(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]],
) -> None:
    configure(cache_dir=served[0], mode="load")
    module = Decorated().eval()
    module(x_of(3))
    frames: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            frames.append(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        module(x_of(3))
    finally:
        sys.setprofile(None)
    assert not [name for name in frames if name.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))]


def test_first_calls_from_several_threads_load_once(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]],
) -> None:
    configure(cache_dir=served[0], mode="load")
    module = Decorated().eval()
    runs: list[object] = []

    def call() -> None:
        with torch.no_grad():
            assert agrees(module, 3)
        runs.append(vars(module)[STATE].run)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 4
    assert len(set(map(id, runs))) == 1


def test_a_first_call_that_waits_is_compiled(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]],
) -> None:
    """The pieces are in the cache already, so this costs a trace; the outer's graph holds the inner modules."""
    configure(cache_dir=served[0], first_call="wait", max_tokens=64)
    module = DecoratedOuter().eval()
    wanted = Affine()(Affine()(Affine()(x_of(3))))
    assert torch.allclose(module(x_of(3)), wanted)
    assert state_of(module).phase is Phase.SERVING
    inner: list[nn.Module] = [module.first, module.last]
    assert [state_of(part).phase for part in inner] == [Phase.NEW, Phase.NEW]


def test_recache_compiles_anew_and_finds_the_same(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, seen = served
    options: dict[str, Any] = {"cache_dir": cache, "max_tokens": 64, "inputs": ["x:float32[n,8]"], "jobs": 1}
    entry = next((state.entry for _, state in seen if state.phase is Phase.FILLING), None)
    before = pwcc.precompile(Decorated().eval(), **options)
    assert before.hit
    assert entry in (None, before.entry_key)
    monkeypatch.setenv("PWCC_RECACHE", "1")
    again = pwcc.precompile(Decorated().eval(), **options)
    assert (again.hit, again.counters.piece_cache_hits) == (False, 0)
    assert again.counters.compiles == before.counters.unique_pieces > 0
    assert again.entry_key == before.entry_key
    with pytest.raises(PwccError, match="PWCC_RECACHE ignores what a cache holds"):
        pwcc.precompile(Decorated().eval(), verify_hit=True, **options)

    configure(cache_dir=cache)
    module = Decorated().eval()
    assert agrees(module, 3)
    assert state_of(module).phase is Phase.COMPILING, "what is there is not loaded"
    module.double()  # ends it


def test_the_command_line_and_the_decorator_find_each_others_entries(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]], machine: Machine
) -> None:
    cache, seen = served
    model = ("--model", "tests.compile.decorated:Decorated", "--input", "x:float32[n,8]", "--device", "cpu")
    options = (*model, "--max-tokens", "64", "--sizes", "2", "--cache-dir", cache, "--frozen")
    hit = machine.pwcc_json("compile", *options, PYTHONPATH=str(REPOSITORY))
    assert (hit["hit"], hit["entry_key"]) == (True, seen[-1][1].entry)
    loaded = machine.pwcc_json("load", cache, *model, "--check", PYTHONPATH=str(REPOSITORY))
    assert loaded["entry"] == seen[-1][1].entry
    assert loaded["check"]["ok"]


def test_level_2_runs_the_code_that_dynamo_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Once().eval()
    assert agrees(module, 3)
    state = state_of(module)
    assert (state.phase, state.level, state.entry) == (Phase.SERVING, pwcc.CompileLevel.DYNAMO_ONCE, None)
    assert agrees(module, 1, 2, 3, 64)
    assert torch.allclose(module(x=x_of(2)), Affine()(x_of(2)))
    with pytest.raises(SizeError):
        module(x_of(65))
    with pytest.raises(ArgumentError, match="'mask' was None at the first call"):
        module(x_of(3), mask=torch.ones(3))
    module.shift = torch.zeros(8)  # read from the module at each call
    assert torch.allclose(module(x_of(3)), 3 * x_of(3))

    from torch._dynamo.utils import counters

    counters.clear()
    module(x_of(5))
    assert not counters["frames"], "Dynamo met no frame"


def test_level_1_and_a_disabled_cache_are_torch_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(cache_dir=tmp_path / "cache")
    monkeypatch.setenv("PWCC_DISABLE", "1")
    caplog.set_level(logging.WARNING, "pwcc")
    disabled, stock = Decorated().eval(), Stock().eval()
    for module in (disabled, stock):
        assert agrees(module, 3)
        state = state_of(module)
        assert (state.phase, state.level) == (Phase.SERVING, pwcc.CompileLevel.DYNAMO_AS_IS)
    assert torch.allclose(stock(x_of(3), torch.zeros(3)), torch.zeros(3, 8)), "it compiles another form"
    assert not (tmp_path / "cache").exists()
    assert [r.getMessage() for r in caplog.records if r.name == "pwcc"] == [
        "Decorated: PWCC_DISABLE is on: torch.compile as it is, no cache"
    ]


def test_a_compile_that_fails_is_told_and_eager_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(cache_dir=tmp_path / "cache")
    module = Rebinding().eval()
    assert torch.allclose(module(x_of(3)), 3 * x_of(3) + torch.arange(8.0) + 1)
    with pytest.raises(UnsealableError, match=r"changes self.shift \(a buffer that is rebound\)") as caught:
        pwcc.wait_for_compile(module, 120)
    assert str(caught.value.where).partition(":")[0].endswith("decorated.py")
    state = state_of(module)
    assert (state.phase, state.error, state.is_compiled) == (Phase.FAILED, caught.value, False)
    assert torch.allclose(module(x_of(3)), 3 * x_of(3) + torch.arange(8.0) + 2), "eager, with its effects"
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "eager goes on serving" in record.getMessage()


def test_a_first_call_that_waits_for_what_cannot_be_compiled_fails_at_once_ever_after(tmp_path: Path) -> None:
    configure(cache_dir=tmp_path / "cache", first_call="wait")
    module = Rebinding().eval()
    with pytest.raises(UnsealableError) as first:
        module(x_of(3))
    started = time.monotonic()
    with pytest.raises(UnsealableError) as second:
        module(x_of(3))
    assert second.value is first.value
    assert time.monotonic() - started < 0.2
    assert state_of(module).phase is Phase.FAILED


def test_a_killed_compile_is_told(tmp_path: Path) -> None:
    configure(cache_dir=tmp_path / "cache")
    module = Decorated().eval()
    module(x_of(3))
    behind: Background = vars(module)[STATE]._behind
    while behind._process is None:
        time.sleep(0.01)
    os.killpg(behind._process.pid, signal.SIGKILL)
    with pytest.raises(PieceCompileError, match="the process of a compile was killed by SIGKILL"):
        pwcc.wait_for_compile(module, 60)
    assert agrees(module, 3)


def test_a_module_that_no_other_process_can_import_is_told(tmp_path: Path) -> None:
    @pwcc.support_compile(max_tokens=8)
    class Local(Affine):
        pass

    configure(cache_dir=tmp_path / "cache")
    module = Local().eval()
    assert agrees(module, 3)
    with pytest.raises(ModelError, match="cannot be sent to another process"):
        pwcc.wait_for_compile(module, 60)
    assert agrees(module, 3)


def test_moving_a_module_ends_the_compile_behind_it(tmp_path: Path) -> None:
    configure(cache_dir=tmp_path / "cache")
    module = Decorated().eval()
    module(x_of(3))
    behind: Background = vars(module)[STATE]._behind
    while behind._process is None:
        time.sleep(0.01)
    module.double()
    behind.join(10)
    assert behind._process.poll() is not None
    assert state_of(module).phase is Phase.NEW
    assert state_of(module).error is None


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_ends_takes_its_compile_along(tmp_path: Path, ending: str) -> None:
    code = f"""
        import os, signal, time
        import torch, pwcc
        from tests.compile.decorated import Decorated
        pwcc.configure(cache_dir={str(tmp_path / "cache")!r})
        module = Decorated().eval()
        with torch.no_grad():
            module(torch.zeros(3, 8))
        behind = vars(module)["_pwcc_state"]._behind
        while behind._process is None:
            time.sleep(0.01)
        print(behind._process.pid, flush=True)
        {ending}
    """
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    assert time.monotonic() - started < 30
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert "Traceback" not in done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline, "the compile outlived the process that wanted it"
        time.sleep(0.1)


def test_ranges_that_an_entry_lacks_are_compiled_behind_it(
    served: tuple[Path, list[tuple[float, pwcc.CompileState]]],
) -> None:
    configure(cache_dir=served[0], ranges=((1, 8), (9, 64)))
    module = Decorated().eval()
    assert agrees(module, 3)
    loaded: CompiledModel = vars(module)[STATE]._compiled
    assert state_of(module).phase is Phase.FILLING
    assert (1, 64) in loaded.ranges
    assert pwcc.wait_for_compile(module, 120).phase is Phase.SERVING
    compiled: CompiledModel = vars(module)[STATE]._compiled
    assert compiled.ranges == ((1, 8), (9, 64))
    assert agrees(module, 3, 9, 64)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_process_behind_compiles_for_it(tmp_path: Path) -> None:
    configure(cache_dir=tmp_path / "cache", sizes=(2,))
    module = Decorated().eval().cuda()
    x = x_of(3).cuda()
    wanted = module.forward(x)
    assert torch.allclose(module(x), wanted)
    state = pwcc.wait_for_compile(module, 300)
    assert (state.phase, state.sizes) == (Phase.SERVING, (2,))
    assert torch.allclose(module(x), wanted)
    module.half()
    configure(cache_dir=tmp_path / "cache", first_call="wait")
    assert torch.allclose(module(x.half()), module.forward(x.half()))
    assert state_of(module).phase is Phase.SERVING
    once = Once().eval().cuda()
    assert torch.allclose(once(x), wanted)
