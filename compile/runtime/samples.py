"""Artifact: seeded sample inputs of a piece and the error measures that its numerics record holds.

Used when a piece is compiled (warm-up, tuning, check) and again by ``pwcc load --check``, so that both
see the same values on the same kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pwcc.compile.piece_graph import REDUCED, PieceGraph, PieceNode, SymbolInput, TensorInput
from pwcc.compile.runtime.arguments import values_in
from pwcc.compile.runtime.expressions import compile_expressions

MAX_INDEX = 1024
_INDEXING = frozenset(
    """
    gather getitem index index_add index_copy index_fill index_put index_reduce index_select put scatter
    scatter_add scatter_reduce setitem take take_along_dim
    """.split()  # noqa: SIM905 (a table)
)


def sample_inputs(graph: PieceGraph, size: int, device: torch.device, *, seed: int) -> list[object]:
    """Return one list of inputs for ``size`` tokens; values come from a generator on ``device``.

    Sizes other than the token count are ``size``, too, within their own ranges.

    Matrices whose shape is fixed are taken for weights and scaled by 1/sqrt(columns), vectors of fixed
    shape lie around 1; all else is standard normal. Integers are drawn below the smallest leading
    dimension of the fixed inputs, at most 1,024, so that they may index any of them, and below the size of
    whatever an operation indexes by a tensor, such as the rows of hidden states; none is drawn twice where
    there are enough.
    """
    generator = torch.Generator(device).manual_seed(seed)
    symbols = graph.symbols
    sizes = graph.sizes_at(size)
    bound = _index_bound(graph)
    bound = max(1, min([bound, *(_indexed(node, graph, sizes) for node in graph.nodes)]))
    inputs: list[object] = []
    for item in graph.inputs:
        if isinstance(item, SymbolInput):
            inputs.append(item.at(size))
            continue
        shape = compile_expressions(item.shape, symbols)(*sizes)
        stride = compile_expressions(item.stride, symbols)(*sizes)
        (offset,) = compile_expressions((item.offset,), symbols)(*sizes)
        elements = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        elements = 0 if 0 in shape else elements
        where = device if item.device == device.type else torch.device(item.device)
        own = generator if where == device else torch.Generator(where).manual_seed(seed)
        flat = _values(item, shape, elements, bound, where, own)
        inputs.append(flat.as_strided(shape, stride, offset if elements else 0))
    return inputs


def _values(
    item: TensorInput,
    shape: Sequence[int],
    elements: int,
    bound: int,
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, item.dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,), device=device, generator=generator).bool()
    if not dtype.is_floating_point:
        if elements <= bound:  # no number twice: what is written twice by index depends on the order of writes
            return torch.randperm(bound, device=device, generator=generator)[:elements].to(dtype)
        return torch.randint(0, bound, (elements,), device=device, generator=generator).to(dtype)
    drawn = torch.empty(elements, device=device, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
    drawn.normal_(generator=generator)
    fixed = not any(isinstance(dim, str) for dim in item.shape)
    if fixed and len(shape) >= 2:
        drawn.mul_(1 / math.sqrt(max(shape[-1], 1)))
    elif fixed and len(shape) == 1:
        drawn.mul_(0.1).add_(1)
    return drawn.to(dtype)


def _index_bound(graph: PieceGraph) -> int:
    leading = [
        item.shape[0]
        for item in graph.inputs
        if isinstance(item, TensorInput) and len(item.shape) >= 2 and isinstance(item.shape[0], int)
    ]
    return max(1, min([MAX_INDEX, *leading]))


def _indexed(node: PieceNode, graph: PieceGraph, sizes: Sequence[int]) -> int:
    """Return the smallest size that an operation may index by a tensor; :data:`MAX_INDEX` if it does not.

    What is no input of the piece is taken to be as small as the sizes.
    """
    name = node.target.removesuffix(".default").removesuffix(".Tensor").rpartition(".")[2].rstrip("_")
    args = node.args if isinstance(node.args, list) else []
    if name not in _INDEXING or not args:
        return MAX_INDEX
    by_position = name in ("getitem", "setitem")
    if not values_in(args[1:2] if by_position else [args[1:], node.kwargs]):
        return MAX_INDEX
    base = values_in(args[0])
    item = graph.inputs[base[0]] if base and base[0] < len(graph.inputs) else None
    if not isinstance(item, TensorInput) or not item.shape:
        return min([MAX_INDEX, *sizes])
    shape = compile_expressions(item.shape, graph.symbols)(*sizes)
    index = args[1] if len(args) > 1 else None
    if by_position and isinstance(index, dict) and "v" in index:
        return shape[0]
    return shape[index] if type(index) is int and -len(shape) <= index < len(shape) else min(shape)


def upcast(inputs: Sequence[object]) -> list[object]:
    """Return the inputs with reduced-precision tensors as float32, each a fresh copy."""
    return [_upcast(item) if isinstance(item, torch.Tensor) else item for item in inputs]


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    reduced = str(tensor.dtype).removeprefix("torch.") in REDUCED
    return tensor.float() if reduced else tensor.clone(memory_format=torch.preserve_format)


def copies(inputs: Sequence[object]) -> list[object]:
    """Return a fresh list whose tensors are copies of the same layout."""
    return [
        torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device).copy_(item)
        if isinstance(item, torch.Tensor)
        else item
        for item in inputs
    ]


def relative_error(got: Sequence[object], reference: Sequence[object]) -> float:
    """Return the largest ||got - reference|| / ||reference|| over the outputs (Frobenius, in float64).

    A NaN or infinity that is not the same in both gives infinity; integers must be equal.
    """
    worst = 0.0
    for ours, theirs in zip(got, reference, strict=True):
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            worst = max(worst, 0.0 if ours == theirs else math.inf)
        elif ours.shape != theirs.shape:
            return math.inf
        elif ours.numel():
            worst = max(worst, _tensor_error(ours, theirs))
    return worst


def _tensor_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if theirs.is_complex() and ours.is_complex():
        ours, theirs = (torch.view_as_real(one.resolve_conj()) for one in (ours, theirs))
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(ours, theirs.to(ours.dtype)) else math.inf
    if theirs.element_size() == 1:  # float8 has few operations of its own
        ours, theirs = ours.float(), theirs.float()
    finite = torch.isfinite(theirs)
    if not torch.equal(torch.isfinite(ours), finite):
        return math.inf
    odd, wanted_odd = ours[~finite].double(), theirs[~finite].double()
    if not torch.equal(odd.nan_to_num(0.0), wanted_odd.nan_to_num(0.0)):
        return math.inf
    wanted = torch.where(finite, theirs, 0).double()
    difference = torch.linalg.vector_norm(torch.where(finite, ours, 0).double() - wanted)
    scale = torch.linalg.vector_norm(wanted)
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return float(difference / scale)
