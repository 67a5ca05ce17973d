"""Key: one eager run of a model's forward on fake tensors, with a recorder watching what it reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from pwcc.compile.call import eager_region
from pwcc.compile.input_values import make_call
from pwcc.compile.observation import Observation
from pwcc.compile.observing import Recorder
from pwcc.compile.request import Request
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
    call = make_call(model, request.specs, min(TOKENS, request.max_tokens), device=request.target.device)
    with Recorder(own) as recorder, eager_region():
        recorder.seen.problem = run_on_fakes(model, call.args, call.kwargs, namespaces)
    return recorder.seen
