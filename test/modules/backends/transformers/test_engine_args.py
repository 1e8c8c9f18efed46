"""Engine arguments: vLLM's names where they mean the same, all others refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrl_moe.modules.backends.transformers.engine_args import arguments_of, build_engine_args, seeded


def test_arguments_that_say_what_the_engine_does_anyway_are_left_out() -> None:
    given = {
        "model": "m",
        "tensor_parallel_size": 1,
        "compilation_config": {"mode": 0},
        "enforce_eager": True,
        "enable_lora": False,
        "seed": 3,
    }
    assert arguments_of(given) == {"model": "m", "seed": 3}
    assert arguments_of({"model": "m", "dtype": torch.bfloat16}) == {"model": "m", "dtype": "bfloat16"}
    built = build_engine_args({"model": "m", "max_model_len": 64})
    assert (built.max_model_len, built.max_num_seqs, built.dtype) == (64, 128, "auto")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 2}, "has no tensor_parallel_size=2: a replica computes on one device; raise num_rep"),
        ({"enable_lora": True}, "serves no adapters; send merged weights"),
        ({"enable_prefix_caching": True}, "there is no prefix cache"),
        ({"hf_overrides": {"head_dtype": "float32"}}, "enable_fp32_output is vLLM's"),
        ({"enable_sleep_mode": True}, "the model stays in memory"),
        ({"logprobs_mode": "raw_logprobs"}, "of the distribution that was sampled from"),
        ({"gpu_memory_utilization": 0.5}, "limit it by kv_cache_memory_bytes"),
        ({"no_such_thing": 1}, "has no no_such_thing=1: it knows model, tokenizer, dtype"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_model_len": "abc"}, "max_model_len must be an integer of at least 1, got 'abc'"),
        ({"model": ""}, "engine_args names no model"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments_of({"model": "m", **given})


def test_a_folder_without_weights_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}' has no weights"):
        arguments_of({"model": str(tmp_path)})


def test_objects_of_vllms_are_refused() -> None:
    with pytest.raises(TypeError, match="takes its arguments as a mapping, got SimpleNamespace"):
        arguments_of(SimpleNamespace(model="m"))


def test_each_replica_has_a_seed_of_its_own() -> None:
    assert seeded({"model": "m", "seed": 5}, 0) == {"model": "m", "seed": 5}
    assert seeded({"model": "m", "seed": 5}, 2)["seed"] == 7
    assert seeded({"model": "m"}, 1)["seed"] == 1
