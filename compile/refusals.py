"""Key: what Dynamo says of a failed trace, told in the words of what the model's code did."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_STATE = "keep state in buffers that are updated in place (copy_), without changing their shape or memory"
_RANDOM = "draw random numbers outside the compiled module and pass them in, or in a splitting operation"
_METADATA = (
    r"(?:resize_|resize_as_|t_|transpose_|swapaxes_|swapdims_|squeeze_|unsqueeze_|as_strided_|set_|detach_"
    r"|requires_grad_|rename_)"
)

# (pattern in Dynamo's report, what the code did, what to do instead); groups of the pattern fill the second
_KNOWN: Final[Sequence[tuple[re.Pattern[str], str, str]]] = tuple(
    (re.compile(pattern, re.DOTALL), said, hint)
    for pattern, said, hint in (
        (
            rf"Unsupported function call \(delayed\).*?member='(?P<name>{_METADATA})'",
            "forward changes the shape, the layout or the memory of a tensor that exists outside it ({name})",
            _STATE,
        ),
        (
            r"Unsupported Tensor\.(?P<name>resize_|resize_as_|set_)\(\) call",
            "forward changes the memory that a tensor stands for ({name})",
            "make a new tensor instead",
        ),
        (
            r"Failed to mutate tensor data attribute",
            "forward changes the memory that a tensor stands for (.data =)",
            "write into the tensor (copy_), or make a new one",
        ),
        (
            r"requires_grad_\(\)|autograd\.grad|trace_autograd_ops|Tensor\.backward|\.backward\(\)",
            "forward asks for gradients, and compiled pieces are for inference only",
            "compute them outside the compiled module",
        ),
        (
            r"(?:module: random, |qualname: Random\.)(?:qualname: )?(?P<name>[\w.]*)",
            "forward draws random numbers with Python's random",
            _RANDOM,
        ),
        (
            r"module: torch(?:\.cuda)?\.random, qualname: (?P<name>\w+)",
            "forward reads or sets torch's random state ({name})",
            "do it outside the compiled module",
        ),
        (
            r"torch\._C\.Generator|qualname: Generator\.|generator\s*=",
            "forward makes or uses a torch.Generator",
            _RANDOM,
        ),
        (
            r"numpy function: .*?\b(?P<name>default_rng|RandomState|random\w*)",
            "forward draws random numbers with NumPy ({name})",
            _RANDOM,
        ),
    )
)
_TRITON = re.compile(r"[/\\]triton[/\\]|triton\._C")
_NUMPY_RANDOM = re.compile(r"\b(?:np|numpy)\.random\.")


def in_plain_words(report: str, where: str | None) -> tuple[str, str] | None:
    """Return (what the model's code did, what to do instead) for a report that is known, else None.

    ``report`` is Dynamo's whole text and ``where`` the user's line, ``file:line: code``.
    """
    for pattern, said, hint in _KNOWN:
        match = pattern.search(report)
        if match:
            return said.format(**match.groupdict()), hint
    if _TRITON.search(f"{report} {where}"):
        return (
            "forward launches a Triton kernel, which cannot be traced in a process without its GPU",
            "compile on a machine with a GPU, or launch it in a splitting operation",
        )
    if where is not None and _NUMPY_RANDOM.search(where):
        return "forward draws random numbers with NumPy", _RANDOM
    return None
