"""Plain transformers as a kind of engine: vLLM's arguments where they mean the same, all others refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchrl_moe
from torchrl_moe.modules.backends.engine_kind import EngineKind, find_kind
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.transformers import transformers_arguments as kind
from torchrl_moe.modules.backends.transformers.transformers_arguments import arguments_of, build_engine_args, seeded


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
        ({"router_dtype": "bfloat16"}, "router_dtype must be one of auto, float32"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_model_len": "abc"}, "max_model_len must be an integer of at least 1, got 'abc'"),
        ({"model": ""}, "engine_args names no model"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments_of({"model": "m", **given})


def test_each_replica_has_a_seed_of_its_own() -> None:
    assert seeded({"model": "m", "seed": 5}, 0) == {"model": "m", "seed": 5}
    assert seeded({"model": "m", "seed": 5}, 2)["seed"] == 7
    assert seeded({"model": "m"}, 1)["seed"] == 1


# -- the kind ----------------------------------------------------------------------------------------------------------


def test_it_has_all_that_a_kind_has_and_its_program_is_there() -> None:
    assert find_kind("torchrl_moe.modules.backends.transformers.transformers_arguments") is kind
    wanted = {*EngineKind.__annotations__, *(name for name in vars(EngineKind) if not name.startswith("_"))}
    assert wanted <= {*vars(kind)}
    path = Path(torchrl_moe.__file__).parents[1].joinpath(*kind.PROGRAM.split(".")).with_suffix(".py")
    assert {"def preload(", "def run(", "def main("} <= {
        line.partition("(")[0] + "(" for line in path.read_text().splitlines()
    }


def test_its_program_runs_by_itself_where_nothing_may_fork_it(
    plain_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a Ray actor."""
    monkeypatch.setattr(kind, "reason_not_to_fork", lambda environment: "of the tests")
    replica = LocalReplica(0, kind, {"model": str(plain_folder)}, kind.engine_environment())
    replica.start()
    try:
        assert replica.wait_ready(240.0).model == str(plain_folder)
    finally:
        replica.shutdown()
