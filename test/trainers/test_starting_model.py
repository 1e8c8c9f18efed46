"""What a run starts from: what is given or made, and what an earlier start has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.training import fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, ModelConfig
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.placement_config import PlacementConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rank_group import Ranks
from torchrl_moe.trainers.starting_model import new_start, starting_model

MADE = f"{__name__}:made"


def made(value: float = 1.0) -> tuple[Any, Any]:
    model = fake_model()
    torch.nn.init.constant_(model.lm_head.weight, value)
    return model, ByteTokenizer()


def config_of(folder: Path, source: str | None = MADE, **arguments: Any) -> GRPOConfig:
    return GRPOConfig(out=str(folder), model=ModelConfig(source=source, arguments=arguments))


def head(policy_model: PolicyModel) -> float:
    return float(policy_model.model.lm_head.weight.detach()[0, 0])


def test_a_single_process_takes_what_it_gets(tmp_path: Path) -> None:
    model, tokenizer = made(3.0)
    given = starting_model(model, tokenizer, config_of(tmp_path, None), Placement())
    assert given.model is model and (given.source, given.start) == (None, None)
    assert head(starting_model(None, None, config_of(tmp_path, value=5.0), Placement())) == 5.0
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_takes_the_newest_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, value=5.0)
    for value in (2.0, 4.0):
        starting_model(*made(value), config, Placement()).save(new_start(tmp_path))
    assert head(starting_model(None, None, config, Placement())) == 5.0
    config.resume = True
    again = starting_model(None, None, config, Placement())
    assert head(again) == 4.0 and again.start is None


class Two(Ranks):
    """The first of two ranks, the second of which is not asked."""

    size = 2


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What several ranks would load."""
    calls: list[Any] = []
    load = PolicyModel.load

    def note(model: Any, tokenizer: Any, config: ModelConfig, placement: Placement | None = None) -> PolicyModel:
        if placement is None:
            return load(model, tokenizer, config)
        calls.append((model, config.lora.rank))
        return load(model, tokenizer, ModelConfig())

    monkeypatch.setattr(PolicyModel, "load", note)
    return calls


TWO = Placement(Two(), PlacementConfig())


def test_several_ranks_load_what_rank_0_wrote(tmp_path: Path, loaded: list[Any]) -> None:
    config = config_of(tmp_path, value=5.0)
    config.model.lora = LoRAConfig(rank=2)
    found = starting_model(None, None, config, TWO)
    (start,) = tmp_path.glob("start-*")
    assert (head(found), found.start, found.source) == (5.0, start, str(start))
    assert loaded == [(str(start), 2)]  # the adapter is not part of it


def test_several_ranks_load_a_folder_as_it_is(tmp_path: Path, loaded: list[Any]) -> None:
    folder = save_tiny_moe(tmp_path / "model", num_hidden_layers=2)
    found = starting_model(None, None, config_of(tmp_path / "run", str(folder)), TWO)
    assert found.start is None and loaded == [(str(folder), 0)]
    starting_model(folder, None, config_of(tmp_path / "run", None), TWO)
    assert loaded[1] == (folder, 0)
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_its_own_is_for_one_rank(tmp_path: Path) -> None:
    adapted = PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig(lora=LoRAConfig(rank=2))).model
    with pytest.raises(ConfigError, match=r"give several the bare one, and set model\.lora"):
        starting_model(adapted, ByteTokenizer(), config_of(tmp_path, None), TWO)
