"""The engine of a run, and where its samples come from: mistakes are one line, before anything is started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.data.llm import History
from torchrl.envs import EnvBase
from torchrl.modules.llm.policies import ChatHistory

from support.collecting import TOKENIZER, chat, policy_of
from support.data_sets import FakeDataset, FakeDatasetDict
from support.training import fake_config, fake_fleet, fake_model, fake_run
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import policy_model as rollout_engine
from torchrl_moe.trainers.config import (
    ConfigError,
    DataConfig,
    EngineConfig,
    EvalConfig,
    GRPOConfig,
    LossConfig,
    ModelConfig,
    RolloutConfig,
)
from torchrl_moe.trainers.policy_model import PolicyModel, RolloutEngine, check_arguments, check_room, engine_arguments
from torchrl_moe.trainers.samples import Given, PromptEpisode, RolloutSource


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


# -- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("router_dtype", "given", "wanted"),
    [
        ("auto", {}, {}),
        ("float32", {}, {"router_dtype": "float32"}),
        ("float32", {"router_dtype": "auto"}, {"router_dtype": "auto"}),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_the_engines_routers_have_the_dtype_of_the_trainers(
    kind: str, router_dtype: str, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    config = GRPOConfig()
    config.engine.kind, config.model.router_dtype, config.engine.arguments = kind, router_dtype, given
    assert engine_arguments(config) == wanted
    if kind == "vllm":  # the other one looks for the model
        check_arguments(config)


# -- room -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "each"), [({}, 4), ({"dtype": "bfloat16"}, 2), ({"dtype": "auto"}, 4), ({"dtype": "half"}, 2)]
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


@pytest.mark.parametrize(
    ("count", "arguments", "replicas", "expected"),
    [
        (1, {}, 1, [[0]]),  # the usual machine: trainer and engine share its GPU
        (2, {}, 1, None),  # the service gives it the other one
        (4, {}, 4, [[1], [2], [3], [0]]),
        (4, {"tensor_parallel_size": 2}, 2, [[1, 2], [3, 0]]),
        (1, {"devices": ["cuda:0"]}, 1, ["cuda:0"]),
    ],
)
def test_replicas_share_the_trainer_s_gpu_where_no_other_is_left(
    policy_model: PolicyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_start: list[Any],
    count: int,
    arguments: dict[str, Any],
    replicas: int,
    expected: Any,
) -> None:
    for name, value in {
        "is_available": True,
        "device_count": count,
        "is_initialized": True,
        "current_device": 0,
        "memory_reserved": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    engine = EngineConfig(kind="vllm", num_replicas=replicas, arguments=arguments)
    RolloutEngine(policy_model, GRPOConfig(engine=engine), tmp_path).shutdown()
    ((_, options),) = no_start
    assert options.get("devices") == expected


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
    assert len(no_start) == 1 and not (tmp_path / "other").exists()


# -- what it is started with, and what is refused ---------------------------------------------------------------------
def test_a_sleeping_engine_without_a_gpu_is_refused_before_it_starts(
    policy_model: PolicyModel, tmp_path: Path, no_start: list[Any]
) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        RolloutEngine(policy_model, GRPOConfig(engine=EngineConfig(sleep=True)), tmp_path / "run")
    assert not no_start and not (tmp_path / "run").exists()


def test_it_starts_from_the_model(policy_model: PolicyModel, tmp_path: Path, no_start: list[Any]) -> None:
    config = GRPOConfig(seed=5, engine=EngineConfig(arguments={"max_model_len": 64}))
    own = RolloutEngine(policy_model, config, tmp_path)
    ((arguments, options),) = no_start
    (start,) = tmp_path.glob("start-*")
    assert arguments == (str(start),) and (start / "model.safetensors").exists()
    wanted = {"num_replicas": 1, "engine": "vllm", "backend": "local"}
    assert options == {**wanted, "seed": 5, "max_model_len": 64}
    assert own.owns_engine
    own.forget_start()
    assert not start.exists()
    own.shutdown()
    own.shutdown()
    with pytest.raises(RuntimeError):
        own.engine.generate("after the end", use_tqdm=False)
    # one that lies in a folder is read from there; another engine gets nothing that only vLLM knows
    there = PolicyModel(policy_model.model, policy_model.tokenizer, "some/folder", torch.float32)
    config = GRPOConfig(engine=EngineConfig(kind="transformers", num_replicas=2))
    RolloutEngine(there, config, tmp_path / "other").shutdown()
    wanted = {"num_replicas": 2, "engine": "transformers", "backend": "local"}
    assert no_start[-1] == (("some/folder",), {**wanted, "seed": 0}) and not (tmp_path / "other").exists()


def test_an_engine_of_a_run_that_resumes_draws_from_another_seed(
    policy_model: PolicyModel, tmp_path: Path, no_start: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    for saved in (0, 3, 4):
        monkeypatch.setattr(rollout_engine, "steps_saved", lambda _, saved=saved: saved)
        RolloutEngine(policy_model, GRPOConfig(seed=5, resume=saved > 0), tmp_path).shutdown()
        seeds.append(no_start[-1][1]["seed"])
    assert len(set(seeds)) == 3


def test_an_engine_that_is_given_stays(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    given = RolloutEngine(policy_model, GRPOConfig(), tmp_path / "run", fleet)
    assert not given.owns_engine
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
    assert not joined.owns_engine
    joined.sync()
    joined.shutdown()
    assert events == ["theirs", "left"] and not no_start and not (tmp_path / "run").exists()
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
        history = ChatHistory(prompt=History(role=["user"], content=["1+1="], batch_size=[1])[None])
        row = own.policy(TensorDict({"history": history}, batch_size=[1]))[0]
        assert (("routed_experts", "full") in row.keys(True)) == expected
        own.shutdown()


# -- versions ---------------------------------------------------------------------------------------------------------
def test_versions_never_fall(policy_model: PolicyModel, fleet: FakeFleet, tmp_path: Path) -> None:
    first = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    assert first.version == 0 and [first.sync().version for _ in range(3)] == [1, 2, 3]
    first.shutdown()
    behind = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    behind.restore(2)  # of a checkpoint, and the engine is further on
    assert behind.version == 4 and fleet.versions == [4, 4]
    behind.shutdown()
    ahead = RolloutEngine(policy_model, GRPOConfig(), tmp_path, fleet)
    ahead.restore(9)
    assert ahead.version == 9 and fleet.versions == [9, 9] and ahead.sync().version == 10
    ahead.shutdown()


def test_a_replica_that_did_not_take_the_weights_is_logged(
    policy_model: PolicyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_fleet(2) as fleet:
        fleet.fakes[1].fail["stage_weights"] = lambda _: RuntimeError("no room in there")
        own = RolloutEngine(policy_model, GRPOConfig(engine=EngineConfig(sync={"min_serving": 1})), tmp_path, fleet)
        report = own.sync()
        own.shutdown()
    assert list(report.failed) == [1] and "replica 1 does not hold version 1: " in caplog.text


# -- sleep ------------------------------------------------------------------------------------------------------------
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

    config = fake_config(tmp_path, 2)
    config.engine.sleep, config.engine.sync_every, config.optim.epochs = True, sync_every, 2
    with fake_run(fleet, config) as trainer:
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


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


@pytest.fixture(autouse=True)
def stacked() -> Iterator[None]:
    """As a training run has it."""
    with set_list_to_stack(True):
        yield


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    """Knows each sum but those of 5 and more."""

    def script(prompt: str) -> str | None:
        text = next((row for row in ROWS if row["prompt"] in prompt), None)
        return None if text is None else text["answer"] if text["prompt"] < "5" else "no idea"

    with FakeAsyncVLLM(script=script) as service:
        yield service


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def half(completion: str) -> float:
    return 0.5 * completion.isdigit()


def rows_of(count: int) -> Any:
    return ROWS[:count]


def failing_source() -> Any:
    raise KeyError("no such task")


async def play(data: TensorDictBase, ask: Any) -> float:
    answer = await ask(data["prompt"])
    return exact(answer["history"].response.content[0], data["answer"])


def of(data: DataConfig | None = None, eval_config: EvalConfig | None = None, **given: Any) -> RolloutSource:
    config = GRPOConfig(
        data=data or DataConfig(), eval=eval_config or EvalConfig(), rollout=RolloutConfig(group_size=3)
    )
    return RolloutSource.of(config, TOKENIZER, Given(**given))


def prompts(source: RolloutSource) -> list[str]:
    assert source.dataloader is not None
    return sorted(row["prompt"] for row in source.dataloader)


# -- data sets --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rewards", [exact, [exact], [exact, half], f"{__name__}:exact"])
@pytest.mark.parametrize("dataset", [ROWS, FakeDataset(ROWS), f"{__name__}:rows_of"])
def test_a_dataset_and_its_rewards(dataset: Any, rewards: Any) -> None:
    source = of(
        DataConfig(arguments={"count": 10} if isinstance(dataset, str) else {}), dataset=dataset, rewards=rewards
    )
    assert prompts(source) == sorted(row["prompt"] for row in ROWS) and isinstance(source.env, PromptEpisode)
    assert source.env.rewards.names == (["exact", "half"] if isinstance(rewards, list) and rewards[1:] else ["exact"])
    assert (source.held_out, source.held_out_env) == (0, None)


def test_data_and_rewards_that_the_configuration_names(engine: FakeAsyncVLLM) -> None:
    data = DataConfig(
        source=f"{__name__}:rows_of", arguments={"count": 6}, held_out=2,
        rewards=[f"{__name__}:exact", f"{__name__}:half"], weights=[1.0, 2.0],
    )  # fmt: skip
    source = of(data)
    assert len(prompts(source)) == 4 and source.held_out == 2 and source.held_out_loader is not None
    known = [row["prompt"] < "5" for row in source.held_out_loader()]
    assert source.evaluate(policy_of(engine)) == 2.0 * sum(known) / 2  # exact, and 2 * 0.5


def test_what_is_given_counts_more_than_the_configuration() -> None:
    data = DataConfig(source="no_such_module:rows", rewards=["no_such_module:reward"], arguments={"a": 1})
    assert len(prompts(of(data, dataset=ROWS, rewards=exact))) == 10


def test_rows_are_held_out_or_given(engine: FakeAsyncVLLM) -> None:
    split = of(DataConfig(held_out=4), dataset=ROWS, rewards=exact)
    assert split.held_out_loader is not None
    held_out = [row["prompt"] for row in split.held_out_loader()]
    assert sorted([*prompts(split), *held_out]) == sorted(row["prompt"] for row in ROWS)
    # what is given stands for itself, and nothing is split off
    given = of(DataConfig(held_out=4), dataset=ROWS, rewards=exact, held_out=ROWS[3:7])
    assert (len(prompts(given)), given.held_out) == (10, 4)
    assert given.evaluate(policy_of(engine)) == 0.5  # of 3, 4, 5 and 6
    assert given.evaluate(policy_of(engine)) == 0.5  # and again
    few = of(DataConfig(), EvalConfig(prompts=1), dataset=ROWS, rewards=exact, held_out=ROWS[4:])
    assert few.held_out == 1 and few.evaluate(policy_of(engine)) == 1.0
    assert of(dataset=ROWS, rewards=exact).evaluate(policy_of(engine)) is None  # nothing is held out
    own = of(dataset=FakeDatasetDict(train=FakeDataset(ROWS[:6]), test=FakeDataset(ROWS[6:])), rewards=exact)
    assert (len(prompts(own)), own.held_out) == (6, 4)


# -- environments -----------------------------------------------------------------------------------------------------
def test_an_environment_and_another_to_evaluate_on(engine: FakeAsyncVLLM) -> None:
    env = chat(3)
    source = of(env=env)
    assert (source.env, source.dataloader, source.evaluate(policy_of(engine))) == (env, None, None)
    assert of(env=lambda: chat(3)).dataloader is None
    other = chat(1)
    assert of(None, EvalConfig(prompts=7), env=env, held_out=other).held_out == 7


def test_an_environment_holds_nothing_out() -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out=5: an environment, .* set it to 0"):
        of(DataConfig(held_out=5), env=chat(3))
    assert of(DataConfig(held_out=5), EvalConfig(every=0), env=chat(3)).held_out == 0  # nobody asks for them
    assert of(DataConfig(held_out=5), EvalConfig(prompts=7), env=chat(3), held_out=chat(1)).held_out == 7


def test_an_async_function_that_plays_a_sample(engine: FakeAsyncVLLM) -> None:
    source = of(DataConfig(held_out=5), env=play, dataset=ROWS)
    assert source.env is play and len(prompts(source)) == 5 and source.held_out_loader is not None
    known = [row["prompt"] < "5" for row in source.held_out_loader()]
    assert source.evaluate(policy_of(engine)) == sum(known) / 5
    assert len(prompts(of(DataConfig(source=f"{__name__}:rows_of", arguments={"count": 4}), env=play))) == 4


def test_a_function_makes_its_own_prompts_from_any_column() -> None:
    async def sums(data: TensorDictBase, ask: Any) -> float:
        answer = await ask(f"{data['a']}+{data['b']}=")
        return float(answer["history"].response.content[0] == str(data["a"] + data["b"]))

    source = of(DataConfig(held_out=1), env=sums, dataset=[{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    assert source.dataloader is not None and [sorted(row.keys()) for row in source.dataloader] == [["a", "b"]]


# -- what the chat template gets --------------------------------------------------------------------------------------
def tokenizer_with(template: str | None, **added: Any) -> Any:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    if added:
        tokenizer.add_special_tokens(added)
    return tokenizer


def of_tokenizer(tokenizer: Any, dataset: Any, config: GRPOConfig | None = None, **given: Any) -> RolloutSource:
    return RolloutSource.of(config or GRPOConfig(), tokenizer, Given(dataset=dataset, rewards=exact, **given))


CHAT = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("row", "config"),
    [
        ({"prompt": CHAT}, GRPOConfig()),
        ({"prompt": "a", "tools": [{"name": "f"}]}, GRPOConfig()),
        ({"prompt": "a"}, GRPOConfig(chat_template_kwargs={"enable_thinking": False})),
    ],
)
def test_without_a_chat_template_prompts_are_texts(row: dict[str, Any], config: GRPOConfig) -> None:
    tokenizer = tokenizer_with(None)
    assert not of_tokenizer(tokenizer, [{"prompt": "Q: 1+1= A:", "answer": "2"}]).env.is_chat
    with pytest.raises(ConfigError, match=r"set tokenizer\.chat_template"):
        of_tokenizer(tokenizer, [{"prompt": "a", "answer": "2"}, {**row, "answer": "2"}], config)
    with pytest.raises(ConfigError, match="an environment of chats needs a chat template"):
        RolloutSource.of(GRPOConfig(data=DataConfig(source="countdown")), tokenizer, Given())
    with pytest.raises(ConfigError, match=r"an environment of chats needs a chat template: set tokenizer\.chat"):
        RolloutSource.of(GRPOConfig(), tokenizer, Given(env=chat(8)))


def test_a_template_that_refuses_the_prompts_is_noticed_at_once() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}x"
    system = [{"role": "system", "content": "Be brief."}, *CHAT]
    with pytest.raises(ConfigError, match=r"^the chat template, given the prompt .*: TemplateError: no system"):
        of_tokenizer(tokenizer_with(strict), [{"prompt": system, "answer": "2"}])
    with pytest.raises(ConfigError, match="makes no text of"):
        of_tokenizer(tokenizer_with(""), [{"prompt": "a", "answer": "2"}])
    with pytest.raises(ConfigError, match="'tokenize' is not one"):
        config = GRPOConfig(chat_template_kwargs={"tokenize": True})
        of_tokenizer(TOKENIZER, [{"prompt": "a", "answer": "2"}], config)


@pytest.mark.parametrize(
    ("sampling", "seen"), [({}, "so 2"), ({"skip_special_tokens": False}, "<think>so</think> 2")], ids=["", "all"]
)
def test_special_tokens_reach_the_rewards_if_sampling_says_so(sampling: dict[str, Any], seen: str) -> None:
    """Not the end of the turn, which is no part of an answer."""
    tokenizer = tokenizer_with("x", additional_special_tokens=["<think>", "</think>"])
    answered: list[str] = []

    def judge(completion: str) -> float:
        answered.append(completion)
        return 1.0

    config = GRPOConfig(rollout=RolloutConfig(sampling=sampling))
    episode = RolloutSource.of(config, tokenizer, Given(dataset=[{"prompt": "a"}], rewards=judge)).env
    ids = [*tokenizer("<think>so</think> 2")["input_ids"], tokenizer.eos_token_id]

    async def ask(prompt: Any) -> Any:
        return {"tokens": SimpleNamespace(response=torch.tensor(ids))}

    assert asyncio.run(episode(TensorDict(prompt="a"), ask)) == 1.0 and answered == [seen]


def test_torchrls_countdown(engine: FakeAsyncVLLM) -> None:
    """The one of TorchRL's tasks that needs no hub."""
    source = of(DataConfig(source="countdown", arguments={"num_count": 3}), EvalConfig(prompts=4))
    assert isinstance(source.env, EnvBase)
    policy = policy_of(engine)
    assert source.evaluate(policy) is not None
    assert source.evaluate(policy) is not None  # as often as the run asks
    collector = AsyncLLMCollector(source.env, policy=policy, group_size=3, groups_per_batch=2)
    try:
        batch = next(iter(collector))
    finally:
        collector.shutdown()
    assert batch is not None and len(batch) == 6
    groups = [int(row["group_id"]) for row in batch.unbind(0)]
    assert groups[:3] == [groups[0]] * 3 != groups[3:] == [groups[3]] * 3
    assert of(DataConfig(source="countdown"), EvalConfig(every=0)).held_out == 0


def test_a_task_asks_the_same_with_the_same_seed() -> None:
    def first(source: RolloutSource) -> str:
        return str(source.env.reset()["query"])

    assert first(of(DataConfig(source="countdown"))) == first(of(DataConfig(source="countdown")))


def test_a_task_whose_data_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl.envs import llm

    class Unreachable(Exception):
        pass

    def fail(**_: Any) -> Any:
        raise Unreachable

    monkeypatch.setattr(llm, "GSM8KEnv", fail)
    with pytest.raises(ConfigError, match=r"^data\.source=gsm8k: Unreachable$"):
        of(DataConfig(source="gsm8k"))


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({}, {"env": play}, "data.source=None: "),
        ({}, {"dataset": "no_such_module:rows", "rewards": exact}, "data: cannot import 'no_such_module'"),
        ({"source": f"{__name__}:failing_source"}, {"rewards": exact}, "data: KeyError: 'no such task'"),
        ({"weights": [1.0, 2.0]}, {"dataset": ROWS, "rewards": exact}, "rewards: there are 2 weights for 1 reward"),
        ({"rewards": ["no_such_module:f"]}, {"dataset": ROWS}, "data.rewards: cannot import 'no_such_module'"),
        ({}, {"env": chat(3), "rewards": exact}, "rewards are for a dataset: an env gives its own"),
        ({}, {"dataset": ROWS, "rewards": half, "held_out": []}, "^held_out: there are no rows"),
        ({}, {"dataset": [{"prompt": "a", "at": Lock()}], "rewards": half}, "row 0, column 'at' is a lock, which a ch"),
        ({}, {"dataset": [{"prompt": "a", "at": [lambda: 0]}], "env": play}, "row 0, column 'at' is a list, which a c"),
        ({}, {"env": play, "dataset": ROWS, "rewards": exact}, "rewards are for a dataset: an env gives its own"),
        ({}, {"env": chat(3), "dataset": ROWS}, "dataset and env: give one of them"),
        ({}, {"env": chat(3), "held_out": ROWS}, "held_out must be an environment, as env is"),
        ({}, {"env": 3}, "env must be an environment, a callable that makes one, or an async function"),
        ({"source": "countdown"}, {"rewards": exact}, "data.source=countdown has rewards of its own"),
        ({"source": "countdown"}, {"held_out": ROWS}, "held_out must be an environment"),
        ({"source": "countdown", "arguments": {"numbers": 3}}, {}, "data.source=countdown: .*'numbers'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(data: dict[str, Any], given: dict[str, Any], message: str) -> None:
    """Those that a newcomer meets first are in ``test_first_errors.py``."""
    with pytest.raises(ConfigError, match=message) as caught:
        of(DataConfig(**data), **given)
    assert "\n" not in str(caught.value)
