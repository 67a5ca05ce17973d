"""The extern table means what Inductor means by each name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from pwcc.compile.runtime.externs import EXTERNS, bias_addmm, conv1x1_via_mm

CODE = """
import json
import torch
from torch._inductor.select_algorithm import extern_kernels
import torch._inductor.kernel.mm, torch._inductor.kernel.bmm, torch._inductor.kernel.conv
import torch._inductor.kernel.mm_plus_mm, torch._inductor.kernel.mm_grouped, torch._inductor.quantized_lowerings
from pwcc.compile.runtime.externs import EXTERNS
print(json.dumps({name: getattr(extern_kernels, name, None) is function for name, function in EXTERNS.items()}))
"""


@pytest.mark.slow
def test_torch_functions_are_the_ones_inductor_registers() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    same = json.loads(result.stdout)
    assert {name for name, equal in same.items() if not equal} == {
        "bias_addmm",
        "conv1x1_via_mm",
        "_mm_plus_mm",
    }


@pytest.mark.parametrize("bias", [torch.randn(5).expand(3, 5), torch.randn(3, 5), torch.randn(1, 5)])
def test_bias_addmm(bias: torch.Tensor) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    out = torch.empty(3, 5)
    assert bias_addmm(bias, a, b, out=out) is out
    torch.testing.assert_close(out, bias + a @ b)


def test_conv1x1_via_mm() -> None:
    x, w = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5, 3, 1, 1)
    out = torch.empty(2, 5, 4, 4).to(memory_format=torch.channels_last)
    conv1x1_via_mm(x, w, out=out)
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, w))


def test_mm_plus_mm() -> None:
    a, b, c, d = (torch.randn(3, 3) for _ in range(4))
    out = torch.empty(3, 3)
    EXTERNS["_mm_plus_mm"](a, b, c, d, out=out)
    torch.testing.assert_close(out, a @ b + c @ d)
