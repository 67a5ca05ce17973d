"""Names in a cache reach operations of tensors, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.targets import require_attribute, require_method, resolve_target, target_name

ALLOWED: list[tuple[Callable[..., Any], str]] = [
    (torch.empty, "torch.empty"),
    (torch.cat, "torch.cat"),
    (torch.rms_norm, "torch.rms_norm"),
    (torch.einsum, "torch.functional.einsum"),
    (F.linear, "torch._C._nn.linear"),
    (F.layer_norm, "torch.nn.functional.layer_norm"),
    (F.max_pool1d, "torch.nn.functional.max_pool1d"),
    (F.scaled_dot_product_attention, "torch._C._nn.scaled_dot_product_attention"),
    (torch.special.erf, "torch._C._special.special_erf"),
    (torch.linalg.inv, "torch._C._linalg.linalg_inv"),
    (torch.fft.fft, "torch._C._fft.fft_fft"),
    (operator.add, "operator.add"),
    (operator.getitem, "operator.getitem"),
    (getattr, "builtins.getattr"),
    (max, "builtins.max"),
    (torch.sym_max, "torch.sym_max"),
    (torch.Tensor.add, "torch.Tensor.add"),
    (torch.Tensor.__getitem__, "torch.Tensor.__getitem__"),
    (torch.ops.aten.mm, "torch.ops.aten.mm"),
    (torch.ops.aten.mm.default, "torch.ops.aten.mm.default"),
    (torch.ops.prims.mul.default, "torch.ops.prims.mul.default"),
    (torch.ops.pwcctest.one, "torch.ops.pwcctest.one"),
]


@pytest.mark.parametrize(("function", "name"), ALLOWED, ids=[name for _, name in ALLOWED])
def test_operations_have_a_name_that_leads_back(function: Callable[..., Any], name: str) -> None:
    assert target_name(function) == name
    assert resolve_target(name) == function


@pytest.mark.parametrize(
    "function",
    [
        *(
            torch.load,
            torch.save,
            torch.compile,
            torch.cond,
            torch.from_file,
            torch.manual_seed,
            torch.hub.load,
        ),
        *(eval, print, operator.attrgetter, operator.methodcaller, torch.Tensor.numpy, lambda x: x),
    ],
)
def test_functions_without_a_name(function: Callable[..., Any]) -> None:
    assert target_name(function) is None


@pytest.mark.parametrize(
    "target",
    """
    os.system subprocess.run builtins.eval builtins.exec builtins.open builtins.__import__ builtins.print
    builtins.getattr.__self__ operator.attrgetter operator.methodcaller operator.itemgetter operator.call
    math.__loader__ math.floor.__self__
    torch torch. .torch torch..cat torch.cat.x
    torch.load torch.save torch.compile torch.manual_seed torch.set_num_threads torch.fork torch.wait
    torch.import_ir_module torch.from_file torch.from_numpy torch.frombuffer torch.os.system torch.sys.exit
    torch.hub.load torch.serialization.load torch.jit.load torch.package.PackageImporter torch.classes.x.y
    torch.utils.cpp_extension.load torch.utils.data.DataLoader torch.distributed.init_process_group
    torch.multiprocessing.spawn torch._C._load_for_lite_interpreter torch._dynamo.reset torch.random.seed
    torch.nn.functional.importlib.import_module torch.nn.functional.handle_torch_function
    torch.nn.functional.boolean_dispatch torch.nn.functional.torch torch.functional.torch.load
    torch.ops.load_library torch.ops.load_library.x torch.ops.import_module.x torch.ops.loaded_libraries.add
    torch.ops.aten.from_file torch.ops.aten.save torch.ops.aten.warn torch.ops.aten.mm.__class__
    torch.ops.aten.mm.schemas torch.ops.aten.mm.nosuch torch.ops.aten.__name__.x torch.ops.prim.Print
    torch.ops.c10d.send torch.ops.higher_order.cond torch.ops.nosuch.op torch.nosuch
    torch.Tensor.numpy torch.Tensor.apply_ torch.Tensor.untyped_storage torch.Tensor.set_
    torch.Tensor.__reduce_ex__ torch.Tensor.__class__ torch.Tensor._make_subclass torch.Tensor.nosuch
    """.split(),  # noqa: SIM905 (a table)
)
def test_everything_else_is_refused(target: str) -> None:
    with pytest.raises(CorruptEntry):
        resolve_target(target)


def test_an_operation_that_is_not_registered_says_so() -> None:
    with pytest.raises(CorruptEntry, match="does not exist in this process") as raised:
        resolve_target("torch.ops.mylib.paged_attention")
    assert raised.value.hint == "import the library that registers it before loading"


@pytest.mark.parametrize("name", ["view", "float", "add_", "__getitem__", "__setitem__", "__radd__", "to"])
def test_methods_of_tensors(name: str) -> None:
    require_method(name)


@pytest.mark.parametrize(
    "name",
    ["numpy", "storage", "__reduce__", "__class__", "_make_subclass", "apply_", "register_hook", "", "a.b"],
)
def test_methods_that_reach_elsewhere(name: str) -> None:
    with pytest.raises(CorruptEntry):
        require_method(name)


@pytest.mark.parametrize("name", ["T", "mT", "real", "values", "shape", "dtype"])
def test_attributes_of_tensors(name: str) -> None:
    if name == "values":  # a method of tensors, and a field of what max returns
        with pytest.raises(CorruptEntry):
            require_attribute(name)
    else:
        require_attribute(name)


@pytest.mark.parametrize("name", ["__class__", "_backward_hooks", "grad_fn", "numpy", 3, None, "a b"])
def test_attributes_that_reach_elsewhere(name: object) -> None:
    with pytest.raises(CorruptEntry):
        require_attribute(name)
