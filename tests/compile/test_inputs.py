from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import UsageError
from pwcc.compile.input_declarations import parse_declaration, parse_tensor
from pwcc.compile.input_forms import Fill, InputSpec
from pwcc.compile.input_values import make_inputs
from pwcc.compile.inputs import input_specs as any_specs
from pwcc.compile.models.llama import PRESETS, Llama


def input_specs(module: nn.Module, **options: Any) -> tuple[InputSpec, ...]:
    """The specs of a module that takes tensors only."""
    found = any_specs(module, **options)
    assert all(isinstance(spec, InputSpec) for spec in found)
    return cast("tuple[InputSpec, ...]", found)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.kinds = nn.Embedding(20, 8)

    def forward(
        self, input_ids: Tensor, hidden: Tensor, flag: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        return self.tokens(input_ids) + hidden  # type: ignore[no-any-return]


class IdsOnly(nn.Module):
    def forward(self, token_ids: Tensor, position_ids: Tensor, bias: Tensor | None = None) -> Tensor:
        return token_ids + position_ids


def test_annotations_of_the_reference_model() -> None:
    specs = input_specs(Llama(PRESETS["llama-tiny"]))
    assert [str(spec) for spec in specs] == ["input_ids:int64[n]", "positions:int64[n]"]
    assert (specs[0].fill, specs[0].high, specs[0].token_dims) == (Fill.INTEGERS, 512, (0,))
    assert specs[1].fill is Fill.ARANGE
    ids, positions = make_inputs(specs, 200, seed=4)
    assert ids.dtype is positions.dtype is torch.int64
    assert 0 <= int(ids.min()) < int(ids.max()) < 512
    assert torch.equal(positions, torch.arange(200))


def test_annotations_leave_out_defaults_and_refuse_to_guess() -> None:
    assert [spec.name for spec in input_specs(IdsOnly())] == ["token_ids", "position_ids"]
    with pytest.raises(UsageError, match="cannot tell what to pass as 'hidden'") as caught:
        input_specs(Net())
    assert "--input 'hidden:float32[n,WIDTH]'" in str(caught.value)

    class Untyped(nn.Module):
        def forward(self, input_ids):  # type: ignore[no-untyped-def]
            return input_ids

    class Nothing(nn.Module):
        def forward(self, flag: bool = False) -> None: ...

    with pytest.raises(UsageError, match="not annotated as a Tensor"):
        input_specs(Untyped())
    with pytest.raises(UsageError, match="no required tensor argument"):
        input_specs(Nothing())


def test_declarations() -> None:
    specs = input_specs(Net(), declarations=["hidden : float32 [n, 8]", "input_ids:int64[n]"])
    assert [str(spec) for spec in specs] == ["input_ids:int64[n]", "hidden:float32[n,8]"]
    assert specs[0].high == 20  # valid in whichever table it indexes
    ids, hidden = make_inputs(specs, 3)
    assert (ids.shape, hidden.shape, hidden.dtype) == ((3,), (3, 8), torch.float32)
    assert str(parse_declaration("x:bfloat16[2,n]@cuda:1")) == "x:bfloat16[2,n]@cuda:1"
    assert parse_tensor("x:bool[]").shape == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input_ids", "cannot read the input declaration"),
        ("input_ids:int64", "expected name:dtype[sizes]"),
        ("input_ids:int65[n]", "did you mean"),
        ("input_ids:int64[m-1]", "size 'm-1'"),
        ("input_ids:int64[n<=4]", "size 'n<=4'"),
        ("input_ids:int64[n,3<=m<=2]", "the lower first"),
        ("flag=maybe", "a string in quotes"),
        ("flag=inf", "expected None, true"),
        ("input_ids:int64[n,0]", "size '0'"),
        ("input_ids:int64[n,]", "size ''"),
        ("input_ids:int64[-1]", "size '-1'"),
    ],
)
def test_bad_declarations(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_declaration(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (["ids:int64[n]"], "did you mean input_ids"),
        (["input_ids:int64[n]"], "also takes hidden"),
        (["input_ids:int64[n]", "input_ids:int64[n]"], "declared twice"),
        (["input_ids:int64[m]", "hidden:float32[4,8]"], "no token count"),
        (["input_ids:int64[n,m<=4]", "hidden:float32[m<=5,8]"], "two ranges"),
    ],
)
def test_declarations_must_fit_forward(declared: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        input_specs(Net(), declarations=declared)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "examples",
    [
        lambda n: (torch.arange(n) % 5 + 3, torch.zeros(n, 8, dtype=torch.float16)),
        lambda n: {"hidden": torch.zeros(n, 8, dtype=torch.float16), "input_ids": torch.arange(n) % 5 + 3},
    ],
)
def test_examples_reveal_token_dims_and_ranges(examples: Callable[[int], object]) -> None:
    ids, hidden = input_specs(Net(), example_inputs=examples)
    assert ids == InputSpec(
        name="input_ids", dtype=torch.int64, shape=("n",), fill=Fill.INTEGERS, low=3, high=8
    )
    assert hidden == InputSpec(name="hidden", dtype=torch.float16, shape=("n", 8))


def test_examples_with_other_token_dims_and_one_tensor() -> None:
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    (spec,) = input_specs(One(), example_inputs=lambda n: torch.zeros(2, n))
    assert spec.token_dims == (1,)
    (positions,) = input_specs(One(), example_inputs=lambda n: (torch.arange(n),))
    assert positions.fill is Fill.ARANGE


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (lambda n: (torch.zeros(2 * n), torch.zeros(n)), "is 14 for 7 tokens and 22 for 11"),
        (lambda n: (torch.zeros(n), n), "gives 7 as 'hidden' for 7 tokens and 11 for 11"),
        (lambda n: (torch.zeros(n), [torch.zeros(n)] * n), "changes the structure of 'hidden'"),
        (lambda n: (torch.zeros(n), object()), "'hidden': expected a tensor"),
        (lambda n: (torch.zeros(n), None if n == 7 else torch.zeros(n)), "changes the type of 'hidden'"),
        (lambda n: 3, "got a int"),
        (lambda n: [torch.zeros(n)] * 5, "gave 5 values"),
        (lambda n: (torch.zeros(n),), "also takes hidden"),
        (lambda n: {"x": torch.zeros(n)}, "no parameter 'x'"),
        (
            lambda n: (
                (torch.zeros(*[n] * (1 + n % 2)), torch.zeros(n))
                if n == 7
                else (torch.zeros(n), torch.zeros(n))
            ),
            "dtype or rank",
        ),
    ],
)
def test_bad_examples(examples: Callable[[int], object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        input_specs(Net(), example_inputs=examples)
    assert said in str(caught.value)


def test_values_depend_on_seed_name_and_size_only() -> None:
    specs = [
        parse_declaration(text) for text in ("a:float32[n,2]", "b:float32[n,2]", "c:bool[n]", "d:int32[n]")
    ]
    first, again, other = (
        make_inputs(specs, 4),
        make_inputs(specs[::-1], 4)[::-1],
        make_inputs(specs, 4, seed=1),
    )
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    assert first[2].dtype is torch.bool
    with pytest.raises(UsageError, match="at least one token"):
        make_inputs(specs, 0)
