"""What of a forward's arguments is dynamic, and what its first call tells of all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, UsageError
from pwcc.compile.decorator_dims import FirstCall, dynamic_dims
from pwcc.compile.input_forms import ContainerSpec
from tests.compile.decorated import Batch


class Form(nn.Module):
    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        bias: Optional[Tensor] = None,  # noqa: UP045 (the older spelling counts, too)
        scale: float = 1.0,
        table: Any = None,
    ) -> Tensor:
        return ids


def with_batch(self: object, batch: Batch, count: int) -> None: ...


def test_annotations_tell_the_first_dimension() -> None:
    assert dynamic_dims(Form().forward, None) == {"ids": {0: "n"}, "mask": {0: "n"}, "bias": {0: "n"}}


def test_fields_of_a_dataclass_of_tensors() -> None:
    assert dynamic_dims(with_batch, None) == {"batch.ids": {0: "n"}, "batch.positions": {0: "n"}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"ids": 0}, {"ids": {0: "n"}}),
        ({"ids": [0, -1], "table": 1}, {"ids": {0: "n", -1: "n"}, "table": {1: "n"}}),
        ({"ids": {0: "tokens", 1: "heads"}}, {"ids": {0: "tokens", 1: "heads"}}),
        ({}, {}),
    ],
)
def test_overrides(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert dynamic_dims(Form().forward, given) == wanted


@pytest.mark.parametrize(
    "given", [{"idz": 0}, {"ids": "0"}, {"ids": [0, "1"]}, {"ids": {0: "a b"}}, {"ids": True}]
)
def test_overrides_that_mean_nothing_are_refused(given: Mapping[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"idz|expected dynamic_arg_dims\['ids'\]"):
        dynamic_dims(Form().forward, given)


def test_nothing_annotated_and_annotations_that_cannot_be_read() -> None:
    def bare(x, y): ...  # type: ignore[no-untyped-def]

    def broken(x: Missing): ...  # type: ignore[name-defined, no-untyped-def] # noqa: F821

    with pytest.raises(UsageError, match="no argument of forward is annotated as a Tensor"):
        dynamic_dims(bare, None)
    with pytest.raises(UsageError, match="annotations of forward cannot be read: NameError"):
        dynamic_dims(broken, None)


def first(*args: object, dims: Any = None, model: nn.Module | None = None, **kwargs: object) -> FirstCall:
    model = model or Form()
    return FirstCall.of(model, dynamic_dims(model.forward, dims), args, kwargs)


def shown(found: FirstCall) -> list[str]:
    return [str(spec) for spec in found.specs]


def test_a_first_call_as_forms_of_its_arguments() -> None:
    found = first(torch.zeros(5, 3, dtype=torch.int64), None, bias=torch.zeros(5))
    assert shown(found) == ["ids:int64[n,3]", "mask=None", "bias:float32[n]"]
    assert found.nones == {"ids": False, "mask": True, "bias": False, "scale": False, "table": True}
    assert shown(first(torch.zeros(5), None, scale=2.0)) == ["ids:float32[n]", "mask=None", "scale=2.0"]


class Batched(nn.Module):
    def forward(self, batch: Batch, *, last: bool = False) -> Tensor:
        return batch.ids


def test_a_dataclass_of_tensors_by_its_leaves() -> None:
    batch = Batch(torch.zeros(5, dtype=torch.int64), None, "a")
    found = first(batch, model=Batched(), last=True)
    container, last = found.specs
    assert isinstance(container, ContainerSpec)
    assert [str(leaf) for leaf in container.leaves] == [
        "batch.ids:int64[n]",
        "batch.positions=None",
        "batch.name='a'",
    ]
    assert str(last) == "last=True"
    found.require_same_nones((batch,), {})
    with pytest.raises(ArgumentError, match=r"'batch.positions' was None at the first call and is a value now"):
        found.require_same_nones((Batch(batch.ids, batch.ids, "a"),), {})


def test_sizes_of_one_name_are_one_and_others_have_names_of_their_own() -> None:
    dims = {"ids": {0: "t", 1: "k"}, "table": {0: "k"}}
    found = first(torch.zeros(5, 7), None, table=torch.zeros(7), dims=dims)
    assert shown(found) == ["ids:float32[n,k]", "mask=None", "table:float32[k]"]
    with pytest.raises(UsageError, match="dimension 0 of 'bias' is 4 and that of 'ids' is 5"):
        first(torch.zeros(5), None, torch.zeros(4))
    with pytest.raises(UsageError, match="has no dimension 2: it has 2"):
        first(torch.zeros(5, 3), None, dims={"ids": 2})


def test_what_pieces_cannot_take_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match="argument 'table': expected a tensor, None, a finite scalar or a container"
    ):
        first(torch.zeros(5), None, table=object())


def test_a_call_that_forward_refuses_is_refused_as_it_would() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        first(torch.zeros(5), None, colour=1)


def test_none_is_for_life() -> None:
    found = first(torch.zeros(5), None)
    found.require_same_nones((torch.zeros(9), None), {})
    found.require_same_nones((torch.zeros(9),), {"mask": None})
    found.require_same_nones((torch.zeros(9), None), {"scale": 1.0, "table": object()})
    with pytest.raises(ArgumentError, match="'mask' was None at the first call and is a value now"):
        found.require_same_nones((torch.zeros(9), torch.zeros(9)), {})
    with pytest.raises(ArgumentError, match="'bias' was None at the first call"):
        found.require_same_nones((torch.zeros(9),), {"mask": None, "bias": torch.zeros(9)})
    with pytest.raises(ArgumentError, match="'ids' was a value at the first call and is None now"):
        found.require_same_nones((None, None), {})
