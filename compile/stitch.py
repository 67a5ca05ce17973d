"""Artifact: write ``stitch.py``, the straight-line program that calls pieces and splitting operations."""

from __future__ import annotations

import keyword
import math
from collections.abc import Sequence
from typing import cast

from pwcc.cache.errors import UnsealableError
from pwcc.compile.regions import CONTEXT
from pwcc.compile.steps import EagerStep, PieceStep, Program, Ref, SizeOutput

_PREFIX = {"weight": "w", "argument": "a", "value": "v"}


def stitch_source(program: Program, symbols: Sequence[str], arguments: int) -> str:
    """Return the source of ``bind(pieces, operation, constant, weights) -> run(arguments, sizes)``.

    ``pieces`` are the unique pieces' callables in order of first use, ``operation(name)`` and
    ``constant(kind, text)`` resolve names once, at binding. Values are deleted after their last use.
    """
    return _Stitcher(program, symbols, arguments).source()


class _Stitcher:
    def __init__(self, program: Program, symbols: Sequence[str], arguments: int) -> None:
        self._program = program
        self._symbols = symbols
        self._arguments = arguments
        self._names: dict[str, str] = {}
        self._order = {graph.digest: index for index, graph in enumerate(program.unique)}

    def source(self) -> str:
        body = self._body()
        returned = [self._output(item) for item in self._program.outputs]
        count = len(self._program.unique)
        lines = ["def bind(pieces, operation, constant, weights):"]
        if count:
            lines.append(f"    {_targets('p', range(count))} = pieces")
        lines += [f"    {name} = {text}" for text, name in self._names.items()]
        if self._program.weights:
            lines.append(f"    {_targets('w', range(len(self._program.weights)))} = weights")
        lines.append("    def run(arguments, sizes):")
        if self._arguments:
            lines.append(f"        {_targets('a', range(self._arguments))} = arguments")
        if self._symbols:
            lines.append(f"        {', '.join(self._symbols)}, = sizes")
        lines += [f"        {line}" for line in body]
        outputs = "".join(f"{text}, " for text in returned)
        lines += [f"        return ({outputs.strip()})", "    return run", ""]
        return "\n".join(lines)

    def _body(self) -> list[str]:
        last = self._last_uses()
        lines: list[str] = []
        for index, step in enumerate(self._program.steps):
            lines.append(self._piece(step) if isinstance(step, PieceStep) else self._eager(step))
            dead = [f"v{value}" for value, use in last.items() if use == index]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        return lines

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for index, step in enumerate(self._program.steps):
            made = (
                step.outputs if isinstance(step, PieceStep) else () if step.output is None else (step.output,)
            )
            used = step.inputs if isinstance(step, PieceStep) else _refs((step.args, step.kwargs))
            for value in (*made, *(ref.index for ref in used if ref.kind == "value")):
                last[value] = index
        for ref in self._program.outputs:
            if isinstance(ref, Ref) and ref.kind == "value":
                last.pop(ref.index, None)
        return last

    def _output(self, item: Ref | SizeOutput) -> str:
        if isinstance(item, Ref):
            return _name(item)
        return item.size if isinstance(item.size, str) else self._literal(item.size)

    def _piece(self, step: PieceStep) -> str:
        inputs = ", ".join([*step.symbols, *(_name(ref) for ref in step.inputs)])
        call = f"p{self._order[step.graph.digest]}([{inputs}])"
        return f"{_targets('v', step.outputs)} = {call}" if step.outputs else call

    def _eager(self, step: EagerStep) -> str:
        function = self._bound(f"operation({step.target!r})")
        args = [self._literal(item) for item in _elements(step.args)]
        kwargs = [_keyword(key, self._literal(item)) for key, item in _pairs(step.kwargs)]
        call = f"{function}({', '.join([*args, *kwargs])})"
        statement = call if step.output is None else f"v{step.output} = {call}"
        if not step.regions:
            return statement
        context = self._bound(f"operation({CONTEXT!r})")
        entered = [f"{context}({', '.join(map(self._literal, region.arguments))})" for region in step.regions]
        return f"with {', '.join(entered)}: {statement}"

    def _bound(self, text: str) -> str:
        return self._names.setdefault(text, f"o{len(self._names)}")

    def _literal(self, item: object) -> str:
        if isinstance(item, list):
            return "[" + ", ".join(self._literal(element) for element in item) + "]"
        if isinstance(item, float) and not math.isfinite(item):
            return self._bound(f"constant('float', {str(item)!r})")
        if not isinstance(item, dict):
            return repr(item)
        ((tag, held),) = item.items()
        match tag:
            case "r":
                return _name(Ref(held[0], held[1]))
            case "s":
                return f"({held})"
            case "tuple":
                return "(" + "".join(f"{self._literal(element)}, " for element in held).strip() + ")"
            case "slice":
                return f"slice({', '.join(self._literal(part) for part in held)})"
            case "dict":
                return "{" + ", ".join(f"{key!r}: {self._literal(part)}" for key, part in held) + "}"
            case "ellipsis":
                return "..."
            case "dtype" | "device" | "layout" | "memory_format" | "float" | "complex":
                return self._bound(f"constant({tag!r}, {held!r})")
            case _:
                raise UnsealableError(f"an eager call holds an argument of unknown kind {tag!r}")


def _targets(prefix: str, indices: Sequence[int]) -> str:
    return "".join(f"{prefix}{index}, " for index in indices).strip()


def _keyword(key: str, text: str) -> str:
    if key.isidentifier() and not keyword.iskeyword(key):
        return f"{key}={text}"
    return f"**{{{key!r}: {text}}}"  # ATen has arguments called "from" and "lambda"


def _name(ref: Ref) -> str:
    return f"{_PREFIX[ref.kind]}{ref.index}"


def _elements(args: object) -> list[object]:
    return cast(list[object], args["tuple"]) if isinstance(args, dict) else cast(list[object], args)


def _pairs(kwargs: object) -> list[tuple[str, object]]:
    return [(str(key), item) for key, item in cast(dict[str, list[list[object]]], kwargs)["dict"]]


def _refs(value: object) -> list[Ref]:
    if isinstance(value, (list, tuple)):
        return [ref for item in value for ref in _refs(item)]
    if isinstance(value, dict):
        if "r" in value:
            return [Ref(*value["r"])]
        return [ref for item in value.values() for ref in _refs(item)]
    return []
