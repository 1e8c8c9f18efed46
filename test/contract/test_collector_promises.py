"""What each collector promises: whole groups, each prompt once, whole turns, no silent error, and a buffer's rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import StepCounter
from torchrl.envs.llm import DatasetChatEnv

from support.collecting import TOKENIZER, NextQuestion, Questions, Reward, chat, new_weights, policy_of, queries
from support.services import submitted
from support.waiting import until
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM

GROUPS = 2
"""Of two samples, in a batch."""


def asynchronous(
    engine: Any, turns: int = 1, reward: Callable[[str], float] | None = None, ahead: int = 0, **kwargs: Any
) -> AsyncLLMCollector:
    given = {
        "policy": policy_of(engine),
        "dataloader": Questions(64),
        "max_staleness": ahead,
        "order": "fifo",
        **kwargs,
    }
    return AsyncLLMCollector(lambda: chat(1, turns, reward), group_size=2, groups_per_batch=GROUPS, **given)


def synchronous(
    engine: Any, turns: int = 1, reward: Callable[[str], float] | None = None, ahead: int = 0, **kwargs: Any
) -> LLMCollector:
    env = DatasetChatEnv.from_dataloader(Questions(64), repeats=2, batch_size=(4,), tokenizer=TOKENIZER)
    if turns > 1:
        env = env.append_transform(NextQuestion())
    if reward is not None:
        env = env.append_transform(Reward(reward))
    env = env.append_transform(StepCounter(max_steps=turns))
    given = {"policy": policy_of(engine), "yield_completed_trajectories": True, **kwargs}
    return LLMCollector(env, dialog_turns_per_batch=2 * GROUPS * turns, **given)


@pytest.fixture
def engine() -> Any:
    with FakeAsyncVLLM(num_replicas=2) as service:
        yield service


@pytest.fixture(params=[asynchronous, synchronous])
def collect(request: pytest.FixtureRequest, engine: AsyncVLLM) -> Any:
    """Makes collectors of batches of two groups of two, and shuts them down."""
    made: list[Any] = []

    def make(**kwargs: Any) -> Any:
        made.append(request.param(engine, **kwargs))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def rows_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """Samples one after another, each with its turns in order."""
    return list(batch.reshape(-1).unbind(0))


def asked(batch: TensorDictBase) -> list[str]:
    return queries(batch.reshape(-1))


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyStackStorage(64), batch_size=8)


def no_reward(query: str) -> float:
    raise ZeroDivisionError(f"no reward for {query}")


def test_turns_follow_one_another_and_keep_what_is_known_of_the_earlier(collect: Any, engine: Any) -> None:
    rows = rows_of(next(iter(collect(turns=3))))
    assert len(rows) == 4 * 3
    for sample in (rows[i : i + 3] for i in range(0, 12, 3)):
        for earlier, later in pairwise(sample):
            had = earlier["tokens", "full"]
            assert torch.equal(later["tokens", "prompt"][: len(had)], had)
            for key in ("log_probs", "routed_experts", "policy_versions"):
                first, second = earlier[key, "full"], later[key, "full"][: len(had)]
                known = first.isfinite() if key == "log_probs" else first != -1
                assert known.any() and torch.equal(first[known], second[known])
            # the last token of a turn has its route from the next turn's prefill
            assert (later["routed_experts", "full"][len(had) - 1][1:] != -1).all()
    sent = submitted(engine)
    assert all(request.prompt_token_ids is not None for request in sent)
    assert len({request.request_id for request in sent}) == len(sent)


def test_routes_and_kept_tokens_of_all_turns_come_through_a_buffer(collect: Any, engine: Any) -> None:
    rows, kwargs = buffer(), {"max_new_tokens": 6, "top_k": 3, "temperature": 0.5}
    policy = policy_of(engine).get_new_version(generate_kwargs=kwargs)
    collector = collect(turns=2, policy=policy, replay_buffer=rows, total_dialog_turns=16)
    assert list(islice(collector, 2)) == [None, None]
    assert len(rows) == 16
    turns = set()
    for row in rows.sample().unbind(0):
        length, answered = len(row["tokens", "full"]), row["policy_versions", "full"] >= 0
        assert len(row["routed_experts", "full"]) == len(row["log_probs", "full"]) == length
        assert torch.equal(row["log_probs", "full"].isfinite(), answered)
        kept = row["sampling", "kept"].validate(vocabulary=259, num_tokens=length, tokens=row["tokens", "full"])
        assert (kept.sizes.tolist(), float(row["sampling", "temperature"])) == ((3 * answered).tolist(), 0.5)
        turns.add(int(answered.sum()))
    assert turns == {6, 12}


def test_its_own_thread_fills_a_buffer_to_the_end(collect: Any) -> None:
    collector = collect(ahead=8, replay_buffer=buffer(), total_dialog_turns=12)
    collector.start()
    until(lambda: collector.getattr_rb("write_count") == 12)
    until(lambda: not collector.is_running())
    assert sorted(queries(collector.replay_buffer[:])) == sorted(f"q{i}" for i in range(6) for _ in range(2))
    with pytest.raises(RuntimeError):
        collect().start()  # without a buffer


def test_an_error_in_its_thread_reaches_who_waits_for_the_buffer(collect: Any) -> None:
    collector = collect(reward=no_reward, replay_buffer=buffer())
    collector.start()
    with pytest.raises(ZeroDivisionError):
        until(lambda: collector.getattr_rb("write_count") > 0)  # TorchRL's trainer spins like this


def test_the_first_failure_of_a_reward_is_raised_and_the_state_can_be_saved(collect: Any) -> None:
    collector = collect(reward=no_reward)
    with pytest.raises(ZeroDivisionError, match="no reward for q"):
        next(iter(collector))
    assert collector.state_dict()["frames"] == 0


def test_after_a_shutdown_its_state_can_be_saved_and_the_engine_still_serves(collect: Any, engine: Any) -> None:
    collector = collect()
    next(iter(collector))
    collector.shutdown()
    collector.shutdown()
    again = collect()
    again.load_state_dict(collector.state_dict())
    assert asked(next(iter(again))) == ["q2", "q2", "q3", "q3"]
    assert engine.generate("a", use_tqdm=False).outputs


def test_versions_are_the_engines_and_stand_where_torchrls_scripts_look_if_asked_for(collect: Any, engine: Any) -> None:
    new_weights(engine, 3)
    for wanted in (True, False):
        collector = collect(track_policy_version=wanted)
        batch = next(iter(collector)).reshape(-1)
        assert collector.policy_version == collector.get_policy_version() == 3
        assert batch["policy_version"].flatten().tolist() == [3] * 4
        assert ("policy_version" in batch["next"].keys()) is wanted  # noqa: SIM118
        if wanted:
            assert batch["next", "policy_version"].flatten().tolist() == [3] * 4
