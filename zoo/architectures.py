"""Key: the zoo's denominator, and what of it is excluded for which reason."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES: Final[Mapping[str, str]] = dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))
"""Every model type that ``AutoModelForCausalLM`` of the installed transformers knows, and its class."""


class Exclusion(Enum):
    """Why an architecture is not among those that must pass."""

    OWN_ATTENTION = "computes attention itself, without AttentionInterface"
    ENCODER_DECODER = "the decoder of an encoder-decoder model, which numbers its tokens itself"
    RECURRENT = "recurrent only: no attention to split at"
    OTHER_MODEL = "a draft head that needs another model's states and keys"
    BYTES = "works on patches of bytes that a model of its own finds"
    AUDIO = "transcribes audio; its forward takes no positions"
    VISION_LIBRARY = "its image tower needs timm, which is not installed; its text decoder is a row of its own"


EXCLUDED: Final[Mapping[str, Exclusion]] = {
    **dict.fromkeys(
        (
            "big_bird",
            "bloom",
            "cpmant",
            "falcon",
            "git",
            "gpt_neo",
            "gpt_neox_japanese",
            "megatron-bert",
            "mpt",
            "openai-gpt",
            "reformer",
            "rembert",
            "roformer",
            "xglm",
            "xlm",
            "xlnet",
        ),
        Exclusion.OWN_ATTENTION,
    ),
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "musicgen",
            "musicgen_melody",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
            "whisper",
        ),
        Exclusion.ENCODER_DECODER,
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), Exclusion.RECURRENT),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), Exclusion.OTHER_MODEL),
    "blt": Exclusion.BYTES,
    "gemma3n": Exclusion.VISION_LIBRARY,
    "moss_transcribe_diarize": Exclusion.AUDIO,
}
"""Excluded ones run as the others do: if one passes it counts, and its refusal shows the line otherwise."""
