"""Serve the Key noun: Hugging Face attention that chooses its keys by an index, or adds compressed ones.

DeepSeek's sparse attention scores all keys by an indexer and attends to the best of them; DeepSeek-V4 adds keys
that a compressor makes of several tokens each. Such a module runs whole and eagerly, over one whole sequence,
as ``pwcc::opaque``. It is known by what it holds and by the parameters of its forward, not by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pwcc.compile.ops.dense import AttentionParams, causal_visibility

INDICES: Final = "prev_topk_indices"
"""The parameter by which an attention gets the indices that an earlier layer chose."""
GIVEN: Final = ("hidden_states", "position_embeddings", "attention_mask")
"""Parameters that such an attention must have."""
KNOWN: Final = frozenset({*GIVEN, "cache", "position_ids", INDICES})


@dataclass(frozen=True, slots=True)
class Convention:
    """How one sparse attention is called and what it returns.

    ``positions``: it is given position ids. ``rope``: the name under which it finds its rotary cosines and
    sines among several. ``shares``: it returns indices as a third result; ``reads``: those are an earlier
    layer's, else ``chosen`` is how many it chooses for a token at most.
    """

    positions: bool
    rope: str | None
    shares: bool
    reads: bool
    chosen: int


def selects_keys(module: nn.Module) -> bool:
    """Tell whether ``module`` is an indexer, or a compressor of keys."""
    kind = type(module).__name__
    return "Indexer" in kind or ("Compressor" in kind and "cache" in _parameters(module))


def is_sparse(module: nn.Module) -> bool:
    """Tell whether ``module`` is attention that chooses or adds keys, or uses an earlier layer's choice."""
    if not type(module).__name__.endswith("Attention"):
        return False
    return INDICES in _parameters(module) or _holds_index(module)


def obstacle(module: nn.Module) -> str | None:
    """Say what of a sparse attention is unknown here, so that it cannot run; None if nothing is."""
    parameters = _parameters(module)
    named = {name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    if unknown := sorted(named - KNOWN):
        return f"takes {', '.join(unknown)}"
    if missing := [name for name in GIVEN if name not in named]:
        return f"takes no {', '.join(missing)}"
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return "has no configuration that names its attention"
    if any(_rotary_changes(part) for part in module.modules()):
        return "holds rotary frequencies that change with the length"
    if INDICES in named and _holds_index(module) and not _chosen(module):
        return "hands on indices whose number is not known"
    return None


def convention_of(module: nn.Module) -> Convention | None:
    """Return how ``module`` is called; None unless it is sparse attention without an obstacle."""
    if not is_sparse(module) or obstacle(module) is not None:
        return None
    parameters = _parameters(module)
    shares = INDICES in parameters
    reads = shares and not _holds_index(module)
    return Convention(
        positions="position_ids" in parameters,
        rope=getattr(module, "rope_layer_type", None),
        shares=shares,
        reads=reads,
        chosen=_chosen(module) if shares and not reads else 0,
    )


def use_eager_attention(module: nn.Module) -> None:
    """Set the configurations of all parts of ``module`` to transformers' eager attention."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"


def attend(convention: Convention, module: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Run ``module`` on one whole sequence: ``[1, tokens, hidden]``, cosines, sines and what else it is given.

    Returns ``[1, tokens, hidden]``; of a module that hands its indices on, ``[1, tokens, hidden + chosen]`` in
    at least float32, which holds both exactly. Indices beyond the number of tokens are padding.
    """
    hidden, cos, sin, *others = inputs
    extra: dict[str, Tensor] = {}
    if convention.positions:
        extra["position_ids"] = others.pop(0)
    if convention.reads:
        extra[INDICES] = others.pop(0)[..., : hidden.shape[1]]
    pair = (cos, sin)
    mixed, _, *indices = module(
        hidden_states=hidden,
        position_embeddings=pair if convention.rope is None else {convention.rope: pair},
        attention_mask=causal_mask(hidden, getattr(module, "sliding_window", None)),
        **extra,
    )
    if not convention.chosen:
        result: Tensor = mixed
        return result
    dtype = packed_dtype(hidden)
    padded = pad(indices[0], (0, convention.chosen - indices[0].shape[-1]))
    return torch.cat([mixed.to(dtype), padded.to(dtype)], dim=-1)


def packed_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype that holds both ``states`` and indices of keys exactly: at least float32."""
    return torch.promote_types(states.dtype, torch.float32)


def causal_mask(states: Tensor, window: int | None) -> Tensor:
    """Return the additive mask of eager attention, ``[1, 1, tokens, tokens]``; a window counts the own key."""
    places = torch.arange(states.shape[1], device=states.device)
    seen = causal_visibility(places, len(places), AttentionParams(layer=0, scale=1.0, window=window))
    mask = torch.zeros(seen.shape, dtype=states.dtype, device=states.device)
    return mask.masked_fill(~seen, torch.finfo(states.dtype).min)[None, None]


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _holds_index(module: nn.Module) -> bool:
    return any(selects_keys(part) for part in module.modules())


def _chosen(module: nn.Module) -> int:
    """Return how many keys the indexer of ``module`` chooses for a token, 0 if it does not say."""
    found = (getattr(part, "index_topk", 0) for part in module.modules() if selects_keys(part))
    return next((int(number) for number in found if number), 0)


def _rotary_changes(part: nn.Module) -> bool:
    kinds: Any = getattr(part, "rope_type", None)
    named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in named)
