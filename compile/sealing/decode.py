"""Artifact: the paged decode attention kernels of ``ops/decode_kernel.py``, compiled ahead of time, sealed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, fx

from pwcc.cache.operators import DecodeAttention
from pwcc.cache.requirements import Requirement
from pwcc.cache.sealed import CompiledProgram, SealedPiece, TritonKernel
from pwcc.compile.runtime import program_code
from pwcc.compile.runtime.decode import MIN_ROWS, TILE
from pwcc.compile.sealing.builder_paths import builder_paths, refuse_builder_paths
from pwcc.compile.sealing.cpp import PutBlob
from pwcc.compile.torch_private.triton_aot import CompiledKernel, compile_kernel
from pwcc.compile.torch_private.triton_static import line_info_disabled

_TYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_WARPS: Final = 4
_STAGES: Final = 3
_ARGUMENTS: Final = ("q", "k", "v", "out", "layer", "scale", "window", "softcap", "sinks", "chunk", "bias")
_TENSORS: Final = ("q", "k", "v", "keys", "values", "out")
_STRIDES: Final = ("q_stride", "k_stride", "v_stride", "out_stride")


@dataclass(frozen=True)
class DecodeForm:
    """What a decode kernel is made for; see :class:`pwcc.cache.operators.DecodeAttention`."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    window: bool
    softcap: bool
    sinks: str | None

    @property
    def sealable(self) -> bool:
        """Whether the kernels take this form; others stay with the default attention."""
        return (
            self.dtype in _TYPES
            and (self.sinks is None or self.sinks in _TYPES)
            and self.head_dim % 16 == 0
            and self.head_dim <= 256
            and self.heads % self.kv_heads == 0
        )


def decode_forms(graphs: Iterable[fx.GraphModule]) -> tuple[DecodeForm, ...]:
    """Return the forms of the ``pwcc::attention`` calls in traced graphs that have a sealed decode kernel."""
    found: set[DecodeForm] = set()
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.op != "call_function" or str(node.target).removesuffix(".default") != "pwcc.attention":
                continue
            given = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
            if given.get("chunk") is not None or given.get("bias") is not None:
                continue
            q, k = (given[name].meta["example_value"] for name in ("q", "k"))
            sinks = given.get("sinks")
            found.add(
                DecodeForm(
                    _name(q),
                    int(q.shape[1]),
                    int(k.shape[1]),
                    int(q.shape[2]),
                    given.get("window") is not None,
                    given.get("softcap") is not None,
                    None if sinks is None else _name(sinks.meta["example_value"]),
                )
            )
    return tuple(sorted((form for form in found if form.sealable), key=str))


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def seal_decode(form: DecodeForm, capability: str, put_blob: PutBlob) -> DecodeAttention:
    """Compile and store the kernels for one form; needs Triton, but no GPU.

    ``capability`` is ``9.0`` for sm_90. The program's ``call`` takes ``[q, k, v, keys, values, slots,
    table, lengths, sinks, out, scale, softcap, window, block_shift, splits, chunk]`` and returns ().

    Raises:
        UnsealableError: a kernel needs scratch memory, or holds a path of the building machine.
    """
    single = _compile(form, capability, split=False)
    part = _compile(form, capability, split=True)
    join = _compile_combine(form, capability)
    kernels: list[TritonKernel] = []
    for name, kernel, grid in (
        ("decode", single, (str(form.kv_heads), "1", "seqs")),
        ("decode_part", part, (str(form.kv_heads), "splits", "seqs")),
        ("decode_join", join, (str(form.heads), "seqs", "1")),
    ):
        refuse_builder_paths(
            kernel.cubin,
            builder_paths([]),
            what=f"the cubin of kernel {name!r}",
            hint="compile with TRITON_DISABLE_LINE_INFO=1 in the environment",
        )
        kernels.append(
            TritonKernel(
                name=name,
                blob=put_blob(kernel.cubin),
                symbol=kernel.symbol,
                shared=kernel.shared,
                num_warps=kernel.num_warps,
                arg_types=kernel.arg_types,
                capability=capability,
                config=f"TILE={TILE} num_stages={_STAGES} num_warps={_WARPS}",
                grid=grid,
                registers=-1,
                spills=-1,
            )
        )
    text = _program(form, single, part, join)
    record = SealedPiece(
        source=put_blob(text),
        code=CompiledProgram(program_code.MAGIC, put_blob(program_code.encode(text))),
        device_type="cuda",
        inputs=(),
        outputs=0,
        mutated=(),
        realigned=(),
        aligned=(),
        kernels=tuple(kernels),
        externs=(),
        fallbacks=(),
        ops=("pwcc::attention",),
        constants=None,
        tuned=False,
        requirements=(Requirement("cuda_capability", capability),),
    )
    return DecodeAttention(
        dtype=form.dtype,
        heads=form.heads,
        kv_heads=form.kv_heads,
        head_dim=form.head_dim,
        window=form.window,
        softcap=form.softcap,
        sinks=form.sinks,
        piece=put_blob(record.to_bytes()),
    )


def rows_and_width(form: DecodeForm) -> tuple[int, int]:
    """Return a tile's extents as powers of two: query heads of one key head, and ``head_dim``."""
    return max(MIN_ROWS, _power(form.heads // form.kv_heads)), max(16, _power(form.head_dim))


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _shape(form: DecodeForm) -> dict[str, object]:
    rows, width = rows_and_width(form)
    return {
        "KV_HEADS": form.kv_heads,
        "GROUP": form.heads // form.kv_heads,
        "HEAD_DIM": form.head_dim,
        "ROWS": rows,
        "WIDTH": width,
    }


def _compile(form: DecodeForm, capability: str, *, split: bool) -> CompiledKernel:
    from pwcc.compile.ops.decode_kernel import paged_decode

    dtype = f"*{_TYPES[form.dtype]}"
    signature = {
        **dict.fromkeys(("q", "k", "v", "keys", "values"), dtype),
        "slots": "*i64",
        "table": "*i32",
        "lengths": "*i32",
        "sinks": f"*{_TYPES[form.sinks or form.dtype]}",
        "out": dtype,
        "partial": "*fp32",
        "scale": "fp32",
        "softcap": "fp32",
        **dict.fromkeys(("window", *_STRIDES, "table_stride", "block_shift", "chunk"), "i32"),
    }
    constants = {
        **_shape(form),
        "TILE": TILE,
        "WINDOW": form.window,
        "SOFTCAP": form.softcap,
        "SINKS": form.sinks is not None,
        "SPLIT": split,
    }
    with line_info_disabled():
        return compile_kernel(
            paged_decode,
            signature,
            constants,
            aligned=(*_TENSORS, "partial", *_STRIDES),
            capability=int(capability.replace(".", "")),
            num_warps=_WARPS,
            num_stages=_STAGES,
        )


def _compile_combine(form: DecodeForm, capability: str) -> CompiledKernel:
    from pwcc.compile.ops.decode_kernel import paged_decode_combine

    signature = {"partial": "*fp32", "out": f"*{_TYPES[form.dtype]}", "out_stride": "i32", "splits": "i32"}
    with line_info_disabled():
        return compile_kernel(
            paged_decode_combine,
            signature,
            _shape(form),
            aligned=("partial", "out", "out_stride"),
            capability=int(capability.replace(".", "")),
            num_warps=_WARPS,
            num_stages=_STAGES,
        )


def _program(form: DecodeForm, single: CompiledKernel, part: CompiledKernel, join: CompiledKernel) -> bytes:
    rows, width = rows_and_width(form)
    strides = "q.stride(0), k.stride(0), v.stride(0), out.stride(0), table.stride(0)"
    common = "q, k, v, keys, values, slots, table, lengths, sinks, out"
    scalars = f"scale, softcap, window, {strides}, block_shift, chunk"

    def launch(function: str, kernel: CompiledKernel, grid: str, arguments: Sequence[str]) -> str:
        given = ", ".join([*arguments, *["None"] * kernel.scratch])
        return (
            f"launch_kernel({function}, {grid}, {kernel.num_warps}, {kernel.shared}, {kernel.arg_types!r}, "
            f"({given}), stream)"
        )

    whole = launch("decode", single, f"{form.kv_heads}, 1, seqs", [common, "out", scalars])
    parts = launch("decode_part", part, f"{form.kv_heads}, splits, seqs", [common, "partial", scalars])
    joined = launch("decode_join", join, f"{form.heads}, seqs, 1", ["partial, out, out.stride(0), splits"])
    lines = [
        "import torch",
        "from pwcc.compile.torch_private.primitives import empty_strided_cuda, get_raw_stream, launch_kernel",
        "",
        "def bind(kernels, constants, _device_index):",
        "    decode = kernels['decode']",
        "    decode_part = kernels['decode_part']",
        "    decode_join = kernels['decode_join']",
        "    def call(args):",
        "        (q, k, v, keys, values, slots, table, lengths, sinks, out, scale, softcap, window, "
        "block_shift, splits, chunk) = args",
        "        args.clear()",
        "        seqs = q.shape[0]",
        "        stream = get_raw_stream(_device_index)",
        "        if splits == 1:",
        f"            {whole}",
        "        else:",
        f"            size = seqs * {form.kv_heads * rows * (width + 2)} * splits",
        "            partial = empty_strided_cuda((size,), (1,), torch.float32)",
        f"            {parts}",
        f"            {joined}",
        "        return ()",
        "    return call",
        "",
    ]
    return "\n".join(lines).encode()
