"""The seam to Dynamo's sources: where a guarded value was reached from, as an access path.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used, and what breaks if they change: the
``Source`` classes of ``torch._dynamo.source`` and their fields. A class that is not listed here leaves
its guards without a path: refused by name, never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pwcc.compile.runtime.paths import Step


@dataclass(frozen=True, slots=True)
class Path:
    """Where a guarded value was reached from: ``base`` is local, cell, global, import or state."""

    base: str
    name: str
    steps: tuple[Step, ...] = ()


class NoPath(Exception):
    """A source that no portable path can express; the message names it."""


def source_types() -> list[str]:
    """Return every source class of the installed torch."""
    from torch._dynamo import source
    from torch._guards import Source

    return [
        name
        for name, value in vars(source).items()
        if isinstance(value, type) and issubclass(value, Source) and value.__module__ == source.__name__
    ]


def source_path(source: Any) -> Path:
    """Return the access path of a ``torch._guards.Source``.

    Raises:
        NoPath: a source class without a portable path.
    """
    kind = type(source).__name__
    start = _STARTS.get(kind)
    if start is not None:
        return start(source)
    step = _STEPS.get(kind)
    if step is None:
        raise NoPath(f"source {kind}")
    base = source_path(source.base)
    return Path(base.base, base.name, (*base.steps, *step(source)))


def _local(source: Any) -> Path:
    base = "cell" if source.is_derefed_cell_contents and not source.is_input else "local"
    return Path(base, source.local_name)


_STARTS: dict[str, Callable[[Any], Path]] = {
    "LocalSource": _local,
    "GlobalSource": lambda s: Path("global", s.global_name),
    "ImportSource": lambda s: Path("import", s.module_name),
    "GlobalStateSource": lambda s: Path("state", ""),
    "ShapeEnvSource": lambda s: Path("state", ""),
    "TorchFunctionModeStackSource": lambda s: Path("state", "torch function modes"),
}


def _index(index: Any) -> str | int:
    if isinstance(index, (str, int)) and type(index) in (str, int):
        return index
    raise NoPath(f"an index of type {type(index).__name__}")


def _item(source: Any) -> tuple[Step, ...]:
    if getattr(source, "index_is_slice", False):
        raise NoPath("a slice")
    return (("item", _index(source.index)),)


def _dict_item(source: Any) -> tuple[Step, ...]:
    if type(source.index).__name__ == "ConstDictKeySource":
        return (("value_at", _index(source.index.index)),)  # by position; predicates.py finds the key
    if isinstance(source.index, bytes) and source.index.isascii():
        return (("bytes_item", source.index.decode()),)
    return (("dict_item" if "Subclass" in type(source).__name__ else "item", _index(source.index)),)


def _default(source: Any) -> tuple[Step, ...]:
    return (("attr", str(source.field)), ("item", _index(source.idx_key)))


def _attr(source: Any) -> tuple[Step, ...]:
    return (("attr", str(source.member)),)


def _same(source: Any) -> tuple[Step, ...]:
    return ()


_STEPS: dict[str, Callable[[Any], tuple[Step, ...]]] = {
    "AttrSource": _attr,
    "CellContentsSource": _attr,
    "GradSource": _attr,
    "ParamBufferSource": _attr,
    "UnspecializedParamBufferSource": _attr,
    "GenericAttrSource": lambda s: (("plain_attr", str(s.member)),),
    "TypeDictSource": lambda s: (("vars",),),
    "TypeMROSource": lambda s: (("attr", "__mro__"),),
    "CodeSource": lambda s: (("attr", "__code__"),),
    "ClosureSource": lambda s: (("attr", "__closure__"),),
    "TypeSource": lambda s: (("type",),),
    "NamedTupleFieldsSource": lambda s: (("attr", "_fields"),),
    "DataclassFieldsSource": lambda s: (("fields",),),
    "DefaultsSource": _default,
    "GetItemSource": _item,
    "ListGetItemSource": lambda s: (("list_item", _index(s.index)),),
    "DictGetItemSource": _dict_item,
    "DictSubclassGetItemSource": _dict_item,
    "ConstDictKeySource": lambda s: (("key", _index(s.index)),),
    "NNModuleSource": _same,
    "UnspecializedNNModuleSource": _same,
    "UnspecializedBuiltinNNModuleSource": _same,
    "SkipGuardSource": _same,
}

PATHLESS = {
    "Source": "abstract",
    "ChainedSource": "abstract",
    "TempLocalSource": "cannot carry a guard",
    "SyntheticLocalSource": "a value Dynamo made up",
    "RandomValueSource": "a draw of Python's random module",
    "GlobalWeakRefSource": "a weak reference Dynamo installed",
    "WeakRefCallSource": "calls what it finds",
    "CallFunctionNoArgsSource": "calls what it finds",
    "LocalCellSource": "cannot carry a guard",
    "EphemeralSource": "cannot carry a guard",
    "TensorPropertySource": "a size, stride or offset: shape guards carry it",
    "IndexedSource": "internal to tensor subclasses",
    "NegateSource": "shape arithmetic: shape guards carry it",
    "ConvertIntSource": "shape arithmetic: shape guards carry it",
    "DynamicScalarSource": "a scalar read from a tensor",
    "FlattenScriptObjectSource": "a script object",
    "ScriptObjectQualifiedNameSource": "a script object",
    "AttrProxySource": "export's proxies",
    "NonSerializableSetGetItemSource": "an element of an unordered set",
    "TupleIteratorGetItemSource": "an iterator",
    "OptimizerSource": "an optimizer: training only",
    "FSDPNNModuleSource": "sharded modules change their parameters between calls",
    "ConstantSource": "cannot carry a guard",
    "NumpyTensorSource": "an array argument",
    "SubclassAttrListSource": "internal to tensor subclasses",
    "FloatTensorSource": "a float argument made into a tensor",
    "CallMethodItemSource": "a scalar read from a tensor",
    "CurrentStreamSource": "a stream",
    "BackwardStateSource": "training only",
    "ContextVarGetSource": "a context variable: it belongs to the call, not to the model",  # 2.14
    "UnwrapCollectiveTensorSource": "collectives are not sealed",  # 2.14
}
"""Source classes without a portable path, and why; guards on them are refused by name."""

KNOWN_SOURCES = frozenset({*_STARTS, *_STEPS, *PATHLESS})
