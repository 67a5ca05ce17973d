"""Serve the Artifact noun: operators of pwcc's own in torch's registry.

They are registered with ``Library.define`` and ``impl`` because ``torch.library.custom_op`` imports Dynamo on
its first call (1.2 s on a host that must not compile).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Operator(NamedTuple):
    """One operator: its schema after the name, and what runs on a CPU, on a GPU and on fake tensors.

    ROCm builds use the CUDA dispatch key, too.
    """

    schema: str
    cpu: Callable[..., Any]
    cuda: Callable[..., Any]
    meta: Callable[..., Any]


def register(operators: Mapping[str, Operator]) -> torch.library.Library | None:
    """Register operators of the namespace ``pwcc``, all of one module; return the library that holds them.

    A second copy of that module (a reload, another import name) finds them and leaves them alone: None. The
    first copy's library stays alive through the dispatcher, which holds its functions and so its globals.
    """
    if hasattr(torch.ops.pwcc, next(iter(operators))):
        return None
    library = torch.library.Library("pwcc", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, operator in operators.items():
        library.define(name + operator.schema)  # type: ignore[no-untyped-call]
        for function, key in ((operator.cpu, "CPU"), (operator.cuda, "CUDA"), (operator.meta, "Meta")):
            library.impl(name, function, key)  # type: ignore[no-untyped-call]
    return library
