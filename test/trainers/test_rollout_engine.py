"""The engine of a run: what is refused before it starts, its versions, and its sleep while the trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from support.training import fake_fleet, fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import ConfigError, GRPOConfig, MoEGRPOTrainer, rollout_engine
from torchrl_moe.trainers.config import EngineConfig, LossConfig, ModelConfig, RolloutConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rollout_engine import RolloutEngine, check_room


@pytest.fixture(scope="module")
def policy_model() -> PolicyModel:
    return PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig())


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2) as service:
        yield service


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_free(nbytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=nbytes))

    return set_free


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Engines that would have been started."""
    started: list[tuple[Any, ...]] = []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append((arguments, options))
        return fake_fleet(1)

    monkeypatch.setattr(rollout_engine.AsyncVLLM, "from_pretrained", start)
    return started


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "each"),
    [({}, 4), ({"dtype": "bfloat16"}, 2), ({"dtype": "auto"}, 4), ({"dtype": "half"}, 2)],
)
@pytest.mark.parametrize("cache", [0, 1000])
def test_replicas_that_memory_does_not_hold(
    policy_model: PolicyModel, free_memory: Any, arguments: dict[str, Any], each: int, cache: int
) -> None:
    numbers = sum(weight.numel() for weight in policy_model.model.parameters())
    arguments = {**arguments, "kv_cache_memory_bytes": cache or None}
    free_memory(3 * (numbers * each + cache))
    check_room(policy_model, 3, arguments)
    with pytest.raises(ConfigError, match=r"^engine\.num_replicas=4 needs .* GB of memory, and .* GB are free$"):
        check_room(policy_model, 4, arguments)


def test_replicas_without_a_gpu(policy_model: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_room(policy_model, 4, {})
    check_room(policy_model, 2, {"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"^engine\.num_replicas=3 needs 6 GPUs, and there are 4$"):
        check_room(policy_model, 3, {"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"^engine\.num_replicas=1 needs 8 GPUs, and there are 4$"):
        check_room(policy_model, 1, {"data_parallel_size": 2, "pipeline_parallel_size": 4})
    with pytest.raises(ConfigError, match=r"^engine\.num_replicas=5 needs 5 GPUs, and there are 4$"):
        check_room(policy_model, 5, {}, "transformers")


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four of which are ranks of the trainer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    return monkeypatch


def test_gpus_of_ranks_are_no_room_for_replicas(policy_model: PolicyModel, eight_gpus: pytest.MonkeyPatch) -> None:
    check_room(policy_model, 4, {})
    with pytest.raises(ConfigError, match=r"^engine\.num_replicas=5 needs 5 GPUs, and there are 4$"):
        check_room(policy_model, 5, {})
    check_room(policy_model, 5, {"devices": [[0]] * 5})  # as the user says
    eight_gpus.delenv("WORLD_SIZE")
    check_room(policy_model, 8, {})


def test_other_machines_may_hold_replicas_of_ray(
    policy_model: PolicyModel, free_memory: Any, no_start: list[Any], tmp_path: Path
) -> None:
    free_memory(0)
    config = GRPOConfig(engine=EngineConfig(num_replicas=2, backend="ray"))
    RolloutEngine(policy_model, config, tmp_path).shutdown()
    assert len(no_start) == 1
    config.engine.backend = "local"
    with pytest.raises(ConfigError, match="GB are free"):
        RolloutEngine(policy_model, config, tmp_path / "other")
    assert len(no_start) == 1
    assert not (tmp_path / "other").exists()


# -- what it is started with, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "rollout", "message"),
    [
        ({"sync": {"transports": "memmap"}}, {}, "engine.sync: .*unexpected keyword argument 'transports'"),
        ({"sync": {"transport": "pigeon"}}, {}, "engine.sync: transport must be"),
        ({"sync": {"mode": "later"}}, {}, "engine.sync: mode must be"),
        ({}, {"sampling": {"num_beams": 2}}, "rollout.sampling: .*has no beam search"),
        ({"sleep": True}, {}, "engine.sleep=True needs a GPU"),
    ],
)
def test_what_it_does_not_know_is_refused_before_it_starts(
    policy_model: PolicyModel, tmp_path: Path, no_start: list[Any], engine: Any, rollout: Any, message: str
) -> None:
    config = GRPOConfig(engine=EngineConfig(**engine), rollout=RolloutConfig(**rollout))
    with pytest.raises(ConfigError, match=message) as caught:
        RolloutEngine(policy_model, config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not no_start
    assert not (tmp_path / "run").exists()


def test_it_starts_from_the_model(policy_model: PolicyModel, tmp_path: Path, no_start: list[Any]) -> None:
    config = GRPOConfig(seed=5, engine=EngineConfig(arguments={"max_model_len": 64}))
    own = RolloutEngine(policy_model, config, tmp_path)
    ((arguments, options),) = no_start
    (start,) = tmp_path.glob("start-*")
    assert arguments == (str(start),)
    assert (start / "model.safetensors").exists()
    wanted = {"num_replicas": 1, "engine": "vllm", "backend": "local"}
    assert options == {**wanted, "seed": 5, "max_model_len": 64}
    assert own.has_the_models_weights
    own.forget_start()
    assert not start.exists()
    own.shutdown()
    own.shutdown()
    with pytest.raises(RuntimeError):
        own.engine.generate("after the end", use_tqdm=False)
    there = PolicyModel(policy_model.model, policy_model.tokenizer, "some/folder", torch.float32)
    RolloutEngine(there, GRPOConfig(), tmp_path / "other").shutdown()
    assert no_start[-1][0] == ("some/folder",)
    assert not (tmp_path / "other").exists()


def test_another_engine_is_started_without_what_only_vllm_knows(
    policy_model: PolicyModel, tmp_path: Path, no_start: list[Any]
) -> None:
    config = GRPOConfig(engine=EngineConfig(kind="transformers", num_replicas=2))
    RolloutEngine(policy_model, config, tmp_path).shutdown()
    ((_, options),) = no_start
    assert options == {"num_replicas": 2, "engine": "transformers", "backend": "local", "seed": 0}


def test_an_engine_that_is_given_stays(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    given = RolloutEngine(policy_model, GRPOConfig(), tmp_path / "run", fleet)
    assert not given.has_the_models_weights
    given.shutdown()
    assert len(fleet.generate("still there", {"max_tokens": 2}, use_tqdm=False).outputs) == 1
    assert not (tmp_path / "run").exists()


def test_an_engine_of_another_job_is_joined_and_left(
    policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_start: list[Any]
) -> None:
    events: list[str] = []
    monkeypatch.setattr(rollout_engine.AsyncVLLM, "connect", lambda name: events.append(name) or fleet)
    monkeypatch.setattr(fleet, "disconnect", lambda: events.append("left"), raising=False)
    joined = RolloutEngine(policy_model, GRPOConfig(engine=EngineConfig(connect="theirs")), tmp_path / "run")
    assert not joined.has_the_models_weights
    joined.sync()
    joined.shutdown()
    assert events == ["theirs", "left"] and not no_start
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(rollout_engine, "steps_saved", lambda _: 4)
    config = GRPOConfig(engine=EngineConfig(connect="theirs"), resume=True)
    RolloutEngine(policy_model, config, tmp_path / "run").shutdown()  # it may be as fresh as at step 0
    assert [replica.seed for replica in fleet.fakes] == [
        rollout_engine.seed_after(config.seed, 4) + index for index in range(len(fleet.fakes))
    ]
    config = GRPOConfig(engine=EngineConfig(connect="theirs", arguments={"max_model_len": 64}))
    with pytest.raises(ConfigError, match=r"^engine\.connect=theirs is started elsewhere: leave sleep and"):
        config.check()


def test_routes_are_fetched_where_they_are_read(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    for replay, expected in (("R3", True), ("R2", False), ("none", False)):
        config = GRPOConfig(loss=LossConfig(replay=replay), rollout=RolloutConfig(max_new_tokens=3, temperature=0.7))
        own = RolloutEngine(policy_model, config, tmp_path, fleet)
        fleet.fakes[0].submitted.clear()
        fleet.fakes[1].submitted.clear()
        with set_list_to_stack(True):
            history = ChatHistory(prompt=History(role=["user"], content=["1+1="], batch_size=[1])[None])
            row = own.policy(TensorDict({"history": history}, batch_size=[1]))[0]
        assert (("routed_experts", "full") in row.keys(True)) == expected
        own.shutdown()


# -- versions ---------------------------------------------------------------------------------------------------------


def test_versions_never_fall(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    first = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    assert first.version == 0
    assert [first.sync().version for _ in range(3)] == [1, 2, 3]
    first.shutdown()
    behind = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    behind.restore(2)  # of a checkpoint, and the engine is further on
    assert behind.version == 4
    assert fleet.versions == [4, 4]
    behind.shutdown()
    ahead = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    ahead.restore(9)
    assert ahead.version == 9
    assert fleet.versions == [9, 9]
    assert ahead.sync().version == 10
    ahead.shutdown()


def test_a_sync_brings_the_weights_of_the_model(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    own = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    weight = policy_model.model.lm_head.weight
    with torch.no_grad():
        weight.add_(1.0)
    own.sync()
    for fake in fleet.fakes:
        assert torch.equal(fake.weights["lm_head.weight"], weight)
    own.shutdown()


def test_a_replica_that_did_not_take_the_weights_is_logged(
    policy_model: PolicyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_fleet(2) as fleet:
        fleet.fakes[1].fail["stage_weights"] = lambda _: RuntimeError("no room in there")
        own = RolloutEngine(policy_model, GRPOConfig(engine=EngineConfig(sync={"min_serving": 1})), tmp_path, fleet)
        report = own.sync()
        own.shutdown()
    assert list(report.failed) == [1]
    assert "replica 1 does not hold version 1: " in caplog.text


# -- sleep ------------------------------------------------------------------------------------------------------------


def test_it_sleeps_only_where_that_is_asked_for(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    own = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    own.sleep()
    assert not any(fake._asleep for fake in fleet.fakes)
    own.wake_up()
    own.shutdown()


@pytest.mark.parametrize("sync_every", [1, 2])
def test_it_sleeps_while_the_trainer_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet, sync_every: int
) -> None:
    events: list[str] = []

    def noted(name: str, of: Any, method: str) -> None:
        original = getattr(of, method)

        def call(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(of, method, call)

    config = GRPOConfig(out=str(tmp_path), steps=2, engine=EngineConfig(sleep=True, sync_every=sync_every))
    config.rollout = RolloutConfig(prompts_per_step=2, group_size=2, max_new_tokens=3)
    config.log.loggers, config.log.progress, config.optim.epochs = [], False, 2
    rows = [{"prompt": f"{i}+1="} for i in range(4)]
    with (
        set_list_to_stack(True),
        MoEGRPOTrainer(
            fake_model(),
            dataset=rows,
            rewards=lambda completion: float(len(completion)),
            config=config,
            tokenizer=ByteTokenizer(),
            engine=fleet,
        ) as trainer,
    ):
        # it has the weights of the model by now
        assert fleet.versions == [1, 1]
        for name, of, method in (
            ("generate", fleet, "agenerate"),
            ("sleep", fleet, "sleep"),
            ("wake", fleet, "wake_up"),
            ("sync", trainer.rollout_engine.sender, "update_weights"),
            ("score", trainer.learner, "scores"),
            ("train", trainer.learner.stepper, "step"),
        ):
            noted(name, of, method)
        trainer.train()
    # answers of the next step are asked for as soon as there is a new version; they wait until the engine is awake
    assert events[:5] == ["generate"] * 4 + ["sleep"]
    step = ["sleep", "score", "train", "train"]
    without = [event for event in events if event != "generate"]
    assert without == [*step, *(["sync"] if sync_every == 1 else []), "wake", *step, "sync", "wake"]
    assert not any(fake._asleep for fake in fleet.fakes)
