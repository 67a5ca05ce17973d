"""Artifact: Inductor's generated wrapper, read as data: its ``call``, its kernels and what its names mean.

The wrapper is a Python module: imports, aliases of torch helpers, kernel definitions by way of
``async_compile``, then ``call`` (a function; under graph partitioning a method of ``Runner``), then
benchmark helpers. Only ``call`` and the meaning of the names it uses matter for sealing. Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from pwcc.cache.errors import UnsealableError


@dataclass(frozen=True)
class KernelDefinition:
    """``name = async_compile.<factory>(...)``; ``arg_types`` are the C++ types of a ``cpp_pybinding``."""

    name: str
    factory: str
    arg_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wrapper:
    """A parsed wrapper.

    ``aliases`` maps module-level names to the dotted path that they stand for, such as
    ``reinterpret_tensor`` to ``torch._C._dynamo.guards._reinterpret_tensor``. ``opaque`` maps other
    module-level names to what they are, for the error if ``call`` uses one.
    """

    call: ast.FunctionDef
    aliases: Mapping[str, str]
    kernels: Mapping[str, KernelDefinition]
    opaque: Mapping[str, str]


def parse_wrapper(source: str) -> Wrapper:
    """Parse a wrapper's text (torch 2.11 and 2.13 layouts).

    Raises:
        UnsealableError: it is no Python, or holds no single ``call``.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise UnsealableError(f"expected Inductor's wrapper to be Python, got {error}") from error
    aliases: dict[str, str] = {}
    kernels: dict[str, KernelDefinition] = {}
    opaque: dict[str, str] = {}
    calls: list[ast.FunctionDef] = []
    for node in module.body:
        match node:
            case ast.Import(names=names):
                aliases |= {
                    item.asname or item.name.split(".")[0]: item.name
                    if item.asname
                    else item.name.split(".")[0]
                    for item in names
                }
            case ast.ImportFrom(module=str(package), names=names):
                aliases |= {item.asname or item.name: f"{package}.{item.name}" for item in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                _assignment(name, value, aliases, kernels, opaque)
            case ast.FunctionDef(name="call"):
                calls.append(node)
            case ast.FunctionDef(name=name):
                opaque[name] = "a function of the wrapper (a sub-graph, or a helper)"
            case ast.ClassDef(name="Runner", body=body):
                calls += [
                    _method(item) for item in body if isinstance(item, ast.FunctionDef) and item.name == "call"
                ]
            case ast.ClassDef(name=name):
                opaque[name] = "a class of the wrapper"
            case _:
                pass
    if len(calls) != 1:
        raise UnsealableError(f"expected one function 'call' in Inductor's wrapper, got {len(calls)}")
    return Wrapper(calls[0], aliases, kernels, opaque)


def _assignment(
    name: str,
    value: ast.expr,
    aliases: dict[str, str],
    kernels: dict[str, KernelDefinition],
    opaque: dict[str, str],
) -> None:
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr=factory), args=arguments):
            kernels[name] = KernelDefinition(name, factory, _arg_types(arguments) if "cpp" in factory else ())
        case ast.Constant(value=None):
            opaque[name] = "a constant that is set after the module is loaded"
        case _:
            path = dotted(value)
            if path is None:
                opaque[name] = "a module-level value"
            else:
                root, _, rest = path.partition(".")
                aliases[name] = f"{aliases.get(root, root)}.{rest}" if rest else aliases.get(root, root)


def _arg_types(arguments: list[ast.expr]) -> tuple[str, ...]:
    match arguments:
        case [ast.List(elts=elements), *_]:
            return tuple(
                item.value
                for item in elements
                if isinstance(item, ast.Constant) and isinstance(item.value, str)
            )
        case _:
            return ()


def _method(node: ast.FunctionDef) -> ast.FunctionDef:
    """Return ``Runner.call`` as a plain function; a use of ``self`` in it is found when it is rewritten."""
    node.args.args = [item for item in node.args.args if item.arg != "self"]
    return node


def dotted(node: ast.expr) -> str | None:
    """Return ``a.b.c`` for an attribute chain that starts at a name, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
