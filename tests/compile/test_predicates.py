"""Guards of real traces: carried, covered or refused by name; and violated by name where a model differs."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pwcc.cache.errors import UnsealableError
from pwcc.compile.guard_table import GUARDS, Refused, rows
from pwcc.compile.predicates import Collected, collect
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.torch_private.guards import GuardView, guard_types
from pwcc.compile.torch_private.sources import KNOWN_SOURCES, source_types
from tests.conftest import REPOSITORY

MODEL = """
import enum
import os

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 0.5
TABLE = {"gain": 2.0}


class Act(enum.Enum):
    SILU = 1
    RELU = 2


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OtherNorm(Norm):
    pass


def closure(bias):
    def add(x):
        return x + bias

    return add


class Layer(nn.Module):
    def __init__(self, size, index, heads, theta, eps):
        super().__init__()
        self.norm = Norm(size, eps)
        self.linear = nn.Linear(size, size, bias=False)
        self.drop = nn.Dropout(0.1)
        self.index, self.heads, self.theta = index, heads, theta
        self.act = Act.SILU
        self.windows = [4, 8]
        self.add = closure(1.0)

    def forward(self, x):
        y = self.linear(self.norm(x)).view(x.shape[0], self.heads, -1) * self.theta
        for window in self.windows:
            y = y + window
        if hasattr(self, "extra"):
            y = y + 1
        if self.act is Act.SILU:
            y = F.silu(y)
        return self.drop(x + self.add(y.view(x.shape)) * (SCALE + self.index))


class Model(nn.Module):
    def __init__(self, layers=2, size=8, heads=2, theta=10000.0, eps=1e-5):
        super().__init__()
        self.embed = nn.Embedding(16, size)
        self.layers = nn.ModuleList(Layer(size, i, heads, theta, eps) for i in range(layers))
        self.head = nn.Linear(size, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(me, ids, flag=True):
        x = me.embed(ids) * TABLE["gain"]
        if os.environ.get("PWCC_TEST_SECRET") == "hunter2":
            x = x + 1
        for layer in me.layers:
            x = layer(x)
        return me.head(x) if flag else x
"""


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pwcc_guarded", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pwcc_guarded"] = module
    spec.loader.exec_module(module)
    return module


def trace_guards(model: nn.Module, args: tuple[Any, ...]) -> Collected:
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    torch._dynamo.reset()
    with torch.no_grad(), get_metrics_context(), dynamo_timed("capture"):
        out: Any = convert_frame.fullgraph_capture(model.forward, args, {})
    captured = out.graph_capture_output
    names = model.forward.__func__.__code__.co_varnames  # type: ignore[attr-defined]
    return collect(
        list(captured.output_graph.guards),
        model=model,
        local_scope=dict(zip(names, (model, *args), strict=False)),
        global_scope=captured.f_globals,
    )


@pytest.fixture(scope="session")
def guarded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guarded") / "pwcc_guarded.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="session")
def guarded(guarded_file: Path) -> ModuleType:
    return load_module(guarded_file)


@pytest.fixture(scope="session")
def collected(guarded: ModuleType) -> Collected:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PWCC_TEST_SECRET", "hunter2")
        return trace_guards(guarded.Model().eval(), (torch.arange(4),))


@pytest.fixture(scope="session")
def predicates(collected: Collected) -> PredicateSet:
    return PredicateSet.from_json(PredicateSet.of(collected.predicates).to_json())


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWCC_TEST_SECRET", "hunter2")


def test_table_covers_every_guard_type_of_this_torch() -> None:
    assert sorted(set(guard_types()) - set(GUARDS)) == []


def test_what_the_table_has_beyond_this_torch_is_of_a_later_one() -> None:
    """And nothing that this torch has is marked as later: the versions in the table are right."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    since = {name: tuple(map(int, text.split("."))) for name, _, text in rows()}
    assert {name for name, first in since.items() if first <= version} == set(guard_types())


def test_the_guide_shows_the_table_as_it_is() -> None:
    text = (REPOSITORY / "docs/guards.md").read_text()
    lines = [f"| `{name}` | {how} | {since} |" for name, how, since in rows()]
    shown = [line for line in text.splitlines() if re.match(r"\| `[A-Z_]+` \|", line)]
    assert shown == lines


def test_every_source_class_of_this_torch_has_steps_or_a_reason() -> None:
    assert sorted(set(source_types()) - KNOWN_SOURCES) == []


def test_every_guard_is_carried_or_covered(collected: Collected) -> None:
    assert collected.guards > 100
    assert set(collected.covers()) <= {
        "shapes", "numeric", "inference", "argument", "tree", "builtin", "compiler",
    }  # fmt: skip
    assert collected.covers()["tree"] > 0
    assert collected.covers()["argument"] >= 1


def test_a_second_instance_passes(guarded: ModuleType, predicates: PredicateSet) -> None:
    assert predicates.check(guarded.Model().eval()) == []


def test_the_same_guards_give_the_same_bytes_in_any_order(collected: Collected) -> None:
    backwards = PredicateSet.of(reversed(collected.predicates))
    assert backwards.to_json() == PredicateSet.of(collected.predicates).to_json()


def test_nothing_of_the_machine_is_stored(collected: Collected, guarded_file: Path) -> None:
    stored = PredicateSet.of(collected.predicates).to_json().decode()
    assert str(guarded_file.parent) not in stored
    assert sys.prefix not in stored
    assert "hunter2" not in stored
    assert "0x7f" not in stored


def change(name: str) -> Callable[[nn.Module], None]:
    def apply(model: Any) -> None:
        layer = model.layers[1]
        if name == "hook":
            layer.norm.register_forward_hook(lambda *a: None)
        elif name == "root hook":
            model.register_forward_pre_hook(lambda *a: None)
        elif name == "train":
            model.train()
        elif name == "longer list":
            layer.windows.append(16)
        elif name == "list item":
            layer.windows[1] = 9
        elif name == "added attribute":
            layer.extra = 1
        elif name == "patched forward":
            layer.norm.forward = lambda x: x
        elif name == "bias":
            layer.linear.bias = nn.Parameter(torch.zeros(8))
        elif name == "other class":
            layer.norm = sys.modules["pwcc_guarded"].OtherNorm(8, 1e-5)
        elif name == "broken tie":
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        elif name == "enum":
            layer.act = type(layer.act).RELU
        elif name == "closure cell":
            layer.add = sys.modules["pwcc_guarded"].closure(2.0)
        elif name == "other function":
            layer.add = lambda x: x
        elif name == "int for float":
            layer.theta = 10000
        elif name == "longer model":
            model.layers.append(copy.deepcopy(layer))
        elif name == "no layer":
            del model.layers[1]

    return apply


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("hook", "model.layers.1.norm._forward_hooks: compiled with 0 items, found 1 item"),
        ("root hook", "model._forward_pre_hooks: compiled with 0 items, found 1 item"),
        ("train", "model.layers.0.drop.training: compiled with False, found True"),
        ("longer list", "model.layers.1.windows: compiled with 2 items, found 3 items"),
        ("list item", "model.layers.1.windows[1]: compiled with 8, found 9"),
        ("added attribute", "model.layers.1: compiled with no attribute 'extra', found one"),
        ("patched forward", "model.layers.1.norm: compiled with no attribute 'forward' of its own, found one"),
        ("bias", "model.layers.1.linear._parameters['bias']: compiled with None, found"),
        ("other class", ".norm: compiled with type pwcc_guarded:Norm, found type pwcc_guarded:OtherNorm"),
        ("broken tie", "compiled with the same object as model."),
        ("enum", ".act: compiled with enum pwcc_guarded:Act SILU 1, found enum pwcc_guarded:Act RELU 2"),
        ("closure cell", "model.layers.1.add.__closure__[0].cell_contents: compiled with 1.0, found 2.0"),
        ("other function", "model.layers.1.add: compiled with function pwcc_guarded:closure.<locals>.add"),
        ("int for float", "model.layers.1.theta: compiled with 10000.0, found 10000 "),
        ("longer model", "model.layers._modules"),
        ("no layer", "model.layers.1: compiled with it present, found no submodule"),
    ],
)  # fmt: skip
def test_a_changed_model_is_named(guarded: ModuleType, predicates: PredicateSet, name: str, path: str) -> None:
    model = guarded.Model().eval()
    change(name)(model)
    found = [str(violation) for violation in predicates.check(model, limit=1000)]
    assert any(path in text for text in found), found


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        (
            "eps",
            1e-6,
            "model.layers.0.norm.eps: compiled with 1e-05, found 1e-06 (relied on at pwcc_guarded.py:",
        ),
        ("heads", 4, "model.layers.0.heads: compiled with 2, found 4"),
        ("theta", 500000.0, "model.layers.1.theta: compiled with 10000.0, found 500000.0"),
    ],
)
def test_another_configuration_is_named(
    guarded: ModuleType, predicates: PredicateSet, argument: str, value: float, text: str
) -> None:
    found = [str(v) for v in predicates.check(guarded.Model(**{argument: value}).eval())]
    assert any(item.startswith(text) for item in found), found


def test_a_changed_global_is_named(
    guarded: ModuleType, predicates: PredicateSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "SCALE", 0.25)
    monkeypatch.setitem(guarded.TABLE, "gain", 3.0)
    found = [str(v) for v in predicates.check(guarded.Model().eval())]
    assert any(text.startswith("pwcc_guarded.SCALE: compiled with 0.5, found 0.25") for text in found), found
    assert any(text.startswith("pwcc_guarded.TABLE['gain']: compiled with 2.0, found 3.0") for text in found)


def test_a_changed_environment_variable_is_named_without_its_value(
    guarded: ModuleType, predicates: PredicateSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWCC_TEST_SECRET", "other")
    found = [str(v) for v in predicates.check(guarded.Model().eval())]
    assert any("PWCC_TEST_SECRET" in text for text in found), found
    assert not any("hunter2" in text or "other'" in text for text in found)


def test_a_fresh_process_without_dynamo_agrees(
    guarded_file: Path, predicates: PredicateSet, tmp_path: Path
) -> None:
    stored = tmp_path / "predicates.json"
    stored.write_bytes(predicates.to_json())
    script = f"""
        import json, pathlib, sys
        sys.path.insert(0, {str(guarded_file.parent)!r})
        import torch
        from pwcc.compile.runtime.predicates import PredicateSet
        before = set(sys.modules)
        import pwcc_guarded
        loaded = PredicateSet.from_json(pathlib.Path({str(stored)!r}).read_bytes())
        same = loaded.check(pwcc_guarded.Model().eval())
        other = loaded.check(pwcc_guarded.Model(eps=1e-6).eval())
        heavy = [n for n in sys.modules if n in ("torch._dynamo", "torch._inductor", "triton", "sympy")]
        print(json.dumps([[str(v) for v in same], len(other), heavy]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], 2, []]


@pytest.mark.parametrize("kind", ["TENSOR_SUBCLASS_METADATA_MATCH", "A_GUARD_OF_TOMORROW", "WEAKREF_ALIVE"])
def test_what_cannot_be_carried_is_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pwcc.compile import predicates as subject

    guard = GuardView(kind, "L['self'].x", None, where="/home/someone/model.py:3")
    monkeypatch.setattr(subject, "views", lambda guards: [guard])
    with pytest.raises(UnsealableError, match=rf"guard {kind} on L\['self'\].x") as error:
        collect([], model=nn.Linear(1, 1), local_scope={}, global_scope={})
    assert error.value.where == "/home/someone/model.py:3"


def test_every_refusal_gives_a_reason() -> None:
    assert all(item.reason for item in GUARDS.values() if isinstance(item, Refused))


@pytest.fixture(scope="session")
def qwen() -> Callable[..., nn.Module]:
    transformers = pytest.importorskip("transformers")

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            masks = {"full_attention": None, "sliding_attention": None}
            out: torch.Tensor = self.inner(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_mask=masks
            ).logits[0]
            return out

    def build(eps: float = 1e-6) -> nn.Module:
        config = transformers.Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, rms_norm_eps=eps, tie_word_embeddings=True,
        )  # fmt: skip
        inner = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return Wrapper(inner).eval()

    return build


@pytest.mark.hf
def test_every_guard_of_a_hugging_face_decoder_is_carried_or_covered(qwen: Callable[..., nn.Module]) -> None:
    found = trace_guards(qwen(), (torch.arange(4), torch.arange(4)))
    assert found.guards > 400
    assert set(found.covers()) <= {
        "shapes", "numeric", "inference", "argument", "tree", "builtin", "compiler", "registry",
    }  # fmt: skip
    predicates = PredicateSet.of(found.predicates)
    assert predicates.check(qwen()) == []
    violated = [str(v) for v in predicates.check(qwen(eps=1e-5))]
    assert len(violated) == 9  # 2 layers x 4 norms, and the last
    assert (
        "model.inner.model.layers.0.input_layernorm.variance_epsilon: compiled with 1e-06, found 1e-05"
        in (violated[0])
    )


@pytest.mark.hf
def test_other_models_in_the_process_do_not_matter(qwen: Callable[..., nn.Module]) -> None:
    """transformers registers each model class it builds; the size of that registry says nothing."""
    import transformers

    found = PredicateSet.of(trace_guards(qwen(), (torch.arange(4), torch.arange(4))).predicates)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config)
    assert found.check(qwen()) == []


# Hooks


def doubling(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def with_kwargs(module: nn.Module, args: object, kwargs: object, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def before(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + 3,)


def scaled(by: float) -> Callable[..., torch.Tensor]:
    def hook(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * by

    return hook


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x))
        return out


def hooked(*names: str, ids: int = 0) -> Hooked:
    """A model with hooks, in a process where ``ids`` hooks were registered before."""
    for _ in range(ids):
        nn.Identity().register_forward_hook(doubling)
    model = Hooked().eval()
    for name in names:
        if name == "doubling":
            model.one.register_forward_hook(doubling)
        elif name == "kwargs":
            model.one.register_forward_hook(with_kwargs, with_kwargs=True)
        elif name == "before":
            model.two.register_forward_pre_hook(before)
        elif name == "always":
            model.one.register_forward_hook(doubling, always_call=True)
        elif name.startswith("scaled"):
            model.one.register_forward_hook(scaled(float(name.split()[1])))
    return model


HOOKS = ("doubling", "kwargs", "before", "scaled 0.5")


@pytest.fixture(scope="session")
def of_hooks() -> PredicateSet:
    found = trace_guards(hooked(*HOOKS), (torch.randn(3, 4),))
    assert found.covers()["hooks"] > 0
    return PredicateSet.from_json(PredicateSet.of(found.predicates).to_json())


def test_hooks_are_compared_without_the_ids_of_a_process(of_hooks: PredicateSet) -> None:
    """In another process, or later in this one, the same hooks have other ids."""
    assert of_hooks.check(hooked(*HOOKS, ids=7)) == []
    assert of_hooks.check(hooked(*HOOKS, ids=3)) == []


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("doubling", "kwargs", "scaled 0.5"),
        ("kwargs", "doubling", "before", "scaled 0.5"),
        ("doubling", "kwargs", "before", "scaled 0.25"),
        ("always", "kwargs", "before", "scaled 0.5"),
        ("doubling", "kwargs", "before", "scaled 0.5", "doubling"),
        ("doubling", "doubling", "before", "scaled 0.5"),
    ],
    ids=["none", "one less", "another order", "another closure", "called otherwise", "one more", "another"],
)
def test_other_hooks_are_another_model(of_hooks: PredicateSet, names: tuple[str, ...]) -> None:
    found = [str(violation) for violation in of_hooks.check(hooked(*names))]
    assert any("hook" in text for text in found), found
