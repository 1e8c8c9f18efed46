"""Rewards: what a function gets, what its values come to, and the episode that asks for them."""

from __future__ import annotations

import asyncio
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
def test_a_parameter_gets_what_it_is_named_after() -> None:
    def judge(
        completion: str, completion_ids: list[int], prompt: str, answer: str, tests: list[int], *, hint: Any
    ) -> float:
        assert (completion, completion_ids, prompt) == ("2 ", [6, 19], "1+1=")
        assert (answer, tests, hint) == ("2", [1, 2], None)
        return 0.5

    assert reward(judge) == Reward(0.5, {"judge": 0.5})


def test_keywords_get_all_the_rest() -> None:
    seen: dict[str, Any] = {}

    def judge(answer: str, **others: Any) -> float:
        seen.update(others)
        return 1.0

    reward(judge, columns={**COLUMNS, "completion": "of the data"})
    expected = {"prompt": "1+1=", "completion": "2 ", "completion_ids": [6, 19], "tests": [1, 2], "hint": None}
    assert seen == expected


@pytest.mark.parametrize(
    ("prompt", "completion"), [("1+1=", "2 "), (CHAT, [{"role": "assistant", "content": "2 "}])], ids=["text", "chat"]
)
def test_one_with_completions_gets_lists_of_one(prompt: Any, completion: Any) -> None:
    seen: dict[str, Any] = {}

    def judge(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float]:
        assert (prompts, completions, completion_ids, answer) == ([prompt], [completion], [[6, 19]], ["2"])
        seen.update(others)
        return [0.25]

    assert reward(judge, prompt=prompt) == Reward(0.25, {"judge": 0.25})
    assert seen == {"prompt": ["1+1="], "tests": [[1, 2]], "hint": [None]}


@pytest.mark.parametrize(
    ("function", "total"),
    [
        *((lambda completion, value=value: value, total) for value, total in (
            (True, 1.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (torch.tensor(0.25), 0.25),
        )),
        *((lambda completions, values=values: values, 0.5) for values in (
            [0.5], (0.5,), torch.tensor([0.5]), np.array([0.5]),
        )),
    ],
)  # fmt: skip
def test_what_counts_as_a_number(function: Any, total: float) -> None:
    found = reward(function)
    assert found == Reward(total, {"<lambda>": total})
    assert type(found.values["<lambda>"]) is float


ONE_VALUE = "the reward function '<lambda>' was given one completion, and must return a list of one value, got "
NUMBER = "the reward function 'returned' must return a number or None, got "
FINITE = "the reward function 'returned' returned {}: a reward must be finite"


@pytest.mark.parametrize(
    ("functions", "error", "message"),
    [
        *((lambda completions, values=values: values, TypeError, ONE_VALUE) for values in (
            0.5, [], [0.5, 0.5], None, torch.tensor(0.5),
        )),
        *((returning(value), TypeError, NUMBER) for value in (
            "1.0", [1.0], {"reward": 1.0}, 1j, torch.tensor([1.0]),
        )),
        *(([named("a", 1.0), returning(value)], ValueError, FINITE.format(float(value))) for value in (
            float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan")),
        )),
        (returning(10**400), ValueError, FINITE.format("inf")),
        ([named("a", 3e38), named("b", 1e38)], ValueError, r"sum of the functions returned 3\.1.*e\+39"),
    ],
)  # fmt: skip
def test_what_is_no_reward(functions: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
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
def test_the_total_is_the_weighted_sum() -> None:
    functions = [named("a", 1.0), named("b", 0.5), named("c", -2)]
    assert reward(functions) == Reward(-0.5, {"a": 1.0, "b": 0.5, "c": -2.0})
    assert reward(functions, [1.0, 4.0, 0.5]) == Reward(2.0, {"a": 1.0, "b": 0.5, "c": -2.0})


def test_one_without_an_opinion_counts_for_nothing() -> None:
    assert reward([named("a", None), named("b", 0.5)], [10.0, 2.0]) == Reward(1.0, {"a": None, "b": 0.5})
    assert reward([lambda completions: [None], named("b", 1.0)]) == Reward(1.0, {"<lambda>": None, "b": 1.0})
    assert reward([named("a", None), named("b", None)]) == Reward(None, {"a": None, "b": None})


def test_an_answer_that_continues_a_message_is_a_part_of_it_for_functions_of_lists() -> None:
    """As TRL calls them; a function of one answer gets the prompt as it is, and what was generated."""
    prompt, seen = [*CHAT, {"role": "assistant", "content": "It is "}], []

    def listed(prompts: Any, completions: Any) -> list[float]:
        seen.append((prompts, completions))
        return [0.0]

    def one(prompt: Any, completion: str) -> float:
        seen.append((prompt, completion))
        return 0.0

    reward(listed, prompt=prompt)
    reward(one, prompt=prompt)
    assert seen == [([CHAT], [[{"role": "assistant", "content": "It is 2 "}]]), (prompt, "2 ")]


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


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_cancellation_of_its_own_names_the_function(is_asynchronous: bool) -> None:
    def breaks(completion: str) -> float:
        raise asyncio.CancelledError

    async def ends(completion: str) -> float:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return 1.0

    name = "ends" if is_asynchronous else "breaks"
    with pytest.raises(RuntimeError, match=f"the reward function '{name}' "):
        reward(ends if is_asynchronous else breaks)


def test_an_error_ends_the_others() -> None:
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
    message = (
        "the reward function 'exact' asks for 'solution'; there are prompt, completion, completion_ids, and the "
        "columns 'answer', 'tests'"
    )
    with pytest.raises(ValueError) as error:
        Rewards([Judge(), exact]).check(["prompt", "answer", "tests"])
    assert str(error.value) == message
    with pytest.raises(ValueError, match=r"asks for 'solution'; .* and the columns 'answer', 'tests', 'hint'"):
        reward(exact)
    with pytest.raises(
        ValueError, match=r"'batched' asks for 'completion'; there are prompts, completions, completion_ids$"
    ):
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


def asked(row: TensorDictBase) -> str:
    return TOKENIZER.decode(row["tokens"].prompt.tolist())


def by_answer(completion: str, answer: int) -> float:
    return float(answer)


# -- what is asked ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt", ["q0", TWO_MESSAGES], ids=["text", "messages"])
def test_a_chat_is_asked_as_messages(engine: FakeAsyncVLLM, collector_of: Any, prompt: Any) -> None:
    batch = next(
        iter(
            collector_of(
                engine, PromptEpisode("prompt", Rewards(by_answer), TOKENIZER), [{"prompt": prompt, "answer": 1}]
            )
        )
    )
    messages = [{"role": "user", "content": "q0"}]
    expected = messages if prompt == "q0" else [{"role": "system", "content": "Be brief."}, *messages]
    rendered = TOKENIZER.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert [asked(row) for row in batch.unbind(0)] == [rendered, rendered]


def test_messages_are_not_for_a_policy_that_reads_text(engine: FakeAsyncVLLM, collector_of: Any) -> None:
    episode = PromptEpisode("prompt", Rewards(by_answer), PLAIN)
    collector = collector_of(engine, episode, [{"prompt": TWO_MESSAGES, "answer": 1}], input_mode="text")
    with pytest.raises(ValueError, match="the policy reads text, not messages: column 'prompt'"):
        next(iter(collector))


def test_a_sample_without_its_prompt_says_what_it_has() -> None:
    async def ask(prompt: Any, **kwargs: Any) -> TensorDictBase:
        raise AssertionError("nothing is asked")

    episode = PromptEpisode("prompt", Rewards(by_answer), TOKENIZER)
    with pytest.raises(ValueError, match="the sample has no column 'prompt'; its columns are 'query'"):
        asyncio.run(episode(TensorDict(query="q0"), ask))


# -- what rewards see -------------------------------------------------------------------------------------------------
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
    batch = next(
        iter(collector_of(engine, PromptEpisode("prompt", Rewards(by_answer), TOKENIZER), rows, groups_per_batch=2))
    )
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


# -- what goes wrong --------------------------------------------------------------------------------------------------
