"""Samples come from what a trainer was given, or from what its configuration names; mistakes are one line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.envs import EnvBase

from support.collecting import TOKENIZER, chat, policy_of
from support.data_sets import FakeDataset, FakeDatasetDict
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM
from torchrl_moe.trainers.compose import CONFIGS, load_config
from torchrl_moe.trainers.config import ConfigError, DataConfig, EvalConfig, GRPOConfig, RolloutConfig
from torchrl_moe.trainers.rewards import PromptEpisode
from torchrl_moe.trainers.rollout_engine import TASKS, Given, RolloutSource

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
    assert prompts(source) == sorted(row["prompt"] for row in ROWS)
    assert isinstance(source.env, PromptEpisode)
    assert source.env.rewards.names == (["exact", "half"] if isinstance(rewards, list) and rewards[1:] else ["exact"])
    assert (source.held_out, source.held_out_env) == (0, None)


def test_data_and_rewards_that_the_configuration_names(engine: FakeAsyncVLLM) -> None:
    data = DataConfig(
        source=f"{__name__}:rows_of",
        arguments={"count": 6},
        held_out=2,
        rewards=[f"{__name__}:exact", f"{__name__}:half"],
        weights=[1.0, 2.0],
    )
    source = of(data)
    assert len(prompts(source)) == 4
    assert source.held_out == 2
    assert source.held_out_loader is not None
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
    assert few.held_out == 1
    assert few.evaluate(policy_of(engine)) == 1.0
    own = of(dataset=FakeDatasetDict(train=FakeDataset(ROWS[:6]), test=FakeDataset(ROWS[6:])), rewards=exact)
    assert (len(prompts(own)), own.held_out) == (6, 4)


def test_without_held_out_data_there_is_no_metric(engine: FakeAsyncVLLM) -> None:
    assert of(dataset=ROWS, rewards=exact).evaluate(policy_of(engine)) is None


def test_a_column_that_not_every_row_has() -> None:
    """Rewards get ``None`` there."""

    def graded(completion: str, hint: str | None) -> float:
        return float(hint is None)

    assert len(prompts(of(dataset=[{"prompt": "0+1="}, {"prompt": "1+1=", "hint": "even"}], rewards=graded))) == 2


# -- environments -----------------------------------------------------------------------------------------------------


def test_an_environment_and_another_to_evaluate_on(engine: FakeAsyncVLLM) -> None:
    env = chat(3)
    source = of(env=env)
    assert (source.env, source.dataloader, source.evaluate(policy_of(engine))) == (env, None, None)
    assert of(env=lambda: chat(3)).dataloader is None
    other = chat(1)
    assert of(None, EvalConfig(prompts=7), env=env, held_out=other).held_out == 7


def test_an_environment_holds_nothing_out() -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out=5: an environment, .* set it to 0, or give the trainer"):
        of(DataConfig(held_out=5), env=chat(3))
    assert of(DataConfig(held_out=5), EvalConfig(every=0), env=chat(3)).held_out == 0  # nobody asks for them
    assert of(DataConfig(held_out=5), EvalConfig(prompts=7), env=chat(3), held_out=chat(1)).held_out == 7


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.yaml")])
def test_configurations_of_the_package_hold_out_what_their_task_can(name: str) -> None:
    data = load_config(name).data
    assert data.source not in TASKS or data.held_out == 0


def test_an_async_function_that_plays_a_sample(engine: FakeAsyncVLLM) -> None:
    source = of(DataConfig(held_out=5), env=play, dataset=ROWS)
    assert source.env is play
    assert len(prompts(source)) == 5
    assert source.held_out_loader is not None
    known = [row["prompt"] < "5" for row in source.held_out_loader()]
    assert source.evaluate(policy_of(engine)) == sum(known) / 5
    named = of(DataConfig(source=f"{__name__}:rows_of", arguments={"count": 4}), env=play)
    assert len(prompts(named)) == 4


def test_a_function_makes_its_own_prompts_from_any_column() -> None:
    async def sums(data: TensorDictBase, ask: Any) -> float:
        answer = await ask(f"{data['a']}+{data['b']}=")
        return float(answer["history"].response.content[0] == str(data["a"] + data["b"]))

    source = of(DataConfig(held_out=1), env=sums, dataset=[{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    assert source.dataloader is not None
    assert [sorted(row.keys()) for row in source.dataloader] == [["a", "b"]]


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
    source = of_tokenizer(tokenizer, [{"prompt": "Q: 1+1= A:", "answer": "2"}])
    assert not source.env.is_chat
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

    assert asyncio.run(episode(TensorDict(prompt="a"), ask)) == 1.0
    assert answered == [seen]


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

NO_COLUMN = "data: train row 0 has no column 'prompt'; its columns are 'question', 'answer'"


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({}, {}, "data.source=None: name a dataset, or give the trainer a dataset or an env"),
        ({}, {"dataset": [{"question": "1+1=", "answer": "2"}], "rewards": exact}, NO_COLUMN),
        ({}, {"env": play}, "data.source=None: "),
        (
            {},
            {"dataset": ROWS, "rewards": lambda completion, solution: 0.0},
            "asks for 'solution'; there are .*'answer'",
        ),
        ({}, {"dataset": ROWS}, r"^data.rewards=\[\]: name a function, package.module:function"),
        ({}, {"dataset": [], "rewards": exact}, "data: there are no rows to train on"),
        ({"held_out": 10}, {"dataset": ROWS, "rewards": exact}, "data: held_out=10 leaves none of 10 rows to train on"),
        ({}, {"dataset": "./no/such.jsonl", "rewards": exact}, "data: there is no file or folder 'no/such.jsonl'"),
        ({}, {"dataset": "no_such_module:rows", "rewards": exact}, "data: cannot import 'no_such_module'"),
        ({"source": f"{__name__}:failing_source"}, {"rewards": exact}, "data: KeyError: 'no such task'"),
        ({"source": f"{__name__}:rows_of"}, {"rewards": exact}, "data: .*missing 1 required positional argument"),
        ({"weights": [1.0, 2.0]}, {"dataset": ROWS, "rewards": exact}, "rewards: there are 2 weights for 1 reward"),
        ({"rewards": ["no_such_module:f"]}, {"dataset": ROWS}, "data.rewards: cannot import 'no_such_module'"),
        ({"source": "some/hub-name"}, {"rewards": exact}, "data: .*which needs a package: pip install datasets"),
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
)
def test_mistakes_are_one_line(
    data: dict[str, Any], given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed, wherever this runs
    with pytest.raises(ConfigError, match=message) as caught:
        of(DataConfig(**data), **given)
    assert "\n" not in str(caught.value)
