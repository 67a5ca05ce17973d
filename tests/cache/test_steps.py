"""The calls of a stitched program, read from its text and never executed."""

from __future__ import annotations

import pytest

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.steps import StepCall, steps_of

PROGRAM = b"""def bind(pieces, operation, constant, weights):
    p0, p1, = pieces
    o0 = operation('torch.ops.pwcc.attention.default')
    o1 = operation('torch.zeros')
    o2 = constant('dtype', 'float32')
    w0, = weights
    def run(arguments, sizes):
        a0, = arguments
        s0, = sizes
        v0, v1, = p0([s0, a0, w0])
        o0(v0, v0, v0, v1, 0, 0.5)
        v2 = o1(3, dtype=o2)
        with o1('cpu'): v3 = o0(v1)
        p1([s0, v1])
        del v1
        return (v2, )
    return run
"""


def test_calls_in_order() -> None:
    assert steps_of(PROGRAM, where="x") == [
        StepCall("p0", 0),
        StepCall("pwcc::attention"),
        StepCall("torch.zeros"),
        StepCall("pwcc::attention"),
        StepCall("p1", 1),
    ]


@pytest.mark.parametrize(
    "text",
    [b"", b"import os\nos.abort()\n", b"def bind(:", b"\xff", b"def bind(pieces): pass\n", b"(" * 9_999],
)  # fmt: skip
def test_another_text_is_refused_and_not_run(text: bytes) -> None:
    with pytest.raises(CorruptEntry, match="stitched program"):
        steps_of(text, where="x")
