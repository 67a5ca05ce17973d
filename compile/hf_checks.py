"""Serve the Key noun: which Hugging Face models can run on flat tokens, and why the others cannot.

Every rule stands for an architecture that would otherwise answer wrongly, or fail where nobody understands it.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from torch import nn

from pwcc.cache.errors import ModelError
from pwcc.compile.hf_sparse import is_sparse, obstacle, selects_keys

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"
"""What the source of a module names that takes its attention from transformers' AttentionInterface."""
_OWN_MODEL: Final = "write the model with torch.ops.pwcc.attention and compile it as path/to/file.py:attr"
STATE: Final = re.compile(r"\.(update_conv_state|update_recurrent_state|set_linear_cache)\(")
"""What the source of a class calls that keeps other state than keys and values in transformers' cache."""
CROSS: Final = ("cross", "encoder_attn")
"""Parts of names of attention over an encoder's states, which a decoder without one does not run."""


def require_servable(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` for an architecture that ``pwcc::attention`` on flat tokens cannot serve.

    Refused: attention that is not causal, that does not go through AttentionInterface, or that picks its keys
    by an index in a form that :mod:`pwcc.compile.hf_sparse` does not know, and decoders that number their
    tokens themselves.
    """
    parts = list(_decoder_modules(model))
    owners = tuple(f"{name}." for name, module in parts if is_sparse(module))
    for name, module in parts:
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False:
            raise ModelError(
                f"{name} is not causal; pwcc::attention attends causally",
                hint="only causal decoders can be built from a Hugging Face directory",
            )
        _require_known_index(name, module, owners)
    attention = [module for _, module in parts if "Attention" in type(module).__name__]
    own = next((module for module in attention if not _uses_interface(type(module))), None)
    if own is not None:
        raise ModelError(
            f"{type(own).__name__} computes attention itself, without transformers' AttentionInterface",
            where=_definition(type(own)),
            hint=_OWN_MODEL,
        )
    if attention and not takes_positions(model):
        raise ModelError(
            f"{type(model).__name__}.forward takes no position_ids: a batch's positions cannot reach it",
            where=_definition(type(model)),
            hint="decoders of encoder-decoder models number their tokens themselves and cannot be served so",
        )


def _require_known_index(name: str, module: nn.Module, owners: tuple[str, ...]) -> None:
    """Raise ``ModelError`` for sparse attention of an unknown form, and for an index outside of attention."""
    if is_sparse(module):
        reason = obstacle(module)
    elif selects_keys(module) and not name.startswith(owners):
        reason = "selects or adds keys, and no attention holds it"
    else:
        return
    if reason is not None:
        raise ModelError(
            f"{name} ({type(module).__name__}) {reason}, so its sparse attention cannot run as pwcc::opaque",
            where=_definition(type(module)),
            hint="pwcc::attention sees every key of a window; there is no sparse form of it yet",
        )


def require_known_state(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` for a part that keeps state beside the keys and is not run as ``pwcc::opaque``.

    Decoding token by token would go without that state, and answer wrongly. Told by source; call it after
    :func:`~pwcc.compile.hf_opaque.make_opaque`.
    """
    first: dict[type[nn.Module], str] = {}
    for name, module in _decoder_modules(model):
        first.setdefault(type(module), name)
    for cls, name in first.items():
        source = _source(cls)
        if source is not None and STATE.search(source):
            raise ModelError(
                f"{name} ({cls.__name__}) keeps state from token to token that no KV cache holds",
                where=_definition(cls),
                hint=_OWN_MODEL,
            )


def no_interface(name: str, error: Exception) -> ModelError:
    """Return the refusal of a model that looked our attention up in a table of its own classes."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return ModelError(
        f"{name} computes attention itself, without transformers' AttentionInterface",
        where=f"{frame.filename}:{frame.lineno}",
        hint=_OWN_MODEL,
    )


def takes_positions(model: nn.Module) -> bool:
    """Tell whether ``forward`` can be told the positions of its tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _decoder_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the text decoder: no image or audio towers, no attention over an encoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, module in (decoder if isinstance(decoder, nn.Module) else model).named_modules():
        if not any(part in name.lower() or part in type(module).__name__.lower() for part in CROSS):
            yield name, module


def _uses_interface(cls: type[nn.Module]) -> bool:
    """Tell by source, as transformers itself does; a class without source gets the benefit of the doubt."""
    home = sys.modules.get(cls.__module__)
    try:
        return home is None or INTERFACE in inspect.getsource(home)
    except (OSError, TypeError):
        return True


def _source(cls: type[nn.Module]) -> str | None:
    try:
        return inspect.getsource(cls) if cls.__module__.startswith("transformers.models.") else None
    except (OSError, TypeError):
        return None


def _definition(cls: type) -> str | None:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return None
