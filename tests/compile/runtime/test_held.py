from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pwcc.cache.errors import CacheMiss
from pwcc.compile.runtime.calling import Weight
from pwcc.compile.runtime.held import bind_weights, named_tensors

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        self.shared = nn.Linear(4, 4)
        self.again = self.shared
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("absent", None)
        self.plain = torch.ones(3, 4).t()


def weight(
    name: str, *others: str, dtype: str = "float32", shape: tuple[int, ...], stride: tuple[int, ...]
) -> Weight:
    return Weight((name, *others), dtype, shape, stride)


WEIGHTS = [
    weight("embed.weight", "head.weight", shape=(10, 4), stride=(4, 1)),
    weight("shared.bias", "again.bias", shape=(4,), stride=(1,)),
    weight("scratch", shape=(4,), stride=(1,)),
    weight("plain", shape=(4, 3), stride=(1, 4)),
]


def test_every_name_of_every_tensor() -> None:
    model = Model()
    found = dict(named_tensors(model))
    assert set(found) == {
        "embed.weight",
        "head.weight",
        "head.bias",
        "shared.weight",
        "shared.bias",
        "again.weight",
        "again.bias",
        "kept",
        "scratch",
        "plain",
    }
    assert found["embed.weight"] is found["head.weight"] is model.embed.weight
    assert found["again.bias"] is model.shared.bias


def test_binding_gives_the_live_memory() -> None:
    model = Model()
    bound = bind_weights(dict(named_tensors(model)), WEIGHTS, CPU)
    live = [model.embed.weight, model.shared.bias, model.scratch, model.plain]
    for tensor, held in zip(bound, live, strict=True):
        assert isinstance(held, torch.Tensor)
        assert tensor.data_ptr() == held.data_ptr()
        assert not tensor.requires_grad
    with torch.no_grad():
        model.shared.bias.fill_(5)
    assert bound[1].eq(5).all()


def test_rebinding_after_the_tensors_are_replaced() -> None:
    model = Model()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model.head.weight = model.embed.weight
    (first,) = bind_weights(dict(named_tensors(model)), WEIGHTS[:1], CPU)
    assert first.data_ptr() == model.embed.weight.data_ptr()


def untied(model: Model) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def untied_view(model: Model) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach()[:5])


def gone(model: Model) -> None:
    del model.scratch


def unset(model: Model) -> None:
    model._buffers["scratch"] = None


def twin_gone(model: Model) -> None:
    del model.again


def other_dtype(model: Model) -> None:
    model.scratch = torch.ones(4, dtype=torch.float64)


def other_shape(model: Model) -> None:
    model.scratch = torch.ones(5)


def other_layout(model: Model) -> None:
    model.plain = model.plain.contiguous()


def on_meta(model: Model) -> None:
    model.scratch = torch.ones(4, device="meta")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (untied, "'embed.weight' and 'head.weight' were one tensor"),
        (untied_view, "'embed.weight' and 'head.weight' were one tensor"),
        (gone, "'scratch' in the model, found none"),
        (unset, "'scratch' in the model, found none"),
        (twin_gone, "'shared.bias' and 'again.bias' were one tensor"),
        (other_dtype, r"'scratch': expected float32 \(4,\), got float64 \(4,\)"),
        (other_shape, r"'scratch': expected float32 \(4,\), got float32 \(5,\)"),
        (other_layout, r"'plain': expected stride \(1, 4\), got \(3, 1\)"),
        (on_meta, "'scratch': expected it on cpu, got meta"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_mismatch_names_the_tensor(change: Callable[[Model], None], words: str) -> None:
    model = Model()
    change(model)
    with pytest.raises(CacheMiss, match=words):
        bind_weights(dict(named_tensors(model)), WEIGHTS, CPU)


def test_one_tensor_as_two_parameter_objects() -> None:
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    bind_weights(dict(named_tensors(model)), WEIGHTS, CPU)


def test_strides_of_single_and_empty_dimensions_are_free() -> None:
    model = nn.Module()
    model.one = torch.ones(1, 4).as_strided((1, 4), (99, 1))
    model.none = torch.ones(0, 4).as_strided((0, 4), (99, 7))
    wanted = [weight("one", shape=(1, 4), stride=(4, 1)), weight("none", shape=(0, 4), stride=(4, 1))]
    bind_weights(dict(named_tensors(model)), wanted, CPU)
    with pytest.raises(CacheMiss, match="'one': expected stride"):
        bind_weights(dict(named_tensors(model)), [replace(wanted[0], stride=(4, 2))], CPU)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
        self.pairs = [(torch.zeros(2), torch.ones(2)), (torch.zeros(3), None)]
        self.tables = {"a": torch.ones(4), 7: [torch.zeros(1)], "deep": [[[torch.zeros(1)]]]}
        self.names = ["a", "b"]
        self.many = [0] * 10_000


def test_tensors_in_containers_have_names() -> None:
    model = Containers()
    found = dict(named_tensors(model))
    assert list(found) == [
        "pairs[0][0]",
        "pairs[0][1]",
        "pairs[1][0]",
        "tables['a']",
        "tables[7][0]",
        "layers.0.weight",
    ]
    assert found["pairs[0][1]"] is model.pairs[0][1]


def test_a_wrapped_tensor_is_named_where_it_is_now() -> None:
    class Adapter(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.lora = nn.Linear(4, 4)

    model = nn.Sequential(Adapter(nn.Linear(4, 4)))
    wanted = weight("0.weight", shape=(4, 4), stride=(4, 1))
    with pytest.raises(CacheMiss, match=r"'0.weight'.*found none; it may be '0.base_layer.weight' now"):
        bind_weights(dict(named_tensors(model)), [wanted], CPU)


def test_what_holds_no_values_is_named() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    wanted = weight("weight", shape=(2, 2), stride=(2, 1))
    held = {"weight": torch.zeros(2, 2, device="meta")}
    with pytest.raises(CacheMiss, match="'weight': expected it on cpu, got meta") as raised:
        bind_weights(held, [wanted], CPU)
    assert "load_state_dict" in str(raised.value.hint)
    held = {"weight": FakeTensorMode().from_tensor(torch.zeros(2, 2))}
    with pytest.raises(CacheMiss, match="'weight' is a fake tensor, which holds no values"):
        bind_weights(held, [wanted], CPU)


class Quantised(torch.Tensor):
    """A weight that says float32 and holds something else."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Quantised:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.float32)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> Any:
        raise NotImplementedError


def test_a_weight_that_computes_in_its_own_way_is_named() -> None:
    wanted = weight("weight", shape=(2, 2), stride=(2, 1))
    held = {"weight": Quantised(torch.zeros(2, 2, dtype=torch.int8))}
    with pytest.raises(CacheMiss, match="'weight' is a Quantised here"):
        bind_weights(held, [wanted], CPU)
