"""What a decorator leaves as it is, when it stays eager, and what it refuses; nothing is compiled here."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pwcc
from pwcc.cache.errors import CacheMiss, UsageError
from pwcc.compile.call import STATE, eager_region
from pwcc.compile.decorator_phase import Phase
from pwcc.compile.levels import CompileConfig, CompileLevel, compile_config, configure
from tests.compile.decorated import Affine, Batch, Decorated, Outer, Plain

X = torch.ones(3, 8)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever tries to load finds nothing, and nothing may be compiled."""
    monkeypatch.setenv("PWCC_CACHE_DIR", str(tmp_path / "empty"))
    configure(mode="load")
    yield
    configure()


def plus_one(module: nn.Module, args: object, output: Any) -> Any:
    return output + 1


def phase(module: nn.Module) -> Phase:
    return pwcc.compile_state(module).phase


def test_the_class_and_its_modules_are_what_they_were() -> None:
    module = Decorated().eval()
    assert isinstance(module, Decorated)
    assert isinstance(module, Affine)
    assert type(module).__qualname__ == "Decorated"
    assert list(module.state_dict()) == ["scale", "shift"]
    assert [name for name, _ in module.named_parameters()] == ["scale"]
    assert [name for name, _ in module.named_modules()] == [""]
    assert torch.equal(module.forward(X), Affine().forward(X))
    module.load_state_dict({"scale": torch.zeros(8), "shift": torch.ones(8)})
    assert torch.equal(module.forward(X), torch.ones(3, 8))
    assert phase(module) is Phase.NEW


def test_undecorated_classes_are_not_touched() -> None:
    assert type(Affine()).__call__ is nn.Module.__call__
    assert not hasattr(Affine(), "compile_state")
    assert STATE not in vars(Affine())


def test_level_0_is_the_module_as_it_is() -> None:
    module = Plain()
    module.scale.requires_grad_(True)
    out = module(X)
    assert out.requires_grad
    assert torch.equal(out, module.forward(X))
    found: Any = module.compile_state
    assert (found.phase, found.level, found.is_compiled) == (Phase.EAGER, CompileLevel.NO_COMPILATION, False)
    module.register_forward_hook(plus_one)
    assert torch.equal(module(X), module.forward(X) + 1)


def test_the_environment_chooses_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWCC_LEVEL", "no_compilation")
    module = Decorated().eval()
    assert torch.equal(module(X), module.forward(X))
    assert phase(module) is Phase.EAGER


def test_a_miss_in_mode_load_is_the_error_of_each_call() -> None:
    module = Decorated().eval()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(CacheMiss, match="no entry"):
            module(X)
    assert phase(module) is Phase.NEW


def test_frozen_means_that_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(mode="load-or-compile", first_call="wait")
    monkeypatch.setenv("PWCC_FROZEN", "1")
    with torch.no_grad(), pytest.raises(CacheMiss):
        Decorated().eval()(X)
    with pytest.raises(CacheMiss, match="no entry"):
        pwcc.precompile(Decorated().eval(), inputs=["x:float32[n,8]"])


def test_disabled_means_that_no_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PWCC_DISABLE", "1")
    for use in (
        lambda: pwcc.load(Affine().eval()),
        lambda: pwcc.precompile(Affine().eval(), inputs=["x:float32[n,8]"]),
    ):
        with pytest.raises(UsageError, match="PWCC_DISABLE is on") as caught:
            use()
        assert type(caught.value).__name__ == "CacheDisabled"
    assert not (tmp_path / "empty").exists()


def test_bad_switches_are_told_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWCC_RECACHE", "often")
    with torch.no_grad(), pytest.raises(UsageError, match="expected PWCC_RECACHE to be 1 or 0"):
        Decorated().eval()(X)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pwcc"]


def test_training_hooks_and_gradients_run_eagerly_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pwcc")
    module = Decorated()
    assert module.training
    for _ in range(3):
        assert torch.equal(module(X), module.forward(X))
    module.eval()
    handle = module.register_forward_hook(plus_one)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(X), module.forward(X) + 1)
    handle.remove()
    module.scale.requires_grad_(True)
    for _ in range(3):
        out = module(X)
        out.sum().backward()
    assert module.scale.grad is not None
    assert phase(module) is Phase.NEW, "nothing was looked up"
    first, second, third = said(caplog)
    assert "training mode" in first
    assert "hooks" in second
    assert "gradients" in third


def test_global_hooks_run(caplog: pytest.LogCaptureFixture) -> None:
    module = Decorated().eval()
    handle = nn.modules.module.register_module_forward_hook(plus_one)
    try:
        with torch.no_grad():
            assert torch.equal(module(X), module.forward(X) + 1)
    finally:
        handle.remove()


def test_an_argument_that_requires_gradients_runs_eagerly() -> None:
    module = Decorated().eval()
    x = X.clone().requires_grad_(True)
    module(x).sum().backward()
    assert x.grad is not None


def test_inside_an_eager_region_modules_are_part_of_what_is_around() -> None:
    module = Outer().eval()
    with torch.no_grad(), eager_region():
        assert torch.equal(module(X), Outer(Affine)(X))
    assert (phase(module.first), phase(module.last)) == (Phase.NEW, Phase.NEW)
    with torch.no_grad(), pytest.raises(CacheMiss):
        module(X)


def test_enabled_if_is_asked_once_after_the_constructor() -> None:
    asked: list[int] = []

    def wanted(module: Any) -> bool:
        asked.append(module.width)
        return bool(module.width > 8)

    @pwcc.support_compile(enabled_if=wanted)
    class Chosen(Affine):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.width = width

    small, large = Chosen(8).eval(), Chosen(16).eval()
    assert asked == [8, 16]
    with torch.no_grad():
        assert torch.equal(small(X), small.forward(X))
        with pytest.raises(CacheMiss):
            large(torch.ones(3, 16))
        twin = copy.deepcopy(small)
        assert torch.equal(twin(X), small.forward(X))
    assert asked == [8, 16], "a copy is asked nothing"
    small.half()
    assert phase(small) is Phase.EAGER


def test_the_context_at_construction_counts_at_the_first_call() -> None:
    with compile_config(level=0):
        module = Decorated().eval()
    with torch.no_grad():
        assert torch.equal(module(X), module.forward(X))
    assert phase(module) is Phase.EAGER


def test_copies_and_pickles_are_new() -> None:
    with compile_config(level=0):
        module = Decorated().eval()
    with torch.no_grad():
        module(X)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    others = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
        copy.copy(module),
    ]
    for other in others:
        assert phase(other) is Phase.NEW
        assert vars(other)[STATE] is not vars(module)[STATE]
        with torch.no_grad():
            assert torch.equal(other(X), module.forward(X)), "the context of its construction came along"
    assert phase(module) is Phase.EAGER


def test_moving_a_module_or_what_is_around_it_gives_up_what_was_loaded() -> None:
    outer = nn.Sequential(Plain().eval())
    inner: Any = outer[0]
    outer(X)
    assert phase(inner) is Phase.EAGER
    outer.double()
    assert phase(inner) is Phase.NEW
    assert inner.scale.dtype is torch.float64
    assert torch.equal(outer(X.double()), inner.forward(X.double()))


def test_subclasses_are_served_too_and_the_lowest_decoration_counts() -> None:
    class Child(Decorated):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask) + 1

    @pwcc.support_compile(level=0)
    class Grandchild(Child):
        pass

    with torch.no_grad(), pytest.raises(CacheMiss):
        Child().eval()(X)
    module = Grandchild().eval()
    with torch.no_grad():
        assert torch.equal(module(X), Affine().forward(X) + 1)
    assert phase(module) is Phase.EAGER


def test_a_module_made_without_its_constructor_works() -> None:
    module = Plain.__new__(Plain)
    nn.Module.__init__(module)
    module.scale, module.shift = nn.Parameter(torch.ones(8)), torch.zeros(8)
    assert torch.equal(module(X), X)


class Calls(nn.Module):
    def __call__(self, *args: Any) -> Any:
        return None


class Named(nn.Module):
    compile_state = 3


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Calls, "Calls has a __call__ of its own"),
        (Named, "Named has a compile_state of its own"),
        (Decorated, "Decorated is decorated twice"),
        (Batch, "expected a class of torch.nn.Module"),
        (3, "expected a class of torch.nn.Module"),
    ],
)
def test_what_cannot_be_decorated(cls: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pwcc.support_compile(cls)


def test_options_that_do_not_exist_and_arguments_that_do_not() -> None:
    with pytest.raises(UsageError, match="unknown option 'colour'"):
        pwcc.support_compile(colour="red")
    with pytest.raises(UsageError, match="expected a compile level"):
        pwcc.support_compile(level=9)
    with pytest.raises(UsageError, match="forward has no parameter 'idz'"):
        pwcc.support_compile(dynamic_arg_dims={"idz": 0})(type("New", (Affine,), {}))


def test_options_win_over_a_configuration() -> None:
    cls: Any = pwcc.support_compile(config=CompileConfig(level=3, tag="a"), level=0)(type("New", (Affine,), {}))
    module = cls()
    module(X)
    assert phase(module) is Phase.EAGER


def test_waiting_for_nothing_and_for_what_is_not_decorated() -> None:
    assert pwcc.wait_for_compile(Decorated()).phase is Phase.NEW
    with pytest.raises(TypeError, match="Affine is not decorated"):
        pwcc.wait_for_compile(Affine())
