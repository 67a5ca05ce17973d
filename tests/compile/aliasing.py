"""Compare what two runs gave and where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf of nested containers with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def aliasing(outputs: object, others: Mapping[str, Tensor]) -> list[list[object]]:
    """Return which output lies in whose memory, how many bytes from its start, and with which strides."""
    found: list[list[object]] = []
    made = {name: item for name, item in leaves(outputs, "output") if isinstance(item, Tensor)}
    for index, (name, one) in enumerate(made.items()):
        for other, held in {**others, **dict(list(made.items())[:index])}.items():
            if one.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
                found.append([name, other, one.data_ptr() - held.data_ptr(), list(one.stride())])
    return found


def difference(got: object, wanted: object) -> list[str]:
    """Return the leaves in which two nested results differ, by path."""
    mine, theirs = dict(leaves(got)), dict(leaves(wanted))
    found = [f"{name} only on one side" for name in mine.keys() ^ theirs.keys()]
    for name in mine.keys() & theirs.keys():
        one, other = mine[name], theirs[name]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            same = one.shape == other.shape and torch.allclose(one, other, atol=1e-4)
        else:
            same = one == other
        if not same:
            found.append(f"{name}: {one} for {other}")
    return sorted(found)
