"""Key: views that a piece takes beside what they are views of, derived again inside the piece that writes one.

A piece is compiled as if its tensor inputs were separate, so one that writes a tensor must not take a second
one of the same memory. Where the others are views that an earlier piece made, this piece makes them again
of the one tensor that they all come from; the compiler then sees how they overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import fx

from pwcc.compile.encoding import leaves
from pwcc.compile.runtime.user_kernels import launch
from pwcc.compile.segments import Segment, is_tensor, operation_name
from pwcc.compile.torch_private.writes import schema_writes, storage

_VIEWS: Final = frozenset(
    """
    view view_as reshape reshape_as transpose permute t numpy_T adjoint unsqueeze squeeze expand expand_as
    unbind split chunk tensor_split hsplit vsplit narrow select getitem __getitem__ getattr flatten unflatten
    detach as_strided movedim swapaxes swapdims diagonal unfold contiguous ravel
    """.split()  # noqa: SIM905 (a table)
)
_IN_PLACE_OPERATORS: Final = frozenset(
    """
    setitem __setitem__ iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
    """.split()  # noqa: SIM905 (a table)
)
_STATISTICS: Final = frozenset({"batch_norm", "instance_norm"})


def derive_views_again(segment: Segment, is_number: Callable[[fx.Node], bool]) -> None:
    """Give a compiled segment that may write one tensor of shared memory a single input for that memory.

    Args:
        segment: its members are changed; the graph gets copies of view operations before the first.
        is_number: tells nodes whose values are numbers, which may be arguments of a view operation.
    """
    if segment.eager or not any(may_write(node) for node in segment.members):
        return
    own = set(segment.members)
    taken = dict.fromkeys(
        used for node in segment.members for used in node.all_input_nodes if used not in own and is_tensor(used)
    )
    groups: dict[int, list[fx.Node]] = {}
    for node in taken:
        groups.setdefault(storage(node.meta["example_value"]), []).append(node)
    for group in groups.values():
        chains = {node: _chain(node, is_number) for node in group}
        if len(group) > 1 and len({chain[0] for chain in chains.values()}) == 1:
            for node, chain in chains.items():
                _derive(segment, node, chain)


def may_write(node: fx.Node) -> bool:
    """Tell whether an operation may write one of its arguments, by what it is called and called with."""
    by_schema = schema_writes(node.target)
    if by_schema is not None:
        return by_schema
    name = operation_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or node.target is launch
        or name in _IN_PLACE_OPERATORS
        or name in _STATISTICS
        or node.kwargs.get("out") is not None
        or any(value is True for value in (node.kwargs.get("inplace"), *_last(node.args)))
    )


def _last(args: Sequence[object]) -> Sequence[object]:
    """The place of ``inplace`` among the positional arguments of torch's functionals."""
    return args[-1:] if len(args) > 1 else ()


def _chain(node: fx.Node, is_number: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return what a tensor was made of by views alone: the tensor that is no view, then each operation."""
    chain = [node]
    while (base := _viewed(chain[0], is_number)) is not None:
        chain.insert(0, base)
    return chain


def _viewed(node: fx.Node, is_number: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return what a node is a view of, if it is one and of nothing else but numbers."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    base, name = node.args[0], operation_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    if not isinstance(base, fx.Node) or not (name in _VIEWS or in_place):
        return None
    if in_place and not _same_tensor(node, base):
        return None
    others = [leaf for leaf in leaves((node.args[1:], node.kwargs)) if isinstance(leaf, fx.Node)]
    if not in_place and any(not is_number(other) for other in others):
        return None
    memory = {storage(tensor) for tensor in (*_tensors(base), *_tensors(node))}
    return base if len(memory) == 1 else None


def _same_tensor(node: fx.Node, base: fx.Node) -> bool:
    one, other = node.meta.get("example_value"), base.meta.get("example_value")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one is other or _layout(one) == _layout(other)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(map(str, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())))


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("example_value")
    yield from (item for item in leaves(value) if isinstance(item, torch.Tensor))


def _derive(segment: Segment, node: fx.Node, chain: Sequence[fx.Node]) -> None:
    """Put copies of a chain's views in front of a segment and use the last one there."""
    made = chain[0]
    copies: list[fx.Node] = []
    for link in chain[1:]:
        if operation_name(link) not in _VIEWS:
            continue  # written in place: the same tensor
        with link.graph.inserting_before(segment.members[0]):
            copied = link.graph.node_copy(link, lambda used: used)
        if isinstance(link.args[0], fx.Node):
            copied.replace_input_with(link.args[0], made)
        made = copied
        made.meta = dict(link.meta)
        copies.append(made)
    if made is not node:
        for member in segment.members:
            member.replace_input_with(node, made)
        segment.members[:0] = copies
