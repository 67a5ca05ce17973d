"""Artifact: what Inductor's outer callable does around a compiled piece, for inputs that lie askew.

Kernels were compiled for 16-byte aligned inputs. An input that is not is copied, and copied back when
the piece writes it; a result that is a view of the copy is given as that view of the input
(``align_inputs_from_check_idxs`` in ``torch/_inductor/utils.py``, same in 2.11 and 2.13, whose generated
code does it itself for inputs that are only read; the view is AOTAutograd's part).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

ALIGNMENT: Final = 16
PieceCall = Callable[[list[object]], tuple[object, ...]]


def realigning(call: PieceCall, realigned: Sequence[int], mutated: Sequence[int]) -> PieceCall:
    """Return ``call`` preceded by the copies and followed by the write-backs; itself if there are none."""
    if not realigned:
        return call
    checked, written = tuple(realigned), frozenset(mutated)

    def run(args: list[object]) -> tuple[object, ...]:
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        originals: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for index in checked:
            tensor = args[index]
            if tensor.data_ptr() % ALIGNMENT:  # type: ignore[attr-defined]  # the record says tensor
                copy = clone_preserving_strides(tensor)  # type: ignore[arg-type]
                args[index] = copy
                moved.append((tensor, copy))  # type: ignore[arg-type]
                if index in written:
                    originals.append(tensor)  # type: ignore[arg-type]
                    copies.append(copy)
        outputs = call(args)
        if originals:
            torch._foreach_copy_(originals, copies)  # pyright: ignore[reportPrivateImportUsage]
        return tuple(_moved_back(output, moved) for output in outputs) if moved else outputs

    return run


def _moved_back(output: object, moved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> object:
    """Return a result that is a view of a copy as the same view of what was copied."""
    if not isinstance(output, torch.Tensor):
        return output
    for original, copy in moved:
        if output is copy:
            return original
        if output.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr():
            continue
        start = original.storage_offset() * original.element_size()
        start += output.storage_offset() * output.element_size() - copy.storage_offset() * copy.element_size()
        if start % output.element_size():
            raise RuntimeError(f"a view as {output.dtype} of a misaligned {original.dtype} input")
        return torch.empty(0, dtype=output.dtype, device=output.device).set_(
            original.untyped_storage(), start // output.element_size(), output.size(), output.stride()
        )
    return output


def clone_preserving_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into fresh, aligned storage of the same strides."""
    needed = 0
    if 0 not in tensor.size():
        needed = (
            sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
        )
    buffer = torch.as_strided(tensor, (needed,), (1,)).clone()
    return torch.as_strided(buffer, tensor.size(), tensor.stride())
