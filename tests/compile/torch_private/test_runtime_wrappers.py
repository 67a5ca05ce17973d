"""Each of AOTAutograd's wrappers has a row in decision 0022, and a refusal where it would be needed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from pwcc.cache.errors import UnsealableError
from pwcc.compile.torch_private.inductor import _refuse_runtime_wrappers
from tests.conftest import REPOSITORY

DECISION = REPOSITORY / "docs/decisions/0022-what-aotautograd-would-have-done.md"
PARTS = ("CompilerWrapper", "InductorWrapper")  # what a wrapper derives from; they do nothing


def test_every_wrapper_of_the_installed_torch_has_a_row() -> None:
    from torch._functorch._aot_autograd import runtime_wrappers

    found = {
        name
        for name, value in vars(runtime_wrappers).items()
        if inspect.isclass(value)
        and any(base.__name__ in PARTS for base in value.__mro__)
        and name not in PARTS
    }
    assert len(found) >= 7
    text = DECISION.read_text()
    assert [name for name in sorted(found) if f"`{name}`" not in text] == []


def metadata(*, mutated: Any = None, subclass: Any = None, **others: Any) -> Any:
    quiet = SimpleNamespace(
        mutates_metadata=False, mutates_storage_metadata=False, mutation_inductor_storage_resize=False
    )
    fields = {"input_info": [mutated or quiet], "subclass_inp_meta": [subclass], "tokens": {}}
    return SimpleNamespace(**{**fields, "is_rng_op_functionalized": False, **others})


class SubclassCreationMeta:
    """Named as torch's own record of a subclass."""


def info(name: str) -> Any:
    names = ("mutates_metadata", "mutates_storage_metadata", "mutation_inductor_storage_resize")
    return SimpleNamespace(**{field: field == name for field in names})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (metadata(mutated=info("mutates_metadata")), "input 0 has its metadata"),
        (metadata(mutated=info("mutates_storage_metadata")), "input 0 has its metadata"),
        (metadata(mutated=info("mutation_inductor_storage_resize")), "input 0 has its storage resized"),
        (metadata(subclass=SubclassCreationMeta()), "an input is a tensor subclass"),
        (metadata(tokens={"effect": 0}), "ordered side effects (tokens)"),
        (metadata(is_rng_op_functionalized=True), "draws random numbers through functionalised state"),
        (None, "its runtime wrapper is unknown"),
    ],
)
def test_what_would_need_a_wrapper_is_refused_by_name(found: Any, words: str) -> None:
    with pytest.raises(UnsealableError) as raised:
        _refuse_runtime_wrappers(found)
    assert words in raised.value.message


def test_nothing_to_wrap_is_accepted() -> None:
    _refuse_runtime_wrappers(metadata())
