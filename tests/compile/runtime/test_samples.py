from __future__ import annotations

import math

import pytest
import torch

from pwcc.compile.piece_graph import PieceGraph, PieceInput, PieceNode, SymbolInput, TensorInput
from pwcc.compile.runtime.samples import MAX_INDEX, copies, relative_error, sample_inputs, upcast

CPU = torch.device("cpu")


def graph(*inputs: PieceInput) -> PieceGraph:
    return PieceGraph((SymbolInput("s0"), *inputs), (), ())


def tensor(
    shape: tuple[int | str, ...], stride: tuple[int | str, ...], dtype: str = "float32", offset: int | str = 0
) -> TensorInput:
    return TensorInput(dtype, "cpu", shape, stride, offset)


def test_layouts_and_sizes() -> None:
    piece = graph(
        tensor(("s0", 8), (8, 1)),
        tensor((8, "s0"), (1, 8)),
        tensor(("s0", 4), (8, 1), offset=4),
        tensor(("s0", 2, 4), ("8*s0", 4, 1), offset="s0"),
        tensor(("s0", 3), (0, 1)),
        tensor((), (), "bfloat16"),
        tensor((0, 8), (8, 1)),
        tensor(("s0",), (1,), "bool"),
        tensor(("s0",), (1,), "complex64"),
        tensor(("s0", 4), (4, 1), "float8_e4m3fn"),
    )
    size, *tensors = sample_inputs(piece, 5, CPU, seed=1)
    assert size == 5
    for item, made in zip(piece.inputs[1:], tensors, strict=True):
        assert isinstance(item, TensorInput)
        assert isinstance(made, torch.Tensor)
        assert made.dtype == getattr(torch, item.dtype)
        assert made.shape == tuple(5 if dim == "s0" else dim for dim in item.shape)
    layouts = [(made.stride(), made.storage_offset()) for made in tensors if isinstance(made, torch.Tensor)]
    assert layouts[:5] == [((8, 1), 0), ((1, 8), 0), ((8, 1), 4), ((40, 4, 1), 5), ((0, 1), 0)]


def test_sizes_beside_the_token_count() -> None:
    piece = PieceGraph(
        (SymbolInput("s0"), SymbolInput("s1", 2, 9), tensor(("s0", "s1"), ("s1", 1)), tensor(("s1",), (1,))),
        (),
        (),
    )
    for size, other in ((1, 2), (5, 5), (64, 9)):
        first, second, matrix, vector = sample_inputs(piece, size, CPU, seed=1)
        assert (first, second) == (size, other)
        assert isinstance(matrix, torch.Tensor)
        assert isinstance(vector, torch.Tensor)
        assert (matrix.shape, vector.shape) == ((size, other), (other,))


def test_same_seed_same_values_and_another_seed_others() -> None:
    piece = graph(tensor(("s0", 8), (8, 1)), tensor((8, 8), (8, 1), "bfloat16"))
    first, again, other = (sample_inputs(piece, 4, CPU, seed=seed) for seed in (1, 1, 2))
    assert relative_error(first, again) == 0
    assert relative_error(first, other) > 0.1


def test_weights_are_scaled_and_norms_lie_around_one() -> None:
    piece = graph(tensor((256, 256), (256, 1)), tensor((4096,), (1,)), tensor(("s0", 256), (256, 1)))
    _, matrix, vector, activation = sample_inputs(piece, 64, CPU, seed=0)
    assert isinstance(matrix, torch.Tensor)
    assert isinstance(vector, torch.Tensor)
    assert isinstance(activation, torch.Tensor)
    assert matrix.std().item() == pytest.approx(1 / 16, rel=0.1)
    assert vector.mean().item() == pytest.approx(1, abs=0.05)
    assert activation.std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("rows", "bound"), [((30, 8), 30), ((5000, 8), MAX_INDEX), (("s0", 8), MAX_INDEX)])
def test_integers_may_index_every_fixed_table(rows: tuple[int | str, int], bound: int) -> None:
    piece = graph(tensor(("s0",), (1,), "int64"), tensor(rows, (8, 1)), tensor((bound, 2), (2, 1)))
    _, indices, *_ = sample_inputs(piece, 2000, CPU, seed=0)
    assert isinstance(indices, torch.Tensor)
    assert indices.min() >= 0
    assert bound * 0.9 <= indices.max() < bound


@pytest.mark.parametrize(
    ("base", "target", "args", "bound"),
    [
        (("s0", 8), "_operator.getitem", [{"v": 1}, {"v": 2}], 5),
        (("s0", 8), "_operator.getitem", [{"v": 1}, {"tuple": [{"slice": [None, None, None]}, {"v": 2}]}], 5),
        (("s0", 8), "_operator.setitem", [{"v": 1}, {"tuple": [0, 1]}, {"v": 2}], MAX_INDEX),
        (("s0", 3), "torch.gather", [{"v": 1}, -1, {"v": 2}], 3),
        (("s0", 8), "torch.ops.aten.index.Tensor", [{"v": 1}, [{"v": 2}]], 5),
        ((7,), "_operator.getitem", [{"v": 1}, {"v": 2}], 7),
        (("s0", 8), "torch.index_select", [{"v": 3}, 0, {"v": 2}], 5),
        (("s0", 8), "torch.add", [{"v": 1}, {"v": 2}], MAX_INDEX),
    ],
)
def test_integers_may_index_what_the_piece_indexes(
    base: tuple[int | str, ...], target: str, args: list[object], bound: int
) -> None:
    inputs = (tensor(base, (8, 1)[2 - len(base) :]), tensor((4096,), (1,), "int64"))
    node = PieceNode("call_function", target, args, {"dict": []})
    piece = PieceGraph((SymbolInput("s0"), *inputs), (node,), ())
    drawn = sample_inputs(piece, 5, CPU, seed=1)[2]
    assert isinstance(drawn, torch.Tensor)
    assert bound * 0.9 <= int(drawn.max()) + 1 <= bound


def test_upcast_and_copies_are_fresh() -> None:
    half, single = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(4, 3).t()
    wide = upcast([7, half, single])
    assert wide[0] == 7
    assert [item.dtype for item in wide if isinstance(item, torch.Tensor)] == [torch.float32] * 2
    same = copies([7, half, single])
    for made, given in zip([*wide[1:], *same[1:]], [half, single] * 2, strict=True):
        assert isinstance(made, torch.Tensor)
        assert made.data_ptr() != given.data_ptr()
        assert made.stride() == given.stride()


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("got", "wanted", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([3.0, 4.0], [0.0, 0.0], INF),
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([NAN, 1.0], [NAN, 1.0], 0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [INF, 1.0], INF),
        ([INF, 1.0], [INF, 1.0], 0),
        ([-INF, 1.0], [INF, 1.0], INF),
        ([NAN, 1.0], [INF, 1.0], INF),
        ([1, 2], [1, 2], 0),
        ([1, 2], [1, 3], INF),
        ([True, False], [True, True], INF),
        ([3 + 4j, 0], [3 + 4j, 0], 0),
        ([3 + 4j, 0], [3 + 3j, 0], pytest.approx(1 / math.sqrt(18))),
        ([], [], 0),
    ],
)
def test_relative_error(got: list[complex], wanted: list[complex], error: float) -> None:
    assert relative_error([torch.tensor(got)], [torch.tensor(wanted)]) == error


def test_relative_error_of_other_things() -> None:
    ones = torch.ones(2)
    assert relative_error([ones, ones], [ones, 2 * ones]) == 0.5
    assert relative_error([torch.ones(2, 1)], [ones]) == INF
    assert relative_error([ones.bfloat16()], [ones]) == 0
    assert relative_error([3, None], [3, None]) == 0
    assert relative_error([3], [4]) == INF
    with pytest.raises(ValueError, match="zip"):
        relative_error([ones], [])


def test_float8_outputs_are_compared() -> None:
    values = torch.tensor([1.0, 2.0, -3.0]).to(torch.float8_e4m3fn)
    assert relative_error([values], [values]) == 0
    assert relative_error([values], [torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn)]) > 1


def test_no_index_is_drawn_twice_where_there_are_enough() -> None:
    """Rows that a piece writes by index would else depend on the order of its writes."""
    table = TensorInput("float32", "cpu", (64, 4), (4, 1), 0)
    rows = TensorInput("int64", "cpu", ("s0",), (1,), 0)
    graph = PieceGraph((SymbolInput("s0"), table, rows), (), ({"v": 1},))
    for size in (1, 7, 64):
        drawn = sample_inputs(graph, size, torch.device("cpu"), seed=3)[2]
        assert isinstance(drawn, torch.Tensor)
        assert len(set(drawn.tolist())) == size
        assert int(drawn.max()) < 64


def test_lazily_conjugated_tensors_are_compared() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert relative_error([x.conj()], [x.conj().resolve_conj()]) == 0
    assert relative_error([x], [x.conj()]) > 0.1
