"""Artifact: what the compiler hands to sealing, one compiled and already run piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from pwcc.cache.passes import PassCount
from pwcc.cache.sealed import InputFacts

__all__ = ["CompiledPiece", "InputFacts"]


@dataclass(frozen=True)
class CompiledPiece:
    """One piece as Inductor compiled it.

    ``source`` is the wrapper's text and ``module`` the loaded wrapper, whose attributes are its kernels;
    it must have run once, so that Triton's autotuning is final. ``inputs_to_check``,
    ``mutated_inputs`` and ``defers_input_alignment`` are CompiledFxGraph's ``inputs_to_check``,
    ``mutated_input_idxs`` and ``_defers_input_alignment`` (absent before torch 2.12: False).
    ``static_inputs`` were passed as static to Inductor, which then assumes their alignment.
    ``builder_paths`` must not occur in anything sealed, see ``sealing/builder_paths.py``. ``passes`` are
    the graph passes that it went through, in order.
    """

    source: str
    module: ModuleType
    constants: Mapping[str, torch.Tensor]
    inputs_to_check: Sequence[int]
    mutated_inputs: Sequence[int]
    device_type: str
    device_index: int | None
    inputs: Sequence[InputFacts]
    static_inputs: Sequence[int] = ()
    defers_input_alignment: bool = False
    ops: Sequence[str] = ()
    tuned: bool = False
    cpu_flags: Sequence[str] = ()
    builder_paths: Sequence[str] = field(default=())
    passes: tuple[PassCount, ...] = ()
