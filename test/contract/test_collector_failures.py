"""One rule for what fails in environments and rewards: its group is dropped whole, counted, and said by its prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv

from support.collecting import TOKENIZER, chat, collectors_over, queries
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import FakeAsyncVLLM

Collect = Callable[..., AsyncLLMCollector]
BAD = "q1"
SOON = 10.0  # seconds: the other groups must end in them, on a busy machine, too


@pytest.fixture
def collect() -> Iterator[Collect]:
    """Makes collectors of groups of 2 over questions."""
    with FakeAsyncVLLM(num_replicas=2) as engine, collectors_over(engine) as make:
        yield make


def ending(value: Callable[[], Any]) -> Any:
    """An async function whose second prompt ends in another way than the others."""

    async def episode(data: TensorDictBase, ask: Any) -> Any:
        await ask(data["query"])
        if data["query"] != BAD:
            return 1.0
        found = value()
        return await found if asyncio.iscoroutine(found) else found

    return episode


class Rewards(Transform):
    """Sets the reward that a function has for the second prompt; 1 for others."""

    def __init__(self, value: Callable[[], Any]) -> None:
        super().__init__()
        self.value = value

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        is_bad = tensordict.get("query").tolist()[0] == BAD
        reward = self.value() if is_bad else torch.ones(*tensordict.batch_size, 1, 1)
        return next_tensordict if reward is None else next_tensordict.set("reward", reward)


def rewarding(value: Callable[[], Any], size: int = 2) -> Callable[[], Any]:
    """A callable that makes environments of such rewards."""

    def make() -> Any:
        env = ChatEnv(batch_size=(size,), tokenizer=TOKENIZER)
        return env.append_transform(Rewards(value)).append_transform(StepCounter(max_steps=1))

    return make


def raises(error: BaseException) -> Any:
    raise error


async def forever() -> float:
    await asyncio.Event().wait()
    return 1.0


CALLS: list[int] = []


def first_only() -> Any:
    """A reward for every other call."""
    CALLS.append(1)
    return torch.ones(1, 1, 1) if len(CALLS) % 2 else None


CASES = {
    "an exception": (ending(lambda: raises(ZeroDivisionError("no"))), "ZeroDivisionError('no')", "failed"),
    "None": (ending(lambda: None), "2 of 2 answers have no reward", "failed"),
    "beyond float32, env": (
        rewarding(lambda: torch.full((2, 1, 1), 1e39, dtype=torch.float64)),
        "a reward must be finite, in float32",
        "failed",
    ),
    "an exit": (ending(lambda: raises(SystemExit(3))), "an episode raised SystemExit(3)", "failed"),
    "a Ctrl-C": (ending(lambda: raises(KeyboardInterrupt())), "an episode raised KeyboardInterrupt()", "failed"),
    "a hang": (ending(forever), f"the episode did not continue within {SOON:g} s", "reward_timeout"),
    "an exception, env": (rewarding(lambda: raises(ZeroDivisionError("no"))), "ZeroDivisionError('no')", "failed"),
    "no reward, env": (rewarding(first_only, 1), "1 of 2 rows of a group have no reward", "failed"),
    "NaN, env": (rewarding(lambda: torch.full((2, 1, 1), torch.nan)), "a reward must be finite", "failed"),
    "no number, env": (
        rewarding(lambda: NonTensorData("good", batch_size=(2,))),
        "the environment's reward is 'good': a reward must be a tensor",
        "failed",
    ),
    "wrong length, env": (rewarding(lambda: torch.ones(3, 1, 1)), "", "failed"),
    "an exit, env": (rewarding(lambda: raises(SystemExit(3))), "an environment raised SystemExit(3)", "failed"),
    "a Ctrl-C, env": (
        rewarding(lambda: raises(KeyboardInterrupt())),
        "an environment raised KeyboardInterrupt()",
        "failed",
    ),
    "a hang, env": (
        rewarding(lambda: time.sleep(SOON + 1)),
        f"the environment did not return within {SOON:g} s",
        "reward_timeout",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failure_costs_its_group_whole_is_counted_and_has_its_words(collect: Collect, case: str) -> None:
    env, words, reason = CASES[case]
    patience = SOON if reason == "reward_timeout" else 60.0
    collector = collect(env, groups_per_batch=2, order="fifo", max_failures=1, reward_timeout=patience)
    batch = check_that_q1_was_dropped(collector, words, reason)
    assert batch["next", "reward"].flatten().tolist() == [1.0] * 4
    for shown in (repr(collector), collector.to_pandas()["first_failure"][0], collector._repr_html_()):
        assert "at prompt 1" in shown


def check_that_q1_was_dropped(collector: AsyncLLMCollector, words: str, reason: str = "failed") -> Any:
    """Whole, counted, and replaced by the next prompt, in the batch that comes."""
    batch: Any = next(iter(collector))
    assert queries(batch) == ["q0", "q0", "q2", "q2"]
    stats = collector.stats()
    assert (stats["collector/failures"], stats[f"collector/groups_dropped/{reason}"]) == (1, 1)
    assert collector.first_failure is not None
    assert collector.first_failure.startswith("at prompt 1 (query='q1'): ") and words in collector.first_failure
    return batch


def test_a_prompt_that_the_engine_refuses_costs_its_group() -> None:
    def too_long(request: Any) -> str | None:
        return "longer than the model" if ord("1") in request.prompt_token_ids else None

    with FakeAsyncVLLM(refuse=too_long) as engine, collectors_over(engine) as make:
        collector = make(ending(lambda: 1.0), groups_per_batch=2, order="fifo", max_failures=1)
        check_that_q1_was_dropped(collector, "longer than the model")


def test_a_filter_that_raises_costs_the_group_that_it_was_asked_about(collect: Collect) -> None:
    def keep(rows: TensorDictBase) -> bool:
        if queries(rows)[0] == BAD:
            raise ZeroDivisionError("no filter")
        return True

    collector = collect(ending(lambda: 1.0), groups_per_batch=2, order="fifo", max_failures=1, group_filter=keep)
    check_that_q1_was_dropped(collector, "ZeroDivisionError('no filter')")


@pytest.mark.parametrize("case", ["an exception", "None", "NaN, env"])
def test_a_failure_beyond_those_that_are_borne_is_raised(collect: Collect, case: str) -> None:
    env, words, _ = CASES[case]
    with pytest.raises(Exception, match=None) as caught:
        next(iter(collect(env, groups_per_batch=2, max_staleness=0)))
    assert words in repr(caught.value) and "at prompt 1: query='q1'" in caught.value.__notes__


def test_an_error_that_is_raised_again_names_the_prompt_at_which_it_ended_the_collection(collect: Collect) -> None:
    shared = ZeroDivisionError("again")

    async def episode(data: TensorDictBase, ask: Any) -> float:
        await ask(data["query"])
        if data["query"] in ("q1", "q3"):
            raise shared
        return 1.0

    collector = collect(episode, groups_per_batch=1, order="fifo", max_failures=1, max_staleness=0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(islice(collector, 4))
    assert caught.value.__notes__ == ["at prompt 3: query='q3'"]
    assert collector.first_failure == "at prompt 1 (query='q1'): ZeroDivisionError('again')"


def test_a_sample_that_is_left_out_is_counted(collect: Collect) -> None:
    plays: list[str] = []

    async def episode(data: TensorDictBase, ask: Any) -> float | None:
        plays.append(data["query"])
        number = len(plays)
        await ask(data["query"])
        return None if number == 2 else 1.0

    collector = collect(episode, group_size=3, max_staleness=0)
    assert len(next(iter(collector))) == 2
    stats = collector.stats()
    assert (stats["collector/samples_left_out"], stats["collector/failures"]) == (1, 0)
    assert collector.first_failure is None and "first_failure" not in collector.to_pandas()


def test_rows_may_come_without_any_reward_for_a_postproc_to_add(collect: Collect) -> None:
    assert ("next", "reward") not in next(iter(collect(chat(2)))).keys(include_nested=True)
