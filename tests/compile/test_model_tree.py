"""The model as rows: what changes the digest and what does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from pwcc.cache.errors import ModelError
from pwcc.compile.model_tree import ModelTree, identity, model_tree


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("cache", torch.ones(size), persistent=False)
        self.table = torch.arange(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SameShape(Block):
    pass


class Model(nn.Module):
    def __init__(self, layers: int = 2, size: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        self.embed = nn.Embedding(size, size)
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight = self.embed.weight


def test_rows_name_kind_shape_dtype_and_tie() -> None:
    rows = {row.name: row for row in model_tree(Model(1)).tensors}
    assert list(rows) == [
        "blocks.0.scale", "blocks.0.cache", "blocks.0.table", "blocks.0.linear.weight", "blocks.0.linear.bias",
        "embed.weight", "head.weight",
    ]  # fmt: skip
    assert rows["blocks.0.scale"].to_json() == ["blocks.0.scale", "buffer", "torch.float32", [4], "", ""]
    assert rows["blocks.0.cache"].kind == "scratch buffer"
    assert rows["blocks.0.table"].to_json()[1:4] == ["attribute", "torch.int64", [4]]
    assert rows["head.weight"].tied_to == "embed.weight"
    assert rows["embed.weight"].tied_to == ""


def test_identity_is_the_class() -> None:
    assert identity(nn.Linear(1, 1)) == "torch.nn.modules.linear:Linear"


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(4, 4))


def patch_forward(model: Any) -> None:
    model.blocks[1].forward = lambda x: x


def set_class(model: Any) -> None:
    model.blocks[1] = SameShape(4)


def make_strided(model: Any) -> None:
    model.blocks[0].linear.weight = nn.Parameter(torch.ones(4, 8)[:, ::2])


CHANGES: dict[str, Callable[[Any], object]] = {
    "dtype": lambda m: m.blocks[0].half(),
    "untied": untie,
    "class": set_class,
    "patched forward": patch_forward,
    "no bias": lambda m: m.blocks[0].linear.register_parameter("bias", None),
    "persistence": lambda m: m.blocks[0].register_buffer("cache", torch.ones(4)),
    "attribute shape": lambda m: setattr(m.blocks[0], "table", torch.arange(5)),
    "strides": make_strided,
    "renamed": lambda m: m.add_module("tail", m._modules.pop("head")),
    "order": lambda m: m.add_module("embed", m._modules.pop("embed")),
    "added module": lambda m: m.add_module("extra", nn.Identity()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_changes_the_digest(name: str) -> None:
    model = Model()
    before = model_tree(model).digest()
    CHANGES[name](model)
    assert model_tree(model).digest() != before


def test_values_devices_and_modes_do_not() -> None:
    before = model_tree(Model()).digest()
    other = Model().eval()
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    assert model_tree(other).digest() == before


def test_meta_and_fake_parameters_give_the_same_digest() -> None:
    def bare() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4), nn.BatchNorm1d(4))

    before = model_tree(bare()).digest()
    with torch.device("meta"):
        assert model_tree(bare()).digest() == before
    with FakeTensorMode():
        assert model_tree(bare()).digest() == before


def test_a_class_whose_forward_was_patched_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_tree(Model())
    monkeypatch.setattr(Block, "forward", nn.Identity.forward)
    after = model_tree(Model())
    assert after.digest() != before.digest()
    assert {row.forward for row in after.modules if row.name == "blocks.0"} == {
        "torch.nn.modules.linear:Identity.forward"
    }


def test_three_hundred_parameters_take_milliseconds() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(150)))
    model_tree(model).digest()
    start = time.perf_counter()
    tree = model_tree(model)
    tree.digest()
    assert time.perf_counter() - start < 0.1  # 2 ms measured
    assert isinstance(tree, ModelTree)
    assert len(tree.tensors) == 300


def test_a_lazy_module_that_never_ran_is_named() -> None:
    with pytest.raises(ModelError, match=r"parameter '0.weight' has no shape yet"):
        model_tree(nn.Sequential(nn.LazyLinear(4)))
    ran = nn.Sequential(nn.LazyLinear(4))
    ran(torch.zeros(2, 3))
    assert [row.shape for row in model_tree(ran).tensors] == [(4, 3), (4,)]
