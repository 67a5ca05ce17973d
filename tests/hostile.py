"""Hostile JSON for the tests of every parser: valid files with one or more places changed for the worse."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from pwcc.cache.errors import PwccError


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


TEXTS = (
    "",
    "x" * 5000,
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "\x1b[2J",
    "\ud800",
    "\ufeff",
    "é" * 40,
    "0" * 32,
    "0" * 64,
    "9**9**9",
    "-" * 4000 + "1",
    "(" * 300 + "s0" + ")" * 300,
    "not " * 1000 + "s0",
    "s0 // 0",
    "max(" * 90 + "1" + ",1)" * 90,
    "s0" + "+1" * 2000,
    "9" * 4000 + "*" + "9" * 90,
    "1if s0 else 2",
    "0x10",
    "lambda: 0",
    "__import__('os')",
    "s0.real",
    "os:system",
    "builtins:dict",
    "_inductor",
    "compile",
    "nan",
    "module:os",
    "model:" + "." * 1000,
    "torch.ops.aten.add.Tensor",
    "torch.load",
    "cuda:99999999999999999999",
)
SCALARS = (None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**19, -(10**18), 0.5, -0.0, 1e308)
SHAPES: tuple[Callable[[], object], ...] = (
    list,
    dict,
    lambda: nested(50),
    lambda: nested(70),
    lambda: list(range(2000)),
    lambda: {str(number): number for number in range(2000)},
    lambda: {"v": 10**6},
    lambda: {"s": "s0 // 0"},
    lambda: {"class": "os:environ", "fields": []},
    lambda: {"class": "collections:OrderedDict", "fields": [[1, {"output": 10**9}]]},
    lambda: {"constant": [1]},
    lambda: ["float", "0x1p99999"],
    lambda: ["float"],
    lambda: [[]],
    lambda: ["attr", ""],
    lambda: ["free", "x"],
    lambda: ["dict", [1]],
)
BYTES = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"1." + b"0" * 5000, b"\xff", b'"\\ud83d"', b"\xef\xbb\xbf{}",
    b'{"a":1,"a":2}', b"[" * 5000, b"{", b"", b" ", b"]", b'"', b"//", b"'a'", b"\x00",
)  # fmt: skip

values = st.sampled_from(TEXTS) | st.sampled_from(SCALARS) | st.sampled_from(SHAPES).map(lambda make: make())
Path = tuple[str | int, ...]


def paths(value: object, here: Path = ()) -> list[Path]:
    """Every place in a JSON value, the root first."""
    found = [here]
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths(item, (*here, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths(item, (*here, index))
    return found


@st.composite
def changed(draw: st.DrawFn, value: Any) -> object:
    """A deep copy of a JSON value with one to three places replaced, removed, repeated or added to."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(value)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                value = draw(values)
            continue
        parent: Any = value
        for step in path[:-1]:
            parent = parent[step]
        last, how = (
            path[-1],
            draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "repeat"))),
        )
        if how == "replace":
            parent[last] = draw(values)
        elif how == "remove":
            del parent[last]
        elif how == "repeat" and isinstance(parent, list):
            parent.insert(0, parent[int(last)])
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(TEXTS))] = draw(values)
        else:
            parent.append(draw(values))
    return value


def encoded(value: object) -> bytes:
    """JSON as an attacker may write it: lone surrogates as escapes, any order."""
    return json.dumps(value, separators=(",", ":")).encode()


@st.composite
def spoiled(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of a file with a part replaced: what no JSON writer would write."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 40)))
    return data[:start] + draw(st.sampled_from(BYTES) | st.binary(max_size=8)) + data[stop:]


def hostile(data: bytes) -> st.SearchStrategy[bytes]:
    """Versions of a valid JSON file that are wrong, or right in an unexpected way."""
    return changed(json.loads(data)).map(encoded) | spoiled(data)


def only_expected(parse: Callable[[bytes], object], data: bytes) -> bool:
    """Parse; return whether that went well. Any failure but one of ours is the test's."""
    try:
        parse(data)
    except PwccError as error:
        message = str(error)
    else:
        return True
    assert len(message) < 3000, "a message must not repeat the file"
    return False
