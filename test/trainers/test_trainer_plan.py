"""What each rank of the trainer holds, by hand; :mod:`test_plan` has more of it, in whole plans."""

from __future__ import annotations

import pytest

from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import GRPOConfig
from torchrl_moe.trainers.plan import HOST, TRAINER, ModelSizes, longest, model_config_of, of_trainer

HIDDEN, INNER, TOP_K = 2048, 768, 8  # of Qwen3-30B-A3B


def rows(config: GRPOConfig, part: str = TRAINER) -> dict[str, int]:
    hf_config = model_config_of("Qwen/Qwen3-30B-A3B")
    found = of_trainer(config, hf_config, ModelSizes.of(hf_config, config.model))
    return {row.item: row.bytes for row in found if row.part == part}


def test_experts_in_parallel_by_hand() -> None:
    """A micro-batch of 2 x 8192 tokens, each at 8 experts, in bfloat16; layers are computed again, one at a time."""
    config = load_config("qwen3_30b_a3b")
    pairs = 2 * 8192 * TOP_K
    found = rows(config)
    assert found["tokens on their way to experts"] == 4 * pairs * HIDDEN * 2
    one_more = pairs * (2 * HIDDEN + 3 * INNER) * 2  # the busiest rank gets twice the mean
    assert found["more tokens on the busiest rank"] == one_more
    config.hardware.expert_imbalance = 100.0  # more than all of four ranks' tokens it cannot be
    assert rows(config)["more tokens on the busiest rank"] == 3 * one_more
    config.hardware.expert_imbalance = 1.0
    assert rows(config)["more tokens on the busiest rank"] == 0
    config.hardware.expert_imbalance, config.model.activation_checkpointing = 2.0, False
    assert rows(config)["more tokens on the busiest rank"] == 48 * one_more  # each layer keeps them
    config.placement.expert_parallel = 1
    assert not {"tokens on their way to experts", "more tokens on the busiest rank"} & rows(config).keys()


def test_ranks_that_split_layers_send_each_a_part_of_their_tokens() -> None:
    config = load_config("qwen3_30b_a3b", ["placement.tensor_parallel=2"])
    assert rows(config)["tokens on their way to experts"] == 4 * (8192 * TOP_K) * HIDDEN * 2


@pytest.mark.parametrize(("offload", "part", "ranks"), [("true", HOST, 4), ("false", TRAINER, 1)])
def test_the_largest_weight_is_gathered_in_float32_when_the_model_is_saved(offload: str, part: str, ranks: int) -> None:
    config = load_config("qwen3_30b_a3b", [f"placement.cpu_offload={offload}"])
    gate_and_up = 128 * 2 * INNER * HIDDEN
    assert rows(config, part)["a weight that is gathered to be written"] == ranks * 4 * gate_and_up
    config.hardware.trainer_gpus, config.placement = 1, GRPOConfig().placement
    assert "a weight that is gathered to be written" not in rows(config)


def test_the_longest_sequence_is_the_engines_or_the_models() -> None:
    hf_config = model_config_of("Qwen/Qwen3-30B-A3B")
    assert longest(load_config("qwen3_30b_a3b"), hf_config) == 8192
    assert longest(GRPOConfig(), hf_config) == hf_config.max_position_embeddings
