"""Settings that cannot be meant are refused, with their names."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from pytest import MonkeyPatch

from support.shared_training import changed as with_changes
from support.values import VALUES
from torchrl_moe import objectives
from torchrl_moe.modules.backends.sampling_fields import FIELDS
from torchrl_moe.trainers import MoEGRPOTrainer
from torchrl_moe.trainers.config import (
    ConfigError,
    GRPOConfig,
    LoRAConfig,
    OptimConfig,
    Settings,
    as_yaml,
)


def changed(name: str, value: Any) -> GRPOConfig:
    return with_changes(GRPOConfig(), {name: value})


INF, NAN = math.inf, math.nan
WRONG: dict[str, list[Any]] = {
    "rollout.temperature": [0.0],
    "placement.timeout": [INF],
    "rollout.reward_timeout": [INF],
    "rollout.top_p": [1.5],
    "optim.betas": [[0.9], [2, 0.9]],
    "optim.minibatches": [3],  # of 128 answers
    "loss.replay": ["R4"],
    "model.lora": [LoRAConfig(target="mlp")],
    "log.loggers": [["tensorboard", "stdout"]],
    "rollout.over_sample": [1.5],  # begins more groups than can be used in time
    "loss.arguments": [{"thresholds": object()}, {"aggregation": "none"}, {"clip_eps": 0.1}, {"entropy_coeff": NAN}],
    "rollout.sampling": [
        {"repetition_penalty": 1.2}, {"nope": 1}, {"n": 2}, {"top_k": 2**40}, {"temperature": 0}, {"logprobs": None},
        {"actor_index": 99},
    ],
    "loss.router": [{"top_k": 0}],
    "engine.sync": [{"mod": "drain"}],
    "chat_template_kwargs": [{"tokenize": True}],
    "log.arguments": [{"wandb": {}}, {"tensorboard": {"x": 1}}],
    "optim.weight_decay": [2e6],  # times the learning rate
    "seed": [2**70],
    "parity": ["near"],
    "steps": [2**20000],
    "model.arguments": [{"size": 2**20000}],
    "optim": [3],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_value_is_refused_by_its_name(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ConfigError) as caught:
            changed(name, value).check()
        assert str(caught.value).startswith(name) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine.arguments": {"max_model_len": 256}}, r"rollout\.max_new_tokens=256 must be below engine\.arguments"),
        ({"engine.sleep": True, "rollout.max_staleness": 1}, r"engine\.sleep=True needs rollout\.max_staleness=0"),
        ({"engine.sleep": True, "engine.kind": "transformers"}, r"engine\.sleep=True needs engine\.kind=vllm"),
        ({"optim": {"lrr": 1}}, "there is no setting .*lr"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_as_names_that_are_none(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_changes(GRPOConfig(), settings).check()
    changed("engine.sleep", True).check()


# -- every setting, every kind of value -------------------------------------------------------------------------------
def names_of(group: type[Settings] = GRPOConfig, before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of each setting."""
    for name, kind in get_type_hints(group).items():
        if name in {item.name for item in fields(group)}:
            is_group = isinstance(kind, type) and issubclass(kind, Settings)
            yield from names_of(kind, f"{before}{name}.") if is_group else [(before + name, kind)]


@pytest.mark.parametrize(("name", "kind"), [*names_of()])
def test_each_setting_takes_a_value_of_its_type_or_refuses_it_by_its_name(name: str, kind: Any) -> None:
    plain = tuple({int, float, bool, str, type(None)} & {*get_args(kind), kind})
    for value in VALUES:
        config = changed(name, value)
        try:
            config.check()
        except ConfigError as error:
            assert str(error).startswith(name) and "\n" not in str(error), (value, str(error))
        else:
            assert isinstance(config.get(name), (*plain, list, dict)) and as_yaml(config)
            assert not isinstance(config.get(name), float) or math.isfinite(config.get(name))


PASSED_ON = {
    "loss.router": ["top_k", "load_balancing_coeff", "z_coeff", "scoring", "per_sequence"],
    "rollout.sampling": sorted({*FIELDS, "do_sample", "num_beams"}),
    "loss.arguments": [*objectives.GRPOLoss.__init__.__annotations__],
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in PASSED_ON.items() for key in keys])
def test_what_is_passed_on_is_checked_by_what_it_is_passed_to(name: str, key: str) -> None:
    if key in ("return", "actor_network"):
        return
    for value in VALUES:
        config = changed(name, {key: value})
        try:
            config.check()
        except ConfigError as error:
            assert str(error).startswith(name) and key in str(error), (value, str(error))


def test_a_trainer_reads_its_settings_before_anything_else(tmp_path: Path) -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of the model was read")

    for name, value in (("rollout.order", "lifo"), ("loss.router", {"top_k": None}), ("steps", True)):
        config = changed(name, value)
        config.out = str(tmp_path / "run")
        with pytest.raises(ConfigError, match=name):
            MoEGRPOTrainer(Untouched(), config=config, engine=Untouched(), tokenizer=Untouched())
    with pytest.raises(ConfigError, match=r"there is no setting stepps: did you mean steps\?"):
        MoEGRPOTrainer(Untouched(), config={"stepps": 3}, engine=Untouched())
    assert not (tmp_path / "run").exists()


def test_numbers_in_texts_are_read_as_hydra_reads_them() -> None:
    config = GRPOConfig(steps="3", resume="yes", optim={"lr": "1e-4", "betas": ("0.5", 0)})  # type: ignore[arg-type]
    config.rollout.temperature, config.rollout.group_size = "1.0", np.int64(4)  # type: ignore[assignment]
    config.out = Path("runs") / "one"  # type: ignore[assignment]
    config.check()
    assert (config.steps, config.resume, config.out) == (3, True, "runs/one")
    assert config.optim == OptimConfig(lr=1e-4, betas=[0.5, 0.0])
    assert (config.rollout.temperature, config.rollout.group_size, type(config.rollout.group_size)) == (1.0, 4, int)


def test_a_home_folder_is_found(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = GRPOConfig(out="~/run")
    config.model.source, config.data.source = "~/model", "~/rows.jsonl"
    config.check(passed_on=False)
    found = config.out, config.model.source, config.data.source
    assert found == tuple(str(tmp_path / name) for name in ("run", "model", "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("config", "omegaconf", "configurations need OmegaConf"),
        ("compose", "hydra", "configurations need Hydra"),
        ("plan", "rich.table", "the trainer's tables need rich"),
        ("run_record", "rich.table", "the trainer's tables need rich"),
    ],
)
def test_a_missing_extra_is_named(name: str, missing: str, message: str, monkeypatch: MonkeyPatch) -> None:
    for module in ("plan", name):
        monkeypatch.delitem(sys.modules, f"torchrl_moe.trainers.{module}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{message}: pip install 'torchrl_moe\[train\]'"):
        importlib.import_module(f"torchrl_moe.trainers.{name}")
