"""Artifact: the rewriting of a wrapper's ``call`` into one that names only what a sealed piece may use.

Every name, attribute and statement is checked against a list; what is not on it is an UnsealableError
that names it, so that a construct of a torch release that nobody has read cannot slip through.

What changes: device guards and ``set_device`` go (the caller holds the guard, once for all pieces);
device index 0 becomes a parameter; the stream is asked for once; ``kernel.run(..., stream=s)`` becomes a
launcher call; operators and extern kernels are looked up once, when the piece is bound; size and stride
assertions on inputs go, since whoever calls the piece checks them (weights once, activations once a
size); ``assert`` becomes ``raise``, which ``python -O`` keeps.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from pwcc.compile.sealing.allowed import METHODS, PRIMITIVES
from pwcc.compile.sealing.names import Names, Outside, refuse
from pwcc.compile.sealing.wrapper import Wrapper

_DEVICE_GUARD: Final = "torch.cuda._DeviceGuard"
_SET_DEVICE: Final = "torch.cuda.set_device"
_RAW_STREAM: Final = "torch._C._cuda_getCurrentRawStream"


@dataclass(frozen=True)
class Rewritten:
    """A rewritten ``call`` and what it needs.

    ``arguments`` are the inputs' names, ``outputs`` counts the returned tuple, ``stated`` are the (name,
    size, stride) texts of the assertions on inputs that were dropped.
    """

    call: ast.FunctionDef
    outside: Outside
    arguments: tuple[str, ...]
    outputs: int
    stated: tuple[tuple[str, str, str], ...]


def rewrite(
    wrapper: Wrapper, *, constants: Collection[str], device_type: str, device_index: int | None
) -> Rewritten:
    """Rewrite a wrapper's ``call`` for one device; the wrapper's own tree is consumed.

    Raises:
        UnsealableError: names the first construct that cannot be sealed.
    """
    call = wrapper.call
    if [item.arg for item in call.args.args] != ["args"] or call.decorator_list:
        refuse("the parameters of 'call'", call)
    names = Names(
        wrapper,
        locals_={"args"} | stored_names(call),
        constants=constants,
        device_type=device_type,
        device_index=device_index or 0,
    )
    arguments = _arguments(call)
    rewriter = _Rewriter(names, arguments)
    call.body = rewriter.block(call.body)
    last = call.body[-1] if call.body else call
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
        refuse("a 'call' that does not end by returning a tuple", last)
    return Rewritten(call, names.outside, arguments, len(last.value.elts), tuple(rewriter.stated))


def stored_names(tree: ast.AST) -> set[str]:
    """Return the names that a tree assigns or deletes."""
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


class _Rewriter(ast.NodeTransformer):
    """Statement by statement; an expression is visited by the ``visit_`` methods."""

    def __init__(self, names: Names, arguments: tuple[str, ...]) -> None:
        self.stated: list[tuple[str, str, str]] = []
        self._names = names
        self._arguments = arguments
        self._untouched = set(arguments)  # inputs that have not been assigned again
        self._streams: set[str] = set()  # names that hold the stream already
        self._depth = 0

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a list of statements."""
        handlers: dict[type[ast.stmt], Callable[..., list[ast.stmt]]] = {
            ast.Expr: self._expression,
            ast.With: self._with,
            ast.Assert: self._assert,
            ast.Assign: self._assign,
            ast.If: self._if,
            ast.Delete: self._plain,
            ast.Raise: self._plain,
            ast.Return: self._plain,
            ast.Pass: self._plain,
        }
        done: list[ast.stmt] = []
        for node in body:
            if type(node) not in handlers:
                refuse(f"a {type(node).__name__} statement", node)
            done += handlers[type(node)](node)
        return done

    def _plain(self, node: ast.stmt) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node]

    def _expression(self, node: ast.Expr) -> list[ast.stmt]:
        if isinstance(node.value, ast.Constant):
            return []  # a docstring: in 2.13 it may hold the autotuning block, with paths
        if isinstance(node.value, ast.Call) and self._dropped(node.value):
            return []
        return self._plain(node)

    def _dropped(self, call: ast.Call) -> bool:
        path = self._names.path(call.func)
        if path == _SET_DEVICE:
            self._names.require_device(call.args, call)
            return True
        primitive = None if path is None else PRIMITIVES.get(path)
        match primitive, call.args:
            case "assert_size_stride", [name, size, stride, *_]:
                stated = [(name, size, stride)]
            case "assert_size_stride_grouped", [ast.Tuple(n), ast.Tuple(s), ast.Tuple(t), *_] if (
                len(n) == len(s) == len(t)
            ):
                stated = list(zip(n, s, t, strict=True))
            case _:
                return False
        if not all(isinstance(name, ast.Name) and name.id in self._untouched for name, _, _ in stated):
            return False
        self.stated += [
            (ast.unparse(name), ast.unparse(size), ast.unparse(stride)) for name, size, stride in stated
        ]
        return True

    def _with(self, node: ast.With) -> list[ast.stmt]:
        guard = node.items[0].context_expr
        if (
            len(node.items) != 1
            or not isinstance(guard, ast.Call)
            or self._names.path(guard.func) != _DEVICE_GUARD
        ):
            refuse("a 'with' statement other than a device guard", node)
        self._names.require_device(guard.args, node)
        return self.block(node.body)

    def _assert(self, node: ast.Assert) -> list[ast.stmt]:
        error = ast.Call(ast.Name("RuntimeError", ast.Load()), [node.msg] if node.msg else [], [])
        negated = ast.UnaryOp(ast.Not(), node.test)
        return self._if(ast.If(negated, [ast.Raise(error, None)], []))

    def _if(self, node: ast.If) -> list[ast.stmt]:
        self._depth += 1
        node.test = self.visit(node.test)
        node.body = self.block(node.body) or [ast.Pass()]
        node.orelse = self.block(node.orelse)
        self._depth -= 1
        return [node]

    def _assign(self, node: ast.Assign) -> list[ast.stmt]:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)):
                if self._names.path(function) == _RAW_STREAM:
                    if name in self._streams:
                        self._names.require_device(node.value.args, node)  # type: ignore[attr-defined]
                        return []  # the stream cannot change within a piece
                    if not self._depth:
                        self._streams.add(name)
            case ast.Assign(value=ast.Name(id="args")):
                return [node]  # the unpacking of the inputs
            case _:
                pass
        self._untouched -= stored_names(node)
        return self._plain(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Rewrite devices, streams and kernel launches; check other calls."""
        path = self._names.path(node.func)
        if path == "torch.device":
            return self._names.device(node)
        if path == _RAW_STREAM:
            self._names.require_device(node.args, node)
            parameter: ast.expr = ast.Name("_device_index", ast.Load())
            return ast.Call(self._names.primitive("get_raw_stream"), [parameter], [])
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="run") if self._names.is_kernel(name):
                return self._launch(node, name)
            case _:
                self.generic_visit(node)
                return node

    def _launch(self, node: ast.Call, name: str) -> ast.expr:
        if self._names.kernel(name, node).factory != "triton":
            refuse(f"'.run' of kernel {name!r}", node)
        if [item.arg for item in node.keywords] != ["stream"]:
            refuse(f"keywords in the launch of kernel {name!r}", node)
        arguments = [self.visit(item) for item in (*node.args, node.keywords[0].value)]
        return ast.Call(ast.Name(name, ast.Load()), arguments, [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Resolve a path from outside, or check a method of something inside."""
        path = self._names.path(node)
        if path is not None:
            return self._names.resolve(path, node)
        if node.attr not in METHODS:
            refuse(f"attribute {node.attr!r}", node)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Resolve a name that is read."""
        return self._names.name(node) if isinstance(node.ctx, ast.Load) else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Check the kind of every other node."""
        if not isinstance(node, _ALLOWED_NODES):
            refuse(f"a {type(node).__name__} expression", node)
        return super().generic_visit(node)


_ALLOWED_NODES: Final = (
    ast.stmt,  # statements are checked in block
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.keyword,
    ast.Attribute,
    ast.BinOp,
    ast.BoolOp,
    ast.Call,
    ast.Compare,
    ast.Constant,
    ast.FormattedValue,  # in the message of a failed divisibility check
    ast.IfExp,
    ast.JoinedStr,
    ast.List,
    ast.Name,
    ast.Slice,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
)


def _arguments(call: ast.FunctionDef) -> tuple[str, ...]:
    """The input names of ``a, b = args``; a piece without inputs has no such line."""
    for node in call.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Name(id="args")):
                return tuple(item.id for item in elements if isinstance(item, ast.Name))
            case _:
                pass
    return ()
