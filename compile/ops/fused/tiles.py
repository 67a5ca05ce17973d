"""Artifact: how wide a tile of a fused operator is and how many warps work on it; imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WIDTH = 16384
"""The widest row that one program holds in registers; wider rows are left to Inductor, or to torch eagerly."""
_POINTWISE = 1024  # at 1 and 8 tokens a fifth faster than 2,048 on an H200, at 4,096 the same


@dataclass(frozen=True)
class Tile:
    """``block`` elements (a power of two), ``warps`` warps, and ``count`` tiles a row."""

    block: int
    warps: int
    count: int = 1


def row_tile(width: int) -> Tile:
    """Return the tile that holds a whole row: 16 elements a thread, from 1 to 16 warps."""
    block = max(16, 1 << (width - 1).bit_length())
    return Tile(block, max(1, min(16, block // 512)))


def pointwise_tile(width: int) -> Tile:
    """Return the tile of a kernel whose elements do not meet: 4 elements a thread."""
    block = min(_POINTWISE, row_tile(width).block)
    return Tile(block, max(1, block // 128), -(-width // block))
