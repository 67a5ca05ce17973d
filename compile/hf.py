"""Serve the Key noun: Hugging Face decoders on flat tokens, their attention through ``pwcc::attention``.

transformers is imported only when one of these functions runs; it is the extra ``hf``.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import pwcc.compile.ops.attention  # noqa: F401  registers torch.ops.pwcc.attention
from pwcc.cache.errors import ModelError, UsageError, install
from pwcc.compile.model_args import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IMPLEMENTATION = "pwcc"
"""Name of our attention in transformers' AttentionInterface."""


def pwcc_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    """Run ``pwcc::attention`` as a transformers attention function.

    ``query``: ``[1, heads, tokens, head_dim]``, ``key`` and ``value`` with ``kv_heads``; returns
    ``[1, tokens, heads, head_dim]``. ``sliding_window`` counts keys with the query's own, as the op does.
    ``s_aux`` are attention sinks. Raise ``ValueError`` for a mask or position bias: causality, window and
    sequence bounds are the op's and its metadata's business.
    """
    if attention_mask is not None or position_bias is not None:
        raise ValueError("attention implementation 'pwcc' takes no mask and no position bias")
    if dropout:
        raise ValueError("attention implementation 'pwcc' is for inference: expected dropout 0")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx, so its KV cache cannot be found")
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    torch.ops.pwcc.attention(q, k, v, out, layer, scale, sliding_window, softcap, s_aux)
    return out.unsqueeze(0), None


class HFDecoder(nn.Module):
    """A transformers causal LM on flat tokens: int64 ids and positions ``[tokens]`` to ``[tokens, vocab]``.

    Refuses models with attention that is not causal (``ModelError``), since the op would answer wrongly.
    Does not support encoder inputs, images or audio, nor architectures that compute attention themselves.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        for name, module in model.named_modules():
            if hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False:
                raise ModelError(
                    f"{name} is not causal; pwcc::attention attends causally",
                    hint="only causal decoders can be built from a Hugging Face directory",
                )
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits of every token."""
        # No mask argument: for an attention implementation without a mask function of that name transformers
        # makes none, on every model type. Registering one would first compare position ids with torch.diff,
        # which fails when the token count is an unbacked symbol.
        output = self.model(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        logits: Tensor = output.logits.squeeze(0)
        return logits


def load_config(location: str, args: Mapping[str, object]) -> PreTrainedConfig:
    """Read the configuration of a directory, or of a hub id when there is a network; ``args`` override it.

    Overrides apply before the configuration is built, so that what it derives from them follows.
    Raise ``UsageError`` for a missing transformers, an unreadable or unknown configuration, or an argument
    that the configuration does not have.
    """
    _require_transformers()
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    try:
        values, _ = PreTrainedConfig.get_config_dict(location)
        model_type = values.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise UsageError(
                f"the configuration's model_type {model_type!r} is not known to this transformers",
                where=location,
                hint="a newer transformers may know it; pwcc does not run code from model directories",
            )
        config: PreTrainedConfig = AutoConfig.for_model(**copy.deepcopy(values))
        if not args:
            return config
        known = sorted({*values, *config.to_dict()})
        for name in args:
            if name not in known:
                raise unknown_name(f"the configuration of {model_type} has no {name!r}", name, known)
        return AutoConfig.for_model(**{**values, **args})
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"cannot build the configuration: {_first_line(error)}", where=location) from error


def build_causal_lm(
    config: PreTrainedConfig, *, dtype: torch.dtype | None = None, weights_from: str | None = None
) -> PreTrainedModel:
    """Build the causal LM of ``config`` with our attention; ``dtype`` defaults to the configuration's.

    ``weights_from`` is a directory or hub id to load weights from; None leaves them to initialisation.
    ``config`` itself is not changed: transformers keeps the attention's name in it, so two models that share
    one would share their attention.
    """
    _require_transformers()
    from transformers import AutoModelForCausalLM

    register_attention()
    own = copy.deepcopy(config)
    chosen = dtype or own.dtype or torch.float32
    if weights_from is None:
        return AutoModelForCausalLM.from_config(own, attn_implementation=IMPLEMENTATION, dtype=chosen)
    return AutoModelForCausalLM.from_pretrained(
        weights_from, config=own, attn_implementation=IMPLEMENTATION, dtype=chosen, use_safetensors=True
    )


def register_attention() -> None:
    """Make ``attn_implementation="pwcc"`` known to transformers; a second call changes nothing."""
    _require_transformers()
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, pwcc_attention_forward)


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the model class's name, such as ``Qwen3ForCausalLM``."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.architectures:
        return str(config.architectures[0])
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return str(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__name__", config.model_type))
    return str(config.model_type)


def portable_config(config: PreTrainedConfig) -> dict[str, object]:
    """Return the configuration as JSON values, without what differs between hosts of equal models."""
    values: dict[str, object] = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version", "architectures", "_attn_implementation"):
        values.pop(name, None)
    return values


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("Hugging Face models need transformers", hint=install("hf"))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
