"""Key: constants of modules that the Python code behind an operator reads, where a compiler looks into it.

An operator with a ``CompositeImplicitAutograd`` kernel in Python is taken apart when a piece is compiled, the
body of a ``triton_op`` too, and fakes say what shapes to expect. What such code reads of modules is folded into
the piece. Dynamo keeps the operator as one call, so no guard speaks of it; these records do.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Final

import torch

from pwcc.compile.build_factors import is_covered, module_names
from pwcc.compile.runtime.paths import Step
from pwcc.compile.runtime.portable import describe
from pwcc.compile.runtime.predicates import Predicate, Rule
from pwcc.compile.torch_private.operators import Behind

MAX_READ: Final = 2_000
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Reads:
    """What was found: a predicate per constant, and the files of the functions that were read for them."""

    constants: tuple[Predicate, ...]
    files: tuple[str, ...]


def reads_of(behind: Behind) -> Reads:
    """Return what the opened functions of some operators read of loaded modules, and what those call in turn.

    Plain values, and tuples of them, are recorded with the module that holds them: ``K``, ``module.K`` and
    ``module.CONFIG.size``. What lies in containers, or is computed, is not seen. Of a file whose functions
    torch does not give away, all functions are read.
    """
    names = module_names()
    waiting: list[tuple[ModuleType | None, CodeType | str]] = [
        (sys.modules.get(function.__module__), code)
        for function in behind.opened
        for code in _own_codes(function, 0)
    ]
    waiting += [(sys.modules.get(names.get(os.path.realpath(f), "")), f) for f in behind.opened_files]
    constants: dict[tuple[str, tuple[Step, ...]], Predicate] = {}
    done: set[CodeType | str] = set()
    while waiting and len(done) < MAX_READ:
        module, what = waiting.pop()
        if what in done or module is None or is_covered(os.path.realpath(_file_of(what))):
            continue
        done.add(what)
        for line, chain in _chains(what) if isinstance(what, CodeType) else _chains_in_file(what):
            root, steps, value = _follow(module, chain)
            if isinstance(value, FunctionType):
                waiting += [(sys.modules.get(value.__module__), code) for code in _own_codes(value, 0)]
            elif steps and _is_plain(value):
                where = f"{Path(_file_of(what)).name}:{line}"
                rule = Rule(steps, "is", describe(value), where)
                constants.setdefault((root, steps), Predicate(root, rule))
    files = {_file_of(what) for what in done}
    return Reads(tuple(constants[key] for key in sorted(constants, key=repr)), tuple(sorted(files)))


def functions_of(behind: Behind) -> list[tuple[CodeType, str]]:
    """Return the code behind some operators with the names of its modules, to be compared with its files.

    Of a file whose functions torch does not give away, these are all functions of its module.
    """
    names = module_names()
    found = {code: names.get(os.path.realpath(code.co_filename), "") for code in behind.codes}
    for file in behind.opened_files:
        name = names.get(os.path.realpath(file), "")
        for value in vars(sys.modules[name]).values() if name in sys.modules else ():
            found |= {code: name for code in _own_codes(value, 0) if code.co_filename == file}
    return [(code, name) for code, name in found.items() if name]


def _file_of(what: CodeType | str) -> str:
    return what if isinstance(what, str) else what.co_filename


def _own_codes(function: object, depth: int) -> Iterator[CodeType]:
    """Yield the code of a function and of what it wraps."""
    if isinstance(function, FunctionType) and depth < 8:
        yield function.__code__
        yield from _own_codes(function.__dict__.get("__wrapped__"), depth + 1)


def _chains_in_file(file: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    try:
        code = compile(Path(file).read_bytes(), file, "exec")
    except (OSError, SyntaxError, ValueError):
        return
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return type(value) is tuple and len(value) <= 64 and all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def _chains(code: CodeType) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield what code and the functions inside name: a global, and the attributes that follow at once."""
    line, chain = code.co_firstlineno, list[str]()
    for one in dis.get_instructions(code):
        line = (one.positions.lineno if one.positions else None) or line
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(one.argval))
            continue
        if chain:
            yield line, tuple(chain)
        chain = [str(one.argval)] if one.opname == "LOAD_GLOBAL" else []
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner)


def _follow(module: ModuleType, chain: tuple[str, ...]) -> tuple[str, tuple[Step, ...], object]:
    """Return the module that holds what a chain names, as a root, the steps from there, and the value."""
    home, steps, value = module, [], vars(module).get(chain[0], module)
    if value is module:
        return "", (), None  # a builtin, or gone
    steps = [chain[0]]
    for name in chain[1:]:
        if isinstance(value, ModuleType):
            if is_covered(os.path.realpath(getattr(value, "__file__", None) or os.__file__)):
                return "", (), None
            home, steps = value, []
        if isinstance(value, FunctionType | type):
            break
        held = getattr(value, "__dict__", {})
        if name not in held:  # a property, a method
            return "", (), None
        steps, value = [*steps, name], held[name]
    return f"module:{home.__name__}", tuple(("attr", name) for name in steps), value
