"""An episode in a collector: what is asked, what rewards see, what stands in the rows, and what a slow one costs."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from support.collecting import TOKENIZER, policy_of
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.collector_host import pack, unpack
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.collectors.workflow import is_episode_function
from torchrl_moe.objectives import GRPOAdvantage
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.trainers.prompt_sources import load_prompts
from torchrl_moe.trainers.rewards import TAKEN, PromptEpisode, Rewards

ROWS = [{"prompt": f"q{i}", "answer": i} for i in range(6)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q0", "name": None}]


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        yield engine


@pytest.fixture
def collector_of() -> Iterator[Callable[..., AsyncLLMCollector]]:
    """Makes collectors of groups of 2, a group a batch."""
    made = []

    def make(engine: FakeAsyncVLLM, episode: PromptEpisode, rows: Any, **kwargs: Any) -> AsyncLLMCollector:
        settings = {"group_size": 2, "groups_per_batch": 1, "order": "fifo", **kwargs}
        policy = policy_of(engine, input_mode=settings.pop("input_mode", "history"))
        loader = load_prompts(rows).loader(seed=0)
        made.append(AsyncLLMCollector(episode, policy=policy, dataloader=loader, **settings))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def asked(row: TensorDictBase) -> str:
    return TOKENIZER.decode(row["tokens"].prompt.tolist())


def by_answer(completion: str, answer: int) -> float:
    return float(answer)


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["q0", CHAT], ids=["text", "messages"])
def test_a_chat_is_asked_as_messages(engine: FakeAsyncVLLM, collector_of: Any, prompt: Any) -> None:
    batch = next(
        iter(collector_of(engine, PromptEpisode("prompt", Rewards(by_answer)), [{"prompt": prompt, "answer": 1}]))
    )
    messages = [{"role": "user", "content": "q0"}]
    expected = messages if prompt == "q0" else [{"role": "system", "content": "Be brief."}, *messages]
    rendered = TOKENIZER.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert [asked(row) for row in batch.unbind(0)] == [rendered, rendered]


def test_a_policy_that_reads_text_is_asked_with_it(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    episode = PromptEpisode("prompt", Rewards(by_answer), is_chat=False)
    batch = next(iter(collector_of(engine, episode, ROWS[:1], input_mode="text")))
    assert [asked(row) for row in batch.unbind(0)] == ["q0", "q0"]


def test_messages_are_not_for_a_policy_that_reads_text(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    episode = PromptEpisode("prompt", Rewards(by_answer), is_chat=False)
    collector = collector_of(engine, episode, [{"prompt": CHAT, "answer": 1}], input_mode="text")
    with pytest.raises(ValueError, match="the policy reads text, not messages: column 'prompt' is "):
        next(iter(collector))


def test_a_sample_without_its_prompt_says_what_it_has() -> None:
    async def ask(prompt: Any, **kwargs: Any) -> TensorDictBase:
        raise AssertionError("nothing is asked")

    episode = PromptEpisode("prompt", Rewards(by_answer))
    with pytest.raises(ValueError, match="the sample has no column 'prompt'; its columns are 'query'"):
        asyncio.run(episode(TensorDict(query="q0"), ask))


# -- what rewards see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("input_mode", "is_chat"), [("history", True), ("text", False)])
@pytest.mark.parametrize("tokenizer", [None, TOKENIZER], ids=["", "tokenizer"])
def test_the_answer_its_ids_and_the_row(
    engine: FakeAsyncVLLM, collector_of: Any, input_mode: str, is_chat: bool, tokenizer: Any
) -> None:
    seen = []

    def judge(prompt: Any, completion: str, completion_ids: list[int], answer: int, **columns: Any) -> float:
        seen.append((completion, completion_ids))
        assert (prompt, answer, columns) == ("q0", 7, {"tests": [1, [2]], "hint": None})
        return 1.0

    rows = [{"prompt": "q0", "answer": 7, "tests": [1, [2]], "hint": None}]
    episode = PromptEpisode("prompt", Rewards(judge), is_chat=is_chat, tokenizer=tokenizer)
    batch = next(iter(collector_of(engine, episode, rows, input_mode=input_mode)))
    for row in batch.unbind(0):
        ids = row["tokens"].response.tolist()
        assert (TOKENIZER.decode(ids, skip_special_tokens=tokenizer is not None), ids) in seen


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_tokenizer_leaves_special_tokens_out(is_chat: bool) -> None:
    seen = []

    def judge(completion: str) -> float:
        seen.append(completion)
        return 1.0

    ids = torch.tensor([*TOKENIZER("42")["input_ids"], TOKENIZER.eos_token_id])

    async def ask(prompt: Any, **kwargs: Any) -> Any:
        return {"tokens": SimpleNamespace(response=ids)}

    asyncio.run(
        PromptEpisode("prompt", Rewards(judge), is_chat=is_chat, tokenizer=TOKENIZER)(TensorDict(prompt="a"), ask)
    )
    assert seen == ["42"]


# -- what stands in the rows ------------------------------------------------------------------------------------------


def test_a_row_has_its_reward_and_what_it_is_made_of(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    def silent(completion: str) -> None:
        return None

    async def constant(prompt: str) -> float:
        return 0.5

    rewards = Rewards([by_answer, constant, silent], [1.0, 2.0, 3.0])
    rewards.check(load_prompts(ROWS).columns)
    answers = []
    for batch in islice(collector_of(engine, PromptEpisode("prompt", rewards), ROWS), 6):
        for row in batch.unbind(0):
            answer = row["answer"]
            assert row["prompt"] == f"q{answer}"
            assert row["next", "reward"].tolist() == [[answer + 1.0]]
            assert {name: value.tolist() for name, value in row["rewards"].items() if name != "silent"} == {
                "by_answer": [float(answer)],
                "constant": [0.5],
            }
            assert row["rewards", "silent"].isnan().tolist() == [True]
            assert {value.dtype for value in row["rewards"].values()} == {torch.float32}
        answers += batch["answer"]
    assert sorted(answers) == sorted([*range(6), *range(6)])


def test_columns_named_as_rollouts_name_things_are_for_rewards_only(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    taken = {name: f"of the data: {name}" for name in TAKEN}
    seen = []

    def judge(completion: str, **columns: Any) -> float:
        seen.append({name: columns[name] for name in TAKEN})
        return 1.0

    plain, other = (
        next(iter(collector_of(engine, PromptEpisode("prompt", Rewards(judge)), [row])))[0]
        for row in ({"prompt": "q0", **dict.fromkeys(TAKEN)}, {"prompt": "q0", **taken})
    )
    assert taken in seen
    assert set(plain.keys(True, True)) == set(other.keys(True, True))
    assert "of the data" not in repr(other.to_dict())


def test_held_out_prompts_are_rewarded_alike(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    episode = PromptEpisode("prompt", Rewards(by_answer))
    held_out = load_prompts((ROWS, ROWS[3:])).held_out_loader()
    turns = collector_of(engine, episode, ROWS).evaluate(episode, 3, dataloader=held_out)
    assert turns["answer"] == [3, 4, 5]
    assert turns["rewards", "by_answer"].flatten().tolist() == [3.0, 4.0, 5.0]


def test_an_episode_is_one_and_goes_to_another_process() -> None:
    episode = PromptEpisode("prompt", Rewards("torchrl_moe.testing.arithmetic:exact_answer"))
    copy = pickle.loads(pickle.dumps(episode))
    assert is_episode_function(copy)
    assert (copy.prompt_column, copy.rewards.names) == ("prompt", ["exact_answer"])


def test_a_batch_goes_into_a_buffer_and_into_a_checkpoint(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    """Rows whose columns are lists of other lengths, messages, mappings or nothing, one beside the other."""
    other = {"prompt": CHAT, "answer": 9, "tests": [1, [2, None]], "case": {"x": [1]}}
    rows = [{"prompt": "q0", "answer": 0, "tests": [], "hint": "a"}, other]
    collector = collector_of(engine, PromptEpisode("prompt", Rewards(by_answer)), rows, groups_per_batch=2)
    batch = next(iter(collector))
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=LazyStackStorage(4), sampler=sampler, batch_size=4, transform=GRPOAdvantage())
    buffer.extend(batch)
    written = BytesIO()
    torch.save(buffer.sample(), written)
    written.seek(0)
    for sample in (batch, buffer[:], torch.load(written, weights_only=False), unpack(pack(batch))):
        found = [{name: row[name] for name in ("answer", "tests", "hint", "case")} for row in sample.unbind(0)]
        for row in rows:
            assert found.count({"hint": None, "case": None, **{key: row[key] for key in row if key != "prompt"}}) == 2


def test_a_restored_collector_uses_each_prompt_once(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    episode = PromptEpisode("prompt", Rewards(by_answer))
    first = collector_of(engine, episode, ROWS)
    before = [batch["answer"][0] for batch in islice(first, 4)]
    state = first.state_dict()
    second = collector_of(engine, episode, ROWS)
    second.load_state_dict(state)
    after = [batch["answer"][0] for batch in islice(second, 8)]
    expected = [prompt.data["answer"] for prompt in islice(PromptStream(load_prompts(ROWS).loader(seed=0)), 12)]
    assert before + after == expected


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_plain_function_that_sleeps_costs_its_group_only(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    awake = threading.Event()

    def sleeps(completion: str, answer: int) -> float:
        if answer == 1:
            awake.wait()
        return float(answer)

    try:
        collector = collector_of(
            engine,
            PromptEpisode("prompt", Rewards(sleeps)),
            ROWS,
            reward_timeout=2.0,
            max_failures=1,
            max_staleness=0,
        )
        batches = list(islice(collector, 5))
        assert sorted({row["answer"] for batch in batches for row in batch.unbind(0)}) == [0, 2, 3, 4, 5]
        assert collector.stats()["collector/groups_dropped/reward_timeout"] == 1
        collector.shutdown()  # does not wait for it
        assert not awake.is_set()
    finally:
        awake.set()


def test_a_function_that_raises_costs_its_group(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    def breaks(completion: str, answer: int) -> float:
        return 1 / answer if answer != 1 else float("nan")

    episode = PromptEpisode("prompt", Rewards(breaks))
    collector = collector_of(engine, episode, ROWS, max_failures=2, max_staleness=0)
    batches = list(islice(collector, 4))
    assert sorted({row["answer"] for batch in batches for row in batch.unbind(0)}) == [2, 3, 4, 5]
    assert collector.stats()["collector/groups_dropped/failed"] == 2
