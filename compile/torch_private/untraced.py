"""The seam to Dynamo's frames: functions that ``torch.compile`` of a caller neither traces nor looks into.

Imports no part of Dynamo. Run on torch 2.13.0+cpu. Private names used, and what breaks if they change
(then ``torch.compile`` around a loaded model fails, nothing else): ``torch._C._dynamo.eval_frame`` with
``set_code_exec_strategy``, and the attributes ``_torchdynamo_disable`` and ``_torchdynamo_disable_msg`` that
``torch.compiler.disable`` sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def untraced(reason: str) -> Callable[[F], F]:
    """Return a decorator like ``torch.compiler.disable``, which costs a call nothing: no wrapper, no look."""

    def mark(function: F) -> F:
        marked: Any = function
        with contextlib.suppress(ImportError, AttributeError):
            from torch._C._dynamo import eval_frame

            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
            marked._torchdynamo_disable = True
            marked._torchdynamo_disable_msg = reason
        return function

    return mark
