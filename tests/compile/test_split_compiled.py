"""The hardest splits really compiled: Inductor, sealing, an entry on disk, and a load of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pwcc
from pwcc.compile.runtime.samples import relative_error
from tests.compile.conftest import SPLITTING_OPS, require_equal
from tests.compile.split_cases import Base, attend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]

SIZES = (1, 2, 7, 12)
on_devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.filterwarnings("default"),  # what the compilers say there is shown, not judged
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)


class Hard(Base):
    """Tuples, regions, numbers and sizes across boundaries; splitting ops in a region and a checkpoint."""

    def forward(self, x: Tensor) -> Any:
        n = x.shape[0]
        scale = math.sqrt(n)
        with torch.autocast(x.device.type, torch.bfloat16):
            q, k, v = self.big(x * scale).chunk(3, -1)
            y = torch.ops.pwcctest.project(q.float(), self.lin.weight)
            y = self.lin(y) + k
        variance, mean = torch.var_mean(y.float() / scale, -1)
        doubled = checkpoint(self._block, torch.cat([x, x * n**-0.5]), use_reentrant=False)
        z = doubled.view(2, n, 8).sum(0) * variance[:, None] + mean[:, None] + int(n**0.5) + self.scale
        z = z + self.emb(x.argmax(-1)) * self.scale
        return z, v, (n, scale, n > 3), doubled.shape, x

    def _block(self, y: Tensor) -> Tensor:
        return attend(self.lin(y)) * 2


class TwoSizes(Base):
    """Pieces with two sizes, with the sum of two, and with the second only; floats of both."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        both = attend(torch.cat([self.lin(x), y]))
        scores = (both[: x.shape[0]] @ y.t()) / math.sqrt(y.shape[0])
        attended = attend(scores.softmax(-1))
        return attended @ self.lin(y), y.shape[0] + x.shape[0], self.lin(attend(y))


class Nothing(Base):
    """Pieces in which Inductor finds nothing to do."""

    def forward(self, x: Tensor) -> Any:
        y = torch.ops.pwcctest.one(x)
        z = torch.ops.pwcctest.one(y.contiguous().view(y.shape).to(torch.float32))
        return z, z.detach(), x.to(torch.float32), x.contiguous()


class Picked(Base):
    """Rows of hidden states that an argument picks, as a decoder takes the last token of each sequence."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        result: Tensor = self.lin(attend(x)[rows])
        return result


def compiled(model: nn.Module, cache: Path, inputs: list[str], *sizes: int) -> tuple[nn.Module, Any]:
    report = pwcc.precompile(
        model, cache_dir=cache, inputs=inputs, sizes=sizes, max_tokens=12, splitting_ops=SPLITTING_OPS
    )
    assert not report.hit
    torch._dynamo.reset()
    return model, pwcc.load(model, cache_dir=cache)


@on_devices
def test_hard_splits_after_a_load(tmp_path: Path, device: str) -> None:
    model, loaded = compiled(Hard().eval().to(device), tmp_path / "cache", ["x:float32[n,8]"])
    torch.manual_seed(1)
    for size in SIZES:
        x = torch.randn(size, 8, device=device)
        with torch.no_grad():
            got, wanted = loaded(x), model(x)
        assert got[4] is x
        require_equal(got[2:4], wanted[2:4], f"size {size}")
        for mine, theirs in zip(got[:2], wanted[:2], strict=True):
            assert mine.dtype == theirs.dtype
            assert relative_error([mine], [theirs]) < 2e-2  # bfloat16, rounded at other places
    assert len(list((tmp_path / "cache/v1/entries").glob("*/*/manifest.json"))) == 1


@on_devices
def test_pieces_that_do_nothing_after_a_load(tmp_path: Path, device: str) -> None:
    model, loaded = compiled(Nothing().eval().to(device), tmp_path / "cache", ["x:float32[n,8]"])
    for size in SIZES:
        x = torch.randn(size, 8, device=device)
        with torch.no_grad():
            got, wanted = loaded(x), model(x)
        assert got[2] is x
        assert got[3] is x
        assert got[1].data_ptr() == got[0].data_ptr()
        require_equal(got, wanted, f"size {size}")


@on_devices
def test_two_sizes_after_a_load(tmp_path: Path, device: str) -> None:
    inputs = ["x:float32[n,8]", "y:float32[m<=12,8]"]
    model, loaded = compiled(TwoSizes().eval().to(device), tmp_path / "cache", inputs, 2)
    for n in SIZES:
        for m in SIZES:
            x, y = torch.randn(n, 8, device=device), torch.randn(m, 8, device=device)
            with torch.no_grad():
                got, wanted = loaded(x, y), model(x, y)
            assert got[1] == wanted[1]
            torch.testing.assert_close(got[::2], wanted[::2], rtol=1e-4, atol=1e-4)


def test_rows_picked_by_an_argument(tmp_path: Path) -> None:
    model, loaded = compiled(Picked().eval(), tmp_path / "cache", ["x:float32[n,8]", "rows:int64[m<=4]"])
    for size in SIZES:
        x, rows = torch.randn(size, 8), torch.tensor([size - 1, 0, -1])
        with torch.no_grad():
            torch.testing.assert_close(loaded(x, rows), model(x, rows), rtol=1e-4, atol=1e-4)
