"""Serve the Artifact noun: ``pwcc::opaque``, a splitting op that runs one module of the live model eagerly.

For modules that cannot be part of a graph: mixers that branch on the token count or keep state, experts that
loop over what a router chose. The module's tensors are arguments of the op, bound by name like all weights;
what it computes with them is the code of this process, found by a key that the module's class, place and
configuration decide. Nothing of that code is compiled, so nothing of it can be stale.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError
from pwcc.compile.ops import registration
from pwcc.compile.ops.forward_context import ForwardContext, current_forward_context

OPAQUE_OP: Final = "pwcc::opaque"
"""Qualified name, as the splitter matches it."""
KERNEL: Final = "opaque_kernel"
"""The name in ``ForwardContext.extras`` of a server's own :data:`OpaqueKernel`."""

SCHEMA = "(Tensor[] inputs, Tensor[] weights, Tensor(a!) out, str key, bool sequential) -> ()"

Call = Callable[[nn.Module, Sequence[Tensor]], Tensor]
OpaqueKernel = Callable[[ForwardContext, str, Sequence[Tensor], Mapping[str, Tensor], Tensor], None]
"""``kernel(context, key, inputs, weights by name, out)``: a server's own, which keeps the module's state."""


@dataclass(frozen=True)
class _Template:
    """A module without tensors of its own, the places of its tensors, and how it is called."""

    module: nn.Module
    places: tuple[tuple[dict[str, Any], str], ...]
    names: tuple[str, ...]
    call: Call
    lock: threading.Lock


_templates: dict[str, _Template] = {}


def key_of(module: nn.Module, name: str, configuration: object) -> str:
    """Return the key of a module: equal wherever its class, its place ``name`` and its configuration are."""
    kind = f"{type(module).__module__}:{type(module).__qualname__}"
    text = json.dumps([kind, name, configuration], sort_keys=True, default=str)
    return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def register(
    key: str, module: nn.Module, call: Call, prepare: Callable[[nn.Module], None] | None = None
) -> tuple[str, ...]:
    """Remember how ``key`` is computed; return the names of the tensors that a call must bring, in order.

    Calls run a copy of ``module`` in evaluation mode, whatever mode it is in now (models are built in training
    mode), which ``prepare`` may change. Two modules of one key are alike but for their tensors, so the later
    takes the earlier one's place.
    """
    held = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {}
    for tensor in held:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    template = copy.deepcopy(module, memo).eval()
    if prepare is not None:
        prepare(template)
    places = list(_places(template))
    names = tuple(name for name, _, _ in places)
    _templates[key] = _Template(
        template, tuple((registry, own) for _, registry, own in places), names, call, threading.Lock()
    )
    return names


def _places(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for prefix, part in module.named_modules():
        for registry in (part._parameters, part._buffers):
            for own, tensor in registry.items():
                if tensor is not None:
                    yield f"{prefix}.{own}" if prefix else own, registry, own


def opaque(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor, key: str, sequential: bool
) -> None:
    """Run the module of ``key`` on ``inputs`` and write ``out``; what ``torch.ops.pwcc.opaque`` runs.

    ``sequential`` says that the module reads its tokens as one sequence without history; a batch of several, or
    one that goes on, is refused unless the context brings a kernel of the server's.

    Raises:
        ArgumentError: such a batch, or a key that no module of this process has.
    """
    template = _templates.get(key)
    if template is None:
        raise ArgumentError(
            f"no module of this process is {key!r}",
            hint="build the model as it was built for the compile, before it is loaded",
        )
    context = current_forward_context()
    if context is not None:
        kernel: Any = context.extras.get(KERNEL)
        if kernel is not None:
            kernel(context, key, inputs, dict(zip(template.names, weights, strict=True)), out)
            return
        if sequential:
            _require_whole_sequence(context, key)
    out.copy_(_run(template, inputs, weights))


def _run(template: _Template, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    with template.lock:
        empty = [registry[own] for registry, own in template.places]
        try:
            for (registry, own), tensor in zip(template.places, weights, strict=True):
                registry[own] = tensor
            return template.call(template.module, inputs)
        finally:
            for (registry, own), tensor in zip(template.places, empty, strict=True):
                registry[own] = tensor


def _require_whole_sequence(context: ForwardContext, key: str) -> None:
    metadata = context.metadata
    if metadata is None:
        return
    sequences = metadata.seq_lens.shape[0]
    if sequences != 1 or metadata.max_seq_len != metadata.max_query_len:
        raise ArgumentError(
            f"{key.partition(' ')[0]} keeps state from token to token and runs on one whole sequence, got "
            f"{sequences} with up to {metadata.max_seq_len - metadata.max_query_len} tokens of history",
            hint=f"put a kernel that keeps the state into the forward context: extras={{{KERNEL!r}: ...}}",
        )


def _opaque_meta(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor, key: str, sequential: bool
) -> None:
    """Write nothing: shapes are the caller's business."""


_library = globals().get("_library") or registration.register(
    {"opaque": registration.Operator(SCHEMA, opaque, opaque, _opaque_meta)}
)
