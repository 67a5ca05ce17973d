"""Key: how every guard type of Dynamo is carried to another process, in one table.

No guard is thrown away: each becomes a predicate, or is covered by a check that is named here, or is
refused by name. A type that is not listed is refused, and a test compares this table with the
installed torch. It covers the guard types of torch 2.11.0, 2.12.0, 2.13.0 and 2.14.0; what not all of
them have stands in :data:`SINCE`. ``docs/guards.md`` shows it to users; a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Covered(Enum):
    """Another check that covers a guard, so that no predicate is needed."""

    SHAPES = "shape guards: ranges and predicates of the calling convention"
    NUMERIC = "global numeric modes: numeric_state() at compile and at load"
    INFERENCE = "inference only: compiled code runs without gradients, outside transforms"
    ARGUMENT = "calling convention: type, None-ness, dtype and value of each argument"
    TREE = "model tree: dtype, shape, layout and ties of parameters, buffers and tensor attributes"
    BUILTIN = "Python's own built-ins: the Python version"
    COMPILER = "the compiler's own code, absent from a serving host: the torch version"
    HOOKS = "the hooks of a module: one predicate on all of them in order, without their ids"
    REGISTRY = "a registry filled by whatever models the process has built: the rows used are predicates"


class Form(Enum):
    """The predicate a guard becomes."""

    VALUE = "equal and of the same type"
    IDENTITY = (
        "the same constant, module, type (with bases and methods), function (its code) or Triton kernel (its "
        "source), by name"
    )
    TYPE = "of this type: its name, bases, metaclass and methods"
    CONSTANT_SUBCLASS = "equal as its base type"
    LENGTH = "this many items"
    KEYS = "these keys in this order"
    CONTAINS = "holds this key"
    EXCLUDES = "does not hold this key"
    ATTRIBUTE = "has, or has not, this attribute"
    LACKS_OWN = "has not this attribute in its own dictionary"
    EMPTY_HOOKS = "no hooks"
    NOT_NONE = "not None"
    SAME = "the same object as the other path leads to"
    TENSOR = "a tensor of these facts; the model tree's own are covered by it"


@dataclass(frozen=True, slots=True)
class Refused:
    """Not carried: compiling ends with this reason."""

    reason: str


GUARDS: dict[str, Form | Covered | Refused] = {
    # values
    "CONSTANT_MATCH": Form.VALUE,
    "EQUALS_MATCH": Form.VALUE,
    "BOOL_MATCH": Form.VALUE,
    "NONE_MATCH": Form.VALUE,
    "CONSTANT_SUBCLASS_MATCH": Form.CONSTANT_SUBCLASS,
    "NOT_NONE_MATCH": Form.NOT_NONE,
    # identity
    "ID_MATCH": Form.IDENTITY,
    "FUNCTION_MATCH": Form.IDENTITY,
    "CLASS_MATCH": Form.IDENTITY,
    "MODULE_MATCH": Form.IDENTITY,
    "BUILTIN_MATCH": Form.IDENTITY,
    "CLOSURE_MATCH": Form.IDENTITY,
    "DUPLICATE_INPUT": Form.SAME,
    # structure
    "TYPE_MATCH": Form.TYPE,
    "SEQUENCE_LENGTH": Form.LENGTH,
    "DICT_KEYS_MATCH": Form.KEYS,
    "MAPPING_KEYS_CHECK": Form.KEYS,
    "DICT_CONTAINS": Form.CONTAINS,
    "SET_CONTAINS": Form.CONTAINS,
    "DICT_NOT_CONTAINS": Form.EXCLUDES,
    "SET_NOT_CONTAINS": Form.EXCLUDES,
    "HASATTR": Form.ATTRIBUTE,
    "NOT_PRESENT_IN_GENERIC_DICT": Form.LACKS_OWN,
    "EMPTY_NN_MODULE_HOOKS_DICT": Form.EMPTY_HOOKS,
    "TENSOR_MATCH": Form.TENSOR,
    # covered elsewhere, wherever they stand
    "SHAPE_ENV": Covered.SHAPES,
    "GLOBAL_STATE": Covered.NUMERIC,
    "DETERMINISTIC_ALGORITHMS": Covered.NUMERIC,
    "DEFAULT_DEVICE": Covered.NUMERIC,
    "TORCH_FUNCTION_STATE": Covered.NUMERIC,
    "GRAD_MODE": Covered.INFERENCE,
    "AUTOGRAD_SAVED_TENSORS_HOOKS": Covered.INFERENCE,
    "DUAL_LEVEL": Covered.INFERENCE,
    "FUNCTORCH_STACK_MATCH": Covered.INFERENCE,
    # refused
    "NN_MODULE": Refused("a module specialised by identity: its attributes carry no guards of their own"),
    "FSDP_TRAINING_STATE": Refused("sharded modules change their parameters between calls"),
    "DTENSOR_SPEC_MATCH": Refused("distributed tensors are not sealed"),
    "TENSOR_SUBCLASS_METADATA_MATCH": Refused("tensor subclasses carry metadata that has no portable form"),
    "DISPATCH_KEY_SET_MATCH": Refused("dispatch keys differ between builds of torch"),
    "COW_TENSOR_MATCH": Refused("whether a tensor is copied on write exists in one process only"),
    "FAKE_SCRIPT_TYPE_MATCH": Refused("script objects have no portable form"),
    "OPAQUE_OBJ_GUARD_FN_MATCH": Refused("opaque objects have no portable form"),
    "DICT_VERSION": Refused("a dictionary's version exists in one process only"),
    "WEAKREF_ALIVE": Refused("a weak reference exists in one process only"),
    "TUPLE_ITERATOR_LEN": Refused("an iterator is used up by one call"),
    "RANGE_ITERATOR_MATCH": Refused("an iterator is used up by one call"),
    "COUNT_ITERATOR_MATCH": Refused("an iterator is used up by one call"),
}

SINCE: dict[str, str] = {
    "CONSTANT_SUBCLASS_MATCH": "2.12",
    "COUNT_ITERATOR_MATCH": "2.12",
    "DICT_NOT_CONTAINS": "2.12",  # 2.11 has DICT_CONTAINS with invert
    "SET_NOT_CONTAINS": "2.12",
    "FAKE_SCRIPT_TYPE_MATCH": "2.13",
    "COW_TENSOR_MATCH": "2.14",
}
"""The first supported torch that has a guard type, where that is not the oldest one."""

COMPILER_MODULES = (
    "torch._dynamo",
    "torch._functorch",
    "torch._guards",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._subclasses",
    "torch.fx",
    "torch.utils._pytree",  # its table of node types grows with each library imported
)
"""Modules that belong to the compiler; guards rooted there are :attr:`Covered.COMPILER`."""

REGISTRIES = (
    # transformers fills it when a model class is first built; models look up their own class in it
    ("module:transformers.utils.output_capturing", "_CAN_RECORD_REGISTRY"),
)
"""(root, attribute) of dictionaries whose size and key order say nothing of this model."""


def is_compiler_module(name: str) -> bool:
    """Tell whether a module belongs to the compiler."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in COMPILER_MODULES)


def rows() -> list[tuple[str, str, str]]:
    """Return the table for people, in its own order: guard type, how it is carried, since which torch."""
    found = []
    for name, carried in GUARDS.items():
        if isinstance(carried, Refused):
            text = f"refused: {carried.reason}"
        elif isinstance(carried, Covered):
            text = f"covered by {carried.value}"
        else:
            text = f"predicate: {carried.value}"
        found.append((name, text, SINCE.get(name, "2.11")))
    return found
