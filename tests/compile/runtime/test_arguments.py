from __future__ import annotations

from typing import Any

import pytest
import torch

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.arguments import check_argument, decode_argument, encode_constant, values_in

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, None),
        (True, True),
        (1, 1),
        (1.0, 1.0),
        ("text", "text"),
        (float("inf"), {"float": "inf"}),
        (float("-inf"), {"float": "-inf"}),
        (1 - 2.5j, {"complex": "(1-2.5j)"}),
        (complex("inf-0j"), {"complex": "(inf-0j)"}),
        (torch.bfloat16, {"dtype": "bfloat16"}),
        (torch.strided, {"layout": "strided"}),
        (torch.channels_last, {"memory_format": "channels_last"}),
        (torch.device("cpu"), {"device": "cpu"}),
        (torch.device("cuda:3"), {"device": "cuda"}),
        (..., {"ellipsis": True}),
    ],
)
def test_constants(value: object, encoded: object) -> None:
    found = encode_constant(value)
    assert found == encoded
    assert type(found) is type(encoded)
    check_argument(found, 0, [], "test")
    if not isinstance(value, torch.device):
        assert decode_argument(found, [], len, CPU) == value


def test_device_is_the_callers_own() -> None:
    device = torch.device("cuda:3")
    assert decode_argument({"device": "cuda"}, [], len, device) == device
    assert decode_argument({"device": "cpu"}, [], len, device) == CPU


@pytest.mark.parametrize("value", [object(), torch.Size([1]), torch.ones(1), len, torch.Generator()])
def test_other_values_have_no_form(value: object) -> None:
    with pytest.raises(TypeError):
        encode_constant(value)


def test_nested() -> None:
    encoded: Any = [
        {"v": 1},
        {"tuple": [{"s": "2*s0"}, 3]},
        {"slice": [None, {"s": "s0"}, None]},
        {"dict": [["dtype", {"dtype": "int64"}], ["out", {"v": 0}]]},
    ]
    check_argument(encoded, 2, ["s0"], "test")
    assert values_in(encoded) == [1, 0]
    found = decode_argument(encoded, ["a", "b"], lambda text: f"<{text}>", CPU)
    assert found == ["b", ("<2*s0>", 3), slice(None, "<s0>", None), {"dtype": torch.int64, "out": "a"}]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"v": 2},
        {"v": -1},
        {"v": True},
        {"v": "0"},
        {"v": 0, "s": "s0"},
        {"s": "s1"},
        {"s": 3},
        {"s": "s0.real"},
        {"dtype": "load"},
        {"dtype": "ops"},
        {"dtype": "strided"},
        {"dtype": 3},
        {"layout": "float32"},
        {"memory_format": "nosuch"},
        {"device": "nosuch"},
        {"device": None},
        {"slice": [1, 2]},
        {"slice": "s0"},
        {"tuple": {"v": 0}},
        {"tuple": [{"v": 9}]},
        {"dict": {"a": 1}},
        {"dict": [["a"]]},
        {"dict": [[3, 1]]},
        {"dict": [["a", {"v": 9}]]},
        {"float": "1.0"},
        {"float": []},
        {"complex": "1+2j"},
        {"complex": "many"},
        {"complex": [1, 2]},
        {"ellipsis": False},
        {"code": "1"},
        [{"unknown": 1}],
        object(),
    ],
)
def test_other_forms_are_corrupt(value: object) -> None:
    with pytest.raises(CorruptEntry):
        check_argument(value, 2, ["s0"], "test")
