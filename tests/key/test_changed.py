"""About 25 factors, one changed at a time: a miss, and its explanation names that factor and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pwcc.cache.ids import LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.policy import Policy
from pwcc.cache.requirements import Requirement
from pwcc.cache.store import Store
from pwcc.compile import here, target
from pwcc.compile.input_declarations import parse_declaration
from tests.compile.test_numeric_state import attribute, call
from tests.key import project
from tests.key.conftest import Keyed, model_of, reasons_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]


def only(reasons: Any) -> str:
    """The one reason, of the one entry; it must name one difference."""
    (reason,) = reasons
    assert " more" not in reason, reason
    return str(reason)


# What a load compares: the live model


def change(model: Any, name: str) -> None:
    if name == "eps":
        model.norm.eps = 1e-6
    elif name == "heads":
        model.heads = 4
    elif name == "theta":
        model.theta = 5e5
    elif name == "activation":
        model.act = "relu"
    elif name == "length of a list":
        model.windows.append(3.0)
    elif name == "item of a list":
        model.windows[1] = 2.5
    elif name == "hook":
        model.norm.register_forward_hook(lambda *_: None)
    elif name == "hook of the root":
        model.register_forward_pre_hook(lambda *_: None)
    elif name == "training":
        model.drop.train()
    elif name == "patched forward":
        model.up.forward = lambda x: x
    elif name == "global":
        sys.modules["keyed_consts"].SCALE = 0.75  # type: ignore[attr-defined]
    elif name == "table":
        sys.modules["keyed_model"].ACTS["silu"] = torch.nn.functional.relu


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("eps", "model.norm.eps: compiled with 1e-05, found 1e-06 (relied on at keyed_model.py:"),
        ("heads", "model.heads: compiled with 2, found 4"),
        ("theta", "model.theta: compiled with 10000.0, found 500000.0"),
        ("activation", "model.act: compiled with 'silu', found 'relu'"),
        ("length of a list", "model.windows: compiled with 2 items, found 3 items"),
        ("item of a list", "model.windows[1]: compiled with 2.0, found 2.5"),
        ("hook", "model.norm._forward_hooks: compiled with 0 items, found 1 item"),
        ("hook of the root", "model._forward_pre_hooks: compiled with 0 items, found 1 item"),
        ("training", "model.drop.training: compiled with False, found True"),
        ("patched forward", "model.up: compiled with no attribute 'forward' of its own, found one"),
        ("global", "keyed_consts.SCALE: compiled with 0.25, found 0.75"),
        ("table", "keyed_model.ACTS['silu']: compiled with function torch.nn.functional:silu"),
    ],
)
def test_a_changed_model(keyed: Keyed, model: nn.Module, name: str, said: str) -> None:
    change(model, name)
    assert said in only(reasons_of(lambda: keyed.load(model)))


def test_a_model_without_a_change_is_served(keyed: Keyed, model: nn.Module) -> None:
    """The other tests of this file mean nothing without this one."""
    compiled = keyed.load(model)
    x = torch.randn(5, 8)
    assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert keyed.recompile(model).hit


class Adapter(nn.Module):
    """Wraps a layer, as low-rank adapters do: the same weight under another path."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        return out


def wrap(model: Any) -> None:
    model.up = Adapter(model.up)


@pytest.mark.parametrize(
    ("options", "alter", "said"),
    [
        ({"tied": True}, lambda m: None, "tensor down.weight: compiled with parameter"),
        ({"size": 16}, lambda m: None, "tensor up.weight: compiled with parameter torch.float32 [8, 8], now"),
        ({}, lambda m: m.double(), "tensor up.weight: compiled with parameter torch.float32 [8, 8], now"),
        ({}, lambda m: m.register_buffer("temperature", torch.ones(1)), "tensor temperature"),
        ({}, wrap, ", inside a module that was wrapped around it"),
    ],
    ids=["tying", "size", "dtype", "one more tensor (report 3)", "adapter (report 6)"],
)
def test_another_tree(
    keyed: Keyed,
    module: ModuleType,
    options: dict[str, object],
    alter: Callable[[Any], object],
    said: str,
) -> None:
    other = model_of(module, **options)
    alter(other)
    for ask in (keyed.load, keyed.recompile):
        assert said in reasons_of(lambda: ask(other))[0]  # noqa: B023 (called at once)


PAIRS: list[tuple[str, Callable[[Any], None]]] = [
    ("eps", lambda m: setattr(m.norm, "eps", 1e-2)),
    ("heads", lambda m: setattr(m, "heads", 4)),
    ("theta", lambda m: setattr(m, "theta", 3.0)),
    ("activation", lambda m: setattr(m, "act", "relu")),
    ("length", lambda m: m.windows.append(3.0)),
    ("hook", lambda m: m.norm.register_forward_hook(lambda mod, args, out: out * 2) and None),
    ("train", lambda m: m.drop.train()),
]


@pytest.mark.parametrize("name", [name for name, _ in PAIRS])
def test_pairs_of_equal_parameter_trees_give_different_answers(
    keyed: Keyed, module: ModuleType, name: str
) -> None:
    """Each pair is worth telling apart: equal weights, and eager differs."""
    one, other = model_of(module), model_of(module)
    dict(PAIRS)[name](other)
    assert [(n, p.shape) for n, p in one.named_parameters()] == [
        (n, p.shape) for n, p in other.named_parameters()
    ]
    x = torch.randn(6, 8)
    torch.manual_seed(1)
    assert not torch.allclose(one(x), other(x), atol=1e-6)
    reasons_of(lambda: keyed.load(other))
    reasons_of(lambda: keyed.recompile(other))
    assert keyed.load(one).manifest.entry_key == keyed.entry


# What a load compares: the process


MODES: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "default dtype": (
        lambda: call(torch.set_default_dtype, torch.float64, torch.float32),
        "default_dtype: compiled with 'torch.float32', now 'torch.float64'",
    ),
    "deterministic": (
        lambda: call(torch.use_deterministic_algorithms, True, False),
        "deterministic: compiled with False, now True",
    ),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast.cpu: compiled with False, now 'torch.bfloat16'",
    ),
    "sdpa": (
        lambda: call(torch.backends.cuda.enable_flash_sdp, False, True),
        "sdpa.flash: compiled with True, now False",
    ),
    "cudnn": (
        lambda: attribute(torch.backends.cudnn, "deterministic", True),
        "cudnn.deterministic: compiled with False, now True",
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_a_numeric_mode(keyed: Keyed, model: nn.Module, name: str) -> None:
    enter, said = MODES[name]
    with enter():
        reason = only(reasons_of(lambda: keyed.load(model)))
    assert said in reason
    assert reason.count("compiled with") == 1, reason


PRECISION = """
import sys, torch
from pathlib import Path
from pwcc.cache.errors import CacheMiss
import pwcc
sys.path.insert(0, sys.argv[1])
import keyed_model
torch.manual_seed(0)
model = keyed_model.Tiny().eval().requires_grad_(False)
exec(sys.argv[3])
try:
    pwcc.load(model, cache_dir=sys.argv[2], tag="first")
except CacheMiss as miss:
    print(" ".join(miss.reasons))
else:
    print("HIT")
"""


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "torch.set_float32_matmul_precision('highest'); torch.backends.mkldnn.conv.fp32_precision = 'ieee'",
            "HIT",
        ),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "fp32_precision.cuda.matmul: compiled with 'ieee'"),
    ],
)
def test_float32_precision_through_either_api(keyed: Keyed, statement: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", PRECISION, str(keyed.root), str(keyed.cache), statement],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said in done.stdout
    assert done.stdout.count("compiled with") == (said != "HIT")


# What a load compares: the host and what was asked for


def forged(keyed: Keyed, root: Path, alter: Callable[[Manifest], Manifest]) -> Path:
    """A copy of the cache whose entry's manifest says something else."""
    shutil.copytree(keyed.cache, root)
    store = Store.open(root)
    (ref,) = store.entries()
    ref.manifest.write_bytes(alter(store.read_manifest(ref)).serialise())
    return root


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        (Requirement("cpu_flags", ("avx1024",)), "avx1024"),
        (Requirement("torch", "9.9.9 abc"), "9.9.9"),
        (Requirement("machine", "pdp11"), "pdp11"),
        (Requirement("python_abi", "cpython-399"), "cpython-399"),
    ],
)
def test_a_host_that_is_not_like_the_builder(
    keyed: Keyed, model: nn.Module, tmp_path: Path, requirement: Requirement, said: str
) -> None:
    def alter(manifest: Manifest) -> Manifest:
        kept = [item for item in manifest.requirements if item.kind != requirement.kind]
        return replace(manifest, requirements=(*kept, requirement))

    root = forged(keyed, tmp_path / "cache", alter)
    from pwcc.cache.errors import HostMismatch

    with pytest.raises(HostMismatch) as caught:
        keyed.load(model, root)
    assert said in only(caught.value.reasons)


def test_another_torch_build(keyed: Keyed, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the lookup key, so the entry is found as the nearest one."""
    for module in (target, here):
        monkeypatch.setattr(module, "torch_build", lambda: "9.9.9 0123")
    from pwcc.cache.errors import HostMismatch

    with pytest.raises(HostMismatch) as caught:
        keyed.load(model)
    assert ": torch: expected " in only(caught.value.reasons)
    assert "got 9.9.9 0123" in only(caught.value.reasons)


def test_another_tag(keyed: Keyed, model: nn.Module) -> None:
    for tag in ("second", None):
        reason = only(reasons_of(lambda: keyed.load(model, tag=tag)))  # noqa: B023 (called at once)
        assert "tag" in reason
        assert "'first'" in reason


def test_another_profile_or_entry(keyed: Keyed, model: nn.Module) -> None:
    assert "profile: expected 'fast', got None" in only(reasons_of(lambda: keyed.load(model, profile="fast")))
    said = only(reasons_of(lambda: keyed.load(model, entry="0000")))
    assert "entry: expected a key that starts with '0000'" in said


# Sources: what a load compares with files on disk


EDITS: dict[str, tuple[str, str, str]] = {
    "a: the model's file": ("keyed_model.py", "(-1).view(x.shape)", "(-1).view(x.shape) * 2"),
    "b: a helper two calls deep": ("farther/inner.py", "x + 3.0", "x + 4.0"),
    "c: a method of a base class": ("keyed_base.py", "x + 0.5", "x + 0.75"),
    "d: a decorator": ("keyed_deco.py", "* 2.0", "* 3.0"),
    "e: a constant that is only imported": ("keyed_consts.py", "0.25", "0.75"),
    "f: a file the model reads": ("settings.json", "1.5", "2.5"),
}
NAMED = {"e": "keyed_consts.SCALE", "f": "model.gain"}
"""What names the change where a value says more than its file."""


@pytest.fixture
def copied(keyed: Keyed, tmp_path: Path) -> Iterator[Path]:
    """A copy of the project in another place."""
    root = tmp_path / "elsewhere"
    shutil.copytree(keyed.root, root)
    yield root
    project.forget()


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_source(keyed: Keyed, copied: Path, name: str) -> None:
    file, old, new = EDITS[name]
    project.edit(copied, file, old, new)
    with project.imported(copied) as module:
        reason = reasons_of(lambda: keyed.load(model_of(module)))[0]
    assert NAMED.get(name[0], Path(file).name) in reason
    others = {Path(other).name for other, _, _ in EDITS.values()} - {Path(file).name}
    assert not [other for other in others if f"{other} changed" in reason], reason


def test_a_changed_comment_is_a_changed_source(keyed: Keyed, copied: Path) -> None:
    """g of the reports: content decides, not meaning; a comment costs a compile, never a wrong answer."""
    project.edit(copied, "keyed_base.py", "x + 0.5", "x + 0.5  # half")
    with project.imported(copied) as module:
        assert "keyed_base.py changed" in only(reasons_of(lambda: keyed.load(model_of(module))))


# What only a compile compares


COMPILES: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": ({"sizes": (2, 4)}, "configuration/options.sizes"),
    "max tokens": ({"max_tokens": 128}, "configuration/options.max_tokens"),
    "splitting op": ({"splitting_ops": ("other::op",)}, "configuration/options.splitting_ops"),
    "autotune": ({"autotune": True}, "configuration/options.autotune"),
    "isa": ({"cpu_baseline": "native"}, "configuration/options.cpu_baseline"),
    "passes": ({"passes": "none"}, "configuration/options.passes"),
    "custom operators": ({"custom_ops": "+rms_norm"}, "configuration/options.custom_ops"),
    "profile": ({"profile": "fast"}, "configuration/options.profile"),
    "inputs": ({"specs": (parse_declaration("x:float64[n,8]"),)}, "configuration/options.inputs[0]"),
    "arguments": ({"args": {"layers": 2}}, "configuration/model arguments.layers"),
    "identity": ({"identity": "file:other.py:factory"}, "configuration/model"),
    "policy": ({"policy": Policy.of(include=["MYAPP_*"])}, "configuration/environment policy.include"),
}


@pytest.mark.parametrize("name", COMPILES)
def test_another_request(keyed: Keyed, model: nn.Module, name: str) -> None:
    options, path = COMPILES[name]
    reason = only(reasons_of(lambda: keyed.recompile(model, **options)))
    assert f"{path}: built with" in reason
    assert reason.count("built with") == 1, reason


def test_another_tag_of_a_compile(keyed: Keyed, model: nn.Module) -> None:
    assert "tag" in only(reasons_of(lambda: keyed.recompile(model, tag="second")))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCHINDUCTOR_MAX_FUSION_SIZE", "2"),
        ("TORCH_COMPILE_SOMETHING_NEW", "1"),
        ("TRITON_ALLOW_SOMETHING", "1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_a_variable_that_changes_code(
    keyed: Keyed, model: nn.Module, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    reason = only(reasons_of(lambda: keyed.recompile(model)))
    assert f"environment/{variable}: built with nothing, now '{value}'" in reason
    assert reason.count("built with") == 1, reason


def test_an_option_of_inductor(keyed: Keyed, model: nn.Module) -> None:
    from torch._inductor import config

    with ExitStack() as stack:
        stack.enter_context(config.patch("cpp.simdlen", 512))
        reason = only(reasons_of(lambda: keyed.recompile(model)))
    assert "compiler/config changes.torch._inductor.config.cpp.simdlen: built with nothing, now '512'" in reason


def test_an_entry_of_another_device_is_not_taken(keyed: Keyed, model: nn.Module, tmp_path: Path) -> None:
    """An entry that was moved under another lookup key by hand serves nobody (bug 11)."""
    root = tmp_path / "cache"
    shutil.copytree(keyed.cache, root)
    store = Store.open(root)
    (ref,) = store.entries()
    elsewhere = store.entry_ref(LookupKey("0" * 32), ref.entry_key)
    elsewhere.path.parent.mkdir(parents=True)
    ref.path.rename(elsewhere.path)
    reasons_of(lambda: keyed.load(model, root))
