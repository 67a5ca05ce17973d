"""Serve the Key noun: the modules of Hugging Face models that run eagerly, each as one splitting op.

State-space and linear-attention mixers branch on the token count (they pad it to a chunk) and some experts loop
over what the router chose, so neither fits into one graph for every size; ``pwcc::attention`` has no form of
attention that chooses its keys by an index. They are replaced by modules of the same tensors and names that
call ``pwcc::opaque``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pwcc.compile.hf_sparse import INDICES, attend, convention_of, packed_dtype, use_eager_attention
from pwcc.compile.ops.opaque import Call, key_of, register

Form = tuple[type["_Opaque"], Call]


class _Opaque(nn.Module):
    """Holds the tensors of ``module`` under their names and hands them to ``pwcc::opaque``."""

    def __init__(self, module: nn.Module, key: str, call: Call) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(module).items() if name not in vars(self)}
        vars(self).update(plain)  # such as layer_idx, which the layers around it read
        self._names = tuple(tuple(name.split(".")) for name in register(key, module, call, self._prepare))
        self._parameters.update(module._parameters)
        self._buffers.update(module._buffers)
        self._modules.update(module._modules)
        self._non_persistent_buffers_set |= module._non_persistent_buffers_set
        self._key = key

    @staticmethod
    def _prepare(template: nn.Module) -> None:
        """Change the copy of the module that the op runs; here not at all."""

    def _run(
        self,
        inputs: Sequence[Tensor],
        *,
        sequential: bool,
        width: int | None = None,
        key: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Call the op; ``width`` is the last dimension of what it returns and ``dtype`` its type.

        Both are the first input's where they are None.
        """
        shape = inputs[0].shape if width is None else (*inputs[0].shape[:-1], width)
        out = inputs[0].new_empty(shape, dtype=dtype)
        weights: list[Tensor] = []
        for path in self._names:
            held: Any = self
            for part in path:
                held = getattr(held, part)
            weights.append(held)
        torch.ops.pwcc.opaque(list(inputs), weights, out, key or self._key, sequential)
        return out

    def _stateless(self, *held: object) -> None:
        if any(one is not None for one in held):
            raise ValueError(f"{self._key}: expected neither a cache nor a mask")


class OpaqueMixer(_Opaque):
    """A mixer: ``[1, tokens, hidden]`` to the same, over one whole sequence."""

    def forward(
        self, hidden_states: Tensor, cache: object = None, attention_mask: Tensor | None = None, **_: object
    ) -> Tensor:
        """Return the mixed states; raise ``ValueError`` for a cache or a mask."""
        self._stateless(cache, attention_mask)
        return self._run([hidden_states], sequential=True)


class OpaqueLightningAttention(_Opaque):
    """MiniMax's linear attention: as a mixer, but it returns a pair."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: object = None,
        attention_mask: Tensor | None = None,
        cache: object = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return the mixed states and no weights; raise ``ValueError`` for a cache or a mask."""
        self._stateless(cache, attention_mask)
        return self._run([hidden_states], sequential=True), None


class OpaqueConvolution(_Opaque):
    """Inkling's short convolutions, of which some make their taps from a second input."""

    def forward(
        self,
        hidden_states: Tensor,
        dynamic_input: Tensor | None = None,
        cache: object = None,
        conv_mask: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the convolved states; raise ``ValueError`` for a cache or a mask."""
        self._stateless(cache, conv_mask)
        given = [hidden_states] if dynamic_input is None else [hidden_states, dynamic_input]
        return self._run(given, sequential=True)


class OpaqueProjection(_Opaque):
    """ZAYA's projection to queries, keys and values, which convolves and delays them."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    def forward(
        self, hidden_states: Tensor, cache: object = None, conv_mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return ``[1, tokens, heads, head_dim]`` three times; raise ``ValueError`` for a cache or a mask."""
        self._stateless(cache, conv_mask)
        heads = (self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads)
        joined = self._run([hidden_states], sequential=True, width=sum(heads) * self.head_dim)
        return joined.view(*joined.shape[:-1], sum(heads), self.head_dim).split(heads, dim=-2)  # type: ignore[no-any-return,no-untyped-call]


class OpaqueRecurrentBlock(_Opaque):
    """RecurrentGemma's block, which also reads positions and returns a pair."""

    def forward(
        self,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return the mixed states and no weights; raise ``ValueError`` where state is asked for."""
        if use_cache:
            raise ValueError(f"{self._key}: expected use_cache=False")
        return self._run([input_states, position_ids], sequential=True), None


class OpaqueSparseAttention(_Opaque):
    """Attention that chooses or adds keys, over one whole sequence; see :mod:`pwcc.compile.hf_sparse`."""

    def __init__(self, module: nn.Module, key: str, call: Call) -> None:
        super().__init__(module, key, call)
        convention = convention_of(module)
        if convention is None:
            raise ValueError(f"{key}: expected sparse attention of a known form")
        self._takes_positions = convention.positions
        self._rope = convention.rope
        self._shares = convention.shares
        self._reads = convention.reads
        self._chosen = convention.chosen

    @staticmethod
    def _prepare(template: nn.Module) -> None:
        use_eager_attention(template)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        cache: object = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor | None, ...]:
        """Return the mixed states, no weights and, where layers share indices, ``[1, tokens, chosen]`` of them.

        Raise ``ValueError`` for a cache, a mask, or where position ids or indices are missing.
        """
        self._stateless(cache, attention_mask)
        cos, sin = position_embeddings if self._rope is None else position_embeddings[self._rope]
        given = [hidden_states, cos, sin]
        if self._takes_positions:
            given.append(self._required(position_ids, "position_ids"))
        if self._reads:
            given.append(self._required(prev_topk_indices, INDICES))
        if not self._chosen:
            mixed = self._run(given, sequential=True)
            return (mixed, None, prev_topk_indices) if self._shares else (mixed, None)
        size = hidden_states.shape[-1]
        dtype = packed_dtype(hidden_states)
        packed = self._run(given, sequential=True, width=size + self._chosen, dtype=dtype)
        return packed[..., :size].to(hidden_states.dtype), None, packed[..., size:].to(torch.int32)

    def _required(self, given: Tensor | None, name: str) -> Tensor:
        if given is None:
            raise ValueError(f"{self._key}: expected {name}")
        return given


class OpaqueExperts(_Opaque):
    """A mixture's experts: every token on its own, so any batch may be mixed."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts."""
        return self._run([hidden_states, top_k_index, top_k_weights], sequential=False)


class OpaqueMixture(_Opaque):
    """JetMoE's mixture with its router: every token on its own."""

    def forward(self, layer_input: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts."""
        return self._run([layer_input], sequential=False)


class OpaqueLanguageAdapters(_Opaque):
    """X-MOD's second half of a feed-forward block: adapters, of which each row of a batch picks one."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor, lang_ids: Tensor) -> Tensor:
        """Return the adapted states, of the residual ``input_tensor``'s shape."""
        return self._run([input_tensor, hidden_states, lang_ids], sequential=False)


class OpaqueAttentionExperts(_Opaque):
    """JetMoE's experts around attention. What ``map`` chose, ``reduce`` chooses again from the same states."""

    top_k: int
    hidden_size: int

    def __init__(self, module: nn.Module, key: str, call: Call) -> None:
        super().__init__(module, key, call)
        self._reduce_key = key.replace(" ", ".reduce ", 1)
        register(self._reduce_key, module, _reduce)

    def map(self, layer_input: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return queries ``[1, tokens, top_k, hidden_size]`` and what ``reduce`` needs."""
        queries = self._run([layer_input], sequential=False, width=self.top_k * self.hidden_size)
        return queries.view(*queries.shape[:-1], self.top_k, self.hidden_size), None, layer_input

    def reduce(self, layer_input: Tensor, topo_info: Tensor) -> Tensor:
        """Return the outputs of the chosen experts, merged."""
        return self._run([topo_info, layer_input], sequential=False, key=self._reduce_key)


def make_opaque(model: nn.Module, configuration: object) -> list[str]:
    """Replace every module of ``model`` that must run eagerly; return their names.

    ``configuration`` is the model's, in a portable form: it tells equal modules of different models apart.
    """
    names: list[str] = []
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            form = _form(child)
            if form is None:
                continue
            replacement, call = form
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            setattr(parent, child_name, replacement(child, key_of(child, name, configuration), call))
            names.append(name)
    return names


def _form(module: nn.Module) -> Form | None:
    if isinstance(module, _Opaque):
        return None
    convention = convention_of(module)
    if convention is not None:
        return OpaqueSparseAttention, partial(attend, convention)
    kind = type(module).__name__
    return next((form for pattern, form in FORMS if pattern.fullmatch(kind)), None)


def _whole(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    mixed: Tensor = module(*inputs)
    return mixed.reshape(inputs[0].shape)


def _lightning(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    mixed: Tensor = module(inputs[0], None, None)[0]
    return mixed


def _recurrent(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    mixed: Tensor = module(inputs[0], inputs[1], None, use_cache=False)[0]
    return mixed


def _projection(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(-2) for part in module(inputs[0], None)], dim=-1)


def _adapted(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    residual, hidden_states, languages = inputs
    adapted: Tensor = module(hidden_states, residual, languages)
    return adapted


def _map(module: Any, inputs: Sequence[Tensor]) -> Tensor:
    queries: Tensor = module.map(inputs[0])[0]
    return queries.flatten(-2)


def _reduce(module: Any, inputs: Sequence[Tensor]) -> Tensor:
    merged: Tensor = module.reduce(inputs[1], module.map(inputs[0])[2])
    return merged


FORMS: Final[Sequence[tuple[re.Pattern[str], Form]]] = [
    (re.compile(pattern), form)
    for pattern, form in (
        # forward(hidden_states, cache=None, attention_mask=None); the shape stays as it is
        (r"\w*(Mamba2?Mixer|BambaMixer|FalconH1Mixer|MambaLayer)", (OpaqueMixer, _whole)),
        (r"\w*(GatedDeltaNet|DeltaAttention|ShortConv)", (OpaqueMixer, _whole)),
        (r"\w*LightningAttention", (OpaqueLightningAttention, _lightning)),
        (r"\w*ShortConvolution", (OpaqueConvolution, _whole)),
        (r"\w*CCAProjection", (OpaqueProjection, _projection)),
        (r"RecurrentGemmaRecurrentBlock", (OpaqueRecurrentBlock, _recurrent)),
        # forward(hidden_states, top_k_index, top_k_weights), looping over the experts hit
        (r"DbrxExperts|LongcatFlashExperts", (OpaqueExperts, _whole)),
        (r"JetMoeMoE", (OpaqueMixture, _whole)),
        # forward(hidden_states, input_tensor, lang_ids), indexing with a mask of the rows of one language
        (r"XmodOutput", (OpaqueLanguageAdapters, _adapted)),
        (r"JetMoeMoA", (OpaqueAttentionExperts, _map)),
    )
]
"""Names of classes, and the module that takes such a one's place; sparse attention is known otherwise."""
