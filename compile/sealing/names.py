"""Artifact: what each outside name of a wrapper's ``call`` becomes in a sealed program, or its refusal."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NoReturn

from pwcc.cache.errors import UnsealableError
from pwcc.compile.runtime.externs import EXTERNS
from pwcc.compile.sealing.allowed import BUILTINS, PRIMITIVES, REFUSED_NAMESPACES, is_torch_value, math_function
from pwcc.compile.sealing.wrapper import KernelDefinition, Wrapper, dotted

_EXTERN: Final = "torch._inductor.select_algorithm.extern_kernels."
_OPERATOR: Final = "torch.ops."
_FACTORIES: Final = frozenset({"cpp_pybinding", "triton"})


@dataclass
class Outside:
    """What a program needs from outside, each in order of first use.

    ``fallbacks`` maps operator paths (``torch.ops.aten.sort.stable``) and ``externs`` extern kernels to
    local names; ``devices`` maps local names to expressions.
    """

    kernels: dict[str, KernelDefinition] = field(default_factory=dict)
    externs: dict[str, str] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    primitives: dict[str, None] = field(default_factory=dict)
    constants: dict[str, None] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)


class Names:
    """Resolves the names of one wrapper and records them in ``outside``.

    ``locals_`` are the names that ``call`` itself assigns.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        *,
        locals_: Collection[str],
        constants: Collection[str],
        device_type: str,
        device_index: int,
    ) -> None:
        self.outside = Outside()
        self._wrapper = wrapper
        self._inside = frozenset(locals_)
        self._constants = frozenset(constants)
        self._device_type = device_type
        self._device_index = device_index

    def path(self, node: ast.expr) -> str | None:
        """Return the dotted path of a name or attribute chain, None if it starts inside the piece."""
        path = dotted(node)
        if path is None:
            return None
        root, _, rest = path.partition(".")
        if root in self._inside or root in self._wrapper.kernels or root in self._constants:
            return None
        root = self._wrapper.aliases.get(root, root)
        return f"{root}.{rest}" if rest else root

    def name(self, node: ast.Name) -> ast.expr:
        """Return what a bare name that is read becomes."""
        if node.id in self._inside:
            return node
        if node.id in self._wrapper.kernels:
            if self.kernel(node.id, node).factory != "cpp_pybinding":
                refuse(f"kernel {node.id!r} used other than by '.run'", node)
            return node
        if node.id in self._constants:
            self.outside.constants.setdefault(node.id)
            return node
        return self.resolve(self._wrapper.aliases.get(node.id, node.id), node)

    def resolve(self, path: str, node: ast.expr) -> ast.expr:
        """Return what the outside thing at a dotted path becomes."""
        if path.startswith(_OPERATOR):
            return self._operator(path, node)
        if path.startswith(_EXTERN):
            return self._extern(path.removeprefix(_EXTERN), node)
        if path in PRIMITIVES:
            return self.primitive(PRIMITIVES[path])
        if math_function(path):
            self.outside.modules.setdefault("math")
            return _attribute(path)
        if is_torch_value(path):
            return _attribute(path)
        if path not in BUILTINS:
            what = self._wrapper.opaque.get(path.partition(".")[0])
            refuse(f"name {path!r} ({what})" if what else f"name {path!r}", node)
        return node

    def primitive(self, name: str) -> ast.expr:
        """Return the reference to a helper of ``torch_private/primitives.py``."""
        self.outside.primitives.setdefault(name)
        return ast.Name(name, ast.Load())

    def is_kernel(self, name: str) -> bool:
        """Tell whether the wrapper defines a kernel of that name."""
        return name in self._wrapper.kernels

    def kernel(self, name: str, node: ast.expr) -> KernelDefinition:
        """Return and record a kernel that is used."""
        kernel = self._wrapper.kernels[name]
        if kernel.factory not in _FACTORIES:
            refuse(f"kernel {name!r} made by async_compile.{kernel.factory}", node)
        return self.outside.kernels.setdefault(name, kernel)

    def device(self, node: ast.Call) -> ast.expr:
        """Return the reference for ``device(type=..., index=...)``: the piece's own device, or the CPU."""
        values = {item.arg: item.value for item in node.keywords}
        if node.args or set(values) - {"type", "index"}:
            refuse("a device that is not spelled device(type=..., index=...)", node)
        kind, index = values.get("type"), values.get("index", ast.Constant(None))
        if not isinstance(kind, ast.Constant) or not isinstance(index, ast.Constant):
            refuse("a computed device", node)
        if kind.value == "cpu":
            self.outside.devices["_device_cpu"] = "torch.device('cpu')"
            return ast.Name("_device_cpu", ast.Load())
        if kind.value != self._device_type or index.value not in (None, self._device_index):
            refuse(f"another device than {self._device_type}:{self._device_index}", node)
        self.outside.devices["_device"] = f"torch.device({self._device_type!r}, _device_index)"
        return ast.Name("_device", ast.Load())

    def require_device(self, arguments: list[ast.expr], node: ast.AST) -> None:
        """Refuse device indices other than the one that the piece was compiled on."""
        match arguments:
            case [ast.Constant(value=int(index))] if index == self._device_index:
                return
            case _:
                refuse(f"another device than {self._device_type}:{self._device_index}", node)

    def _operator(self, path: str, node: ast.expr) -> ast.expr:
        _, _, *parts = path.split(".")
        if len(parts) not in (2, 3):
            refuse(f"operator path {path!r}", node)
        if parts[0] in REFUSED_NAMESPACES:
            refuse(f"operator {path!r}, which torch registers only with its compiler loaded", node)
        return ast.Name(self.outside.fallbacks.setdefault(path, "_op_" + "_".join(parts)), ast.Load())

    def _extern(self, name: str, node: ast.expr) -> ast.expr:
        if name not in EXTERNS:
            refuse(f"extern kernel {name!r}", node)
        return ast.Name(self.outside.externs.setdefault(name, f"_extern_{name}"), ast.Load())


def _attribute(path: str) -> ast.expr:
    root, *rest = path.split(".")
    node: ast.expr = ast.Name(root, ast.Load())
    for name in rest:
        node = ast.Attribute(node, name, ast.Load())
    return node


def refuse(what: str, node: ast.AST) -> NoReturn:
    """Raise the UnsealableError for a construct, with its first line."""
    text = ast.unparse(node).partition("\n")[0][:200] if isinstance(node, (ast.stmt, ast.expr)) else ""
    raise UnsealableError(
        f"cannot seal {what} in Inductor's wrapper",
        where=text or None,
        hint="compile with a version of torch that pwcc was run on (see the README), or keep the operation "
        "out of compiled pieces: --splitting-ops",
    )
