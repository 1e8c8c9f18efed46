"""What a model would send is what its checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchrl_moe.modules.backends.checkpoint import checkpoint_metadata
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update import get_model_metadata
from torchrl_moe.weight_update.source import trained_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_a_models_metadata_is_that_of_its_checkpoint(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_moe(family, dtype=dtype)
    model.save_pretrained(tmp_path)
    metadata = get_model_metadata(model)
    assert metadata == checkpoint_metadata(tmp_path)
    assert len(metadata) > len(model.state_dict())  # experts one by one


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_a_wrapper_is_looked_through_and_a_model_is_not() -> None:
    model = make_tiny_moe()
    assert trained_model(Wrapper(model)) is model
    assert trained_model(model) is model  # though it has a ``model`` too
    assert get_model_metadata(Wrapper(model)) == get_model_metadata(model)
    assert trained_model(nn.DataParallel(Wrapper(model))) is model
    with pytest.raises(TypeError, match=r"one of transformers.*, got a Sequential around one: pass what is inside$"):
        get_model_metadata(nn.Sequential(model))
    plain = nn.Linear(1, 1)
    assert trained_model(Wrapper(plain)).model is plain  # no transformers model inside
