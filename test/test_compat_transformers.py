"""What differs between releases of transformers is called by the installed one's names, so that nothing warns."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from torchrl_moe import _compat_transformers
from torchrl_moe.testing.tiny_moe import make_tiny_moe


class Old:
    """A model of a release, or of remote code, that has the older names only."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def gradient_checkpointing_enable(self, **given: Any) -> None:
        self.given = given


@pytest.fixture
def model() -> PreTrainedModel:
    return make_tiny_moe("qwen3_moe")


def test_importing_it_does_not_import_transformers() -> None:
    code = "import sys, torchrl_moe._compat_transformers; print('transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_the_cache_has_the_name_that_does_not_warn(model: PreTrainedModel) -> None:
    cache, ids = DynamicCache(), torch.tensor([[1, 2, 3]])
    name = _compat_transformers.cache_argument(inspect.signature(model.forward).parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model(input_ids=ids, use_cache=True, **{name: cache})
    assert cache.get_seq_length() == 3


def test_activations_are_computed_again_without_a_warning(model: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        _compat_transformers.checkpoint_activations(model)
    assert model.is_gradient_checkpointing


def test_a_model_of_the_older_names_is_called_by_these() -> None:
    old = Old()
    _compat_transformers.checkpoint_activations(old)
    assert old.given == {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    _compat_transformers.checkpoint_activations(old, use_reentrant=True, preserve_rng_state=False)
    assert old.given == {"gradient_checkpointing_kwargs": {"use_reentrant": True, "preserve_rng_state": False}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe", "qwen3"])
def test_a_lowered_model_is_what_transformers_loads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_moe(family)
    model.save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert _compat_transformers.lowered(model, dtype) is model
    for name, tensor in [*wanted.named_parameters(), *wanted.named_buffers()]:
        torch.testing.assert_close(attribute(model, name), tensor, atol=0, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    kept = {name for name, tensor in model.state_dict().items() if tensor.dtype != dtype}
    assert bool(kept) == (family == "deepseek_v3" and dtype != torch.float32)  # its correction bias, at the least


def attribute(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), last)
    return found


def test_a_model_that_is_not_of_transformers_is_lowered_as_a_whole() -> None:
    model = _compat_transformers.lowered(torch.nn.BatchNorm1d(2), torch.bfloat16)
    floating = [tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()]
    assert {*floating} == {torch.bfloat16}
