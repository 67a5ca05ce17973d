"""Key: what a graph pass is: a name, what it requires, its configuration, the files that decide what it does.

A pass is a frozen dataclass: its fields are its configuration, and so part of the key. An example::

    @dataclass(frozen=True)
    class DropDoubleNegation(GraphPass):
        name: ClassVar[str] = "double_negation"

        def __call__(self, graph: fx.Graph, context: PassContext) -> int:
            ...  # rewrite the graph in place
            return matches
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import ClassVar

import torch
from torch import fx

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, UsageError
from pwcc.cache.ids import FactorDigest, factor_digest

Value = bool | int | float | str | None
"""What a field of a pass may hold; numbers are finite, as those of JSON."""


@dataclass(frozen=True)
class PassContext:
    """What a pass may ask about the piece: its device and the token counts that the variant serves.

    ``low`` and ``high`` are inclusive; they are equal for a ``static`` variant, whose graph holds plain
    integers. In other graphs the count is a symbol that nothing may be asked about but what holds for all
    its values: use ``torch.fx.experimental.symbolic_shapes.statically_known_true``.
    """

    device: torch.device
    low: int
    high: int
    static: bool


@dataclass(frozen=True)
class GraphPass(ABC):
    """One rewriting of a piece's graph, after decomposition and functionalisation, before lowering.

    The graph is functional and flat: ATen operators with ``meta["val"]`` on every node, in-place operators
    wrapped by ``auto_functionalized``. A subclass has no state but its fields, so that one instance may
    serve many graphs. It asks nothing of the process or the machine, for only its files and its fields are
    in the key.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    """Names of passes that must run before this one."""
    last: ClassVar[bool] = False
    """Whether no other pass may run after this one."""

    @abstractmethod
    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Rewrite ``graph`` in place and return how many places were rewritten.

        Every new node needs ``meta["val"]``. Nodes left without users are removed by the caller. A graph
        that was not changed must give 0: its text is not looked at.
        """

    def config(self) -> dict[str, Value]:
        """Return the fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def files(cls) -> Sequence[Path]:
        """Return files that decide what the pass does, beside those of its class and its base classes.

        An operator that it inserts, a table that it reads.
        """
        return ()

    @classmethod
    def check_class(cls) -> None:
        """Refuse a class whose instances the key could not tell apart.

        Raises:
            UsageError: it is abstract or no frozen dataclass itself, or ``name`` or ``requires`` is no text,
                no tuple of texts.
        """
        shown = f"{cls.__module__}:{cls.__qualname__}"
        params = vars(cls).get("__dataclass_params__")  # a base's would not know the fields of this class
        if inspect.isabstract(cls) or params is None or not params.frozen:
            raise UsageError(
                f"expected the pass {shown} to be a frozen dataclass with a __call__",
                hint="write @dataclass(frozen=True) above it: its fields are its options, and so in the key",
            )
        if not isinstance(getattr(cls, "name", None), str):
            raise UsageError(f"the pass {shown} has no name", hint='write name: ClassVar[str] = "my_pass"')
        if not isinstance(cls.requires, tuple) or not all(isinstance(name, str) for name in cls.requires):
            raise UsageError(f"expected {shown}.requires to be a tuple of names, got {cls.requires!r}")

    @classmethod
    def configured(cls, config: Mapping[str, object]) -> GraphPass:
        """Return the pass with these fields set.

        Raises:
            UsageError: an unknown field, a value that is no plain one, or one that the pass refuses.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in config:
            if key not in known:
                raise UsageError(
                    f"pass {cls.name!r} has no option {key!r}",
                    hint=f"it has {', '.join(known)}" if known else "it has none",
                )
        try:
            made: GraphPass = cls(**config)
        except (TypeError, ValueError) as error:
            raise UsageError(f"pass {cls.name!r} refuses its options: {error}") from error
        for key, value in made.config().items():
            plain = isinstance(value, bool | int | float | str | None)
            if not plain or (isinstance(value, float) and not math.isfinite(value)):
                raise UsageError(f"expected a plain value for {cls.name}.{key}, got {value!r}")
        return made

    @classmethod
    def own_functions(cls) -> list[tuple[CodeType, str]]:
        """Return the code of the class and its bases up to this one, each with the name of its module."""
        held = [
            (getattr(value, "__func__", value), base.__module__)
            for base in cls.__mro__
            if issubclass(base, GraphPass) and base is not GraphPass
            for value in vars(base).values()
        ]
        codes = [(getattr(value, "__code__", None), home) for value, home in held]
        return [(c, home) for c, home in codes if isinstance(c, CodeType) and not c.co_filename.startswith("<")]

    @classmethod
    def source_digest(cls) -> FactorDigest:
        """Return the digest of the pass's files: its class's, its bases' up to this one, and :meth:`files`."""
        found = [
            _file_of(base) for base in cls.__mro__ if issubclass(base, GraphPass) and base is not GraphPass
        ]
        paths = dict.fromkeys([*found, *(Path(path).resolve() for path in cls.files())])
        try:
            parts = [path.name.encode() + b"\0" + path.read_bytes() for path in paths]
        except OSError as error:
            raise UsageError(f"cannot read a file of the pass {cls.name!r}: {error}") from error
        return factor_digest(b"\0".join(parts))


def _file_of(cls: type) -> Path:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not Path(file).is_file():
        raise UsageError(
            f"the pass {cls.__module__}:{cls.__qualname__} has no file, so it cannot be part of a key",
            hint="define it in a module",
        )
    return Path(file).resolve()


@dataclass(frozen=True)
class PassSpec:
    """A pass that is on, as the key holds it and as worker processes are told: name, fields, sources' digest.

    ``name`` is one of the table's, or ``module:Class`` of the user's own.
    """

    name: str
    config: Mapping[str, Value]
    digest: FactorDigest

    def to_json(self) -> dict[str, strict.Json]:
        """Return the canonical form."""
        return {"name": self.name, "config": dict(sorted(self.config.items())), "digest": self.digest}

    @classmethod
    def parse(cls, value: object, where: str) -> PassSpec:
        """Return what :meth:`to_json` gave; raise CorruptEntry otherwise."""
        fields = strict.Fields(value, where)
        config = fields.mapping("config", _as_value)
        spec = cls(fields.str_("name"), config, FactorDigest(fields.key("digest")))
        fields.done()
        return spec


def _as_value(value: object, where: str) -> Value:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    raise CorruptEntry(f"expected a plain value, got {strict.shown(value)}", where=where)
