"""Artifact: the text of ``piece.py``: a rewritten ``call``, its launchers and look-ups, in one ``bind``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Final

from pwcc.cache.errors import UnsealableError
from pwcc.compile.ops import attention_quant
from pwcc.compile.ops.fused import OPERATORS
from pwcc.compile.sealing.rewrite import Rewritten, stored_names

_FIXED: Final = frozenset(
    {"kernels", "constants", "args", "call", "bind", "torch", "math", "EXTERNS", "_device_index"}
)

_REGISTERED: Final = {
    "pwcc.compile.ops.attention_quant": (attention_quant.NAME,),
    "pwcc.compile.ops.fused": OPERATORS,
}
"""Modules that register operators which passes put into pieces, and the operators."""


def program_text(piece: Rewritten, launchers: Mapping[str, str]) -> bytes:
    """Return the program as UTF-8 text; the same piece and launchers give the same bytes.

    ``launchers`` maps each Triton kernel to the text of its launcher (``sealing/launcher.py``).

    Raises:
        UnsealableError: two things of the program would share a name.
    """
    outside = piece.outside
    primitives = sorted(set(outside.primitives) | ({"launch_kernel"} if launchers else set()))
    lines = ["import math"] if "math" in outside.modules else []
    lines.append("import torch")
    if outside.externs:
        lines.append("from pwcc.compile.runtime.externs import EXTERNS")
    called = {path.removeprefix("torch.ops.pwcc.").split(".")[0] for path in outside.fallbacks}
    for module, names in _REGISTERED.items():
        if not called.isdisjoint(names):
            lines.append(f"import {module}")  # registers them; a model need not have
    if primitives:
        lines.append(f"from pwcc.compile.torch_private.primitives import {', '.join(primitives)}")
    lines += ["", "def bind(kernels, constants, _device_index):"]
    lookups = {
        **outside.devices,
        **{local: path for path, local in outside.fallbacks.items()},
        **{local: f"EXTERNS[{name!r}]" for name, local in outside.externs.items()},
        **{name: f"constants[{name!r}]" for name in outside.constants},
        **{
            function_name(name) if name in launchers else name: f"kernels[{name!r}]" for name in outside.kernels
        },
    }
    _refuse_collisions(piece, [*lookups, *launchers, *primitives])
    lines += [f"    {name} = {value}" for name, value in sorted(lookups.items())]
    for name in sorted(launchers):
        lines += [f"    {line}" for line in launchers[name].splitlines()]
    call = ast.unparse(ast.fix_missing_locations(piece.call))
    lines += [f"    {line}" for line in call.splitlines()]
    lines += ["    return call", ""]
    return "\n".join(lines).encode()


def function_name(kernel: str) -> str:
    """Return the local name of a Triton kernel's function handle."""
    return f"_function_{kernel}"


def _refuse_collisions(piece: Rewritten, names: Iterable[str]) -> None:
    taken = stored_names(piece.call) | _FIXED
    for name in names:
        if name in taken:
            raise UnsealableError(f"expected names of a sealed program to differ, got {name!r} twice")
        taken.add(name)
