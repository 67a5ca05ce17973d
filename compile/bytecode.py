"""Serve the Key noun: a straight-line reading of byte code, with a stack of known values.

Operations that a subclass knows are methods named like them in lower case, with a leading underscore. Any
other one takes what it takes and leaves unknown values. Where branches meet, values that differ by the way
are unknown. Read with Python 3.11, 3.12 and 3.13.
"""

from __future__ import annotations

import dis
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final


class Unknown:
    """A value of which nothing is known."""


@dataclass(frozen=True)
class Constant:
    """A constant of the code."""

    value: object


UNKNOWN: Final = Unknown()
_LEAVES: Final = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_NEUTRAL: Final = (
    *("NOP", "RESUME", "JUMP_FORWARD", "JUMP_BACKWARD", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL"),
    *("PUSH_NULL", "PRECALL", "RETURN_GENERATOR", "GEN_START", "NOT_TAKEN"),
)
_ONLY_TAKE: Final = (
    *("POP_", "STORE_", "DELETE_", "RETURN_VALUE", "RAISE", "RERAISE", "LIST_APPEND", "LIST_EXTEND", "SET_ADD"),
    *("SET_UPDATE", "MAP_ADD", "DICT_UPDATE", "DICT_MERGE", "END_FOR", "END_SEND"),
)


class StackReading(ABC):
    """One code object, read from top to bottom; ``line`` is where the reading is."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.line = code.co_firstlineno
        self._stack: list[object] = []
        self._locals: dict[str, object] = {}

    def read(self) -> None:
        """Read all operations."""
        arriving: dict[int, list[object]] = {}
        falls_through = True
        for step in dis.get_instructions(self.code):
            line = step.positions.lineno if step.positions else None
            self.line = self.line if line is None else line
            if step.is_jump_target or not falls_through:
                self._join(arriving.get(step.offset), falls_through)
            if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                self._note_jump(step, arriving)
            handler: Callable[[Any], None] = getattr(self, f"_{step.opname.lower()}", self._other)
            handler(step)
            falls_through = not step.opname.startswith(_LEAVES)

    @abstractmethod
    def lose(self, value: object) -> None:
        """Note that a value goes where this reading cannot follow."""

    def top(self) -> object:
        """Return the value on top of the stack, which stays."""
        return self._stack[-1] if self._stack else UNKNOWN

    def pop(self) -> object:
        """Take the value on top of the stack."""
        return self._stack.pop() if self._stack else UNKNOWN

    def push(self, *values: object) -> None:
        """Put values on the stack."""
        self._stack.extend(values)

    def _join(self, arriving: list[object] | None, falls_through: bool) -> None:
        """Go on with what this place is reached with: values that differ by the way are unknown."""
        if not falls_through:
            self._stack = list(arriving or ())  # an exception handler's stack holds nothing of interest
        elif arriving is not None:
            self._stack = self._merged(self._stack, arriving)

    def _merged(self, one: list[object], other: list[object]) -> list[object]:
        pairs = list(zip(reversed(one), reversed(other), strict=False))[::-1]
        for mine, theirs in pairs:
            if mine is not theirs:  # whichever way was taken, it is lost sight of
                self.lose(mine)
                self.lose(theirs)
        return [mine if mine is theirs else UNKNOWN for mine, theirs in pairs]

    def _note_jump(self, step: Any, arriving: dict[int, list[object]]) -> None:
        effect = dis.stack_effect(step.opcode, step.arg, jump=True)
        stack = [*self._stack, *[UNKNOWN] * effect] if effect >= 0 else self._stack[:effect]
        before = arriving.get(step.argval)
        if before is not None:
            stack = self._merged(before, stack)
        arriving[step.argval] = list(stack)

    def _other(self, step: Any) -> None:
        """Take what an operation takes and leave unknown values: all that matters of most operations."""
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname.startswith(_NEUTRAL):
            self.push(*[UNKNOWN] * effect)
            return
        tests = step.opname.startswith(("POP_JUMP", "JUMP_IF"))
        leaves_result = not (tests or step.opname.startswith(_ONLY_TAKE))
        if effect > 0:
            self.push(*[UNKNOWN] * effect)
            return
        taken = [self.pop() for _ in range(leaves_result - effect)]
        for value in taken:
            if not tests:
                self.lose(value)
        self.push(*[UNKNOWN] * leaves_result)

    def _load_const(self, step: Any) -> None:
        self.push(Constant(step.argval))

    def _store_fast(self, step: Any) -> None:
        self._keep(step.argval)

    def _keep(self, name: object) -> None:
        value = self.pop()
        self._locals[str(name)] = UNKNOWN if isinstance(value, Constant) else value  # it may be set elsewhere

    def _load_fast(self, step: Any) -> None:
        self.push(self._locals.get(str(step.argval), UNKNOWN))

    _load_fast_check = _load_fast
    _load_fast_borrow = _load_fast

    def _load_fast_load_fast(self, step: Any) -> None:  # 3.13
        for name in step.argval:
            self.push(self._locals.get(str(name), UNKNOWN))

    def _store_fast_load_fast(self, step: Any) -> None:  # 3.13
        stored, loaded = step.argval
        self._keep(stored)
        self.push(self._locals.get(str(loaded), UNKNOWN))

    def _store_fast_store_fast(self, step: Any) -> None:  # 3.13
        for name in step.argval:
            self._keep(name)

    def _copy(self, step: Any) -> None:
        self.push(self._stack[-step.arg] if len(self._stack) >= step.arg else UNKNOWN)

    def _swap(self, step: Any) -> None:
        if len(self._stack) >= step.arg:
            self._stack[-1], self._stack[-step.arg] = self._stack[-step.arg], self._stack[-1]

    def _pop_top(self, _step: Any) -> None:
        self.pop()
