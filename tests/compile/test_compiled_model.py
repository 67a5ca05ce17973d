"""A loaded model is called like the module: same answers, live weights, and refusals by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import pwcc
from pwcc.cache.errors import ArgumentError, CacheMiss, CallError, SizeError, UnsealableError, UsageError
from pwcc.compile.compiled_model import CompiledModel
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.models.llama import Llama, LlamaConfig
from pwcc.compile.precompile import precompile
from tests.conftest import Warm

pytestmark = [
    pytest.mark.slow,
    # what Inductor's own modules say while they are imported
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

Loaded = tuple[Llama, CompiledModel]


def llama_of(**config: object) -> Llama:
    torch.manual_seed(1)
    return Llama(LlamaConfig(**{"layers": 2, **config})).eval()  # type: ignore[arg-type]


def inputs(size: int) -> tuple[Tensor, Tensor]:
    return torch.arange(size) * 31 % 512, torch.arange(size)


@torch.no_grad()
def eager(model: nn.Module, size: int) -> Tensor:
    result: Tensor = model(*inputs(size))
    return result


def agrees(model: Llama, compiled: CompiledModel, size: int) -> bool:
    return torch.allclose(compiled(*inputs(size)), eager(model, size), rtol=1e-4, atol=1e-5)


@pytest.fixture
def loaded(llama: Warm) -> Loaded:
    model = llama_of()
    return model, pwcc.load(model, cache_dir=llama.root)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 33, 200])
def test_static_and_dynamic_sizes_equal_eager(loaded: Loaded, size: int) -> None:
    model, compiled = loaded
    result = compiled(*inputs(size))
    assert result.shape == (size, 512)
    assert result.dtype == torch.float32
    assert not result.requires_grad
    torch.testing.assert_close(result, eager(model, size), rtol=1e-4, atol=1e-5)


def test_the_library_and_pwcc_key_use_the_cache_that_the_variable_names(
    llama: Warm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWCC_CACHE_DIR", str(llama.root))
    assert pwcc.load(llama_of()).manifest.entry_key == llama.report["entry_key"]
    shown = llama.machine.pwcc_json("key", *llama.model, PWCC_CACHE_DIR=str(llama.root))
    assert shown["entry_key"] == llama.report["entry_key"]
    monkeypatch.setenv("PWCC_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(CacheMiss) as caught:
        pwcc.precompile(llama_of(), sizes=(1, 2), frozen=True)
    assert caught.value.where == str(tmp_path / "empty")


@pytest.mark.parametrize("grad", [True, False])
def test_an_error_while_a_piece_runs_names_the_entry(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, grad: bool
) -> None:
    _, compiled = loaded

    def fails(tensors: object, sizes: object) -> tuple[object, ...]:
        raise torch.OutOfMemoryError("no memory for 8 GiB")

    (program,) = compiled.programs
    monkeypatch.setitem(program.by_size, 3, fails)
    with torch.set_grad_enabled(grad), pytest.raises(torch.OutOfMemoryError, match="8 GiB") as caught:
        compiled(*inputs(3))
    (note,) = caught.value.__notes__
    assert note == f"while running pwcc entry {compiled.manifest.entry_key} (builtin:llama-tiny)"
    with pytest.raises(CallError) as refused:
        compiled(*inputs(0))
    assert not hasattr(refused.value, "__notes__")


def test_a_static_variant_is_preferred(loaded: Loaded) -> None:
    _, compiled = loaded
    (program,) = compiled.programs
    dynamic, one, two = (variant.run for variant in program.variants)
    assert [program.select(size) for size in (1, 2, 3, 8192)] == [one, two, dynamic, dynamic]


def test_calls_are_independent(loaded: Loaded) -> None:
    """Outputs are fresh tensors: a later call does not overwrite an earlier one's answer."""
    _, compiled = loaded
    first = compiled(*inputs(2))
    kept = first.clone()
    compiled(torch.zeros(2, dtype=torch.int64), torch.arange(2))
    assert torch.equal(first, kept)


def test_keywords_and_the_largest_size(loaded: Loaded) -> None:
    _, compiled = loaded
    ids, positions = inputs(3)
    wanted = compiled(ids, positions)
    assert torch.equal(compiled(input_ids=ids, positions=positions), wanted)
    assert torch.equal(compiled(ids, positions=positions), wanted)
    assert compiled(*inputs(8192)).shape == (8192, 512)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(loaded: Loaded, mode: Callable[[], torch.no_grad]) -> None:
    model, compiled = loaded
    wanted = eager(model, 5)
    assert any(parameter.requires_grad for parameter in model.parameters())
    with mode():
        result = compiled(*inputs(5))
    assert not result.requires_grad
    assert result.grad_fn is None
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ((torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)), SizeError, "size 0"),
        ((torch.zeros(8193, dtype=torch.int64), torch.zeros(8193, dtype=torch.int64)), SizeError, "8193"),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)), CallError, "positions"),
        ((torch.zeros(2, dtype=torch.int32), torch.arange(2)), ArgumentError, "int32"),
        ((torch.zeros(2, 2, dtype=torch.int64), torch.arange(2)), ArgumentError, "input_ids"),
        ((torch.zeros(2, dtype=torch.int64),), ArgumentError, "positions"),
        ((torch.zeros(2, dtype=torch.int64), None), ArgumentError, "positions"),
        ((torch.zeros(2, dtype=torch.int64), torch.arange(2), 1), ArgumentError, "2"),
        ((torch.zeros(2, dtype=torch.int64, device="meta"), torch.arange(2)), ArgumentError, "meta"),
        ((torch.zeros(4, dtype=torch.int64)[::2], torch.arange(2)), ArgumentError, "stride"),
    ],
)
def test_wrong_calls_are_refused_by_name(
    loaded: Loaded, args: tuple[object, ...], error: type[CallError], said: str
) -> None:
    model, compiled = loaded
    with pytest.raises(error) as caught:
        compiled(*args)
    assert said in str(caught.value)
    assert agrees(model, compiled, 2)


def test_an_unknown_keyword_is_refused(loaded: Loaded) -> None:
    _, compiled = loaded
    with pytest.raises(ArgumentError, match="mask"):
        compiled(*inputs(2), mask=None)


# Weights


def test_in_place_updates_are_seen_at_once(loaded: Loaded) -> None:
    model, compiled = loaded
    before = compiled(*inputs(2))
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    torch.testing.assert_close(compiled(*inputs(2)), 2 * before, rtol=1e-4, atol=1e-5)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})  # copies in place
    assert agrees(model, compiled, 2)


@pytest.mark.parametrize("way", ["assign", "data", "parameter"])
def test_replaced_tensors_are_seen_after_rebind(loaded: Loaded, way: str) -> None:
    model, compiled = loaded
    before = compiled(*inputs(3))
    if way == "assign":
        model.load_state_dict({n: v.clone() * 0.5 for n, v in model.state_dict().items()}, assign=True)
    elif way == "data":
        model.lm_head.weight.data = model.lm_head.weight.data * 0.5
    else:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    compiled.rebind()
    assert agrees(model, compiled, 3)
    assert agrees(model, compiled, 2)
    assert not torch.allclose(before, compiled(*inputs(3)))


@pytest.mark.parametrize("way", ["assign", "parameter"])
def test_replaced_tensors_that_are_gone_are_noticed(loaded: Loaded, way: str) -> None:
    model, compiled = loaded
    before = compiled(*inputs(3))
    if way == "assign":
        model.load_state_dict({n: v.clone() * 0.5 for n, v in model.state_dict().items()}, assign=True)
    else:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    assert agrees(model, compiled, 3)  # without rebind()
    assert not torch.allclose(before, compiled(*inputs(3)))
    model.lm_head.weight = nn.Parameter(torch.zeros(100, 128))
    with pytest.raises(CacheMiss, match=r"lm_head\.weight"):
        compiled(*inputs(3))


def test_a_rebind_that_does_not_fit_keeps_the_old_binding(loaded: Loaded) -> None:
    model, compiled = loaded
    before = compiled(*inputs(2))
    old = model.lm_head.weight
    for wrong, said in (
        (nn.Parameter(torch.zeros(100, 128)), "100"),
        (nn.Parameter(torch.zeros(512, 128, dtype=torch.float64)), "float64"),
        (nn.Parameter(torch.zeros(512, 128, device="meta")), "meta"),
        (nn.Parameter(torch.zeros(128, 512).t()), "stride"),
    ):
        model.lm_head.weight = wrong
        with pytest.raises(CacheMiss) as caught:
            compiled.rebind()
        assert "lm_head.weight" in str(caught.value)
        assert said in str(caught.value)
        assert torch.equal(compiled(*inputs(2)), before)
    model.lm_head.weight = old
    compiled.rebind()


def test_a_rebind_checks_the_model_again(loaded: Loaded) -> None:
    model, compiled = loaded
    model.layers[0].get_submodule("input_norm").__dict__["eps"] = 0.5
    with pytest.raises(CacheMiss, match=r"input_norm\.eps"):
        compiled.rebind()


def test_a_call_in_another_autocast_state_is_refused(loaded: Loaded) -> None:
    model, compiled = loaded
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match="autocast is on"):
        compiled(*inputs(3))
    assert agrees(model, compiled, 3)


def test_a_call_in_autocast_to_another_dtype_is_refused(loaded: Loaded) -> None:
    model, plain = loaded
    with torch.autocast("cpu", torch.bfloat16):
        compiled = CompiledModel(model, plain.device, plain.manifest, plain.programs, plain.read_blob)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ArgumentError, match=r"to torch\.float16, and was"),
    ):
        compiled(*inputs(3))
    with torch.autocast("cpu", torch.bfloat16):
        compiled.bind(inputs(3), {})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(loaded: Loaded, copied: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match="cannot be copied or pickled"):
        copied(loaded[1])


def test_a_parameter_that_requires_gradients_is_refused_in_grad_mode(tmp_path: Path) -> None:
    model = Passing().eval()
    pwcc.precompile(model, cache_dir=tmp_path / "cache", inputs=["x:float32[n,8]"], max_tokens=4)
    compiled = pwcc.load(model, cache_dir=tmp_path / "cache")
    x = nn.Parameter(torch.ones(3, 8))
    with pytest.raises(ArgumentError, match="an argument requires gradients"):
        compiled(x)
    with torch.no_grad():
        assert compiled(x)[0] is x
        assert torch.equal(compiled(x)[1], torch.full((3, 8), 2.0))


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1))  # says on which device the model lies

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


def test_a_global_hook_of_the_server_is_a_miss(llama: Warm) -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(CacheMiss) as caught:
            pwcc.load(llama_of(), cache_dir=llama.root)
    finally:
        handle.remove()
    assert "global hooks" in caught.value.reasons[0]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.lin(x), 0.5, training=True)


def test_random_numbers_are_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(UnsealableError, match="draws random numbers") as caught:
        pwcc.precompile(Dropping().eval(), cache_dir=tmp_path, max_tokens=4, inputs=["x:float32[n,8]"])
    assert "test_compiled_model.py" in str(caught.value.where)
    assert not list((tmp_path / "v1" / "entries").iterdir())


def test_weights_are_bound_and_not_copied(loaded: Loaded) -> None:
    model, compiled = loaded
    held = {parameter.data_ptr() for parameter in model.parameters()}
    (program,) = compiled.programs
    assert {weight.data_ptr() for weight in program.weights} == held


def test_tied_weights(llama: Warm, tmp_path: Path) -> None:
    """The tie is part of the model tree, the pieces are those of the untied model: nothing is compiled."""
    root = llama.copy(tmp_path / "cache")
    built = build(ModelRef.parse("llama-tiny"), args={"layers": 2, "tied": True})
    report = precompile(
        built.module,
        cache_dir=root,
        specs=input_specs(built.module),
        sizes=(1, 2),
        max_tokens=8192,
        device="cpu",
        identity=built.identity,
        args=built.args,
    )
    assert report.counters.compiles == 0
    model = llama_of(tied=True)
    compiled = pwcc.load(model, cache_dir=root)
    assert compiled.manifest.entry_key == report.entry_key
    for size in (1, 2, 9):
        assert agrees(model, compiled, size)
    with torch.no_grad():
        model.embed.weight.add_(0.1)
    assert agrees(model, compiled, 4)
    model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())  # untied: another model
    with pytest.raises(CacheMiss) as caught:
        compiled.rebind()
    assert "lm_head.weight" in str(caught.value)


# Gradients


class Scaled(nn.Module):
    """Float input, so that an argument can require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scaled, CompiledModel]:
    torch.manual_seed(0)
    model = Scaled().eval()
    root = tmp_path_factory.mktemp("scaled") / "cache"
    pwcc.precompile(
        model, cache_dir=root, inputs=["x:float32[n,8]"], splitting_ops=[], cpu_baseline="x86-64-v3"
    )
    return model, pwcc.load(model, cache_dir=root)


def test_an_argument_that_requires_gradients_is_refused(scaled: tuple[Scaled, CompiledModel]) -> None:
    model, compiled = scaled
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(ArgumentError, match="requires gradients") as caught:
        compiled(x)
    assert "detach" in (caught.value.hint or "")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x.detach()), model(x).detach())
    assert not compiled(x.detach()).requires_grad


def test_check_without_a_split_and_without_model_inputs(scaled: tuple[Scaled, CompiledModel]) -> None:
    _, compiled = scaled
    report = compiled.check()
    assert report.ok
    assert [(row.what, row.size) for row in report.rows] == [("piece 0 dynamic", size) for size in (1, 2, 64)]


def test_torch_compile_around_a_loaded_model_leaves_it_as_it_is(loaded: Loaded) -> None:
    model, compiled = loaded
    around = torch.compile(lambda ids, positions: compiled(ids, positions + 0) * 2, backend="eager")
    with torch.no_grad():
        assert torch.equal(around(*inputs(7)), compiled(*inputs(7)) * 2)
        assert torch.equal(torch.compile(compiled, backend="eager")(*inputs(7)), compiled(*inputs(7)))
    assert agrees(model, compiled, 3)
