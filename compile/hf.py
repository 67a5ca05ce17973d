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
from torch.nn.functional import pad, scaled_dot_product_attention

import pwcc.compile.ops.attention  # noqa: F401  registers torch.ops.pwcc.attention
from pwcc.cache.errors import UsageError, install
from pwcc.compile.hf_buffers import settle_buffers
from pwcc.compile.hf_checks import no_interface, require_known_state, require_servable, takes_positions
from pwcc.compile.hf_opaque import make_opaque
from pwcc.compile.model_args import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IMPLEMENTATION = "pwcc"
"""Name of our attention in transformers' AttentionInterface."""
REPEATED = frozenset(
    {"DiffLlamaAttention", "DoryAttention", "HrmTextAttention", "ZambaAttention", "Zamba2Attention"}
)
"""Attention that runs several times under one layer number in one call: a KV cache would keep the last only."""
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",  # of a backward pass
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # rotated in before; a batch's bounds are the metadata's business
        "return_dict",
        "use_cache",
    }
)
"""Keywords that models hand to every attention function and that change no result of one."""


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
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Run ``pwcc::attention`` as a transformers attention function.

    ``query``: ``[1, heads, tokens, head_dim]``, ``key`` and ``value`` with ``kv_heads``; returns
    ``[1, tokens, heads, value_dim]``. ``sliding_window`` counts keys with the query's own, as the op does.
    ``s_aux`` are attention sinks, one for each head; ``sinks``, ``[1, heads, tokens, 1]``, one for each token
    and head. Where values are of another size (MLA), the smaller side is padded with zeros, which changes no
    score and no sum, so that one KV cache holds both. A mask or position bias that the model makes itself,
    ``[1, heads or 1, tokens, tokens]``, is added to the scores: such a model runs on whole sequences only, and
    so does one with ``sinks``. Raise ``ValueError`` for any other mask (causality, window and sequence bounds
    are the op's and its metadata's business) and for a keyword that is not known to change nothing.
    """
    kind = type(module).__name__
    _require_harmless(kind, others)
    if kind.endswith("AttentionResidual"):  # over the depth of one token, not over tokens
        shaped = (attention_mask, position_bias, sliding_window, softcap, s_aux, sinks)
        if any(given is not None for given in shaped):
            raise ValueError(f"attention implementation 'pwcc' expects {kind} to give queries, keys and values")
        return scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None
    biases = [_bias(given) for given in (attention_mask, position_bias) if given is not None]
    if kind in REPEATED or getattr(module, "attn_temperature_tuning", False):
        # Llama 4 scales queries by positions that it counts from the call's first token: whole sequences only.
        biases.append(query.new_zeros(1, 1, 1))
    if sinks is not None:
        if s_aux is not None:
            raise ValueError(f"attention implementation 'pwcc' expects one kind of sinks, {kind} gives two")
        # A token's own sink is a sink of 0, in scores from which the token's sink is subtracted.
        biases.append(-_bias(sinks).float())
        s_aux = query.new_zeros(query.shape[1])
    bias = sum(biases[1:], start=biases[0]) if biases else None
    if dropout:
        raise ValueError("attention implementation 'pwcc' is for inference: expected dropout 0")
    layer = 0 if kind in REPEATED else getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{kind} has no layer_idx, so its KV cache cannot be found")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{kind} is not causal; pwcc::attention attends causally")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size:
        query, key, value = (pad(t, (0, max(size, value_size) - t.shape[-1])) for t in (query, key, value))
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    torch.ops.pwcc.attention(q, k, v, out, layer, scale, sliding_window, softcap, s_aux, _chunk(module), bias)
    return out[..., :value_size].unsqueeze(0), None


def _require_harmless(kind: str, others: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for a keyword that may change the result: ignoring it would be a wrong answer."""
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ValueError(
            f"attention implementation 'pwcc' does not know what {kind} gives: {', '.join(unknown)}"
        )


def _bias(given: Tensor) -> Tensor:
    """Return a model's own mask or bias as what is added to scores; a bool one is True where a key is seen."""
    if given.dim() != 4 or given.shape[0] != 1:
        raise ValueError(
            "attention implementation 'pwcc' expects a mask or bias [1, heads or 1, tokens, tokens], "
            f"got rank {given.dim()}"
        )
    if given.dtype == torch.bool:
        # As large as float32 has it, not infinite: a row without any key must not become NaN.
        given = torch.zeros_like(given, dtype=torch.float32).masked_fill(~given, torch.finfo(torch.float32).min)
    return given.squeeze(0)


def _chunk(module: nn.Module) -> int | None:
    """Return how many tokens one chunk has, where this layer's attention is chunked."""
    config = getattr(module, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if size is None or types is None or types[module.layer_idx] != "chunked_attention":
        return None
    return int(size)


class HFDecoder(nn.Module):
    """A transformers causal LM on flat tokens: int64 ids and positions ``[tokens]`` to ``[tokens, vocab]``.

    Raises ``ModelError`` for architectures that cannot be served so, see :mod:`pwcc.compile.hf_checks`.
    Does not support encoder inputs, images or audio.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        require_servable(model)
        make_opaque(model, portable_config(model.config))
        require_known_state(model)
        settle_buffers(model)
        self.model = model
        self._positions = "position_ids" if takes_positions(model) else None

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits of every token."""
        # No mask argument: for an attention implementation without a mask function of that name transformers
        # makes none, on every model type. Registering one would first compare position ids with torch.diff,
        # which fails when the token count is an unbacked symbol.
        extra = {} if self._positions is None else {self._positions: positions.unsqueeze(0)}
        output = self.model(input_ids=input_ids.unsqueeze(0), use_cache=False, **extra)
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
    try:
        if weights_from is None:
            return AutoModelForCausalLM.from_config(own, attn_implementation=IMPLEMENTATION, dtype=chosen)
        return AutoModelForCausalLM.from_pretrained(
            weights_from, config=own, attn_implementation=IMPLEMENTATION, dtype=chosen, use_safetensors=True
        )
    except KeyError as error:
        if error.args != (IMPLEMENTATION,):
            raise
        raise no_interface(architecture_of(own), error) from error  # its table of attention classes has no such


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
