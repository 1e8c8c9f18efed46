"""Rewards: what a function gets, what its values come to, and the episode that asks for them."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from support.collecting import TOKENIZER, policy_of
from support.waiting import PATIENCE
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.workflow import is_episode_function
from torchrl_moe.data.packed import pack, unpack
from torchrl_moe.objectives import GRPOAdvantage
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM
from torchrl_moe.trainers.prompt_sources import load_prompts
from torchrl_moe.trainers.samples import TAKEN, PromptEpisode, Reward, Rewards

PLAIN = ByteTokenizer()
PLAIN.chat_template = None
CHAT = [{"role": "user", "content": "1+1="}]
COLUMNS = {"prompt": "1+1=", "answer": "2", "tests": [1, 2], "hint": None}


def reward(functions: Any, weights: Any = None, prompt: Any = "1+1=", columns: dict[str, Any] | None = None) -> Reward:
    """What the answer ``"2 "`` is worth."""
    rewards = Rewards(functions, weights)
    return asyncio.run(rewards(prompt, "2 ", [6, 19], COLUMNS if columns is None else columns))


def returning(value: Any) -> Callable[..., Any]:
    def returned(completion: str) -> Any:
        return value

    return returned


def named(name: str, value: Any) -> Callable[..., Any]:
    function = returning(value)
    function.__name__ = name
    return function


# -- what it gets -----------------------------------------------------------------------------------------------------
def test_a_parameter_gets_what_it_is_named_after_and_keywords_all_the_rest() -> None:
    expected = {"prompt": "1+1=", "completion": "2 ", "completion_ids": [6, 19], "tests": [1, 2], "hint": None}

    def judge(
        completion: str, completion_ids: list[int], prompt: str, answer: str, tests: list[int], *, hint: Any
    ) -> float:
        assert (completion, completion_ids, prompt) == ("2 ", [6, 19], "1+1=")
        assert (answer, tests, hint) == ("2", [1, 2], None)
        return 0.5

    def others(answer: str, **others: Any) -> float:
        assert others == expected
        return 1.0

    columns = {**COLUMNS, "completion": "of the data"}
    assert reward([judge, others], columns=columns) == Reward(1.5, {"judge": 0.5, "others": 1.0})


@pytest.mark.parametrize(
    ("prompt", "asked", "completion"),
    [
        ("1+1=", "1+1=", "2 "),
        (CHAT, CHAT, [{"role": "assistant", "content": "2 "}]),
        # an answer that continues a message is a part of it, as TRL has it
        ([*CHAT, {"role": "assistant", "content": "It is "}], CHAT, [{"role": "assistant", "content": "It is 2 "}]),
    ],
    ids=["text", "chat", "continued"],
)
def test_one_with_completions_gets_lists_of_one(prompt: Any, asked: Any, completion: Any) -> None:
    def judge(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float]:
        assert (prompts, completions, completion_ids, answer) == ([asked], [completion], [[6, 19]], ["2"])
        assert others == {"prompt": ["1+1="], "tests": [[1, 2]], "hint": [None]}
        return [0.25]

    def one(prompt: Any, completion: str) -> float:
        return float((prompt, completion) == (given, "2 "))

    given = prompt
    assert reward([judge, one], prompt=prompt) == Reward(1.25, {"judge": 0.25, "one": 1.0})


@pytest.mark.parametrize("value", [True, np.float32(1.0), np.bool_(True), torch.tensor(1.0)])
@pytest.mark.parametrize("values", [[1.0], (1.0,), torch.tensor([1.0]), np.array([1.0])])
def test_what_counts_as_a_number_and_as_a_list_of_one(value: Any, values: Any) -> None:
    for function in (lambda completion: value, lambda completions: values):
        found = reward(function)
        assert found == Reward(1.0, {"<lambda>": 1.0}) and type(found.values["<lambda>"]) is float


def test_what_is_no_number_and_no_list_of_one_is_refused() -> None:
    for values in (0.5, [], [0.5, 0.5], None, torch.tensor(0.5)):
        words = "the reward function '<lambda>' was given one completion, and must return a list of one value, got "
        with pytest.raises(TypeError, match=words):
            reward(lambda completions, values=values: values)
    for value in ("1.0", [1.0], {"reward": 1.0}, 1j, torch.tensor([1.0])):
        with pytest.raises(TypeError, match="the reward function 'returned' must return a number or None, got "):
            reward(returning(value))


FINITE = "the reward function 'returned' returned {}: a reward must be finite"


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([named("a", 1.0), returning(math.nan)], FINITE.format("nan")),
        ([named("a", 1.0), returning(math.inf)], FINITE.format("inf")),
        ([named("a", 1.0), returning(-math.inf)], FINITE.format("-inf")),
        ([named("a", 1.0), returning(torch.tensor(math.nan))], FINITE.format("nan")),
        (returning(10**400), FINITE.format("inf")),
        ([named("a", 3e38), named("b", 1e38)], r"sum of the functions returned 3\.1.*e\+39"),
    ],
)
def test_what_is_not_finite_is_refused(functions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward(functions, [10.0, 1.0] if "sum" in message else None)


# -- how it is called -------------------------------------------------------------------------------------------------
class Judge:
    """An object that is called."""

    def __call__(self, completion: str) -> float:
        return 1.0


class AsyncJudge:
    """The same, awaited."""

    async def __call__(self, completion: str) -> float:
        return 2.0


async def awaited(completion: str, bonus: float = 0.0) -> float:
    await asyncio.sleep(0)
    return 3.0 + bonus


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (Judge(), "Judge", 1.0), (AsyncJudge(), "AsyncJudge", 2.0), (awaited, "awaited", 3.0),
        (partial(awaited, bonus=1.0), "awaited", 4.0),
        (lambda completion: awaited(completion), "<lambda>", 3.0),
        ("torchrl_moe.testing.arithmetic:exact_answer", "exact_answer", 0.0),
    ],
)  # fmt: skip
def test_what_is_called_and_how_it_is_named(function: Any, name: str, value: float) -> None:
    assert reward(function) == reward([function]) == Reward(value, {name: value})
    assert Rewards(function).names == [name]


def test_plain_functions_run_beside_each_other_in_threads() -> None:
    both = threading.Barrier(2, timeout=PATIENCE)
    threads = []

    def wait(completion: str) -> float:
        threads.append(threading.current_thread())
        both.wait()
        return 1.0

    async def two_samples() -> list[Reward]:
        rewards = Rewards(wait)
        return await asyncio.gather(*(rewards("1+1=", "2", [6], COLUMNS) for _ in range(2)))

    assert [one.total for one in asyncio.run(two_samples())] == [1.0, 1.0]
    assert threading.main_thread() not in threads


# -- what the values come to ------------------------------------------------------------------------------------------
def test_the_total_is_the_weighted_sum_and_one_without_an_opinion_counts_for_nothing() -> None:
    functions = [named("a", 1.0), named("b", 0.5), named("c", -2)]
    assert reward(functions) == Reward(-0.5, {"a": 1.0, "b": 0.5, "c": -2.0})
    assert reward(functions, [1.0, 4.0, 0.5]) == Reward(2.0, {"a": 1.0, "b": 0.5, "c": -2.0})
    assert reward([named("a", None), named("b", 0.5)], [10.0, 2.0]) == Reward(1.0, {"a": None, "b": 0.5})
    assert reward([lambda completions: [None], named("b", 1.0)]) == Reward(1.0, {"<lambda>": None, "b": 1.0})
    assert reward([named("a", None), named("b", None)]) == Reward(None, {"a": None, "b": None})


@pytest.mark.parametrize(("raised", "seen"), [(KeyError("a"), KeyError), (StopIteration(), RuntimeError)])
def test_an_error_names_the_function(raised: Exception, seen: type[Exception]) -> None:
    def breaks(completion: str) -> float:
        raise raised

    with pytest.raises(seen) as error:
        reward(breaks)
    (note,) = error.value.__notes__
    assert note == f"in the reward function 'breaks' (test_rewards.py:{breaks.__code__.co_firstlineno + 1})"


def test_each_function_has_ids_of_its_own() -> None:
    def first(completion_ids: list[int]) -> Decimal:
        return Decimal(completion_ids.pop())

    def second(completion_ids: list[int]) -> float:
        return float(completion_ids.pop())

    values = reward([first, second]).values
    assert values["first"] == values["second"]


def test_a_cancellation_of_its_own_names_the_function_and_an_error_ends_the_others() -> None:
    def cancelled(completion: str) -> float:
        raise asyncio.CancelledError

    async def ends(completion: str) -> float:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return 1.0

    for function in (cancelled, ends):
        with pytest.raises(RuntimeError, match=f"the reward function '{function.__name__}' "):
            reward(function)
    ended = []

    async def waits(completion: str) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(completion)
            raise
        return 1.0

    async def breaks(completion: str) -> float:
        raise KeyError("a")

    with pytest.raises(KeyError):
        reward([waits, breaks])
    assert ended == ["2 "]


# -- what is refused --------------------------------------------------------------------------------------------------
def test_a_parameter_that_nothing_has_the_name_of() -> None:
    def exact(completion: str, solution: str) -> float:
        return 1.0

    def batched(completions: list[str], completion: str) -> list[float]:
        return [1.0]

    Rewards(exact).check(["prompt", "solution"])
    there = "'exact' asks for 'solution'; there are prompt, completion, completion_ids, and the columns 'answer', 'tes"
    with pytest.raises(ValueError, match=f"^the reward function {there}ts'$"):
        Rewards([Judge(), exact]).check(["prompt", "answer", "tests"])
    with pytest.raises(ValueError, match=f"{there}ts', 'hint'"):
        reward(exact)
    there = "'batched' asks for 'completion'; there are prompts, completions, completion_ids$"
    with pytest.raises(ValueError, match=there):
        Rewards(batched).check([])


def placed(completion: str, /) -> float:
    return 1.0


def anything(*values: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([], None, "there are no reward functions"),
        ([Judge(), Judge()], None, "two reward functions have the name 'Judge'"),
        ([Judge()], [1.0, 2.0], "there are 2 weights for 1 reward functions"),
        ([Judge(), awaited], [1.0], "there are 1 weights for 2 reward functions"),
        ([Judge()], [float("nan")], "the weight of the reward function 'Judge' must be finite, got nan"),
        ([Judge()], [float("inf")], "must be finite, got inf"),
        ("no_such_package:f", None, "cannot import 'no_such_package'"),
        (["exact"], None, "'exact' is not the name of a function"),
        (placed, None, "'placed' takes 'completion' by its place only"),
        (anything, None, "'anything' asks for nothing: give it a parameter such as 'completion'"),
        (lambda: 1.0, None, "asks for nothing"),
        (max, None, "the reward function 'max' does not say what its parameters are"),
    ],
)
def test_functions_and_weights_that_make_no_sense(functions: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rewards(functions, weights)


ROWS = [{"prompt": f"q{i}", "answer": i} for i in range(6)]
TWO_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q0", "name": None}]


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


def by_answer(completion: str, answer: int) -> float:
    return float(answer)


# -- what is asked, and what rewards see ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tokenizer", "sample", "message"),
    [
        (PLAIN, {"prompt": TWO_MESSAGES}, "the policy reads text, not messages: column 'prompt'"),
        (TOKENIZER, {"query": "q0"}, "the sample has no column 'prompt'; its columns are 'query'"),
    ],
)
def test_what_is_no_prompt_is_not_asked(tokenizer: Any, sample: dict[str, Any], message: str) -> None:
    async def ask(prompt: Any, **kwargs: Any) -> TensorDictBase:
        raise AssertionError("nothing is asked")

    with pytest.raises(ValueError, match=message):
        asyncio.run(PromptEpisode("prompt", Rewards(by_answer), tokenizer)(TensorDict(sample), ask))


@pytest.mark.parametrize(("input_mode", "tokenizer"), [("history", TOKENIZER), ("text", PLAIN)], ids=["chat", "text"])
def test_the_answer_its_ids_and_the_row(
    engine: FakeAsyncVLLM, collector_of: Any, input_mode: str, tokenizer: Any
) -> None:
    seen = []

    def judge(prompt: Any, completion: str, completion_ids: list[int], answer: int, **columns: Any) -> float:
        seen.append((completion, completion_ids))
        assert (prompt, answer, columns) == ("q0", 7, {"tests": [1, [2]], "hint": None})
        return 1.0

    rows = [{"prompt": "q0", "answer": 7, "tests": [1, [2]], "hint": None}]
    episode = PromptEpisode("prompt", Rewards(judge), tokenizer)
    batch = next(iter(collector_of(engine, episode, rows, input_mode=input_mode)))
    for row in batch.unbind(0):
        ids = row["tokens"].response.tolist()
        assert (TOKENIZER.decode(ids, skip_special_tokens=True), ids) in seen


# -- what stands in the rows ------------------------------------------------------------------------------------------
def test_a_row_has_its_reward_and_what_it_is_made_of(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    def silent(completion: str) -> None:
        return None

    async def constant(prompt: str) -> float:
        return 0.5

    rewards = Rewards([by_answer, constant, silent], [1.0, 2.0, 3.0])
    rewards.check(load_prompts(ROWS).columns)
    answers = []
    for batch in islice(collector_of(engine, PromptEpisode("prompt", rewards, TOKENIZER), ROWS), 6):
        for row in batch.unbind(0):
            answer = row["answer"]
            assert row["prompt"] == f"q{answer}" and row["next", "reward"].tolist() == [[answer + 1.0]]
            values = {name: value.item() for name, value in row["rewards"].items()}
            expected = {"by_answer": float(answer), "constant": 0.5, "silent": float("nan")}
            assert values == pytest.approx(expected, nan_ok=True)
            assert {(value.shape, value.dtype) for value in row["rewards"].values()} == {((1,), torch.float32)}
        answers += batch["answer"]
    assert sorted(answers) == sorted([*range(6), *range(6)])


def test_columns_named_as_rollouts_name_things_are_for_rewards_only(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    taken = {name: f"of the data: {name}" for name in TAKEN}
    seen = []

    def judge(completion: str, **columns: Any) -> float:
        seen.append({name: columns[name] for name in TAKEN})
        return 1.0

    plain, other = (
        next(iter(collector_of(engine, PromptEpisode("prompt", Rewards(judge), TOKENIZER), [row])))[0]
        for row in ({"prompt": "q0", **dict.fromkeys(TAKEN)}, {"prompt": "q0", **taken})
    )
    assert taken in seen and set(plain.keys(True, True)) == set(other.keys(True, True))
    assert "of the data" not in repr(other.to_dict())


def test_an_episode_is_one_and_goes_to_another_process() -> None:
    episode = PromptEpisode("prompt", Rewards("torchrl_moe.testing.arithmetic:exact_answer"), TOKENIZER)
    copy = pickle.loads(pickle.dumps(episode))
    assert is_episode_function(copy)
    assert (copy.prompt_column, copy.rewards.names) == ("prompt", ["exact_answer"])


def test_a_batch_goes_into_a_buffer_and_into_a_checkpoint(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    """Rows whose columns are lists of other lengths, messages, mappings or nothing, one beside the other."""
    other = {"prompt": TWO_MESSAGES, "answer": 9, "tests": [1, [2, None]], "case": {"x": [1]}}
    rows = [{"prompt": "q0", "answer": 0, "tests": [], "hint": "a"}, other]
    episode = PromptEpisode("prompt", Rewards(by_answer), TOKENIZER)
    batch = next(iter(collector_of(engine, episode, rows, groups_per_batch=2)))
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
