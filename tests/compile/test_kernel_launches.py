"""Triton kernels of a model's own code: found again by name, their source in the digest; sealed on a GPU."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import pwcc
from pwcc.cache.errors import CorruptEntry, TraceError, UnsealableError
from pwcc.compile import kernel_launches
from pwcc.compile.runtime import user_kernels as runtime
from pwcc.compile.runtime.portable import NotPortable, attempt, describe, show
from pwcc.compile.runtime.targets import resolve_target, target_name
from pwcc.compile.torch_private import operators, writes
from pwcc.compile.torch_private.fake_run import run_on_fakes
from pwcc.compile.torch_private.user_kernels import codes, is_kernel, jitted, source_digest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.compile import user_kernel_parts, user_kernels

NAME = "tests.compile.user_kernels:shift"
KERNEL = """
import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr({step})

@triton.jit
def inner(x):
    return x {operation} 2

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x_ptr + places, inner(tl.load(x_ptr + places)) + STEP)
"""


def kernel_of(tmp_path: Path, name: str, *, step: int = 1, operation: str = "*") -> Any:
    path = tmp_path / f"{name}.py"
    path.write_text(KERNEL.format(step=step, operation=operation))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def test_a_name_leads_to_a_kernel_that_is_imported_and_to_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.find(NAME) is user_kernels.shift
    for name in ("os:system", "tests.compile.user_kernels:Launches", "not_there:kernel", "", "tabnanny:check"):
        with pytest.raises(CorruptEntry, match="not in this process"):
            runtime.find(name)
    assert "tabnanny" not in sys.modules
    lazy = types.ModuleType("lazy_kernels")
    monkeypatch.setattr(lazy, "__getattr__", lambda name: pytest.fail(f"asked for {name}"), raising=False)
    monkeypatch.setitem(sys.modules, "lazy_kernels", lazy)
    with pytest.raises(CorruptEntry):
        runtime.find("lazy_kernels:kernel")


def test_kernels_under_autotune_are_seen_through() -> None:
    assert is_kernel(user_kernels.tuned)
    assert jitted(user_kernels.tuned).__name__ == "tuned"
    assert not is_kernel(user_kernels.Launches)
    assert {code.co_name for code in codes(user_kernels.shift)} == {"shift", "doubled"}


def test_the_digest_is_of_the_source_and_what_it_calls(tmp_path: Path) -> None:
    same = {source_digest(kernel_of(tmp_path, name)) for name in ("one", "two")}
    others = {
        source_digest(kernel_of(tmp_path, "step", step=2)),
        source_digest(kernel_of(tmp_path, "called", operation="+")),
    }
    assert len(same) == 1
    assert len(same | others) == 3
    assert source_digest(user_kernels.tuned) != source_digest(jitted(user_kernels.tuned))  # its configurations


def test_a_kernel_is_compared_by_name_source_and_configurations(tmp_path: Path) -> None:
    for folder in ("built", "served", "edited"):
        (tmp_path / folder).mkdir()
    built, served = (kernel_of(tmp_path / folder, "model") for folder in ("built", "served"))
    described = describe(built)
    assert attempt(served) == described
    assert str(tmp_path) not in repr(described)
    others = [kernel_of(tmp_path / "edited", "model", step=2), kernel_of(tmp_path, "other"), user_kernels.tuned]
    assert all(attempt(other) != described for other in others)
    assert attempt(user_kernels.tuned) != attempt(jitted(user_kernels.tuned))
    assert re.fullmatch(r"kernel model:kernel with source [0-9a-f]{12}", show(described))


def test_a_kernel_whose_source_is_lost_has_no_portable_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(user_kernels.shift), "cache_key", property(lambda _: 1 / 0))
    with pytest.raises(NotPortable, match="a Triton kernel whose source cannot be read: ZeroDivisionError"):
        describe(user_kernels.shift)


def test_another_source_under_the_name_is_refused() -> None:
    with pytest.raises(CorruptEntry, match="is not the one that was compiled"):
        runtime.launch(kernel=NAME, digest="0" * 32, constants={}, grid=[(1, 1, 1)], arguments={}, written=[])


def test_the_launch_is_an_operation_that_a_piece_may_name_and_no_pass_may_drop() -> None:
    assert target_name(runtime.launch) == "pwcc.compile.runtime.user_kernels.launch"
    assert resolve_target("pwcc.compile.runtime.user_kernels.launch") is runtime.launch
    for name in (
        "pwcc.compile.runtime.user_kernels.find",
        "pwcc.load",
        "pwcc.compile.runtime.user_kernels.sys",
    ):
        with pytest.raises(CorruptEntry):
            resolve_target(name)
    graph = fx.Graph()
    graph.call_function(runtime.launch, kwargs={"kernel": NAME})
    graph.output(())
    graph.eliminate_dead_code()
    assert [node.op for node in graph.nodes] == ["call_function", "output"]


@pytest.mark.parametrize("build", [user_kernels.Launches, user_kernels.Counts])
def test_a_run_on_fake_tensors_launches_nothing(build: Any) -> None:
    model, run = build(), type(user_kernels.shift).run
    assert run_on_fakes(model, [torch.ones(3, 8)], {}, []) == ""
    assert type(user_kernels.shift).run is run
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), build().buffers(), strict=True))


def test_what_a_launch_writes_is_written() -> None:
    graph = fx.Graph()
    read, written = graph.placeholder("read"), graph.placeholder("written")
    tensors = [torch.zeros(2), torch.zeros(2)]
    for node, tensor in zip((read, written), tensors, strict=True):
        node.meta["example_value"] = tensor
    graph.call_function(
        runtime.launch, kwargs={"arguments": {"a": read, "b": written}, "written": ["b"], "kernel": NAME}
    )
    assert writes.written(graph, dict(enumerate(tensors))) == {1}


def test_the_sources_of_a_launch_and_of_a_triton_op_include_the_kernels_of_other_modules() -> None:
    graph = fx.Graph()
    graph.call_function(runtime.launch, kwargs={"kernel": NAME})
    files = {code.co_filename for code in kernel_launches.kernel_codes(graph)}
    behind = {code.co_filename for code in operators.behind(["pwcckernels::shifted"]).codes}
    assert files == {user_kernels.__file__, user_kernel_parts.__file__}
    assert files <= behind


def test_a_kernel_without_a_module_level_name_is_refused(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, "hidden")  # its module is not in sys.modules

    class Launch:
        pass

    launch: Any = Launch()
    launch.kernel = kernel
    with pytest.raises(UnsealableError, match="'hidden:kernel' cannot be found again by that name"):
        kernel_launches._name(launch, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for hosts without a GPU")
@pytest.mark.parametrize("build", [user_kernels.Launches, user_kernels.Counts])
def test_a_launch_on_a_host_without_a_gpu_is_refused_by_name(build: Any, traced: Any) -> None:
    with pytest.raises(
        TraceError, match="launches a Triton kernel, which cannot be traced in a process without"
    ):
        traced(build(), max_tokens=16, ops=())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what the compilers say on a GPU is shown, not judged
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", [user_kernels.Launches, user_kernels.Counts, user_kernels.Looked])
def test_sealed_launches_equal_eager_on_a_gpu(build: Any, tmp_path: Path) -> None:
    model, eager = build().cuda().eval(), build().cuda().eval()
    pwcc.precompile(
        model, cache_dir=tmp_path, inputs=["x:float32[n,8]"], sizes=[4], max_tokens=64, splitting_ops=(), jobs=1
    )
    compiled = pwcc.load(model, cache_dir=tmp_path)
    for size in (4, 1, 33, 64):
        x = torch.randn(size, 8, device="cuda")
        with torch.no_grad():
            wanted, got = eager(x.clone()), compiled(x.clone())
        for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, wanted)), strict=True):
            torch.testing.assert_close(one, other)
    if build is user_kernels.Counts:
        torch.testing.assert_close(model.state, eager.state)
