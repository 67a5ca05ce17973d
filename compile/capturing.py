"""Key: one Dynamo capture of a model's ``forward``, whose failures become errors with the user's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from pwcc.cache.errors import TraceError, UnsealableError
from pwcc.compile.call import own_call
from pwcc.compile.kernel_launches import name_launches
from pwcc.compile.refusals import in_plain_words
from pwcc.compile.runtime.hooks import global_hooks, replaced_calls
from pwcc.compile.signature import definition
from pwcc.compile.torch_private import dynamo


def capture(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> dynamo.RawCapture:
    """Trace ``model.forward`` once, without a graph break.

    Raises:
        TraceError: a graph break or failed trace, with the user's file and line.
        UnsealableError: what a call of the module does and a trace of ``forward`` does not show.
    """
    _require_plain_call(model)
    if dynamo.freezes_weights():
        raise UnsealableError(
            "Inductor is asked to fold weights into the code (freezing), and an entry holds no weights",
            hint="unset TORCHINDUCTOR_FREEZING, or set torch._inductor.config.freezing to False",
        )
    forward = model.forward
    try:
        return dynamo.fullgraph_capture(forward, tuple(args), dict(kwargs), finish=name_launches)
    except dynamo.SideEffectError as error:
        raise UnsealableError(
            f"forward changes {', '.join(error.names[:3])}, which compiled code would not do",
            where=error.where or definition(forward),
            hint="keep state in buffers that are updated in place, or outside the compiled module",
        ) from error
    except dynamo.FoldedError as error:
        raise UnsealableError(
            f"the graph would hold {error.folded.what}",
            where=error.folded.where or definition(forward),
            hint=error.folded.hint,
        ) from error
    except dynamo.NoOperationsError:
        raise TraceError("forward holds no tensor operation to compile", where=definition(forward)) from None
    except dynamo.dynamo_errors() as error:
        message, where = dynamo.describe_failure(error)
        if dynamo.fails_itself(error):
            what, hint = (
                "forward fails",
                "check the inputs (--input, example_inputs) and the model; if eager runs it, torch cannot "
                "trace that line for every size",
            )
        else:
            what, hint = "the model does not trace into one graph", "remove the graph break at that line"
        known = in_plain_words(str(getattr(error, "msg", None) or error), where)
        if known is not None:
            what, hint, message = known[0], known[1], ""
        raised = TraceError(
            f"{what}: {message or type(error).__name__}" if known is None else what,
            where=where or definition(forward),
            hint=f"{hint}; --debug shows Dynamo's own report",
        )
        raised.data_dependent = dynamo.is_data_dependent(error)
        raise raised from error


def _require_plain_call(model: nn.Module) -> None:
    """Refuse a module whose call does more than its ``forward``."""
    if own_call(type(model)) is not nn.Module.__call__:
        raise UnsealableError(
            "the model overrides __call__, which a compiled forward would not run",
            where=definition(type(model).__call__),
            hint="move what it does into forward, or wrap the model in a module that calls it",
        )
    if replaced_calls():
        raise UnsealableError(
            f"torch's own {', '.join(replaced_calls())} was replaced, which compiled code would not run",
            hint="compile in a process that leaves nn.Module as it is",
        )
    if global_hooks():
        raise UnsealableError(
            f"modules have global hooks ({', '.join(global_hooks())}), which compiled code would not run",
            hint="remove them before compiling",
        )
    if model._forward_hooks or model._forward_pre_hooks:
        raise UnsealableError(
            "the model has forward hooks on its root, which a compiled forward would not run",
            hint="remove them, or wrap the model in a module that calls it",
        )
