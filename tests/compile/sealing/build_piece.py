"""Compile one small piece with Inductor under the CPU profile and seal it: ``build_piece.py OUT``.

Run as a process of its own, so that Inductor's state and warnings stay out of the tests. Writes blobs by
digest, ``record`` (the record's digest) and ``samples.pt`` (inputs, outputs, mutated state).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

OUT = Path(sys.argv[1])
OUT.mkdir(parents=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(OUT / "inductor")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch  # noqa: E402
from torch._inductor import compile_fx, config  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from pwcc.cache.ids import BlobDigest, blob_digest  # noqa: E402
from pwcc.compile.sealing.builder_paths import builder_paths  # noqa: E402
from pwcc.compile.sealing.compiled import CompiledPiece, InputFacts  # noqa: E402
from pwcc.compile.sealing.driver import write_driver  # noqa: E402
from pwcc.compile.sealing.profile import Baseline, cpu_profile, cpu_target  # noqa: E402
from pwcc.compile.sealing.seal import seal  # noqa: E402
from pwcc.compile.torch_private.inductor_cpp import inductor_directories  # noqa: E402


def piece(x: torch.Tensor, w: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = (x @ w).chunk(2, -1)
    state.copy_(state + x.sum())
    return torch.nn.functional.silu(gate) * up, torch.sort(x, stable=True)[1]


def put(data: bytes) -> BlobDigest:
    digest = blob_digest(data)
    (OUT / digest).write_bytes(data)
    return digest


torch.manual_seed(0)
inputs = [torch.randn(8, 16), torch.randn(16, 32), torch.zeros(4)]
isa: Baseline = "x86-64-v3" if "avx2" in Path("/proc/cpuinfo").read_text() else "native"
target = cpu_target(isa)
driver = write_driver(OUT / "bin", march=target.march, path_prefixes=builder_paths(inductor_directories()))
with torch.no_grad(), config.patch(cpu_profile(isa, driver=driver)):
    graph = make_fx(piece, select_decomp_table())(*[item.clone() for item in inputs])
    compiled: Any = compile_fx.compile_fx_inner(graph, [item.clone() for item in inputs])
    after = [item.clone() for item in inputs]
    outputs = compiled(list(after))
module = next(
    m for m in PyCodeCache.modules if m.__file__ and Path(m.__file__).read_text() == compiled.source_code
)
facts = [InputFacts("tensor", "float32", tuple(item.shape), item.stride()) for item in inputs]
record, digest = seal(
    CompiledPiece(
        source=compiled.source_code,
        module=module,
        constants=compiled.constants or {},
        inputs_to_check=compiled.inputs_to_check,
        mutated_inputs=tuple(compiled.mutated_input_idxs),
        device_type="cpu",
        device_index=None,
        inputs=facts,
        cpu_flags=target.cpu_flags,
    ),
    put,
)
(OUT / "record").write_text(digest)
torch.save((inputs, list(outputs), after), OUT / "samples.pt")
