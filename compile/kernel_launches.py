"""Key: launches of Triton kernels in a traced graph, written so that any process finds the kernel again."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType

from torch import fx

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.compile.conditions import source_line
from pwcc.compile.runtime import user_kernels
from pwcc.compile.torch_private.user_kernels import Launch, codes, jitted, launches, source_digest


def name_launches(graph_module: fx.GraphModule) -> None:
    """Replace torch's launches, which count on a table of this process, by calls that name the kernel.

    Call it before Dynamo is reset, which empties that table.

    Raises:
        UnsealableError: a kernel without a module-level name, constants without a portable form, or
            TMA descriptors.
    """
    found = launches(graph_module.graph)
    for node in found:
        launch = Launch(node)
        where = source_line(node)
        if launch.takes_descriptors:
            raise UnsealableError(
                f"the Triton kernel {jitted(launch.kernel).__name__!r} takes TMA descriptors made on the host",
                where=where,
                hint="make them in the kernel, or launch it in a splitting operation",
            )
        with graph_module.graph.inserting_before(node):
            named = graph_module.graph.call_function(
                user_kernels.launch,
                kwargs={
                    "kernel": _name(launch, where),
                    "digest": source_digest(launch.kernel),
                    "constants": launch.constants,
                    "grid": list(launch.grid),
                    "arguments": launch.arguments,
                    "written": launch.written,
                },
            )
        named.meta = dict(node.meta)
        graph_module.graph.erase_node(node)
    if found:
        graph_module.recompile()


def _name(launch: Launch, where: str | None) -> str:
    """Return ``module:name`` of a kernel, if that leads back to it."""
    function = jitted(launch.kernel)
    name = f"{function.__module__}:{function.__name__}"
    try:
        if user_kernels.find(name) is launch.kernel:
            return name
    except CorruptEntry:
        pass
    raise UnsealableError(
        f"the Triton kernel {name!r} cannot be found again by that name",
        where=where,
        hint="define it at the top level of a module, under its own name",
    )


def kernel_codes(graph: fx.Graph) -> Iterator[CodeType]:
    """Yield the code objects of the Triton kernels that a graph launches by name."""
    for node in graph.nodes:
        if node.target is user_kernels.launch:
            yield from codes(user_kernels.find(str(node.kwargs["kernel"])))
