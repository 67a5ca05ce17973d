"""Traced models run without Inductor: their pieces are interpreted, which checks all but the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pwcc.compile.ops.attention  # noqa: F401  (registers torch.ops.pwcc.attention)
from pwcc.cache.errors import PwccError
from pwcc.compile.compiled_model import constant
from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.input_values import make_inputs
from pwcc.compile.load import compile_stitch
from pwcc.compile.piece_graph import PieceGraph, interpret
from pwcc.compile.request import Request, make_request
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import TOKENS, CallingConvention
from pwcc.compile.runtime.held import bind_weights, named_tensors
from pwcc.compile.runtime.output import build_output
from pwcc.compile.runtime.targets import resolve_target
from pwcc.compile.steps import PieceStep
from pwcc.compile.tracing import Traced, stitch_of, trace_all

CPU = torch.device("cpu")
_NAMES = ("attend", "one", "two", "many", "joined", "note", "project")
SPLITTING_OPS = (*(f"pwcctest::{name}" for name in _NAMES), "pwcc::attention")


def _attend(x: Tensor, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(x.cumsum(0) * scale)


def _register() -> torch.library.Library:
    """Splitting ops: one writes its output argument, others return one, two, several tensors or none."""
    library = torch.library.Library("pwcctest", "FRAGMENT")  # type: ignore[no-untyped-call]
    kernels: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "attend(Tensor x, Tensor(a!) out, float scale=1.0) -> ()": (_attend, lambda x, out, scale=1.0: None),
        "one(Tensor x) -> Tensor": (lambda x: x.cumsum(0), torch.empty_like),
        "two(Tensor x) -> (Tensor, Tensor)": (
            lambda x: (x.cumsum(0), x + 1),
            lambda x: (torch.empty_like(x), torch.empty_like(x)),
        ),
        "many(Tensor x) -> Tensor[]": (lambda x: [x * 2, x + 1, x - 1], lambda x: [x * 2, x + 1, x - 1]),
        "joined(Tensor[] xs) -> Tensor": (lambda xs: torch.cat(xs, -1), lambda xs: torch.cat(xs, -1)),
        "note(Tensor x) -> ()": (lambda x: None, lambda x: None),
        "project(Tensor x, Tensor weight) -> Tensor": (  # its inner product follows autocast
            lambda x, weight: (x @ weight).float(),
            lambda x, weight: torch.empty_like(x @ weight, dtype=torch.float32),
        ),
    }
    for schema, (cpu, meta) in kernels.items():
        library.define(schema)  # type: ignore[no-untyped-call]
        for device in ("CPU", "CUDA"):
            library.impl(schema.partition("(")[0], cpu, device)  # type: ignore[no-untyped-call]
        library.impl(schema.partition("(")[0], meta, "Meta")  # type: ignore[no-untyped-call]
    return library


_library = _register()


class Interpreted:
    """A traced model, called like it. Everything that an entry stores goes through its bytes."""

    def __init__(self, model: nn.Module, traced: Sequence[Traced]) -> None:
        self.traced = traced
        self.sources = [stitch_of(item) for item in traced]
        self.calling = [
            CallingConvention.from_bytes(item.trace.calling.to_bytes(), where="calling") for item in traced
        ]
        self.binders = [Binder(calling, CPU) for calling in self.calling]
        self._outputs = [
            build_output(calling.output, [symbol.name for symbol in calling.symbols])
            for calling in self.calling
        ]
        self._weights = [
            bind_weights(dict(named_tensors(model)), calling.weights, CPU) for calling in self.calling
        ]
        self._runs = [
            compile_stitch(source.encode())(
                [self._piece(graph) for graph in item.program.unique], resolve_target, constant(CPU), weights
            )
            for source, item, weights in zip(self.sources, traced, self._weights, strict=True)
        ]

    @staticmethod
    def _piece(graph: PieceGraph) -> Callable[[Sequence[object]], Sequence[object]]:
        parsed = PieceGraph.from_bytes(graph.to_bytes(), where="piece")
        assert parsed == graph
        return lambda inputs: interpret(parsed, inputs, device=CPU)

    @property
    def shape(self) -> list[str]:
        """The last program's steps: ``piece`` or the operation's name."""
        return [
            "piece" if isinstance(step, PieceStep) else step.target.rsplit(".", 1)[-1]
            for step in self.traced[-1].program.steps
        ]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        failures: list[PwccError] = []
        programs = list(zip(self.binders, self._runs, self._outputs, self._weights, strict=True))
        for binder, run, output, weights in [programs[i] for i in self._fitting(args, kwargs)]:
            try:
                tensors, sizes = binder.bind(args, kwargs)
            except PwccError as error:
                failures.append(error)
                continue
            with torch.no_grad():
                return output(run(tensors, sizes), tensors, weights, sizes)
        raise failures[-1]

    def _fitting(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[int]:
        """The programs for the token count of a call, all where that cannot be told."""
        symbol = next((s for calling in self.calling for s in calling.symbols if s.name == TOKENS), None)
        everything = range(len(self.traced))
        if symbol is None or len(everything) == 1:
            return everything
        tensor = self.binders[0].leaf(args, kwargs, symbol.parameter)
        if not isinstance(tensor, Tensor) or tensor.dim() <= symbol.dim:
            return everything
        size = tensor.shape[symbol.dim]
        return [i for i in everything if self.traced[i].low <= size <= self.traced[i].high] or everything


TraceModel = Callable[..., list[Traced]]
Interpret = Callable[..., Interpreted]
Compare = Callable[..., Interpreted]


@pytest.fixture(scope="session")
def asked() -> Callable[..., Request]:
    """The request of a compile: ``asked(model, declarations)``."""

    def call(
        model: nn.Module,
        declarations: Sequence[str] = ("x:float32[n,8]",),
        max_tokens: int = 40,
        ops: Sequence[str] = SPLITTING_OPS,
        sizes: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
        allow_gaps: bool = False,
    ) -> Request:
        return make_request(
            model.eval(),
            specs=tuple(parse_declaration(text) for text in declarations),
            sizes=sizes,
            max_tokens=max_tokens,
            device="cpu",
            identity="test",
            args={},
            splitting_ops=ops,
            autotune=False,
            cpu_baseline="native",
            profile=None,
            build_observed=True,
            ranges=ranges,
            allow_gaps=allow_gaps,
        )

    return call


@pytest.fixture(scope="session")
def traced(asked: Callable[..., Request]) -> TraceModel:
    """Trace and split a model: ``traced(model, declarations)``."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> list[Traced]:
        return trace_all(model, asked(model, *args, **kwargs))

    return call


@pytest.fixture(scope="session")
def interpreted(traced: TraceModel) -> Interpret:
    """Trace and split a model and return it with interpreted pieces."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Interpreted:
        return Interpreted(model, traced(model, *args, **kwargs))

    return call


@pytest.fixture(scope="session")
def same_as_eager(interpreted: Interpret) -> Compare:
    """Interpret a model and compare outputs, inputs and the model's state with eager, for every size."""

    def call(
        model: nn.Module,
        declarations: Sequence[str] = ("x:float32[n,8]",),
        max_tokens: int = 40,
        sizes: Iterable[int] | None = None,
        static: Sequence[int] = (),
        **options: Any,
    ) -> Interpreted:
        eager = copy.deepcopy(model).eval()
        program = interpreted(model, declarations, max_tokens, sizes=static, **options)
        specs = tuple(parse_declaration(text) for text in declarations)
        for size in range(1, max_tokens + 1) if sizes is None else sizes:
            given = make_inputs(specs, size)
            mine = tuple(tensor.clone() for tensor in given)
            with torch.no_grad():
                wanted = eager(*given)
            require_equal(program(*mine), wanted, f"size {size}")
            require_equal(mine, given, f"size {size}, arguments")
            require_equal(dict(named_tensors(model)), dict(named_tensors(eager)), f"size {size}, state")
        return program

    return call


def require_equal(got: object, wanted: object, what: str) -> None:
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), what
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
        assert torch.allclose(got, wanted, atol=1e-5, equal_nan=True), what
        return
    assert type(got) is type(wanted), what
    if isinstance(wanted, Mapping):
        assert isinstance(got, Mapping)
        assert list(got) == list(wanted), what
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(wanted, (tuple, list)):
        assert isinstance(got, (tuple, list))
        assert len(got) == len(wanted), what
        for one, other in zip(got, wanted, strict=True):
            require_equal(one, other, what)
    elif hasattr(wanted, "__dataclass_fields__"):
        require_equal(vars(got), vars(wanted), what)
    else:
        assert got == wanted or (got != got and wanted != wanted), what
