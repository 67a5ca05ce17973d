"""A decoder of three layers whose pieces are Python: everything of an entry but the compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

import pwcc.compile.ops.attention  # noqa: F401  registers torch.ops.pwcc.attention
from pwcc.cache.ids import EntryKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece
from pwcc.capture.backend import GraphBackend, backend_for
from pwcc.capture.fake import FakeBackend
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import CapturePlan
from pwcc.capture.planning import plan_for
from pwcc.capture.runner import GraphRunner
from pwcc.compile.compiled_model import CompiledModel, LoadedProgram, LoadedVariant
from pwcc.compile.load import compile_stitch
from pwcc.compile.ops.blocks import BlockAllocator, SequenceBlocks
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import CallingConvention, Parameter, SizeSymbol, Weight
from pwcc.compile.runtime.output import build_output
from pwcc.compile.runtime.piece import LoadedPiece

HEADS, HEAD_DIM, HIDDEN, VOCAB, LAYERS, BLOCK, MAX = 2, 16, 32, 48, 3, 4, 64
KEY = EntryKey("0123456789abcdef" * 2)

STITCH = """
def bind(pieces, operation, constant, weights):
    p0, p1, p2, = pieces
    o0 = operation('torch.ops.pwcc.attention')
    w0, w1, w2, w3, w4, = weights
    def run(arguments, sizes):
        a0, a1, = arguments
        s0, = sizes
        v0, v1, v2, v3, v4, = p0([s0, a0, a1, w0, w1])
        o0(v0, v1, v2, v3, 0, 0.25)
        del v0, v1, v2
        v5, v6, v7, v8, v9, = p1([s0, v3, v4, w2])
        del v3, v4
        o0(v5, v6, v7, v8, 1, 0.25)
        del v5, v6, v7
        v10, v11, v12, v13, v14, = p1([s0, v8, v9, w3])
        del v8, v9
        o0(v10, v11, v12, v13, 2, 0.25)
        del v10, v11, v12
        v15, = p2([s0, v13, v14, w4])
        del v13, v14
        return (v15,)
    return run
"""


def heads_of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (part.reshape(-1, HEADS, HEAD_DIM).contiguous() for part in torch.tanh(x @ weight).chunk(3, 1))
    return q, k, v, torch.empty_like(q), x


def first(args: list[Any]) -> tuple[Tensor, ...]:
    _, ids, positions, embed, weight = args
    args.clear()
    return heads_of(embed[ids] + positions[:, None] / 8, weight)


def middle(args: list[Any]) -> tuple[Tensor, ...]:
    _, out, x, weight = args
    args.clear()
    return heads_of(x + out.flatten(1), weight)


def last(args: list[Any]) -> tuple[Tensor, ...]:
    _, out, x, head = args
    args.clear()
    return ((x + out.flatten(1)) @ head,)


def leaking(args: list[Any]) -> tuple[Tensor, ...]:
    (logits,) = last(args)
    return (logits + logits.mean(0),)  # rows depend on each other, so on padding rows, too


class Model(nn.Module):
    """The module that the weights belong to."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / 4, requires_grad=False)

        self.embed = weight(VOCAB, HIDDEN)
        self.layers = nn.ParameterList(weight(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS))
        self.head = weight(HIDDEN, VOCAB)


Call = Callable[[list[Any]], tuple[Tensor, ...]]


def compiled_of(
    model: Model,
    device: torch.device,
    *,
    pieces: Sequence[Call] = (first, middle, last),
    stitch: str = STITCH,
    sizes: tuple[int, ...] = (),
    splits: int = LAYERS,
) -> CompiledModel:
    parameters = tuple(
        Parameter(name, "tensor", "int64", device.type, ("s0",), (1,)) for name in ("input_ids", "positions")
    )
    names = ("embed", *(f"layers.{i}" for i in range(LAYERS)), "head")
    held = dict(model.named_parameters())
    weights = tuple(Weight((n,), "float32", tuple(held[n].shape), tuple(held[n].stride())) for n in names)
    calling = CallingConvention(parameters, (SizeSymbol("s0", 0, 0, 1, MAX),), (), weights, {"output": 0})
    record = cast("SealedPiece", SimpleNamespace(mutated=()))
    loaded = tuple(LoadedPiece(record, cast("Any", piece)) for piece in pieces)
    dynamic = LoadedVariant(1, MAX, False, loaded)
    static = [LoadedVariant(size, size, True, loaded) for size in sizes]
    program = LoadedProgram(
        low=1,
        high=MAX,
        calling=calling,
        bind=compile_stitch(stitch.encode()),
        variants=(dynamic, *static),
        binder=Binder(calling, device),
        output=build_output(calling.output),
    )
    manifest = SimpleNamespace(
        entry_key=KEY,
        model=SimpleNamespace(identity="toy"),
        min_tokens=1,
        max_tokens=MAX,
        sizes=sizes,
        ranges=((1, MAX),),
        serves=lambda size: 1 <= size <= MAX,
        programs=(SimpleNamespace(splits=splits),),
        observed=(),
    )
    return CompiledModel(model, device, cast("Manifest", manifest), [program], lambda digest: b"")


@dataclass
class World:
    """One device: a model, its cache, sequences, and batches of them."""

    device: torch.device
    model: Model = field(init=False)
    compiled: CompiledModel = field(init=False)
    cache: PagedKVCache = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model().to(self.device)
        self.compiled = compiled_of(self.model, self.device)
        self.cache = self.new_cache()
        self.blocks = BlockAllocator(num_blocks=128, block_size=BLOCK)

    def new_cache(self) -> PagedKVCache:
        return PagedKVCache(
            layers=LAYERS,
            num_blocks=128,
            kv_heads=HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK,
            device=self.device,
        )

    def backend(self, **options: Any) -> GraphBackend:
        return FakeBackend(**options) if self.device.type == "cpu" else backend_for(self.device)

    def plan(self, mode: CaptureMode = CaptureMode.FULL_AND_PIECEWISE, **options: Any) -> CapturePlan:
        options = {"sizes": (1, 2, 4, 8, 16), "max_num_seqs": 8, "max_seq_len": 32, **options}
        return plan_for(self.compiled, mode=mode, **options)

    def runner(self, mode: CaptureMode = CaptureMode.FULL_AND_PIECEWISE, **options: Any) -> GraphRunner:
        plan_options = options.pop("plan", {})
        options = {"cache": self.cache, "backend": self.backend(), **options}
        return GraphRunner(self.compiled, self.plan(mode, **plan_options), **options)

    def start(self, *lengths: int) -> list[SequenceBlocks]:
        return [self.blocks.allocate(length) for length in lengths]

    def batch(
        self, new: Sequence[tuple[SequenceBlocks, int]], seed: int = 0
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """The last ``n`` tokens of each sequence."""
        positions = [p for seq, n in new for p in range(seq.length - n, seq.length)]
        ids = [(p * 7 + seed * 11 + index) % VOCAB for index, p in enumerate(positions)]
        metadata = AttentionMetadata.build(list(new), block_size=BLOCK, device=self.device)
        return torch.tensor(ids, device=self.device), torch.tensor(positions, device=self.device), metadata

    def prompts(self, *lengths: int, seed: int = 0) -> tuple[Tensor, Tensor, AttentionMetadata]:
        return self.batch([(seq, seq.length) for seq in self.start(*lengths)], seed)

    def step(
        self, sequences: Sequence[SequenceBlocks], seed: int = 0
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        for sequence in sequences:
            self.blocks.append(sequence)
        return self.batch([(seq, 1) for seq in sequences], seed)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
