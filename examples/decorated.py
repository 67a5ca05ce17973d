"""A decorated decoder: eager answers while a process beside compiles, then sealed code does.

python examples/decorated.py --cache-dir warm            the first time: eager, dynamic, static
python examples/decorated.py --cache-dir warm            again: from the cache at once
PWCC_LEVEL=1 python examples/decorated.py                torch.compile as it is, to compare
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch
from tiny_decoder import TinyDecoder, example_inputs

import pwcc


@pwcc.support_compile(max_tokens=64, sizes=(1,))
class Decoder(TinyDecoder):
    """The dimension of `input_ids` and `positions` is dynamic: forward annotates them as tensors."""


def main() -> None:
    """Call the model until nothing compiles any more, and say what answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, help="default: PWCC_CACHE_DIR, else the user's")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mode", default="load-or-compile", choices=("load", "load-or-compile"))
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    pwcc.configure(cache_dir=given.cache_dir, mode=given.mode)

    torch.manual_seed(0)
    model = Decoder(given.layers, hidden=128, heads=4, kv_heads=2, vocab=512).eval()
    inputs = {tokens: example_inputs(tokens) for tokens in (1, 7)}
    with torch.inference_mode():
        eager = {tokens: model.forward(*arguments) for tokens, arguments in inputs.items()}
        started, seen = time.perf_counter(), ""
        while True:
            for tokens, arguments in inputs.items():
                torch.testing.assert_close(model(*arguments), eager[tokens], rtol=1e-4, atol=1e-4)
            state = pwcc.compile_state(model)
            if state.phase.value != seen:
                seen = state.phase.value
                what = f"entry {state.entry}, static sizes {list(state.sizes)}" if state.entry else "no entry"
                print(f"{time.perf_counter() - started:6.1f} s  {seen}: {what}", flush=True)
            if seen not in ("compiling", "filling"):
                break
            time.sleep(0.05)
    if state.error is not None:
        raise state.error


if __name__ == "__main__":
    # The class must have a name that the compiling process can import; `__main__` is another file there.
    from decorated import main as importable_main

    importable_main()
