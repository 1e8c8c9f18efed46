"""The engine of a run, and where its samples come from: mistakes are one line, before anything is started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.data.llm import History
from torchrl.envs import EnvBase
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm.policies import ChatHistory

from support.collecting import TOKENIZER, Questions, chat, policy_of
from support.data_sets import FakeDataset, FakeDatasetDict
from support.services import submitted
from support.training import fake_config, fake_fleet, fake_model, fake_run
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import MoEGRPOTrainer
from torchrl_moe.trainers import policy_model as policy_model_module
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
from torchrl_moe.trainers.samples import Rewards, RolloutSource


@pytest.fixture(scope="module")
def policy_model() -> PolicyModel:
    return PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig())


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2) as service:
        yield service


@pytest.fixture
def free_memory(monkeypatch: MonkeyPatch) -> Any:
    def set_free(nbytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=nbytes))

    return set_free


@pytest.fixture
def no_start(monkeypatch: MonkeyPatch) -> list[tuple[Any, ...]]:
    """Engines that would have been started."""
    started: list[tuple[Any, ...]] = []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append((arguments, options))
        return fake_fleet(1)

    monkeypatch.setattr(policy_model_module.AsyncVLLM, "from_pretrained", start)
    return started


# -- arguments and room -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_the_engines_routers_have_the_dtype_of_the_trainers(kind: str) -> None:
    float32 = {"router_dtype": "float32"}
    for dtype, given, wanted in (
        ("auto", {}, {}),
        ("float32", {}, float32),
        ("float32", {"router_dtype": "auto"}, {"router_dtype": "auto"}),
    ):
        config = GRPOConfig(engine=EngineConfig(kind=kind, arguments=given), model=ModelConfig(router_dtype=dtype))
        assert engine_arguments(config) == wanted
        if kind == "vllm":  # the other one looks for the model
            check_arguments(config)


@pytest.mark.parametrize(
    ("arguments", "each", "cache"),
    [({}, 4, 0), ({"dtype": "bfloat16"}, 2, 10**9), ({"dtype": "auto"}, 4, 10**9), ({"dtype": "half"}, 2, 0)],
)
def test_replicas_that_memory_does_not_hold(
    policy_model: Any, free_memory: Any, arguments: dict[str, Any], each: int, cache: int
) -> None:
    numbers = sum(weight.numel() for weight in policy_model.model.parameters())
    arguments = {**arguments, "kv_cache_memory_bytes": cache or None}
    free_memory(3 * (numbers * each + cache))
    check_room(policy_model, 3, arguments)
    with pytest.raises(ConfigError, match=r"^engine\.num_replicas=4 needs .* GB of memory, and .* GB are free$"):
        check_room(policy_model, 4, arguments)


@pytest.mark.parametrize("of_ranks", [0, 4])
def test_replicas_without_a_gpu(policy_model: Any, monkeypatch: MonkeyPatch, of_ranks: int) -> None:
    """Those of the trainer's ranks are no room for replicas."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 + of_ranks)
    if of_ranks:
        launched = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in {**launched, "LOCAL_WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
    for replicas, arguments, kind, needed in (
        (4, {}, "vllm", 0),
        (2, {"tensor_parallel_size": 2}, "vllm", 0),
        (5, {"devices": [[0]] * 5}, "vllm", 0),  # as the user says
        (3, {"tensor_parallel_size": 2}, "vllm", 6),
        (1, {"data_parallel_size": 2, "pipeline_parallel_size": 4}, "vllm", 8),
        (5, {}, "transformers", 5),
    ):
        refused = rf"^engine\.num_replicas={replicas} needs {needed} GPUs, and there are 4$"
        with pytest.raises(ConfigError, match=refused) if needed else nullcontext():
            check_room(policy_model, replicas, arguments, kind)


Serve = Callable[..., RolloutEngine]


@pytest.fixture
def serve(policy_model: PolicyModel, tmp_path: Path, fleet: FakeFleet, monkeypatch: MonkeyPatch) -> Iterator[Serve]:
    """Makes what serves the policy in a run, on an engine that is given or as the settings say; ends it before them."""
    with ExitStack() as made:

        def make(engine: Mapping[str, Any] | None = None, given: Any = None, **settings: Any) -> RolloutEngine:
            config = GRPOConfig(engine=EngineConfig(**engine or {}), **settings)
            served = RolloutEngine(policy_model, config, tmp_path / "run", given)
            made.callback(served.shutdown)
            return served

        yield make


@pytest.mark.parametrize(
    ("count", "engine", "expected"),
    [
        (1, {}, [[0]]),  # the usual machine: trainer and engine share its GPU
        (2, {}, None),  # the service gives it the other one
        (4, {"num_replicas": 4}, [[1], [2], [3], [0]]),
        (4, {"num_replicas": 2, "arguments": {"tensor_parallel_size": 2}}, [[1, 2], [3, 0]]),
        (1, {"arguments": {"devices": ["cuda:0"]}}, ["cuda:0"]),
    ],
)
def test_replicas_share_the_trainers_gpu_where_no_other_is_left(
    serve: Serve, monkeypatch: MonkeyPatch, no_start: list[Any], count: int, engine: Any, expected: Any
) -> None:
    seen = {"is_available": True, "device_count": count, "is_initialized": True, "current_device": 0}
    for name, value in {**seen, "memory_reserved": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    serve({"kind": "vllm", **engine})
    assert no_start[0][1].get("devices") == expected


# -- what it is started with, and what is refused ---------------------------------------------------------------------
def test_what_has_no_room_is_refused_but_other_machines_may_have_it(
    serve: Serve, free_memory: Any, no_start: list[Any], tmp_path: Path
) -> None:
    free_memory(0)
    for engine, message in (({}, "GB are free"), ({"sleep": True, "backend": "ray"}, "needs a GPU")):
        with pytest.raises(ConfigError, match=message):
            serve(engine)
    assert not no_start and not (tmp_path / "run").exists()
    serve({"backend": "ray"})
    assert len(no_start) == 1


def test_it_starts_from_the_model(
    serve: Serve, policy_model: PolicyModel, tmp_path: Path, no_start: list[Any], monkeypatch: MonkeyPatch
) -> None:
    own = serve({"arguments": {"max_model_len": 64}}, seed=5)
    ((arguments, options),) = no_start
    (start,) = (tmp_path / "run").glob("start-*")
    assert arguments == (str(start),) and (start / "model.safetensors").exists()
    wanted = {"num_replicas": 1, "engine": "vllm", "backend": "local"}
    assert options == {**wanted, "seed": 5, "max_model_len": 64}
    assert own.owns_engine
    own.forget_start()
    assert not start.exists()
    own.shutdown()
    with pytest.raises(RuntimeError):
        own.engine.generate("after the end", use_tqdm=False)
    # one that lies in a folder is read from there; another engine gets nothing that only vLLM knows
    there = PolicyModel(policy_model.model, policy_model.tokenizer, "some/folder", torch.float32)
    config = GRPOConfig(engine=EngineConfig(kind="transformers", num_replicas=2))
    RolloutEngine(there, config, tmp_path / "other").shutdown()
    wanted = {"num_replicas": 2, "engine": "transformers", "backend": "local"}
    assert no_start[-1] == (("some/folder",), {**wanted, "seed": 0}) and not (tmp_path / "other").exists()
    # that of a run that resumes draws from another seed
    for saved in (3, 4):
        monkeypatch.setattr(policy_model_module, "steps_saved", lambda _, saved=saved: saved)
        serve(seed=5, resume=True)
    assert len({options["seed"] for _, options in (no_start[0], *no_start[-2:])}) == 3


def test_an_engine_of_another_job_is_joined_and_left(
    serve: Serve, fleet: FakeFleet, tmp_path: Path, monkeypatch: MonkeyPatch, no_start: list[Any]
) -> None:
    events: list[str] = []
    monkeypatch.setattr(policy_model_module.AsyncVLLM, "connect", lambda name: events.append(name) or fleet)
    monkeypatch.setattr(fleet, "disconnect", lambda: events.append("left"), raising=False)
    joined = serve({"connect": "theirs"})
    assert not joined.owns_engine
    joined.sync()
    joined.shutdown()
    assert events == ["theirs", "left"] and not no_start and not (tmp_path / "run").exists()
    monkeypatch.setattr(policy_model_module, "steps_saved", lambda _: 4)
    serve({"connect": "theirs"}, resume=True)  # it may be as fresh as at step 0
    first = policy_model_module.seed_after(GRPOConfig().seed, 4)
    assert [replica.seed for replica in fleet.fakes] == [first, first + 1]
    config = GRPOConfig(engine=EngineConfig(connect="theirs", arguments={"max_model_len": 64}))
    with pytest.raises(ConfigError, match=r"^engine\.connect=theirs is started elsewhere: leave sleep and"):
        config.check()


def test_routes_are_fetched_where_they_are_read(serve: Serve, fleet: FakeFleet) -> None:
    history = ChatHistory(prompt=History(role=["user"], content=["1+1="], batch_size=[1])[None])
    for replay, expected in (("R3", True), ("R2", False), ("none", False)):
        own = serve(None, fleet, loss=LossConfig(replay=replay), rollout=RolloutConfig(max_new_tokens=3))
        row = own.policy(TensorDict({"history": history.clone()}, batch_size=[1]))[0]  # type: ignore[misc]
        assert (("routed_experts", "full") in row.keys(True)) == expected
        own.shutdown()


# -- versions ---------------------------------------------------------------------------------------------------------
def test_versions_of_an_engine_that_is_given_never_fall(serve: Serve, fleet: FakeFleet, tmp_path: Path) -> None:
    first = serve(None, fleet)
    assert not first.owns_engine
    assert first.version == 0 and [first.sync().version for _ in range(3)] == [1, 2, 3]
    first.shutdown()
    behind = serve(None, fleet)
    behind.restore(2)  # of a checkpoint, and the engine is further on
    assert behind.version == 4 and fleet.versions == [4, 4]
    behind.shutdown()
    ahead = serve(None, fleet)
    ahead.restore(9)
    assert ahead.version == 9 and fleet.versions == [9, 9] and ahead.sync().version == 10
    ahead.shutdown()
    assert len(fleet.generate("still there", {"max_tokens": 2}, use_tqdm=False).outputs) == 1
    assert not (tmp_path / "run").exists()


def test_a_replica_that_did_not_take_the_weights_is_logged(
    serve: Serve, fleet: FakeFleet, caplog: LogCaptureFixture
) -> None:
    fleet.fakes[1].fail["stage_weights"] = lambda _: RuntimeError("no room in there")
    report = serve({"sync": {"min_serving": 1}}, fleet).sync()
    assert list(report.failed) == [1] and "replica 1 does not hold version 1: " in caplog.text


# -- sleep ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sync_every", [1, 2])
def test_it_sleeps_in_training(tmp_path: Path, monkeypatch: MonkeyPatch, fleet: FakeFleet, sync_every: int) -> None:
    events: list[str] = []

    def noted(name: str, of: Any, method: str) -> None:
        call = getattr(of, method)
        monkeypatch.setattr(of, method, lambda *given, **options: events.append(name) or call(*given, **options))

    config = fake_config(tmp_path, 2)
    config.engine.sleep, config.engine.sync_every, config.optim.epochs = True, sync_every, 2
    with fake_run(fleet, config) as trainer:
        assert fleet.versions == [1, 1]  # it has the weights of the model by now
        noted("generate", fleet, "agenerate")
        noted("sleep", fleet, "sleep")
        noted("wake", fleet, "wake_up")
        noted("sync", trainer.rollout_engine.sender, "update_weights")
        noted("score", trainer.learner, "scores")
        noted("train", trainer.learner.stepper, "step")
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


def failing_source(**_: Any) -> Any:
    raise KeyError("no such task")


async def play(data: TensorDictBase, ask: Any) -> float:
    answer = await ask(data["prompt"])
    return exact(answer["history"].response.content[0], data["answer"])


def of(data: DataConfig | None = None, eval_config: EvalConfig | None = None, **given: Any) -> RolloutSource:
    data, eval_config = data or DataConfig(), eval_config or EvalConfig()
    config = GRPOConfig(data=data, eval=eval_config, rollout=RolloutConfig(group_size=3))
    return RolloutSource(config, **given).load(TOKENIZER)


def prompts(source: RolloutSource) -> list[str]:
    assert source.dataloader is not None
    return sorted(row["prompt"] for row in source.dataloader)


def known(source: RolloutSource) -> float:
    """The share of held-out prompts that the engine knows the answer of."""
    assert source.held_out_loader is not None
    answers = [row["prompt"] < "5" for row in source.held_out_loader()]
    return sum(answers) / len(answers)


# -- data sets --------------------------------------------------------------------------------------------------------
def test_data_and_rewards_that_the_configuration_names(engine: FakeAsyncVLLM) -> None:
    data = DataConfig(
        source=f"{__name__}:rows_of", arguments={"count": 6}, held_out=2,
        rewards=[f"{__name__}:exact", f"{__name__}:half"], weights=[1.0, 2.0],
    )  # fmt: skip
    source = of(data)
    assert len(prompts(source)) == 4 and source.held_out == 2
    assert source.evaluate(policy_of(engine)) == 2.0 * known(source)  # exact, and 2 * 0.5
    # what is given counts more
    data = DataConfig(source="no_such_module:rows", rewards=["no_such_module:reward"], arguments={"a": 1})
    assert len(prompts(of(data, dataset=ROWS, rewards=exact))) == 10
    named = of(DataConfig(arguments={"count": 4}), dataset=f"{__name__}:rows_of", rewards=f"{__name__}:exact")
    assert len(prompts(named)) == 4


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
def test_an_environment_holds_nothing_out_and_another_may_be_evaluated_on(engine: FakeAsyncVLLM) -> None:
    env = chat(3)
    source = of(env=env)
    assert (source.env, source.dataloader, source.evaluate(policy_of(engine))) == (env, None, None)
    assert of(env=lambda: chat(3)).dataloader is None
    with pytest.raises(ConfigError, match=r"data\.held_out=5: an environment, .* set it to 0"):
        of(DataConfig(held_out=5), env=env)
    assert of(DataConfig(held_out=5), EvalConfig(every=0), env=env).held_out == 0  # nobody asks for them
    with pytest.raises(ConfigError, match=r"held_out: there is no data"):
        of(env=env, held_out=chat(1))
    asks = DatasetChatEnv.from_dataloader(Questions(9), repeats=1, batch_size=(1,), tokenizer=TOKENIZER)
    assert of(DataConfig(held_out=5), EvalConfig(prompts=7), env=env, held_out=asks).held_out == 7


def test_an_async_function_that_plays_a_sample(engine: FakeAsyncVLLM) -> None:
    source = of(DataConfig(held_out=5), env=play, dataset=ROWS)
    assert source.env is play and len(prompts(source)) == 5
    assert source.evaluate(policy_of(engine)) == known(source)
    assert len(prompts(of(DataConfig(source=f"{__name__}:rows_of", arguments={"count": 4}), env=play))) == 4
    # it makes its own prompts, from any column
    source = of(DataConfig(held_out=1), env=play, dataset=[{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    assert source.dataloader is not None and [sorted(row.keys()) for row in source.dataloader] == [["a", "b"]]


# -- what the chat template gets --------------------------------------------------------------------------------------
def tokenizer_with(template: str | None) -> Any:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    return tokenizer


def of_tokenizer(tokenizer: Any, dataset: Any, config: GRPOConfig | None = None, **given: Any) -> RolloutSource:
    return RolloutSource(config or GRPOConfig(), dataset=dataset, rewards=exact, **given).load(tokenizer)


CHAT = [{"role": "user", "content": "1+1="}]


def test_without_a_chat_template_prompts_are_texts() -> None:
    tokenizer, without_thinking = tokenizer_with(None), GRPOConfig(chat_template_kwargs={"enable_thinking": False})
    assert not of_tokenizer(tokenizer, [{"prompt": "Q: 1+1= A:", "answer": "2"}]).env.is_chat
    for row, config in (
        ({"prompt": CHAT}, None),
        ({"prompt": "a", "tools": [{"name": "f"}]}, None),
        ({"prompt": "a"}, without_thinking),
    ):
        with pytest.raises(ConfigError, match=r"set tokenizer\.chat_template"):
            of_tokenizer(tokenizer, [{"prompt": "a", "answer": "2"}, {**row, "answer": "2"}], config)
    for source in (
        RolloutSource(GRPOConfig(data=DataConfig(source="countdown"))),
        RolloutSource(GRPOConfig(), env=chat(8)),
    ):
        with pytest.raises(ConfigError, match=r"an environment of chats needs a chat template: set tokenizer\.chat"):
            source.load(tokenizer)


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
    tokenizer = tokenizer_with("x")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})

    def judge(completion: str) -> float:
        return float(completion == seen)

    config = GRPOConfig(rollout=RolloutConfig(sampling=sampling))
    episode = RolloutSource(config, dataset=[{"prompt": "a"}], rewards=judge).load(tokenizer).env
    ids = [*tokenizer("<think>so</think> 2")["input_ids"], tokenizer.eos_token_id]

    async def ask(prompt: Any) -> Any:
        return {"tokens": SimpleNamespace(response=torch.tensor(ids))}

    assert asyncio.run(episode(TensorDict(prompt="a"), ask)) == 1.0
    episode.rewards = Rewards(lambda completion: None)  # an answer without a reward is left out
    assert asyncio.run(episode(TensorDict(prompt="a"), ask)) is None


def test_torchrls_countdown(engine: FakeAsyncVLLM) -> None:
    """The one of TorchRL's tasks that needs no hub."""
    source = of(DataConfig(source="countdown", arguments={"num_count": 3}), EvalConfig(prompts=4))
    assert isinstance(source.env, EnvBase)
    policy = policy_of(engine)
    before = torch.get_rng_state()
    asked = []
    for _ in range(2):  # as often as the run asks: the same questions, and nothing of training's random numbers
        assert source.evaluate(policy) is not None
        asked.append(sorted(map(str, (request.prompt_token_ids for request in submitted(engine)[-4:]))))
    assert asked[0] == asked[1] and len({*asked[0]}) == 4
    assert torch.equal(torch.get_rng_state(), before)
    collector = AsyncLLMCollector(source.env, policy=policy, group_size=3, groups_per_batch=2)
    try:
        batch = next(iter(collector))
    finally:
        collector.shutdown()
    assert batch is not None and len(batch) == 6
    groups = [int(row["group_id"]) for row in batch.unbind(0)]
    assert groups[:3] == [groups[0]] * 3 != groups[3:] == [groups[3]] * 3
    one, other = (of(DataConfig(source="countdown"), EvalConfig(every=0)) for _ in range(2))
    assert one.held_out == 0 and one.env.reset()["query"] == other.env.reset()["query"]  # of the same seed


@pytest.mark.parametrize(("every", "lines"), [(10, 1), (0, 0)])
def test_a_task_without_held_out_prompts_says_that_nothing_is_evaluated(
    monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture, every: int, lines: int
) -> None:
    monkeypatch.setattr("torchrl.envs.llm.GSM8KEnv", lambda **_: chat(3))
    assert of(DataConfig(source="gsm8k"), EvalConfig(every=every)).held_out == 0
    assert [record.message.partition(":")[0] for record in caplog.records] == ["eval.every=10"] * lines


# -- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "given", "name"),
    [
        ({"source": "gsm8k"}, {}, "data.source=gsm8k"),
        ({"source": "openai/gsm8k"}, {"rewards": exact}, "data.source=openai/gsm8k"),
        ({}, {"dataset": "openai/gsm8k", "rewards": exact}, "dataset=openai/gsm8k"),
    ],
)
def test_the_hubs_extra_is_missed_before_a_model_is_loaded(
    monkeypatch: MonkeyPatch, data: dict[str, Any], given: dict[str, Any], name: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"^{name}: .* pip install .torchrl_moe\[hub\].$"):
        MoEGRPOTrainer("no/such-model", config=GRPOConfig(data=DataConfig(**data)), **given)
    RolloutSource(GRPOConfig(data=DataConfig(source="countdown"))).check_names()  # which draws its own


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
        ({"source": "gsm8k"}, {}, r"^data\.source=gsm8k: KeyError: 'no such task'$"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    monkeypatch: MonkeyPatch, data: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    """Those that a newcomer meets first are in ``test_first_errors.py``."""
    monkeypatch.setattr("torchrl.envs.llm.GSM8KEnv", failing_source)  # data that cannot be reached
    with pytest.raises(ConfigError, match=message) as caught:
        of(DataConfig(**data), **given)
    assert "\n" not in str(caught.value)
