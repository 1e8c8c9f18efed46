"""A run with parity=exact: no mismatch in any bit, and a step that has one is refused with its first token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.training import numbers, rows_of, short
from torchrl_moe.errors import EngineError
from torchrl_moe.trainers import ConfigError, GRPOConfig, MoEGRPOTrainer

EXACT = ["parity=exact", "engine.kind=transformers", "~engine.arguments.kv_cache_memory_bytes"]
EXACT += ["engine.arguments.max_model_len=16", "rollout.prompts_per_step=2", "rollout.group_size=2", "steps=2"]
EXACT += ["eval.every=0", "checkpoint.every=0", "model.arguments.warmup.max_steps=2"]


@pytest.mark.filterwarnings("ignore:.*warm-up")
def test_a_run_without_any_mismatch_and_then_with_one_bit(tmp_path: Path) -> None:
    with MoEGRPOTrainer(config=short(tmp_path / "run", *EXACT)) as trainer:
        assert trainer.step()
        # one weight of the trainer is not the engine's: a step later every log-prob is off by a few bits
        with torch.no_grad():
            trainer.policy_model.model.get_parameter("lm_head.weight")[5] *= 1 + 1e-6
        said = "parity=exact, and a log-prob of step 1 is not the engine's bit by bit"
        with pytest.raises(EngineError, match=said) as error:
            trainer.step()
    # the token is named with both values, to the last digit
    place = r"id (\d+) at place (\d+) of row 0, log-prob (\S+) here and (\S+) in the engine"
    found = re.search(place, str(error.value))
    assert found is not None and found[3] != found[4]
    assert abs(float(found[3]) - float(found[4])) < 1e-4
    (row,) = rows_of(tmp_path / "run")
    assert numbers([row], "dlogp_max") == [0.0] and numbers([row], "mismatch_kl") == [0.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": {"kind": "vllm"}}, "needs engine.kind=transformers"),
        ({"engine": {"arguments": {"dtype": "float32"}}}, "needs engine.arguments.max_model_len"),
        ({"engine": {"arguments": {"max_model_len": None}}}, "needs engine.arguments.max_model_len"),
        ({"engine": {"arguments": {"max_model_len": 16}}}, "needs engine.arguments.dtype=float32"),
        ({"engine": {"sync_every": 2}}, "needs engine.sync_every=1"),
        ({"rollout": {"max_staleness": 1}}, "needs rollout.max_staleness=0"),
        ({"model": {"dtype": "bfloat16"}}, "needs model.dtype=auto or float32"),
        ({"model": {"lora": {"rank": 4}}}, "needs model.lora.rank=0"),
        ({"model": {"pretrained": {"attn_implementation": "eager"}}}, "needs one attention"),
    ],
)
def test_settings_that_rule_it_out_are_refused(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "engine": {"kind": "transformers", "arguments": {"dtype": "float32", "max_model_len": 16}},
        "rollout": {"max_new_tokens": 8},
    }
    GRPOConfig(parity="exact", **given).check()
    for group, values in change.items():
        given[group] = {**given.get(group, {}), **values}
    with pytest.raises(ConfigError, match=f"parity=exact {re.escape(said)}"):
        GRPOConfig(parity="exact", **given).check()
