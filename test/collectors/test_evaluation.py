"""Held-out prompts are answered once each, first, without routes, and the collection continues."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import DatasetChatEnv

from support.collecting import TOKENIZER, Questions, chat, policy_of, queries
from support.interrupts import Interrupt
from support.waiting import HOUR, until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.async_collector import evaluate
from torchrl_moe.collectors.environments import EnvironmentTimeoutError
from torchrl_moe.errors import RequestRefusedError
from torchrl_moe.testing import FakeAsyncVLLM

REPLICAS = 1


def test_each_prompt_is_answered_once_in_the_order_of_the_data_and_as_is_asked_for(engine: FakeAsyncVLLM) -> None:
    env = chat(1, reward=lambda query: float(query[1:]))
    rows = evaluate(policy_of(engine), env, 5, Questions(9), temperature=0.0, max_new_tokens=2)
    assert queries(rows) == ["q0", "q1", "q2", "q3", "q4"]
    assert rows["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert "routed_experts" not in rows.keys()  # noqa: SIM118
    asked = engine.replicas[0].submitted
    assert {request.priority for request in asked} == {-1 << 30}
    assert {(request.param("temperature"), request.param("max_tokens")) for request in asked} == {(0.0, 2)}


def test_the_last_turn_is_returned_and_rewards_of_all_turns_are_summed(engine: FakeAsyncVLLM) -> None:
    rows = evaluate(policy_of(engine), lambda: chat(1, turns=3, reward=lambda query: 0.5), 2, Questions())
    found = [rows["next", key].flatten().tolist() for key in ("step_count", "episode_reward", "reward")]
    assert found == [[3, 3], [1.5, 1.5], [0.5, 0.5]]
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got 0"):
        evaluate(policy_of(engine), chat(1), 0, Questions())
    with pytest.raises(ValueError, match="there is no data"):
        evaluate(policy_of(engine), chat(1), 1)


def test_a_prompt_that_the_engine_refuses_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    def too_long(request: Any) -> str | None:
        return "longer than the model" if ord("1") in request.prompt_token_ids else None

    with FakeAsyncVLLM(refuse=too_long) as engine:
        rows = evaluate(policy_of(engine), chat(1), 3, Questions())
        assert queries(rows) == ["q0", "q2"]
        assert "prompt 1 is left out of the evaluation (query='q1'): " in caplog.text
        assert "longer than the model" in caplog.text
        with pytest.raises(RequestRefusedError, match="longer than the model"):
            evaluate(policy_of(engine), chat(1), 1, [{"query": ["q1"]}])


def test_an_episode_that_does_not_continue_ends_the_evaluation(engine: FakeAsyncVLLM) -> None:
    async def episode(data: TensorDictBase, ask: Any) -> float:
        await ask(data["query"])
        await asyncio.Event().wait()
        return 0.0

    with pytest.raises(EnvironmentTimeoutError, match=r"within 0\.2 s"):
        evaluate(policy_of(engine), episode, 1, Questions(), reward_timeout=0.2)


def test_an_environment_can_be_used_again_and_those_that_were_made_are_closed(engine: FakeAsyncVLLM) -> None:
    closed: list[EnvBase] = []
    made: list[EnvBase] = []

    def make() -> EnvBase:
        one = chat(1)
        one.close = lambda **_: closed.append(one)
        made.append(one)
        return one

    policy, env = policy_of(engine), make()
    for _ in range(2):
        assert queries(evaluate(policy, env, 2, Questions())) == ["q0", "q1"]
    evaluate(policy, make, 2, Questions())
    assert len(made) > 1
    assert {id(one) for one in closed} == {id(one) for one in made[1:]}


def test_a_collection_continues_beside_it(collect: Callable[..., AsyncLLMCollector], engine: FakeAsyncVLLM) -> None:
    engine.replicas[0].token_seconds = 1e-3
    collector = collect(order="fifo")
    batches = iter(collector)
    seen = queries(next(batches))[::2]
    assert queries(collector.evaluate(chat(1), 2, dataloader=Questions())) == ["q0", "q1"]
    seen += [query for batch in islice(batches, 4) for query in queries(batch)[::2]]
    assert seen == ["q0", "q1", "q2", "q3", "q4"]


def test_it_works_inside_a_running_event_loop_with_an_environment_that_brings_its_data(engine: FakeAsyncVLLM) -> None:
    env = DatasetChatEnv.from_dataloader(Questions(8), repeats=4, batch_size=(16,), tokenizer=TOKENIZER)

    async def cell() -> list[str]:
        return queries(evaluate(policy_of(engine), env.append_transform(StepCounter(max_steps=1)), 3))

    assert asyncio.run(cell()) == ["q0", "q1", "q2"]


def test_a_bar_counts_answers_where_somebody_looks(
    engine: FakeAsyncVLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for use_tqdm, is_terminal in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
        evaluate(policy_of(engine), chat(1), 3, Questions(), use_tqdm=use_tqdm)
        assert ("3/3" in capsys.readouterr().err) is (use_tqdm and is_terminal)


def test_a_ctrl_c_aborts_its_requests(engine: FakeAsyncVLLM, interrupt: Interrupt) -> None:
    engine.replicas[0].token_seconds = HOUR
    interrupt(lambda: engine.get_num_unfinished_requests() == [3])
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy_of(engine), chat(1), 3, Questions())
    until(lambda: engine.get_num_unfinished_requests() == [0])
    # A thread that was about to start when the signal came ends by itself, a little later.
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("torchrl_moe-evaluation")])
    engine.replicas[0].token_seconds = 0.0
    assert queries(evaluate(policy_of(engine), chat(1), 2, Questions())) == ["q0", "q1"]
