"""What a compile was asked for, changed behind its back: an error that names it, and nothing published."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pwcc.cache.errors import CacheMiss, KeyChanged
from pwcc.cache.store import Store
from pwcc.compile.build_factors import build_factors
from pwcc.compile.frozen import Frozen
from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.load import lookup
from pwcc.compile.precompile import precompile
from pwcc.compile.report import Progress
from pwcc.compile.request import make_request


class Given:
    """What a caller hands over and can still reach."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8).eval()
        self.cuts = ["pwcc::attention"]
        self.sizes = [2, 4]
        self.args: dict[str, Any] = {"layers": 2, "rope": {"theta": 1e4}}

    def freeze(self) -> Frozen:
        request = make_request(
            self.model,
            specs=(parse_declaration("input:float32[n,8]"),),
            sizes=self.sizes,
            max_tokens=64,
            device="cpu",
            identity="test",
            args=self.args,
            splitting_ops=self.cuts,
            autotune=False,
            cpu_baseline="native",
            profile=None,
            build_observed=True,
        )
        key, tree = lookup(self.model, request.target)
        measure = functools.partial(
            build_factors, request.options, request.target, request.identity, request.args
        )
        return Frozen(self.model, request, measure(), key, tree, measure)


@pytest.fixture
def given() -> Given:
    return Given()


def test_nothing_changed(given: Given) -> None:
    frozen = given.freeze()
    frozen.verify()
    frozen.verify()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g.cuts.append("my::op"), "splitting_ops: added my::op"),
        (lambda g: g.cuts.clear(), "splitting_ops: removed pwcc::attention"),
        (lambda g: g.sizes.append(8), "sizes: added 8"),
        (lambda g: g.args.update(layers=3), "model arguments"),
        (lambda g: g.args["rope"].update(theta=5e5), "model arguments"),
        (lambda g: g.model.add_module("more", nn.Linear(1, 1)), "model tree"),
        (lambda g: g.model.double(), "model tree"),
        (lambda g: setattr(g.model, "forward", lambda x, scale=2.0: x), "model tree"),
    ],
)
def test_what_the_caller_changed_is_named(given: Given, change: Callable[[Given], object], said: str) -> None:
    frozen = given.freeze()
    change(given)
    with pytest.raises(KeyChanged, match="changed while compiling") as caught:
        frozen.verify()
    assert said in caught.value.message
    assert caught.value.hint


def test_a_changed_variable_is_named(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = given.freeze()
    monkeypatch.setenv("HOME", "/elsewhere")  # no factor
    frozen.verify()
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    with pytest.raises(KeyChanged, match="environment/TORCHINDUCTOR_FREEZING: built with nothing, now '1'"):
        frozen.verify()


def test_a_changed_mode_and_a_changed_option_are_named(given: Given) -> None:
    from torch._inductor import config

    frozen = given.freeze()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(KeyChanged, match=r"compiler/numeric state\.deterministic: built with False"):
            frozen.verify()
    finally:
        torch.use_deterministic_algorithms(False)
    with config.patch("cpp.simdlen", 512), pytest.raises(KeyChanged, match=r"cpp\.simdlen"):
        frozen.verify()
    frozen.verify()


def test_modes_of_a_workers_thread_are_not_those_of_the_compile(given: Given) -> None:
    """Autocast is each thread's own; the thread that waits for a worker process has none."""
    with torch.autocast("cpu", dtype=torch.bfloat16), ThreadPoolExecutor(1) as pool:
        frozen = given.freeze()
        pool.submit(frozen.verify).result()
        given.cuts.append("my::op")
        with pytest.raises(KeyChanged, match="my::op"):
            pool.submit(frozen.verify).result()
        given.cuts.pop()
        frozen.verify()
    with pytest.raises(KeyChanged, match=r"autocast\.cpu"):
        frozen.verify()


def test_an_option_that_was_forced_into_the_request_is_named(given: Given) -> None:
    frozen = given.freeze()
    object.__setattr__(frozen.request.options, "max_tokens", 128)
    with pytest.raises(KeyChanged, match=r"options.max_tokens: built with 64, now 128"):
        frozen.verify()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("what", ["splitting op", "variable"])
def test_a_plugin_that_changes_the_request_while_compiling_fails_the_compile(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug 14: a hook appends a splitting op during compile. Nothing lies under the key that was promised."""
    cuts = ["pwcc::attention"]
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "0")

    def plugin(progress: Progress) -> None:
        if progress.stage == "compile":
            if what == "splitting op":
                cuts.append("my::op")
            else:
                os.environ["TORCHINDUCTOR_FREEZING"] = "1"

    def compile_(**options: Any) -> object:
        return precompile(
            nn.Linear(8, 8).eval(),
            cache_dir=tmp_path,
            specs=(parse_declaration("input:float32[n,8]"),),
            sizes=(),
            max_tokens=64,
            device="cpu",
            identity="test",
            splitting_ops=cuts,
            **options,
        )

    with pytest.raises(KeyChanged, match=r"my::op|TORCHINDUCTOR_FREEZING"):
        compile_(on_progress=plugin)
    store = Store.open(tmp_path)
    assert not list(store.entries())
    assert not list((tmp_path / "v1/pieces").glob("*.json"))  # a piece under a key of another environment
    cuts[:] = ["pwcc::attention"]
    with pytest.raises(CacheMiss):
        compile_(frozen=True)
