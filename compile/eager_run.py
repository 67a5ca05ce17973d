"""Key: one eager run of a model's forward on fake tensors, with a recorder watching what it reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from pwcc.compile.inputs import make_inputs
from pwcc.compile.observation import Observation
from pwcc.compile.observing import Recorder
from pwcc.compile.request import Request
from pwcc.compile.signature import parameter_names
from pwcc.compile.torch_private.fake_run import run_on_fakes

TOKENS = 3  # not 0 or 1, which many models treat apart, and small


def watch_forward(
    model: nn.Module, request: Request, *, own: Collection[str], namespaces: Iterable[str]
) -> Observation:
    """Run ``forward`` once on fake tensors and return what it read.

    No weight is read and nothing is computed or changed: attributes that the run sets are put back. A
    forward that needs a tensor's value cannot be run so; :attr:`Observation.problem` then says why, and what
    was read until then counts.
    """
    tensors = make_inputs(request.specs, min(TOKENS, request.max_tokens), device=request.target.device)
    inputs = _positional(model, request, tensors)
    with Recorder(own) as recorder:
        recorder.seen.problem = run_on_fakes(model, inputs, namespaces)
    return recorder.seen


def _positional(model: nn.Module, request: Request, tensors: Sequence[torch.Tensor]) -> list[object]:
    by_name: dict[str, object] = dict(zip((spec.name for spec in request.specs), tensors, strict=True))
    names = parameter_names(model)
    last = max((names.index(spec.name) for spec in request.specs), default=-1)
    return [by_name.get(name) for name in names[: last + 1]]
