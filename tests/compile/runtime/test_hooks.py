"""Global module hooks are seen."""

from __future__ import annotations

from torch.nn.modules.module import register_module_forward_hook

from pwcc.compile.runtime.hooks import global_hooks


def test_a_global_hook_is_named_while_it_is_there() -> None:
    assert global_hooks() == []
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert global_hooks() == ["_global_forward_hooks"]
    finally:
        handle.remove()
    assert global_hooks() == []
