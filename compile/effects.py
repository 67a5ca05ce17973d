"""Key: what a traced graph does beside computing values, which a sealed piece cannot: each by name and line.

A sealed piece has no random state to draw from: its replay would repeat, or differ from, eager's numbers.
It has no way to give a tensor other memory or another shape in place, and it knows no derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.conditions import source_line
from pwcc.compile.segments import operation_name

_RANDOM: Final = frozenset(
    """
    rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal
    normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ poisson gumbel_softmax
    fractional_max_pool2d fractional_max_pool3d
    """.split()  # noqa: SIM905 (a table)
)
# Operations that draw only if arguments say so, each as (position, name, default).
_Argument = tuple[int, str, object]
_RATE: Final[_Argument] = (1, "p", 0.5)
_TRAINING: Final[Mapping[str, tuple[_Argument, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"), ((2, "training", True), _RATE)
        ),
        **dict.fromkeys(
            ("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
            ((2, "training", False), _RATE),
        ),
        **dict.fromkeys(("feature_dropout", "feature_dropout_"), ((2, "train", True), _RATE)),
        **dict.fromkeys(("rrelu", "rrelu_"), ((3, "training", False),)),
        "scaled_dot_product_attention": ((4, "dropout_p", 0.0),),
    }
)
_ALSO_CALLED: Final[Mapping[str, str]] = MappingProxyType({"training": "train"})  # torch.dropout's own name

_STORAGE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "set_": "set_ or .data =",
        "shallow_copy_data_": ".data =",  # torch 2.14 has an operation of its own for it
        "_get_data_attr": ".data",
        "resize_": "resize_",
        "resize_as_": "resize_as_",
        "swap_tensors": "swap_tensors",
    }
)
_DERIVATIVES: Final = (
    "_saved_tensors_hooks_disable",
    "_grad_increment_nesting",
    "_jvp_increment_nesting",
    "_vjp_treespec_compare",
)


def refuse_effects(node: fx.Node) -> None:
    """Refuse one operation of a piece that draws random numbers, moves a tensor or takes derivatives.

    Splitting operations run eagerly and may do all of it: do not pass them.

    Raises:
        UnsealableError: as said, with the user's line.
    """
    if _is_custom(node):
        return  # its tags and schema say what it does, and the lowered graph is asked for both
    name = operation_name(node)
    if draws(node, name):
        raise UnsealableError(
            f"the graph draws random numbers ({name})",
            where=source_line(node),
            hint="draw them outside the compiled module and pass them in, or in a splitting operation",
        )
    if name in _STORAGE:
        raise UnsealableError(
            f"forward changes, or reads past autograd, the memory that a tensor stands for ({_STORAGE[name]})",
            where=source_line(node),
            hint="write into the tensor (copy_), make a new one, or use detach()",
        )
    if name in _DERIVATIVES:
        raise UnsealableError(
            f"forward takes derivatives ({name}), and compiled pieces are for inference only",
            where=_line_from(node),
            hint="compute them outside the compiled module",
        )


def _line_from(node: fx.Node) -> str | None:
    """Return the user's line of a node, or of the next one that has it: torch's own bookkeeping has none."""
    while node.op != "root":
        if line := source_line(node):
            return line
        node = node.next
    return None


def _is_custom(node: fx.Node) -> bool:
    """Tell whether a node calls an operator of a library, whose name may be anything."""
    target = node.target
    qualified = str(getattr(target, "_qualified_op_name", "") or getattr(target, "namespace", ""))
    return qualified.partition("::")[0] not in ("", "aten")


def draws(node: fx.Node, name: str) -> bool:
    """Tell whether an operation draws random numbers as it is called; dropout of rate 0 does not."""
    if name in _RANDOM:
        return True
    if name not in _TRAINING:
        return False
    return all(_given(node, argument) for argument in _TRAINING[name])


def _given(node: fx.Node, argument: _Argument) -> object:
    position, name, default = argument
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, node.kwargs.get(_ALSO_CALLED.get(name, name), default))
