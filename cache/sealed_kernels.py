"""Artifact: the kernels of a sealed piece, as its record holds them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import BlobDigest
from pwcc.cache.strict import Fields, Json

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
_ARG_TYPES = re.compile(r"[A-Za-z]{0,1024}")


@dataclass(frozen=True)
class CppKernel:
    """A CPU kernel: a shared object that exports ``PyInit_kernel``; ``arg_types`` are its C++ types."""

    name: str
    blob: BlobDigest
    arg_types: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"kind": "cpp", "name": self.name, "blob": self.blob, "arg_types": list(self.arg_types)}


@dataclass(frozen=True)
class TritonKernel:
    """A GPU kernel: a cubin and how to launch it.

    ``symbol`` is the entry in the cubin, ``shared`` bytes of shared memory, ``arg_types`` one letter an
    argument as torch's static launcher reads them, ``capability`` ``9.0`` for sm_90. ``config``,
    ``grid`` and ``registers`` only inform: the launcher in ``piece.py`` holds the grid.
    """

    name: str
    blob: BlobDigest
    symbol: str
    shared: int
    num_warps: int
    arg_types: str
    capability: str
    config: str
    grid: tuple[str, str, str]
    registers: int
    spills: int

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "kind": "triton",
            "name": self.name,
            "blob": self.blob,
            "symbol": self.symbol,
            "shared": self.shared,
            "num_warps": self.num_warps,
            "arg_types": self.arg_types,
            "capability": self.capability,
            "config": self.config,
            "grid": list(self.grid),
            "registers": self.registers,
            "spills": self.spills,
        }


Kernel = CppKernel | TritonKernel


def parse_kernel(value: object, where: str) -> Kernel:
    """Return what a kernel's ``to_json`` wrote; raise CorruptEntry otherwise."""
    fields = Fields(value, where)
    kind = fields.str_("kind")
    name, blob = fields.item("name", as_identifier), fields.digest("blob")
    kernel: Kernel
    if kind == "cpp":
        kernel = CppKernel(name, blob, fields.list_("arg_types", strict.as_text, max_items=4096))
    elif kind == "triton":
        kernel = TritonKernel(
            name,
            blob,
            symbol=fields.item("symbol", as_identifier),
            shared=fields.int_("shared", high=2**31 - 1),
            num_warps=fields.int_("num_warps", low=1, high=64),
            arg_types=fields.item("arg_types", _arg_types),
            capability=fields.item("capability", strict.as_name),
            config=fields.item("config", strict.as_text),
            grid=_grid(fields.list_("grid", strict.as_text, max_items=3), where),
            registers=fields.int_("registers", low=-1),
            spills=fields.int_("spills", low=-1),
        )
    else:
        fields.fail("kind", "'cpp' or 'triton'", kind)
    fields.done()
    return kernel


def _grid(items: tuple[str, ...], where: str) -> tuple[str, str, str]:
    if len(items) != 3:
        raise CorruptEntry(f"expected three grid expressions, got {len(items)}", where=where)
    return items[0], items[1], items[2]


def as_identifier(value: object, where: str) -> str:
    """Item parser: a Python identifier of at most 512 characters."""
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise CorruptEntry(f"expected an identifier, got {repr(value)[:80]}", where=where)
    return value


def _arg_types(value: object, where: str) -> str:
    if not isinstance(value, str) or not _ARG_TYPES.fullmatch(value):
        raise CorruptEntry(f"expected argument type letters, got {repr(value)[:80]}", where=where)
    return value
