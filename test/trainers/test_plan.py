"""What a run needs, against numbers worked out by hand, and against the peak of an update that really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture
from tensordict import TensorDict, TensorDictBase, lazy_stack
from transformers import AutoModelForCausalLM

from support.rollouts import byte_row
from support.routes import random_routes
from support.shared_training import SHARES_IN_ALL_WAYS
from torchrl_moe._compat_memory import peak_bytes
from torchrl_moe.cli.main import main
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.trainers import ConfigError
from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import GRPOConfig, LoRAConfig, ModelConfig
from torchrl_moe.trainers.learner import Learner
from torchrl_moe.trainers.plan import (
    ENGINE,
    HOST,
    KNOWN,
    TRAINER,
    UPDATE,
    ModelSizes,
    Needs,
    RunPlan,
    activation_bytes,
    model_config_of,
)
from torchrl_moe.trainers.policy_model import PolicyModel, prepared

QWEN_NAME, OLMOE_NAME = "Qwen/Qwen3-30B-A3B", "allenai/OLMoE-1B-7B-0125"
QWEN = 30_532_122_624
"""Numbers of 48 layers of 623_120_640 and, outside, 622_331_904; 61 064 245 248 B on the hub."""
OLMOE = 6_919_161_856
"""Of 16 layers: 4 * 2048**2 of attention, 64 experts of 3 * 2048 * 1024, a router and two norms; 50304 words, twice."""
OLMOE_1B, QWEN_30B, NODES = "olmoe_1b_7b", "qwen3_30b_a3b", "multi_node"
"""Configurations of the package."""
ADAPTER = 16 * 4 * 2 * 32 * 2048
"""Numbers of OLMoE's: two factors of rank 32 for q, k, v and o of 16 layers."""
ALL_THE_TIME = ("rollouts", "recorded experts", "weight store", "processes of replicas")
"""What a host holds, whatever else it does."""


def planned(name: str, *changes: str) -> RunPlan:
    return RunPlan.of(load_config(name, changes))


def items(plan: RunPlan, part: str) -> dict[str, int]:
    return {row.item: row.bytes for row in plan.rows if row.part == part}


@pytest.fixture(scope="module")
def qwen() -> RunPlan:
    """All weights of Qwen3-30B-A3B on four GPUs, and four engines."""
    changes = ["model.source=Qwen/Qwen3-30B-A3B", "model.lora.rank=0", "hardware.trainer_gpus=4"]
    changes += ["engine.num_replicas=4", "engine.sleep=false", "rollout.max_staleness=1"]
    return planned(OLMOE_1B, *changes)


def test_the_trainer_of_qwen3_30b_a3b_by_hand(qwen: RunPlan) -> None:
    found = items(qwen, TRAINER)
    assert found["weights"] == found["gradients"] == QWEN  # 4 bytes each, over 4 ranks
    assert found["AdamW's moments"] == 2 * QWEN
    layer, outside = 623_120_640, 622_331_904
    assert found["gathered layers"] == 2 * (2 * layer + outside)
    assert found["gradients that are being reduced"] == 4 * layer
    resident = 4 * QWEN + 2 * (2 * layer + outside) + 4 * layer
    assert qwen.total(TRAINER) == resident + max(found["a micro-batch"], QWEN)
    assert any("80" in note and "trainer" in note for note in qwen.notes)  # it does not fit
    with pytest.raises(ValueError, match=r"part must be one of .*'trainer, each GPU'.*, got 'trainer'"):
        qwen.total("trainer")


def test_the_rest_of_qwen3_30b_a3b_by_hand(qwen: RunPlan) -> None:
    engine, host = items(qwen, ENGINE), items(qwen, HOST)
    assert engine["weights"] == 2 * QWEN
    tokens = 2 * 32 * 8 * 2048  # two batches of 256 answers, as long as they can be
    assert host["rollouts"] == tokens * 18 and host["recorded experts"] == tokens * 48 * 8
    assert host["weight store"] == 2 * 2 * QWEN
    assert host["the model that is saved"] == 4 * QWEN  # in float32, on rank 0's host
    assert host["a checkpoint that is written"] == 12 * QWEN  # the larger of the two counts
    assert qwen.total(HOST) == sum(host[item] for item in ALL_THE_TIME) + 12 * QWEN


def test_a_weight_update_is_gathered_from_the_ranks_and_sent(qwen: RunPlan) -> None:
    """Each part is cast to the engine's two bytes first; of four ranks' parts a rank has one already."""
    gathered = 2 * QWEN * 3 // 4
    assert items(qwen, UPDATE) == {"bytes to each rank from the others": gathered, "bytes to each replica": 2 * QWEN}
    assert qwen.seconds["InfiniBand 400 Gb/s"] == pytest.approx((gathered + 2 * QWEN) / 50e9)
    changes = ["model.source=Qwen/Qwen3-30B-A3B", "model.lora.rank=0", "hardware.trainer_gpus=4", "engine.sleep=false"]
    wide = planned(OLMOE_1B, *changes, "+engine.sync.dtype=trainer")
    sent = {"bytes to each rank from the others": 2 * gathered, "bytes to each replica": 4 * QWEN}
    assert items(wide, UPDATE) == sent
    assert items(wide, HOST)["weight store"] == 2 * 4 * QWEN
    (alone,) = items(planned(OLMOE_1B), UPDATE).items()
    assert alone == ("bytes to each replica", 2 * OLMOE)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_an_engine_that_is_split_in_a_way_that_is_not_counted_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not count engine\.arguments\.{name}=2: use tensor_parallel_size"):
        planned(QWEN_30B, f"+engine.arguments.{name}=2")
    planned(OLMOE_1B, f"+engine.arguments.{name}=1")
    with pytest.raises(ConfigError, match=r"placement\.expert_parallel=3 must be"):  # nor can ranks share it so
        planned(QWEN_30B, "placement.expert_parallel=3")


def test_the_gpus_that_a_configuration_needs_and_more_than_rank_0s_host_has_are_noted() -> None:
    assert "1 GPU in all: engine and trainer take turns (engine.sleep=true)" in planned(OLMOE_1B).notes
    apart = planned(OLMOE_1B, "engine.sleep=false").notes
    assert "2 GPUs in all: 1 for the trainer, 1 for the engine" in apart
    assert "8 GPUs in all: 4 for the trainer, 4 for the engine" in planned(QWEN_30B).notes
    notes = " ".join(planned(QWEN_30B, "engine.num_replicas=3").notes)
    assert "rank 0's host needs 10 GPUs" in notes and "gloo" in notes
    fits = " ".join(planned(NODES).notes)  # replicas are Ray's
    assert "host needs" not in fits and "gloo" not in fits


def test_olmoe_with_an_adapter_by_hand() -> None:
    plan = planned(OLMOE_1B)
    trainer, engine = items(plan, TRAINER), items(plan, ENGINE)
    assert trainer["weights"] == 4 * ADAPTER + 2 * OLMOE
    assert (trainer["gradients"], trainer["AdamW's moments"]) == (4 * ADAPTER, 8 * ADAPTER)
    assert not {"gathered layers", "a weight that is gathered to be written"} & trainer.keys()
    assert engine["KV cache"] == int(0.5 * 80e9) - 2 * OLMOE
    (how,) = [row.how for row in plan.rows if row.item == "KV cache"]
    assert how.startswith("131,072 B a token")  # 16 layers x 2 x 2048 numbers x 2 B


def test_the_packaged_plan_of_qwen3_30b_a3b_fits_and_is_that_by_hand() -> None:
    """Four ranks, weights and optimizer in the host's memory."""
    plan = planned(QWEN_30B)
    host, trainer = items(plan, HOST), items(plan, TRAINER)
    assert (host["weights"], host["gradients"], host["AdamW's moments"]) == (4 * QWEN, 4 * QWEN, 8 * QWEN)
    assert host["a checkpoint that is written"] == 12 * QWEN  # a copy of weights and moments
    largest = 128 * 2 * 768 * 2048
    assert host["a weight that is gathered to be written"] == 4 * 4 * largest  # by each of four ranks
    assert plan.total(HOST) == 16 * QWEN + 12 * QWEN + sum(host[item] for item in ALL_THE_TIME)
    layer, outside = 623_120_640, 622_331_904
    assert trainer["gathered layers"] == 2 * (2 * layer + outside)
    apart, experts = planned(QWEN_30B, "placement.expert_parallel=4"), 128 * 3 * 2048 * 768
    assert items(apart, TRAINER)["gathered layers"] == 2 * (2 * (layer - experts + experts // 4) + outside)
    assert not {"weights", "gradients", "an optimizer step"} & trainer.keys()
    assert not any("are needed" in note for note in plan.notes)


@pytest.mark.parametrize("name", [OLMOE_1B, QWEN_30B, NODES])
def test_a_packaged_configuration_asks_for_nothing_that_the_installed_transformers_cannot_do(name: str) -> None:
    assert not any("installed transformers" in note for note in planned(name).notes)


@pytest.mark.skipif(SHARES_IN_ALL_WAYS, reason="this transformers shares a model in all of these ways")
@pytest.mark.parametrize("change", ["placement.expert_parallel=4", "placement.replicate=2"])
def test_a_plan_says_what_a_run_would_refuse(change: str) -> None:
    assert sum(change in note and "use a newer" in note for note in planned(QWEN_30B, change).notes) == 1


def kv_how(*changes: str) -> str:
    (how,) = [row.how for row in planned(QWEN_30B, *changes).rows if row.item == "KV cache"]
    return how


def test_a_token_in_the_cache_of_each_gpu_by_hand() -> None:
    """48 layers, keys and values, 4 heads of 128 numbers, which more than 4 GPUs cannot split."""
    whole = 48 * 2 * 4 * 128
    assert kv_how().startswith(f"{whole // 2 * 2:,} B a token")  # two GPUs, two bytes
    assert kv_how("engine.arguments.tensor_parallel_size=8").startswith(f"{whole // 4 * 2:,} B a token")
    assert kv_how("engine.arguments.dtype=float32").startswith(f"{whole // 2 * 4:,} B a token")
    assert kv_how("engine.arguments.kv_cache_dtype=fp8").startswith(f"{whole // 2:,} B a token")


def test_ranks_with_an_adapter_load_the_whole_model_each_and_gather_the_sum_in_float32() -> None:
    """The sum is rounded once: 2 bytes of each frozen number, and 4 of what is added to q, k, v and o of 16 layers."""
    plan = planned(OLMOE_1B, "hardware.trainer_gpus=16", "engine.sleep=false")
    whole, host = 2 * OLMOE + 4 * 16 * 4 * 2048 * 2048, items(plan, HOST)
    assert items(plan, UPDATE)["bytes to each rank from the others"] == whole - whole // 16
    assert host["the model that is saved"] == 2 * OLMOE
    assert host["the model that is loaded"] == 8 * 2 * (OLMOE + ADAPTER)
    assert host["a checkpoint that is written"] == 8 * 12 * ADAPTER // 16
    none = items(planned(OLMOE_1B, "checkpoint.every=0"), HOST)
    assert not {"the model that is loaded", "a checkpoint that is written"} & none.keys()


def test_sixteen_ranks_of_two_hosts_by_hand() -> None:
    plan = planned(NODES)
    assert items(plan, TRAINER)["weights"] == 4 * QWEN // 16
    assert not any("are needed" in note for note in plan.notes)
    copies = planned(NODES, "placement.replicate=2")
    assert items(copies, TRAINER)["weights"] == 4 * QWEN // 8
    whole = planned(NODES, "placement.reshard_after_forward=false", "placement.expert_parallel=8")
    experts = 48 * 128 * 3 * 2048 * 768
    assert items(whole, TRAINER)["gathered layers"] == 2 * (QWEN - experts + experts // 8)


def test_an_adapter_alone_is_a_small_update_and_kept_tokens_are_counted() -> None:
    plan = planned(OLMOE_1B, "+engine.sync.lora=adapter", "rollout.top_k=20")
    assert items(plan, UPDATE) == {"bytes to each replica": 4 * ADAPTER}
    assert items(plan, HOST)["kept tokens"] == 256 * 1024 * 20 * 4


def test_what_is_not_asked_for_is_not_planned() -> None:
    to_ref = "+loss.arguments.kl_to_ref_coeff=0.1"
    for changes, item, there in (
        (["loss.reference=model", to_ref], "reference model", True),
        ([to_ref], "reference model", False),  # the adapter is switched off
        (["loss.replay=none"], "recorded experts", False),
    ):
        assert (item in {row.item for row in planned(OLMOE_1B, *changes).rows}) is there


def test_another_engine_loads_a_second_model_and_holds_so_many_answers() -> None:
    plain = ["engine.kind=transformers", "engine.sleep=false", "~engine.arguments.gpu_memory_utilization"]
    engine = items(planned(OLMOE_1B, *plain), ENGINE)
    assert engine["the next weights, loaded"] == engine["weights"]
    a_token = 2 * 16 * 16 * 128 * 2  # keys and values, layers, heads, width, bfloat16
    assert engine["KV cache"] == 128 * 2048 * a_token
    few = planned(OLMOE_1B, *plain, "+engine.arguments.max_num_seqs=8")
    assert items(few, ENGINE)["KV cache"] == 8 * 2048 * a_token


def batch_of(learner: Learner, answers: int, tokens: int) -> TensorDictBase:
    rows = []
    for place in range(answers):
        total = tokens - place  # a padded batch: its attention has a mask
        row = byte_row(tokens // 4, total - tokens // 4, place)
        row["log_probs"] = {"full": torch.full((total,), -4.0)}
        replay = learner.actor.router_replay
        assert replay is not None
        row["routed_experts"] = {"full": random_routes(replay, 1, total, seed=place)[0]}
        row["advantage"] = torch.full((total, 1), 1.0 - 2 * (place % 2))
        rows.append(TensorDict(row))
    return lazy_stack(rows)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.parity), True])
def test_the_plan_of_a_tiny_model_is_within_a_tenth_of_its_measured_peak(checkpointing: bool, one_thread: None) -> None:
    """An update of four micro-batches with replay, gradients and optimizer included."""
    config = GRPOConfig(steps=2)
    config.model.activation_checkpointing, config.model.dtype = checkpointing, "float32"
    config.rollout.prompts_per_step, config.rollout.group_size = 4, 4
    config.optim.max_tokens, config.engine.arguments = 4 * 256, {"max_model_len": 256, "dtype": "float32"}
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=4)
    policy_model = PolicyModel.load(model, ByteTokenizer(), config.model)
    learner = Learner(TransformersWrapper(policy_model.model, replay="R3"), policy_model, config)
    batch = batch_of(learner, 16, 256)
    learner.stepper.step(batch)
    resident = sum(weight.nbytes for weight in model.parameters())
    states = learner.optimizer.state.values()
    moments = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    measured = resident + moments + peak_bytes(lambda: learner.stepper.step(batch))
    plan = RunPlan.of_model(config, model.config)
    assert items(plan, TRAINER)["AdamW's moments"] == moments == 2 * resident
    assert plan.total(TRAINER) == pytest.approx(measured, rel=0.1)


def test_the_command_prints_it_and_starts_nothing(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    assert main(["train", "--config", "olmoe_1b_7b", "plan=true", f"out={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "trainer, each GPU" in out and "weight update" in out and not (tmp_path / "run").exists()
    assert main(["train", "--config", "olmoe_1b_7b", "plan=true", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["totals"][ENGINE] > 1e9 and {row["part"] for row in plan["rows"]} >= {TRAINER, HOST}
    # a model that is made has no plan
    assert main(["train", "--config", "tiny_cpu", "plan=true"]) == 2 and "model.source" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"model\.source=None"):
        RunPlan.of(GRPOConfig())


def test_what_is_kept_is_of_equal_settings_only() -> None:
    hf_config, again = (make_tiny_moe("olmoe", num_hidden_layers=4).config for _ in range(2))
    lora = LoRAConfig(rank=8)
    sizes = ModelSizes.of(hf_config, ModelConfig(lora=lora))
    assert ModelSizes.of(again, ModelConfig(lora=LoRAConfig(rank=8))) is sizes
    lora.rank = 16
    assert ModelSizes.of(hf_config, ModelConfig(lora=lora)).adapter == 2 * sizes.adapter
    hf_config.num_hidden_layers = 2
    assert ModelSizes.of(hf_config, ModelConfig(lora=lora)).adapter == sizes.adapter
    small = make_tiny_moe("olmoe", num_hidden_layers=3).config
    whole = activation_bytes(small, ModelConfig(), 1, 64, torch.float32)
    assert activation_bytes(small, ModelConfig(activation_checkpointing=True), 1, 64, torch.float32) < whole
    small.num_hidden_layers = 2
    assert activation_bytes(small, ModelConfig(), 1, 64, torch.float32) < whole


def test_more_than_128_experts_take_two_bytes_and_latent_attention_caches_one_vector() -> None:
    config = make_tiny_moe("deepseek_v3").config
    sizes = ModelSizes.of(config, ModelConfig())
    assert sizes.kv == config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert sizes.kv_heads == 1  # each GPU of a replica has all of it
    wide = make_tiny_moe("qwen3_moe", num_experts=160).config
    assert ModelSizes.of(wide, ModelConfig()).route_bytes == wide.num_hidden_layers * wide.num_experts_per_tok * 2


def test_every_known_model_has_its_file_and_no_other_source_does(tmp_path: Path) -> None:
    assert all(model_config_of(name).get_text_config().num_hidden_layers for name in KNOWN)
    with pytest.raises(ConfigError, match=r"model\.source"):
        model_config_of(str(tmp_path / "nothing"))


def real_peak(hf_config: Any, model_config: ModelConfig, sequences: int, tokens: int) -> int:
    """Bytes of a pass that really runs, its gradients made before."""
    model = prepared(AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32), model_config, torch.float32)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    scoring = ScoringModel(model)
    scoring.check()
    ids = torch.randint(0, 100, (sequences, tokens))
    selection = Selection(rows=torch.arange(ids.numel()), tokens=ids.flatten(), temperature=1.0, entropy=True)
    inputs = {"input_ids": ids, "position_ids": torch.arange(tokens).expand(sequences, -1)}
    return peak_bytes(lambda: scoring(inputs, selection)[0].sum().backward())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("family", "layers", "checkpointing"),
    [
        ("mixtral", 3, False),
        pytest.param("qwen3_moe", 5, True, marks=pytest.mark.parity),
        pytest.param("deepseek_v3", 4, False, marks=pytest.mark.parity),
        pytest.param("deepseek_v3", 4, True, marks=pytest.mark.parity),
    ],
)
def test_activations_are_within_a_tenth_of_a_real_pass(family: str, layers: int, checkpointing: bool) -> None:
    hf_config = make_tiny_moe(family, num_hidden_layers=layers).config
    model_config = ModelConfig(activation_checkpointing=checkpointing)
    planned = activation_bytes(hf_config, model_config, 4, 200, torch.float32)
    assert planned == pytest.approx(real_peak(hf_config, model_config, 4, 200), rel=0.1)


HIDDEN, INNER, TOP_K = 2048, 768, 8  # of Qwen3-30B-A3B


def rows(config: GRPOConfig, part: str = TRAINER) -> dict[str, int]:
    found = Needs(config, model_config_of(QWEN_NAME)).of_trainer()
    return {row.item: row.bytes for row in found if row.part == part}


def test_experts_in_parallel_by_hand() -> None:
    """A micro-batch of 2 x 8192 tokens, each at 8 experts, in bfloat16; layers are computed again, one at a time."""
    config = load_config("qwen3_30b_a3b", ["placement.expert_parallel=4"])
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
    # each of two sends a part of their tokens
    split = load_config("qwen3_30b_a3b", ["placement.tensor_parallel=2", "placement.expert_parallel=4"])
    assert rows(split)["tokens on their way to experts"] == 4 * (pairs // 2) * HIDDEN * 2


@pytest.mark.parametrize(("offload", "part", "ranks"), [("true", HOST, 4), ("false", TRAINER, 1)])
def test_the_largest_weight_is_gathered_in_float32_when_the_model_is_saved(offload: str, part: str, ranks: int) -> None:
    config = load_config("qwen3_30b_a3b", [f"placement.cpu_offload={offload}"])
    gate_and_up = 128 * 2 * INNER * HIDDEN
    assert rows(config, part)["a weight that is gathered to be written"] == ranks * 4 * gate_and_up
