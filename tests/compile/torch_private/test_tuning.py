"""Tuning is noted as it is timed, and Inductor's own caches take what was kept of an earlier compile.

No GPU is needed: the timings are made up, all that looks them up and writes them is torch's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._inductor import config, select_algorithm
from torch._inductor.codecache import PersistentCache
from torch._inductor.runtime import triton_heuristics

from pwcc.cache.tuning import Candidate, TunedChoice
from pwcc.compile.torch_private.inductor import private_caches
from pwcc.compile.torch_private.triton_static import config_text
from pwcc.compile.torch_private.tuning import (
    INDUCTOR,
    Watch,
    microseconds,
    operation_choice,
    read_files,
    write_files,
)

triton = pytest.importorskip("triton")


def a_config(block: int) -> Any:
    return triton.Config({"XBLOCK": block}, num_warps=4, num_stages=1)


class Choice:
    """A choice as select_algorithm holds one."""

    def __init__(self, name: str, description: str = "") -> None:
        self.name, self.description = name, description

    def hash_key(self) -> str:
        return f"{self.name}-{self.description}"


class Launcher:
    """A launcher as an autotuner holds several."""

    def __init__(self, config: Any) -> None:
        self.config = config


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[int, float]], None]:
    """Time the configurations of a kernel, by block size to milliseconds, as a first call does."""
    monkeypatch.setattr(
        triton_heuristics.CachingAutotuner, "bench", lambda self, launcher, *_, **__: self.times[launcher.block]
    )

    def call(kernel: str, times: dict[int, float]) -> None:
        self = SimpleNamespace(fn=SimpleNamespace(__name__=kernel), times=times)
        for block in times:
            launcher = SimpleNamespace(config=a_config(block), block=block)
            bench: Any = triton_heuristics.CachingAutotuner.bench
            assert bench(self, launcher, 1, 2) == times[block]

    return call


def wrapper(*kernels: tuple[str, bool]) -> Any:
    return SimpleNamespace(
        **{
            name: SimpleNamespace(
                launchers=[SimpleNamespace(config=SimpleNamespace(found_by_coordesc=descent))]
            )
            for name, descent in kernels
        }
    )


def test_every_timing_is_noted_by_kernel(tmp_path: Path, timed: Any) -> None:
    patched = triton_heuristics.CachingAutotuner.bench
    watch = Watch(tmp_path, {}, active=True)
    with watch:
        timed("k0", {64: 0.004, 128: 0.003})
    timed("k0", {512: 1.0})  # outside: another piece's
    with watch:
        timed("k0", {256: 0.002})
        timed("k1", {64: float("inf")})
    assert triton_heuristics.CachingAutotuner.bench is patched
    result = watch.result(wrapper(("a", True), ("b", False)), [("a", "k0", "w0"), ("b", "k1", "w1")])
    assert result is not None
    first, second = result.choices
    assert [(item.config, item.us) for item in first.candidates] == [
        (config_text(a_config(block)), us) for block, us in ((64, 4.0), (128, 3.0), (256, 2.0))
    ]
    assert (first.winner, first.descent, second.descent) == ("w0", True, False)
    assert second.candidates[0].us is None


def test_without_a_gpu_nothing_is_followed(tmp_path: Path) -> None:
    before = triton_heuristics.CachingAutotuner.bench
    with (watch := Watch(tmp_path, {"ab/c.best_config": "{}"}, active=False)):
        assert triton_heuristics.CachingAutotuner.bench is before
    assert watch.result(wrapper(), []) is None
    assert not list(tmp_path.iterdir())


def test_timing_runs_are_counted(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    with (watch := Watch(tmp_path, {}, active=True)):
        counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 3
    counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 3
    result = watch.result(wrapper(), [])
    assert result is not None
    assert result.runs == 3


def test_choices_of_an_operation(tmp_path: Path) -> None:
    inputs = [SimpleNamespace(get_size=lambda: [1, 64]), SimpleNamespace(get_size=lambda: [64, 8])]
    times: dict[Any, float] = {
        Choice("triton_mm_0", "BLOCK_M=16,\n BLOCK_N=32"): 0.0051234,
        Choice("extern_mm"): 0.004,
        Choice("triton_mm_1"): float("inf"),
    }
    wanted = TunedChoice(
        "operation",
        "mm 1x64 64x8",
        "extern_mm",
        candidates=(
            Candidate("triton_mm_0 BLOCK_M=16, BLOCK_N=32", 5.123),
            Candidate("extern_mm", 4.0),
            Candidate("triton_mm_1", None),
        ),
    )
    assert operation_choice(times, "mm", inputs) == wanted
    assert operation_choice({Choice("x"): float("inf")}, "mm", inputs) is None
    savers = select_algorithm.get_algorithm_selector_cache().feedback_saver_fns
    with (watch := Watch(tmp_path, {}, active=True)):
        saver: Any = savers[-1]
        saver(times, "mm", inputs, list(times), None, {})
        saver({}, "mm", inputs, [], None, {})
    assert not savers
    result = watch.result(wrapper(), [])
    assert result is not None
    assert result.choices == (wanted,)


def look_up(
    scratch: Path, pins: dict[str, str], block: int, *, descent: bool
) -> tuple[list[Any], dict[str, str]]:
    """Load a kernel with three configurations, as a wrapper does, and tune it where no winner is known."""
    with private_caches(scratch), Watch(scratch, pins, active=True):
        meta: dict[str, Any] = {"autotune_local_cache": True, "coordinate_descent_tuning": descent}
        configs = [a_config(size) for size in (64, 128, 256)]
        file = str(scratch / INDUCTOR / "ab" / "cabcdef.py")
        found, cache, _ = triton_heuristics.check_autotune_cache(configs, file, meta)
        if len(found) > 1:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            assert cache is not None
            cache.save(a_config(block), 5_000_000, found_by_coordesc=descent, triton_cache_hash="0")
    return found, read_files(scratch / INDUCTOR)


@pytest.mark.parametrize(("block", "descent"), [(128, False), (512, True)])
def test_inductor_takes_a_kept_winner(tmp_path: Path, block: int, descent: bool) -> None:
    found, files = look_up(tmp_path / "one", {}, block, descent=descent)
    assert len(found) == 3
    assert [name.rpartition(".")[2] for name in files] == ["best_config"]
    (winner,), kept = look_up(tmp_path / "two", files, 64, descent=descent)
    assert config_text(winner) == config_text(a_config(block))
    assert bool(getattr(winner, "found_by_coordesc", False)) == descent  # else the descent would start anew
    assert kept == files


def test_a_kept_winner_that_was_scaled_down_is_taken_and_not_scaled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    kind: Any = triton_heuristics.CachingAutotuner
    monkeypatch.setattr(kind, "_dynamic_scale_rblock", lambda _: done.append("scaled"))
    monkeypatch.setattr(kind, "benchmark_all_configs", lambda *_: done.append("timed"))
    _, files = look_up(tmp_path / "one", {}, 32, descent=False)  # a block that is not among the first three
    scratch = tmp_path / "two"
    launchers = [Launcher(a_config(block)) for block in (64, 32, 128)]
    kernel = SimpleNamespace(
        filename=str(scratch / INDUCTOR / "ab" / "cabcdef.py"),
        inductor_meta={"autotune_local_cache": True},
        autotune_cache_info={"autotune_cache_state": "hit"},
        launchers=launchers,
    )
    with private_caches(scratch), Watch(scratch, files, active=True):
        kind._dynamic_scale_rblock(kernel)
        assert [launcher.config.kwargs for launcher in kind.benchmark_all_configs(kernel)] == [{"XBLOCK": 32}]
        assert done == []
        kernel.autotune_cache_info, kernel.launchers = {"autotune_cache_state": "miss"}, launchers[::2]
        kind._dynamic_scale_rblock(kernel)
        kind.benchmark_all_configs(kernel)
        kernel.filename = None
        kind.benchmark_all_configs(kernel)
    assert done == ["scaled", "timed", "timed"]
    kind.benchmark_all_configs(kernel)
    assert done[3:] == ["timed"]


def choose(scratch: Path, pins: dict[str, str]) -> tuple[dict[str, float], int, dict[str, str]]:
    """Choose among two kernels for an operation through Inductor's own table of times."""
    choices = cast("Any", [Choice("a"), Choice("b")])
    timings = {"a": 0.5, "b": 0.25} if not pins else {"a": 0.1, "b": 0.9}
    runs = 0

    def benchmark(given: Any) -> dict[Any, float]:
        nonlocal runs
        runs += 1
        return {choice: timings[choice.name] for choice in given}

    with (
        private_caches(scratch),
        Watch(scratch, pins, active=True),
        config.patch(autotune_local_cache=True, max_autotune_gemm=True),
    ):
        found = PersistentCache().lookup(choices, "mm", "64x64", benchmark)
    return {choice.name: ms for choice, ms in cast("Any", found).items()}, runs, read_files(scratch / INDUCTOR)


def test_inductor_takes_kept_times_of_choices(tmp_path: Path) -> None:
    times, runs, files = choose(tmp_path / "one", {})
    assert (times, runs) == ({"a": 0.5, "b": 0.25}, 1)
    assert [name.partition("/")[0] for name in files] == ["cache"]
    assert json.loads(next(iter(files.values())))["cache"]["mm"]
    assert choose(tmp_path / "two", files)[:2] == ({"a": 0.5, "b": 0.25}, 0)
    assert choose(tmp_path / "three", {})[1] == 1  # the first directory of the process is not asked again


def test_files_are_read_and_written_by_name(tmp_path: Path) -> None:
    wanted = {"ab/c.best_config": "{}", "ab/c.kernel_perf": "0.5", "cache/0a": "{}"}
    write_files(tmp_path, {**wanted})
    for name, text in {
        "ab/c.py": "x = 1",
        "ab/bad.best_config": "no JSON",
        "ab/c.cubin": "",
        "top": "",
    }.items():
        (tmp_path / name).write_text(text)
    assert read_files(tmp_path) == wanted
    write_files(tmp_path, {"ab/c.kernel_perf": "0.75"})
    assert (tmp_path / "ab/c.kernel_perf").read_text() == "0.5"  # what this compile found stays


def test_times_are_microseconds() -> None:
    assert microseconds(0.0012345) == 1.234
    assert microseconds(float("inf")) is None
    assert microseconds(float("nan")) is None
    assert microseconds(None) is None
