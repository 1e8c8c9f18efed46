"""What a run starts from: what is given or made, and what an earlier start has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.training import fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, ModelConfig, PlacementConfig
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import PolicyModel, new_start, starting_model
from torchrl_moe.trainers.ranks import Ranks

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


def test_a_run_that_continues_takes_the_newest_start(tmp_path: Path) -> None:
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
    assert loaded[1] == (str(folder), 0)
    assert not (tmp_path / "run").exists()


class Second(Ranks):
    """A rank that does what the first one says."""

    rank, size = 1, 2

    def __init__(self, said: Any) -> None:
        self.said = said

    def from_first(self, value: Any, phase: str) -> Any:
        assert phase == "making the model"
        return self.said


@pytest.mark.parametrize("is_new", [False, True])
def test_rank_0_chooses_whatever_the_others_see_or_were_given(tmp_path: Path, loaded: list[Any], is_new: bool) -> None:
    """A shared folder may look different on another host for a while, and a rank may be given something else."""
    folder = save_tiny_moe(tmp_path / "model", num_hidden_layers=2)
    starting_model(*made(2.0), config_of(tmp_path), Placement()).save(new_start(tmp_path))  # which rank 0 has not seen
    config = config_of(tmp_path, value=5.0)
    config.resume = True
    second = Placement(Second((str(folder), is_new)), PlacementConfig())
    for given in (None, "elsewhere", made()[0]):
        found = starting_model(given, None, config, second)
        assert loaded.pop() == (str(folder), 0)
        assert found.start == (folder if is_new else None)


def test_several_ranks_that_continue_load_the_newest_start(tmp_path: Path, loaded: list[Any]) -> None:
    config = config_of(tmp_path, value=5.0)
    starting_model(*made(2.0), config, Placement()).save(new_start(tmp_path))
    config.resume = True
    found = starting_model(None, None, config, TWO)
    assert head(found) == 2.0 and found.start is None


def test_an_adapter_of_its_own_is_for_one_rank(tmp_path: Path) -> None:
    adapted = PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig(lora=LoRAConfig(rank=2))).model
    with pytest.raises(ConfigError, match=r"give several the bare one, and set model\.lora"):
        starting_model(adapted, ByteTokenizer(), config_of(tmp_path, None), TWO)
