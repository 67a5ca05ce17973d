"""The GPU script's figures; the runs themselves need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.conftest import Load


def test_ten_architectures_with_experts_and_a_sliding_window_have_a_configuration(zoo: Load) -> None:
    from transformers import AutoConfig

    shapes = zoo("gpu").SHAPES
    assert len(shapes) >= 10
    configs = {name: AutoConfig.for_model(name, **values) for name, (_, values) in shapes.items()}
    assert any(hasattr(config, "num_local_experts") for config in configs.values())
    windows = [config for config in configs.values() if getattr(config, "sliding_window", None) == 16]
    assert windows
    for name, config in configs.items():
        assert config.num_hidden_layers == 2, name
        assert config.hidden_size >= 2880, name
        assert shapes[name][0]  # the checkpoint that the figures are of


@pytest.mark.parametrize("name", ["a_model_of_another_year"])
def test_an_unknown_type_is_skipped_by_name(zoo: Load, tmp_path: Path, name: str) -> None:
    result = zoo("gpu").guarded("compile", name, tmp_path, "cpu")
    assert result["skipped"]
    assert name in result["reason"]
