"""A model traced as one piece, with nothing cut out of it."""

from __future__ import annotations

from torch import nn

from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.request import make_request
from pwcc.compile.tracing import trace_all


def one_piece(model: nn.Module, declaration: str) -> PieceGraph:
    """Return the graph of a model for up to 64 tokens of its one declared input."""
    request = make_request(
        model,
        specs=(parse_declaration(declaration),),
        sizes=(),
        max_tokens=64,
        device="cpu",
        identity="test",
        args=None,
        splitting_ops=(),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=False,
    )
    (traced,) = trace_all(model, request)
    (graph,) = traced.program.unique
    return graph
