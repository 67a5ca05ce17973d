"""Inductor's wrappers of two torch releases become the programs beside them; anything unread is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pwcc.cache.errors import UnsealableError
from pwcc.compile.sealing.program import program_text
from pwcc.compile.sealing.rewrite import Rewritten, rewrite
from pwcc.compile.sealing.wrapper import parse_wrapper

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
HEADER = """
import torch, math
from math import inf, nan
from torch import device, empty_strided
from torch._inductor.select_algorithm import extern_kernels
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
aten = torch.ops.aten
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
assert_size_stride_grouped = torch._C._dynamo.guards.assert_size_stride_grouped
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
constant0 = None  # abc
k0 = async_compile.triton('k0', '''...''', device_str='cuda')
k1 = async_compile.cpp_pybinding(['const float*', 'int64_t'], '''...''')
k2 = async_compile.cutedsl('k2', '''...''')
def subgraph_0(args):
    return args
"""


def sealed(
    body: str, *, device_type: str = "cuda", index: int | None = 0, constants: tuple[str, ...] = ()
) -> tuple[str, Rewritten]:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    source = f"{HEADER}\ndef call(args):\n    a, b = args\n    args.clear()\n{lines}\n    return (a, )\n"
    piece = rewrite(parse_wrapper(source), constants=constants, device_type=device_type, device_index=index)
    launchers = {
        name: f"def {name}(*args):\n    pass"
        for name, k in piece.outside.kernels.items()
        if k.factory == "triton"
    }
    return program_text(piece, launchers).decode(), piece


@pytest.mark.parametrize("name", ["cpu_2_13", "cuda_2_11", "cuda_2_13"])
def test_real_wrappers_become_the_golden_programs(name: str) -> None:
    def program() -> bytes:
        wrapper = parse_wrapper((FIXTURES / "wrappers" / f"{name}.txt").read_text())
        device, index = ("cpu", None) if name.startswith("cpu") else ("cuda", 0)
        piece = rewrite(wrapper, constants=(), device_type=device, device_index=index)
        launchers = {
            kernel: f"def {kernel}(*args):\n    pass"
            for kernel, definition in piece.outside.kernels.items()
            if definition.factory == "triton"
        }
        return program_text(piece, launchers)

    text = program()
    assert text == program(), "the same wrapper gives the same bytes"
    # compared as trees: how ast.unparse spells a tuple may differ between Python versions
    golden = (FIXTURES / "programs" / f"{name}.txt").read_text()
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(golden))
    for leak in (b"/home/builder", b"#", b"benchmark", b"get_args", b"_inductor", b"_DeviceGuard"):
        assert leak not in text


def test_dropped_assertions_are_stated() -> None:
    wrapper = parse_wrapper((FIXTURES / "wrappers" / "cuda_2_11.txt").read_text())
    piece = rewrite(wrapper, constants=(), device_type="cuda", device_index=0)
    assert piece.arguments == ("x_1", "w_1", "n_1", "d_1", "b_1")
    assert piece.outputs == 3
    assert piece.stated[:2] == (("x_1", "(s28, 64)", "(64, 1)"), ("w_1", "(64, 256)", "(1, 64)"))


def test_assertions_on_what_an_operator_returned_are_kept() -> None:
    text, piece = sealed("buf0 = torch.ops.mylib.op.default(a)\nassert_size_stride(buf0, (8, ), (1, ), 'op')")
    assert "assert_size_stride(buf0, (8,), (1,)" in text
    assert "_op_mylib_op_default = torch.ops.mylib.op.default" in text
    assert piece.stated == ()


def test_grouped_assertions_of_inputs_are_stated_one_by_one() -> None:  # as torch 2.14 writes them
    line = "assert_size_stride_grouped((a, b), ((8, ), (2, 4)), ((1, ), (4, 1)), 'input')"
    text, piece = sealed(line)
    assert "assert_size_stride" not in text
    assert piece.stated == (("a", "(8,)", "(1,)"), ("b", "(2, 4)", "(4, 1)"))
    text, piece = sealed(f"a = a.clone()\n{line}")
    assert "assert_size_stride_grouped((a, b)," in text
    assert piece.stated == ()


def test_an_input_that_was_assigned_again_keeps_its_assertion() -> None:
    text, piece = sealed("a = a.clone()\nassert_size_stride(a, (8, ), (1, ), 'input')")
    assert "assert_size_stride(a," in text
    assert piece.stated == ()


def test_runner_classes_are_read_too() -> None:
    source = (
        f"{HEADER}\nclass Runner:\n    def __init__(self, partitions):\n        self.partitions = partitions\n"
        "    def call(self, args):\n        a, = args\n        args.clear()\n        return (a, )\n"
    )
    piece = rewrite(parse_wrapper(source), constants=(), device_type="cpu", device_index=None)
    assert "def call(args):" in program_text(piece, {}).decode()


def test_device_stream_and_launch() -> None:
    text, piece = sealed(
        "with torch.cuda._DeviceGuard(0):\n"
        "    torch.cuda.set_device(0)\n"
        "    stream0 = get_raw_stream(0)\n"
        "    k0.run(a, 8, stream=stream0)\n"
        "    stream0 = get_raw_stream(0)\n"
        "    k0.run(b, b.item(), stream=stream0)\n"
        "    buf1 = aten.full.default([8], inf, device=device(type='cuda', index=0))\n"
    )
    assert text.count("get_raw_stream(_device_index)") == 1
    assert "k0(a, 8, stream0)" in text
    assert "k0(b, b.item(), stream0)" in text
    assert "_device = torch.device('cuda', _device_index)" in text
    assert "math.inf" in text
    assert "DeviceGuard" not in text
    assert "set_device" not in text
    assert list(piece.outside.kernels) == ["k0"]


def test_a_stream_asked_for_in_a_branch_does_not_stand_for_later_ones() -> None:
    text, _ = sealed("if b:\n    stream0 = get_raw_stream(0)\nstream0 = get_raw_stream(0)")
    assert text.count("get_raw_stream(_device_index)") == 2


def test_asserts_survive_optimised_python() -> None:
    text, _ = sealed("u0 = b\nassert u0 % 2 == 0, f'{u0} not divisible by 2'")
    assert "assert " not in text
    assert "raise RuntimeError(f'{u0} not divisible by 2')" in text


def test_the_last_step_of_a_split_reduction_is_let_through() -> None:
    text, _ = sealed("ws = a\nbuf1 = ws[0 : 8 * 64].view(8, 64).sum(dim=0).to(torch.bfloat16)")
    assert "ws[0:8 * 64].view(8, 64).sum(dim=0).to(torch.bfloat16)" in text


def test_constants_and_cpu_kernels() -> None:
    text, piece = sealed("k1(a, constant0)", device_type="cpu", index=None, constants=("constant0",))
    assert "constant0 = constants['constant0']" in text
    assert piece.outside.kernels["k1"].arg_types == ("const float*", "int64_t")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("b = os.system('true')", "name 'os.system'"),
        ("b = open('f')", "name 'open'"),
        ("b = a.__class__", "attribute '__class__'"),
        ("b = a.numpy()", "attribute 'numpy'"),
        ("b = torch.load('f')", "name 'torch.load'"),
        ("b = extern_kernels.call_aten_dw(a)", "extern kernel 'call_aten_dw'"),
        ("b = torch.ops.prims.iota.default(4)", "operator 'torch.ops.prims.iota.default'"),
        ("k2.run(a, stream=b)", "kernel 'k2' made by async_compile.cutedsl"),
        ("k1.run(a, stream=b)", "'.run' of kernel 'k1'"),
        ("k0.run(a, grid=b, stream=b)", "keywords in the launch of kernel 'k0'"),
        ("b = k0", "kernel 'k0' used other than by '.run'"),
        ("b = subgraph_0(a)", "name 'subgraph_0' (a function of the wrapper"),
        ("b = constant0", "name 'constant0' (a constant that is set after the module is loaded)"),
        ("with torch.cuda._DeviceGuard(1):\n    pass", "another device than cuda:0"),
        ("b = get_raw_stream(1)", "another device than cuda:0"),
        ("b = aten.full.default([1], 1, device=device(type='cuda', index=1))", "another device than cuda:0"),
        ("with stream1:\n    pass", "a 'with' statement other than a device guard"),
        ("while b:\n    pass", "a While statement"),
        ("b = [i for i in a]", "a ListComp expression"),
        ("b = lambda: a", "a Lambda expression"),
        ("import os", "a Import statement"),
        ("b = self.partitions[0](a)", "name 'self.partitions'"),
        ("b = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(a, [8])", "name 'triton.tools"),
    ],
)
def test_what_nobody_has_read_is_refused_by_name(body: str, named: str) -> None:
    with pytest.raises(UnsealableError) as caught:
        sealed(body)
    assert named in str(caught.value)


@pytest.mark.parametrize("source", ["x = (", "y = 1\n", "def call(args):\n    return args\n"])
def test_other_texts_are_refused(source: str) -> None:
    with pytest.raises(UnsealableError):
        rewrite(parse_wrapper(source), constants=(), device_type="cpu", device_index=None)


def test_names_that_would_collide_are_refused() -> None:
    with pytest.raises(UnsealableError, match="'_op_aten_mm_out' twice"):
        sealed("_op_aten_mm_out = aten.mm.out(a, b)")
