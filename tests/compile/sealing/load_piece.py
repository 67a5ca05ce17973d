"""Load the piece that ``build_piece.py`` sealed and say how it went: ``load_piece.py OUT``, JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

OUT = Path(sys.argv[1])
inputs, expected, after = torch.load(OUT / "samples.pt", weights_only=True)
before = dict(os.environ)
events: list[str] = []
sys.addaudithook(
    lambda event, args: (
        events.append(f"{event} {args[:2]}")
        if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec")
        or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else None
    )
)

from pwcc.cache.sealed import SealedPiece  # noqa: E402
from pwcc.compile.runtime.check import input_checker  # noqa: E402
from pwcc.compile.runtime.kernels import TABLE  # noqa: E402
from pwcc.compile.runtime.piece import PieceLoader  # noqa: E402

record = SealedPiece.from_bytes((OUT / (OUT / "record").read_text()).read_bytes(), where="piece.json")
loader = PieceLoader(lambda digest: (OUT / digest).read_bytes(), torch.device("cpu"))
piece = loader.load(record)
loader.load(record)
loaded = TABLE.loaded
input_checker(record)(inputs)
with torch.no_grad():
    results: Any = piece.call(list(inputs))
print(
    json.dumps(
        {
            "equal": [torch.equal(a, b) for a, b in zip((*results, *inputs), (*expected, *after), strict=True)],
            "loaded": loaded,
            "kernels": len(record.kernels),
            "events": events,
            "environment": dict(os.environ) == before,
            "heavy": [
                name
                for name in sys.modules
                if name.split(".")[0] in ("triton", "sympy")
                or name.startswith(("torch._dynamo", "torch._inductor"))
            ],
        }
    )
)
