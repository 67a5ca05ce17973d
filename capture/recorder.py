"""Graph: record one size of a program: warm up, then capture it whole or piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pwcc.cache.errors import CaptureError
from pwcc.capture.backend import Graph, GraphBackend
from pwcc.capture.fake import tensors_in
from pwcc.capture.plan import GraphKey, Instantiate
from pwcc.capture.recording import Recording, Step, Watched
from pwcc.compile.compiled_model import LoadedProgram, LoadedVariant, Run, constant
from pwcc.compile.ops.attention import attention
from pwcc.compile.ops.forward_context import RunMode
from pwcc.compile.runtime.targets import resolve_target


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is recorded: a program at one variant, its static arguments by name, and its sizes."""

    program: LoadedProgram
    variant: LoadedVariant
    arguments: Mapping[str, Tensor]
    sizes: tuple[int, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The bound weights by their first name."""
        names = [weight.names[0] for weight in self.program.calling.weights]
        return dict(zip(names, self.program.weights, strict=True))


class _Phase(Enum):
    WARM = "warm"
    RECORD = "record"


class Recorder:
    """Stands in for the pieces and splitting ops of a stitch program while it runs twice.

    First run (:meth:`warm_up`): pieces and ops really run, so that lazy initialisation is over before anything
    is captured; what splitting ops return is kept as static buffers. Second run (:meth:`record`): in mode
    PIECEWISE every piece call becomes a graph and every op call a step on the recorded tensors, not run, since
    what it would read is recorded and not computed; in mode FULL the whole program becomes one graph. Weights
    that pieces write (a model's own state) are put back as they were. One recorder makes one recording.
    ``pwcc::attention`` is called as the function that it is: torch's dispatcher costs as much as the kernel.
    """

    def __init__(
        self, subject: Subject, backend: GraphBackend, *, pool: object, instantiate: Instantiate
    ) -> None:
        self._subject = subject
        self._backend = backend
        self._pool = pool
        self._instantiate: Instantiate = instantiate
        self._phase = _Phase.WARM
        self._results: list[object] = []
        self._position = 0
        self._graphs: list[Graph] = []
        self._steps: list[Step] = []
        self._values: dict[int, Watched] = {}
        self._watched: dict[tuple[str, str, int], Watched] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: dict[int, Tensor] = {}
        self._named = {
            tensor.data_ptr(): (kind, name, tensor)
            for kind, table in (("weight", subject.weights), ("argument", subject.arguments))
            for name, tensor in table.items()
            if tensor.numel()
        }
        calls = [partial(self._piece, piece.call, piece.record.mutated) for piece in subject.variant.pieces]
        device = next(iter(subject.arguments.values())).device
        self._run: Run = subject.program.bind(
            calls, self._operation_named, constant(device), subject.program.weights
        )

    def warm_up(self) -> tuple[Any, ...]:
        """Run once for real, under the caller's forward context; return the outputs."""
        self._phase, self._results = _Phase.WARM, []
        try:
            return self._run(list(self._subject.arguments.values()), self._subject.sizes)
        finally:
            self._restore()

    def record(self, key: GraphKey) -> Recording:
        """Record under the caller's forward context.

        Raises:
            CaptureError: a splitting op cannot stand between graphs. Whatever else fails passes through, with
                everything that was recorded released.
        """
        self._phase, self._position = _Phase.RECORD, 0
        try:
            outputs = self._whole() if key.mode is RunMode.FULL else self._pieces()
            weak = tuple(self._backend.weak(item) if self._is_value(item) else item for item in outputs)
            return Recording(
                key,
                graphs=self._graphs,
                steps=self._steps,
                watched=list(self._watched.values()),
                outputs=weak,
            )
        except BaseException:
            for graph in self._graphs:
                graph.release()
            raise
        finally:
            self._restore()

    def _whole(self) -> tuple[Any, ...]:
        run, sizes = self._subject.variant.run, self._subject.sizes
        if run is None:
            raise CaptureError("expected a bound program, got none")
        inputs = list(self._subject.arguments.values())
        for tensor in (*inputs, *self._subject.program.weights):
            self._watch(tensor)
        for tensor in self._written.values():  # pieces are not seen one by one here, but were while warming up
            self._save(tensor)
        graph, outputs = self._backend.record(
            lambda arguments: run(arguments, sizes),  # type: ignore[arg-type]
            inputs,
            pool=self._pool,
            owner=self,
            instantiate=self._instantiate,
        )
        self._graphs.append(graph)
        self._steps.append(graph.replay)
        for number, item in enumerate(outputs):
            self._add_value(item, f"output {number}")
        return outputs

    def _pieces(self) -> tuple[Any, ...]:
        return self._run(list(self._subject.arguments.values()), self._subject.sizes)

    # What the stitch program calls

    def _piece(
        self, call: Callable[[list[object]], tuple[object, ...]], mutated: Sequence[int], inputs: list[object]
    ) -> tuple[object, ...]:
        for index in mutated:
            self._save(inputs[index])
        if self._phase is _Phase.WARM:
            return call(inputs)
        number = len(self._graphs)
        for item in inputs:
            self._watch(item)
        graph, outputs = self._backend.record(
            call, inputs, pool=self._pool, owner=self, instantiate=self._instantiate
        )
        self._graphs.append(graph)
        self._steps.append(graph.replay)
        for index, item in enumerate(outputs):
            self._add_value(item, f"value {index} of piece {number}")
        return outputs

    def _operation_named(self, name: str) -> Callable[..., object]:
        found = resolve_target(name)
        packet = torch.ops.pwcc.attention
        return partial(self._operation, name, attention if found in (packet, packet.default) else found)

    def _operation(self, name: str, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        if function is operator.getitem:
            return operator.getitem(*cast("tuple[Any, Any]", args))  # of what an op returned: nothing runs
        if self._phase is _Phase.WARM:
            result = function(*args, **kwargs)
            self._results.append(_kept(result, (args, tuple(kwargs.values())), name))
            return result
        result = self._results[self._position]
        self._position += 1
        held_args = tuple(self._held(item) for item in args)
        held_kwargs = {key: self._held(item) for key, item in kwargs.items()}
        call: Step = partial(function, *held_args, **held_kwargs)
        self._steps.append(call if result is None else partial(_into, result, call, name))
        return result

    def _held(self, item: object) -> object:
        """Return an op's argument for later calls: values of pieces weakly, everything else as it is."""
        if isinstance(item, (tuple, list)):
            return type(item)(self._held(element) for element in item)
        if not isinstance(item, Tensor):
            return item
        self._watch(item)
        return self._backend.weak(item) if self._is_value(item) else item

    # Names and addresses

    def _is_value(self, item: object) -> bool:
        return isinstance(item, Tensor) and item.data_ptr() in self._values

    def _add_value(self, item: object, name: str) -> None:
        if isinstance(item, Tensor) and item.numel() and item.data_ptr() not in self._named:
            # The pool reuses addresses: the newest value at one is the live one.
            address = item.data_ptr()
            self._values[address] = Watched("value", name, self._backend.weak(item), address)

    def _watch(self, item: object) -> None:
        if not isinstance(item, Tensor) or not item.numel():
            return
        address = item.data_ptr()
        known = self._named.get(address)
        if known is not None:
            found = Watched(known[0], known[1], known[2], address)
        elif address in self._values:
            found = self._values[address]
        else:  # what an op returned, or a view into something known
            found = Watched("value", f"a tensor between pieces ({tuple(item.shape)})", item, address)
        self._watched[found.kind, found.name, address] = found

    # A model's own state

    def _save(self, item: object) -> None:
        if isinstance(item, Tensor) and item.data_ptr() in self._named and item.data_ptr() not in self._saved:
            self._saved[item.data_ptr()] = (item, item.clone())

    def _restore(self) -> None:
        for tensor, before in self._saved.values():
            tensor.copy_(before)
        self._written.update((address, tensor) for address, (tensor, _) in self._saved.items())
        self._saved = {}


def _kept(result: object, given: object, name: str) -> object:
    """Return static buffers for what a splitting op returned.

    Raises:
        CaptureError: it returned a view of what it was given: a copy would not follow later writes.
    """
    if isinstance(result, Tensor):
        if result.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in tensors_in(given)}:
            raise CaptureError(
                f"splitting op {name} returns a view of its input, which cannot stand between graphs",
                hint="write into an out argument, or do not split at it",
            )
        return result.clone()
    if isinstance(result, (tuple, list)):
        return type(result)(_kept(item, given, name) for item in result)
    return result


def _into(kept: object, call: Step, name: str) -> None:
    """Run an op and put what it returns where the next graph reads it."""
    _copy(kept, call(), name)


def _copy(kept: object, result: object, name: str) -> None:
    if isinstance(kept, Tensor) and isinstance(result, Tensor) and kept.shape == result.shape:
        kept.copy_(result)
    elif isinstance(kept, (tuple, list)) and isinstance(result, (tuple, list)) and len(kept) == len(result):
        for one, other in zip(kept, result, strict=True):
            _copy(one, other, name)
    elif isinstance(kept, Tensor) or isinstance(result, Tensor) or kept != result:
        raise CaptureError(
            f"splitting op {name} returned something else than when it was captured",
            hint="its result must depend on the token count only; otherwise use mode NONE",
        )
