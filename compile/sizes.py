"""Key: values of a traced graph that are numbers: sizes, which are expressions, and what is computed of them.

Neither ever crosses from piece to piece. An integer size is an expression in the program's symbols, written
where it is used; a float or a condition of sizes (``n ** 0.5``, ``n > 3``) is computed again where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.compile.conditions import run_time_value, source_line
from pwcc.compile.runtime.arguments import encode_constant
from pwcc.compile.runtime.expressions import parse_expression
from pwcc.compile.torch_private import symbols

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Sizes:
    """Knows which nodes of a trace are numbers and which of them have an expression."""

    def __init__(self, env: Any, names: Mapping[Any, str]) -> None:
        self._env = env
        self._names = names
        self._computed: dict[fx.Node, bool] = {}

    def is_number(self, node: fx.Node) -> bool:
        """Tell whether a node is a number, a ``torch.Size``, or a tuple of sizes."""
        value = node.meta.get("example_value")
        if isinstance(value, tuple):
            sizes = all(isinstance(item, (int, torch.SymInt)) for item in value)
            return isinstance(value, torch.Size) or (bool(value) and sizes)
        return isinstance(value, _NUMBERS)

    def is_computed(self, node: fx.Node) -> bool:
        """Tell whether a node is a number that its operation must compute, for it has no expression."""
        if node not in self._computed:
            self._computed[node] = self.is_number(node) and not self._has_text(node.meta["example_value"])
        return self._computed[node]

    def symbols(self, value: object, where: str | None) -> Iterable[Any]:
        """Yield torch's symbols in a value. Raises TraceError for one that the graph computes."""
        for item in value if isinstance(value, tuple) else (value,):
            if not isinstance(item, (torch.SymInt, torch.SymBool, torch.SymFloat)):
                continue
            for symbol in symbols.free_symbols(symbols.expression(item, self._env)):
                if symbol not in self._names:
                    raise run_time_value(symbol, where)
                yield symbol

    def encode(self, value: object, names: Mapping[Any, str]) -> object:
        """Encode a number that has an expression, its symbols by ``names``."""
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item, names) for item in value]}
        if not isinstance(value, torch.SymInt):
            return encode_constant(value)
        text = symbols.to_text(symbols.expression(value, self._env), names)
        return text if isinstance(text, int) else {"s": text}

    def text(self, value: object, names: Mapping[Any, str], node: fx.Node) -> int | str:
        """Return the expression of one dimension of a tensor that crosses a boundary.

        Raises:
            UnsealableError: the size is not made of integers, so that no expression says it.
        """
        text = symbols.to_text(symbols.expression(value, self._env), names)
        if isinstance(text, str) and not _parses(text, names):
            raise UnsealableError(
                f"a tensor whose size is {text} crosses from one piece to the next",
                where=source_line(node),
                hint="compute sizes with + - * // % min and max only, or keep the tensor on one side",
            )
        return text

    def _has_text(self, value: object) -> bool:
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return False
        items = value if isinstance(value, tuple) else (value,)
        return all(self._in_grammar(item) for item in items if isinstance(item, torch.SymInt))

    def _in_grammar(self, size: torch.SymInt) -> bool:
        found = symbols.expression(size, self._env)
        if any(symbol not in self._names for symbol in symbols.free_symbols(found)):
            return True  # a run-time value: it is refused as that wherever it is used
        text = symbols.to_text(found, self._names)
        return isinstance(text, int) or _parses(text, self._names)


def _parses(text: str, names: Mapping[Any, str]) -> bool:
    try:
        parse_expression(text, list(set(names.values())))
    except CorruptEntry:
        return False
    return True
