"""The seam to captured graphs: memory without an owner, and how many nodes a raw graph has.

Run on 2.11.0+cu130. ``torch._C._construct_storage_from_data_pointer`` exists in builds with CUDA from 2.1 on
(``torch/csrc/cuda/Module.cpp``); where it is gone, callers keep their tensors alive, which costs memory only.
``cuGraphGetNodes`` is the driver's own call; a ``cudaGraph_t`` is a ``CUgraph``.
"""

from __future__ import annotations

import ctypes

import torch


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it alive; ``tensor`` itself where torch cannot.

    The caller answers for the memory: it must stay mapped and meant for this use, as in a graph's pool.
    """
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None or not tensor.numel() or tensor.device.type == "cpu":
        return tensor
    held = tensor.untyped_storage()
    storage = make(held.data_ptr(), tensor.device, held.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def graph_nodes(raw_graph: int) -> int | None:
    """Return the number of nodes of a ``cudaGraph_t``; None where the driver does not answer."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_size_t()
        failed = library.cuGraphGetNodes(ctypes.c_void_p(raw_graph), None, ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else count.value
