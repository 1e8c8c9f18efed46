"""What a run needs, against numbers worked out by hand, and against the peak of an update that really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from support.rollouts import byte_row
from support.routes import random_routes
from torchrl_moe._compat_memory import peak_bytes
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.trainers import ConfigError, GRPOConfig
from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.learner import Learner
from torchrl_moe.trainers.plan import ENGINE, HOST, TRAINER, UPDATE, RunPlan
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.script import main

QWEN = 30_532_122_624
OLMOE = 6_919_161_856


def items(plan: RunPlan, part: str) -> dict[str, int]:
    return {row.item: row.bytes for row in plan.rows if row.part == part}


@pytest.fixture(scope="module")
def qwen() -> RunPlan:
    """All weights of Qwen3-30B-A3B on four GPUs, and four engines."""
    changes = ["model.source=Qwen/Qwen3-30B-A3B", "model.lora.rank=0", "hardware.trainer_gpus=4"]
    changes += ["engine.num_replicas=4", "engine.sleep=false", "rollout.max_staleness=1"]
    return RunPlan.of(load_config("olmoe_1b_7b", changes))


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


def test_the_rest_of_qwen3_30b_a3b_by_hand(qwen: RunPlan) -> None:
    engine, host = items(qwen, ENGINE), items(qwen, HOST)
    assert engine["weights"] == 2 * QWEN
    tokens = 2 * 32 * 8 * 2048  # two batches of 256 answers, as long as they can be
    assert host["rollouts"] == tokens * 18
    assert host["recorded experts"] == tokens * 48 * 8
    assert host["weight store"] == 2 * 2 * QWEN
    assert host["the model that is saved"] == 4 * QWEN  # in float32, on rank 0's host
    assert host["a checkpoint that is written"] == 12 * QWEN  # the larger of the two counts
    assert (
        qwen.total(HOST)
        == sum(host[item] for item in ("rollouts", "recorded experts", "weight store", "processes of replicas"))
        + 12 * QWEN
    )


def test_a_weight_update_is_gathered_from_the_ranks_and_sent(qwen: RunPlan) -> None:
    """Each part is cast to the engine's two bytes first; of four ranks' parts a rank has one already."""
    gathered = 2 * QWEN * 3 // 4
    found = items(qwen, UPDATE)
    assert found == {"bytes to each rank from the others": gathered, "bytes to each replica": 2 * QWEN}
    assert qwen.seconds["InfiniBand 400 Gb/s"] == pytest.approx((gathered + 2 * QWEN) / 50e9)
    changes = ["model.source=Qwen/Qwen3-30B-A3B", "model.lora.rank=0", "hardware.trainer_gpus=4", "engine.sleep=false"]
    wide = RunPlan.of(load_config("olmoe_1b_7b", [*changes, "+engine.sync.dtype=trainer"]))
    assert items(wide, UPDATE) == {
        "bytes to each rank from the others": 2 * gathered,
        "bytes to each replica": 4 * QWEN,
    }
    assert items(wide, HOST)["weight store"] == 2 * 4 * QWEN
    (alone,) = items(RunPlan.of(load_config("olmoe_1b_7b")), UPDATE).items()
    assert alone == ("bytes to each replica", 2 * OLMOE)


def test_what_an_adapter_adds_is_gathered_in_float32_by_hand() -> None:
    """The sum is rounded once: 2 bytes of each frozen number, and 4 of what is added to q, k, v and o of 16 layers."""
    plan = RunPlan.of(load_config("olmoe_1b_7b", ["hardware.trainer_gpus=8", "engine.sleep=false"]))
    whole = 2 * OLMOE + 4 * 16 * 4 * 2048 * 2048
    assert items(plan, UPDATE)["bytes to each rank from the others"] == whole - whole // 8
    assert items(plan, HOST)["the model that is saved"] == 2 * OLMOE


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_an_engine_that_is_split_in_a_way_that_is_not_counted_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not count engine\.arguments\.{name}=2: use tensor_parallel_size"):
        RunPlan.of(load_config("qwen3_30b_a3b", [f"+engine.arguments.{name}=2"]))
    RunPlan.of(load_config("olmoe_1b_7b", [f"+engine.arguments.{name}=1"]))


def test_the_gpus_that_a_configuration_needs() -> None:
    assert (
        "1 GPU in all: engine and trainer take turns (engine.sleep=true)"
        in RunPlan.of(load_config("olmoe_1b_7b")).notes
    )
    apart = RunPlan.of(load_config("olmoe_1b_7b", ["engine.sleep=false"])).notes
    assert "2 GPUs in all: 1 for the trainer, 1 for the engine" in apart
    notes = RunPlan.of(load_config("qwen3_30b_a3b")).notes
    assert "8 GPUs in all: 4 for the trainer, 4 for the engine" in notes


def test_more_gpus_than_rank_0s_host_has_are_noted() -> None:
    notes = " ".join(RunPlan.of(load_config("qwen3_30b_a3b", ["engine.num_replicas=3"])).notes)
    assert "rank 0's host needs 10 GPUs" in notes and "gloo" in notes
    fits = " ".join(RunPlan.of(load_config("multi_node")).notes)  # replicas are Ray's
    assert "host needs" not in fits and "gloo" not in fits


def test_olmoe_with_an_adapter_by_hand() -> None:
    plan = RunPlan.of(load_config("olmoe_1b_7b"))
    adapter = 16 * 4 * 2 * 32 * 2048
    trainer, engine = items(plan, TRAINER), items(plan, ENGINE)
    assert trainer["weights"] == 4 * adapter + 2 * OLMOE
    assert (trainer["gradients"], trainer["AdamW's moments"]) == (4 * adapter, 8 * adapter)
    assert "gathered layers" not in trainer
    assert engine["KV cache"] == int(0.5 * 80e9) - 2 * OLMOE
    (how,) = [row.how for row in plan.rows if row.item == "KV cache"]
    assert how.startswith("131,072 B a token")  # 16 layers x 2 x 2048 numbers x 2 B


def test_the_packaged_plan_of_qwen3_30b_a3b_fits_and_is_that_by_hand() -> None:
    """Four ranks with experts in parallel, weights and optimizer in the host's memory."""
    plan = RunPlan.of(load_config("qwen3_30b_a3b"))
    host, trainer = items(plan, HOST), items(plan, TRAINER)
    assert (host["weights"], host["gradients"], host["AdamW's moments"]) == (4 * QWEN, 4 * QWEN, 8 * QWEN)
    assert host["a checkpoint that is written"] == 12 * QWEN  # a copy of weights and moments
    largest = 128 * 2 * 768 * 2048
    assert host["a weight that is gathered to be written"] == 4 * 4 * largest  # by each of four ranks
    assert plan.total(HOST) == 16 * QWEN + 12 * QWEN + sum(
        host[item] for item in ("rollouts", "recorded experts", "weight store", "processes of replicas")
    )
    experts, layer, outside = 48 * 128 * 3 * 2048 * 768 // 48, 623_120_640, 622_331_904
    assert trainer["gathered layers"] == 2 * (2 * (layer - experts + experts // 4) + outside)
    assert not {"weights", "gradients", "an optimizer step"} & trainer.keys()
    assert not any("are needed" in note for note in plan.notes)


def kv_how(*changes: str) -> str:
    (how,) = [row.how for row in RunPlan.of(load_config("qwen3_30b_a3b", changes)).rows if row.item == "KV cache"]
    return how


def test_a_token_in_the_cache_of_each_gpu_by_hand() -> None:
    """48 layers, keys and values, 4 heads of 128 numbers, which more than 4 GPUs cannot split."""
    whole = 48 * 2 * 4 * 128
    assert kv_how().startswith(f"{whole // 2 * 2:,} B a token")  # two GPUs, two bytes
    assert kv_how("engine.arguments.tensor_parallel_size=8").startswith(f"{whole // 4 * 2:,} B a token")
    assert kv_how("engine.arguments.dtype=float32").startswith(f"{whole // 2 * 4:,} B a token")
    assert kv_how("engine.arguments.kv_cache_dtype=fp8").startswith(f"{whole // 2:,} B a token")


def test_ranks_with_an_adapter_load_the_whole_model_each() -> None:
    ranks = ["hardware.trainer_gpus=16", "engine.sleep=false"]
    host = items(RunPlan.of(load_config("olmoe_1b_7b", ranks)), HOST)
    adapter = 16 * 4 * 2 * 32 * 2048
    assert host["the model that is loaded"] == 8 * 2 * (OLMOE + adapter)
    assert host["a checkpoint that is written"] == 8 * 12 * adapter // 16
    none = items(RunPlan.of(load_config("olmoe_1b_7b", ["checkpoint.every=0"])), HOST)
    assert not {"the model that is loaded", "a checkpoint that is written"} & none.keys()


def test_sixteen_ranks_of_two_hosts_by_hand() -> None:
    plan = RunPlan.of(load_config("multi_node"))
    assert items(plan, TRAINER)["weights"] == 4 * QWEN // 16
    assert not any("are needed" in note for note in plan.notes)
    copies = RunPlan.of(load_config("multi_node", ["placement.replicate=2"]))
    assert items(copies, TRAINER)["weights"] == 4 * QWEN // 8
    whole = RunPlan.of(load_config("multi_node", ["placement.reshard_after_forward=false"]))
    experts = 48 * 128 * 3 * 2048 * 768
    assert items(whole, TRAINER)["gathered layers"] == 2 * (QWEN - experts + experts // 8)


def test_ranks_that_cannot_share_the_model_have_no_plan() -> None:
    with pytest.raises(ConfigError, match=r"placement\.expert_parallel=3 must be"):
        RunPlan.of(load_config("qwen3_30b_a3b", ["placement.expert_parallel=3"]))


def test_an_adapter_alone_is_a_small_update_and_kept_words_are_counted() -> None:
    plan = RunPlan.of(load_config("olmoe_1b_7b", ["+engine.sync.lora=adapter", "rollout.top_k=20"]))
    adapter = 16 * 4 * 2 * 32 * 2048
    assert items(plan, UPDATE) == {"bytes to each replica": 4 * adapter}
    assert items(plan, HOST)["kept tokens"] == 256 * 1024 * 20 * 4


@pytest.mark.parametrize(
    ("changes", "item", "there"),
    [
        (["loss.reference=model", "+loss.arguments.kl_to_ref_coeff=0.1"], "reference model", True),
        (["+loss.arguments.kl_to_ref_coeff=0.1"], "reference model", False),  # the adapter is switched off
        (["loss.replay=none"], "recorded experts", False),
    ],
)
def test_what_is_not_asked_for_is_not_planned(changes: list[str], item: str, there: bool) -> None:
    plan = RunPlan.of(load_config("olmoe_1b_7b", changes))
    assert (item in {row.item for row in plan.rows}) is there


def test_another_engine_loads_a_second_model_and_holds_so_many_answers() -> None:
    plain = ["engine.kind=transformers", "engine.sleep=false", "~engine.arguments.gpu_memory_utilization"]
    plan = RunPlan.of(load_config("olmoe_1b_7b", plain))
    engine = items(plan, ENGINE)
    assert engine["the next weights, loaded"] == engine["weights"]
    a_token = 2 * 16 * 16 * 128 * 2  # keys and values, layers, heads, width, bfloat16
    assert engine["KV cache"] == 128 * 2048 * a_token
    few = RunPlan.of(load_config("olmoe_1b_7b", [*plain, "+engine.arguments.max_num_seqs=8"]))
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


@pytest.mark.parametrize("checkpointing", [False, True])
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
    unused: Any = None
    learner.stepper.step(unused, batch)
    resident = sum(weight.nbytes for weight in model.parameters())
    states = learner.optimizer.state.values()
    moments = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    measured = resident + moments + peak_bytes(lambda: learner.stepper.step(unused, batch))
    plan = RunPlan.of_model(config, model.config)
    assert items(plan, TRAINER)["AdamW's moments"] == moments == 2 * resident
    assert plan.total(TRAINER) == pytest.approx(measured, rel=0.1)


def test_the_command_prints_it_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "olmoe_1b_7b", "plan=true", f"out={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "trainer, each GPU" in out and "weight update" in out
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_made_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "tiny_cpu", "plan=true"]) == 2
    assert "model.source" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"model\.source=None"):
        RunPlan.of(GRPOConfig())


def test_a_plan_is_plain_values(qwen: RunPlan) -> None:
    there = json.loads(json.dumps(qwen.to_dict()))
    assert there["totals"][TRAINER] == qwen.total(TRAINER)
    assert len(there["rows"]) == len(qwen.rows)
