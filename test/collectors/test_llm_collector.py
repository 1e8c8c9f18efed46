"""Batches are TorchRL's, and what is mended: lost prompts, silent errors, pauses, seeds, the position in the data."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import PolicyVersion

from support.collecting import TOKENIZER, NextQuestion, Questions, Reward, chat, plain, policy_of, queries
from support.waiting import in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM


class Turns(Transform):
    """Ends each sample after its own number of turns, by its question's number: 1, 2, 3, 1, 2, 3, ..."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        wanted = torch.tensor([1 + int(query[1:]) % 3 for query in tensordict.get("query").tolist()])
        done = next_tensordict["step_count"].flatten() >= wanted
        for key in ("done", "terminated"):
            next_tensordict.set(key, done.reshape(next_tensordict[key].shape))
        return next_tensordict


def env_of(
    data: Any = None,
    batch_size: int = 4,
    repeats: int | None = None,
    turns: int | None = 1,
    reward: Callable[[str], float] | None = None,
) -> EnvBase:
    """An environment with data; ``turns=None``: see :class:`Turns`."""
    data = Questions(64) if data is None else data
    env = DatasetChatEnv.from_dataloader(data, repeats=repeats, batch_size=(batch_size,), tokenizer=TOKENIZER)
    if turns != 1:
        env = env.append_transform(NextQuestion())
    if reward is not None:
        env = env.append_transform(Reward(reward))
    env = env.append_transform(StepCounter(max_steps=turns))
    return env if turns is not None else env.append_transform(Turns())


def collector_of(engine: FakeAsyncVLLM, env: Any = None, turns: int = 4, **kwargs: Any) -> LLMCollector:
    """One of batches of so many turns."""
    policy = kwargs.pop("policy", None) or policy_of(engine)
    return LLMCollector(env_of() if env is None else env, policy=policy, dialog_turns_per_batch=turns, **kwargs)


def asked_of(batch: TensorDictBase) -> list[str]:
    return queries(batch.reshape(-1))


def rows(batch: TensorDictBase) -> list[dict[Any, Any]]:
    return [plain(row) for row in batch.reshape(-1).unbind(0)]


# -- batches ----------------------------------------------------------------------------------------------------------
MODES: dict[str, dict[str, Any]] = {
    "samples": {"yield_completed_trajectories": True},
    "last turns": {"yield_only_last_steps": True},
    "turns": {},
    "flat turns": {"flatten_data": True},
}


@pytest.mark.parametrize(
    ("mode", "turns"),
    [("samples", 1), *((mode, 2) for mode in MODES)],
)
def test_batches_are_torchrls_and_its_lost_prompts(engine: FakeAsyncVLLM, mode: str, turns: int) -> None:
    asked = 2 if mode == "last turns" else 2 * turns  # the environment's samples, once
    arguments: dict[str, Any] = {"policy": policy_of(engine, prefer_tokens=True), "dialog_turns_per_batch": asked}
    theirs = TorchRLCollector(env_of(None, 2, repeats=2, turns=turns), **arguments, **MODES[mode])
    ours = LLMCollector(env_of(None, 2, repeats=2, turns=turns), **arguments, **MODES[mode])
    batches = ours.iterator()
    assert set(queries(next(batches).reshape(-1))) == {"q0"}
    for number, (expected, got) in enumerate(zip(islice(theirs, 2), batches, strict=False), 1):
        assert (set(asked_of(got)), got.batch_size) == ({f"q{number}"}, expected.batch_size)
        assert rows(got) == rows(expected)


def test_they_are_those_of_the_asynchronous_one_without_staleness() -> None:
    """Bit for bit, for the same seed; a seeded fake replica answers by its own, so one replica."""

    def data() -> DataLoader[Any]:
        questions = [{"query": f"q{i}"} for i in range(12)]
        return DataLoader(questions, batch_size=3, shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]

    engine = FakeAsyncVLLM()
    arguments: dict[str, Any] = {"policy": policy_of(engine), "dialog_turns_per_batch": 8}
    ours = LLMCollector(env_of(data(), 8, repeats=4), **arguments, yield_completed_trajectories=True)
    other = AsyncLLMCollector(env_of(data(), 8, repeats=4), **arguments, max_staleness=0)
    assert ours.set_seed(7) == other.set_seed(7)
    assert [replica.seed for replica in engine.replicas] == [7]  # type: ignore[attr-defined]
    order = []
    for one, two in zip(islice(ours, 5), islice(other, 5), strict=True):
        order += queries(one)[::4]
        for expected, got in zip(rows(one), rows(two), strict=True):
            assert got.keys() - expected.keys() == {"group_id"}
            assert {key: got[key] for key in expected} == expected
    other.shutdown()
    engine.shutdown()
    assert Counter(order[:6]) < Counter(f"q{i}" for i in range(12))
    assert order[:6] != sorted(order[:6])


@pytest.mark.parametrize(
    "columns", [{"number": [3, 4]}, {"vector": torch.arange(6.0).reshape(2, 3)}, {"name": ["a", ""]}]
)
def test_data_may_have_columns_of_any_kind(engine: FakeAsyncVLLM, columns: dict[str, Any]) -> None:
    data = [{"query": ["q0", "q1"], **columns}]
    theirs = TorchRLCollector(env_of(data, 2), policy=policy_of(engine), dialog_turns_per_batch=2)
    ours = collector_of(engine, env_of(data, 2), 2)
    assert rows(next(iter(ours))) == rows(next(iter(theirs)))


# -- the data ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "repeats", "turns"),
    [
        ("turns", 2, 1),
        ("samples", None, None),
        ("last turns", None, None),  # turns of a sample in several batches begin again, as the docs say
    ],
)
def test_a_restored_collector_yields_each_sample_once(
    engine: FakeAsyncVLLM, mode: str, repeats: int | None, turns: int | None
) -> None:
    """Stopped after each number of batches; samples of 1, 2 and 3 turns wait for one another and end out of order."""

    def collector() -> LLMCollector:
        env = env_of(Questions(batch_size=5), repeats=repeats, turns=turns)
        return collector_of(engine, env, **MODES[mode])

    def whole(batch: TensorDictBase) -> list[str]:
        flat = batch.reshape(-1)
        return [q for q, done in zip(queries(flat), flat["next", "done"].flatten().tolist(), strict=True) if done]

    for stop in (1, 3):
        first = collector()
        seen = [query for batch in islice(first, stop) for query in whole(batch)]
        again = collector()
        next(iter(again))  # what it has under way is given up
        again.load_state_dict(first.state_dict())
        seen += [query for batch in islice(again, 4) for query in whole(batch)]
        state = again.state_dict()["prompts"]
        is_open = Counter(f"q{position}" for position, _ in state["copies"])
        assert Counter(seen) + is_open == Counter({f"q{i}": repeats or 1 for i in range(state["position"])})


@pytest.mark.parametrize("turns", [1, 2])
def test_resetting_at_each_iteration_loses_no_prompt(engine: FakeAsyncVLLM, turns: int) -> None:
    """Where two turns are wanted and a batch has room for one, samples that are given up do not come again."""
    collector = collector_of(engine, env_of(turns=turns), reset_at_each_iter=True)
    assert [query for batch in islice(collector, 3) for query in asked_of(batch)] == [f"q{i}" for i in range(12)]


def test_data_that_can_be_read_once_continues_where_it_was_and_loses_no_row(engine: FakeAsyncVLLM) -> None:
    """The environment has read a batch to know what is in it."""

    def collector() -> LLMCollector:
        return collector_of(engine, env_of(iter(Questions(64, 3)), 2), 2)

    first, second = collector(), collector()
    seen = [query for batch in islice(first, 2) for query in asked_of(batch)]
    second.load_state_dict(first.state_dict())
    seen += [query for batch in islice(second, 2) for query in asked_of(batch)]
    assert seen == [f"q{i}" for i in range(8)]
    with pytest.raises(ValueError, match="load the state before the first batch"):
        second.load_state_dict(first.state_dict())
    data = iter([{"query": ["q0", "q1", "q2"]}])
    other = AsyncLLMCollector(env_of(data, 3), policy=policy_of(engine), groups_per_batch=2, max_staleness=0)
    assert queries(next(iter(other))) == ["q0", "q1"]
    other.shutdown()


def test_data_from_nowhere_leaves_no_position(engine: FakeAsyncVLLM) -> None:
    class Ask(Transform):
        def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
            return TensorDict(batch_size=[2]).set("query", ["q0", "q1"])

    env = ChatEnv(batch_size=(2,), tokenizer=TOKENIZER).append_transform(Ask()).append_transform(StepCounter(1))
    collector = collector_of(engine, env, 2)
    next(iter(collector))
    with pytest.warns(UserWarning, match="no position in the data"):
        state = collector.state_dict()
    assert state["prompts"] is None
    with pytest.raises(ValueError, match="data came from elsewhere"):
        collector_of(engine).load_state_dict(state)


# -- free running -----------------------------------------------------------------------------------------------------
def running(engine: FakeAsyncVLLM, **kwargs: Any) -> LLMCollector:
    buffer = ReplayBuffer(storage=LazyStackStorage(4096), batch_size=4)
    return collector_of(engine, env_of(**kwargs), replay_buffer=buffer)


def test_a_pause_ends_at_a_batchs_border(engine: FakeAsyncVLLM) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def reward(query: str) -> float:
        if query == "q5":
            reached.set()
            go_on.wait(60)
        return 1.0

    collector = running(engine, reward=reward)
    collector.start()
    assert reached.wait(60)
    pausing = collector.pause()
    pause = in_thread(pausing.__enter__)  # waits for the second batch
    until(lambda: collector._pausing)
    assert not pause.done()
    go_on.set()
    pause.result(60)
    assert collector.getattr_rb("write_count") == 8
    state = collector.state_dict()
    assert [position for position, _ in state["prompts"]["copies"]] == [8, 9, 10, 11]
    pausing.__exit__(None, None, None)
    until(lambda: collector.getattr_rb("write_count") > 8)
    with collector.pause(resume=False):
        assert collector._collecting is None
    written = collector.getattr_rb("write_count")
    collector.shutdown()
    assert not collector.is_running()
    assert collector.replay_buffer.write_count == written


def test_a_state_that_a_hook_saves_has_the_batch_which_the_trainer_has_not_yet(engine: FakeAsyncVLLM) -> None:
    collector = collector_of(engine)
    states: list[Any] = []
    collector.set_post_collect_hook(lambda batch: states.append(collector.state_dict()))
    next(iter(collector))
    assert [position for position, _ in states[0]["prompts"]["copies"]] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert states[0]["frames"] == 0


def test_iterating_during_a_pause_or_after_the_end_is_refused_and_a_pause_of_another_thread_is_waited_for(
    engine: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = LLMCollector(env_of, policy_factory=lambda: policy_of(engine), dialog_turns_per_batch=4)
    assert collector.get_policy_model() is engine
    with collector.pause():
        for ask in (collector.iterator().__next__, iter(collector).__next__, collector.next):
            with pytest.raises(RuntimeError, match="the collector is paused"):
                ask()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # while it waits: it leaves no pause
        patch.setattr(collector._borders, "wait_for", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        collector.state_dict()
    pause = collector.pause()
    in_thread(pause.__enter__).result(60)
    batch = in_thread(collector.next)
    with collector._borders:
        assert collector._collecting is None
    in_thread(lambda: pause.__exit__(None, None, None)).result(60)
    assert batch.result(60).numel() == 4
    collector.shutdown()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="the collector was shut down"):
        next(collector.iterator())


def test_a_shutdown_by_another_thread_ends_the_iteration_after_its_batch(engine: FakeAsyncVLLM) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def reward(query: str) -> float:
        reached.set()
        go_on.wait(60)
        return 1.0

    collector = collector_of(engine, env_of(reward=reward))
    batches = in_thread(lambda: list(iter(collector.iterator())))
    assert reached.wait(60)
    shutdown = in_thread(collector.shutdown)
    until(lambda: collector._stop)
    go_on.set()
    shutdown.result(60)
    assert [asked_of(batch) for batch in batches.result(60)] == [["q0", "q1", "q2", "q3"]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
@pytest.mark.parametrize(
    ("where", "mode"),
    [
        *(("postproc", mode) for mode in ("samples", "turns", "flat turns")),
        ("hook", "turns"),
        ("buffer", "flat turns"),
        ("reward", "samples"),
        ("reward", "turns"),
    ],
)
def test_a_batch_that_an_error_keeps_from_the_trainer_is_in_the_state_and_after_a_ctrl_c_comes_again(
    engine: FakeAsyncVLLM, where: str, mode: str, error: type[BaseException]
) -> None:
    seen: list[Any] = []

    def fail_once(batch: TensorDictBase) -> TensorDictBase:
        seen.append([row["text", "full"] for row in batch.reshape(-1).unbind(0)])
        if len(seen) == 2:
            raise error
        return batch

    def reward(query: str) -> float:
        if where == "reward" and query == "q5" and not seen:
            seen.append(query)
            raise error
        return 1.0

    class Failing(ReplayBuffer):
        def extend(self, data: Any, **kwargs: Any) -> Any:
            return super().extend(fail_once(data) if where == "buffer" else data, **kwargs)

    def collector() -> LLMCollector:
        given = {"postproc": fail_once} if where == "postproc" else {}
        made = collector_of(engine, env_of(reward=reward), **MODES[mode], **given, replay_buffer=buffers.get(where))
        if where == "hook":
            made.set_post_collect_hook(fail_once)
        return made

    def next_of(one: LLMCollector) -> list[str]:
        """The questions of the next batch, wherever it goes to."""
        batch = one.next()
        return sorted(asked_of(batch) if batch is not None else [row["query"] for row in one.replay_buffer[:]][-4:])

    buffers = {"buffer": Failing(storage=LazyStackStorage(64))}
    first = collector()
    assert next_of(first) == ["q0", "q1", "q2", "q3"]
    with pytest.raises(error):
        first.next()
    state = first.state_dict()
    assert state["frames"] == 4
    assert [data["query"] for _, data in state["prompts"]["copies"]][:4] == ["q4", "q5", "q6", "q7"]
    if error is KeyboardInterrupt:
        assert next_of(first) == ["q4", "q5", "q6", "q7"]
        assert where == "reward" or seen[1] == seen[2]  # it is the same batch
        assert first.state_dict()["frames"] == 8
    again = collector()
    again.load_state_dict(state)
    assert next_of(again) == ["q4", "q5", "q6", "q7"]


# -- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queue": object()}, "lose the oldest data"),
        ({"track_policy_version": PolicyVersion()}, "leave the transform out"),
        ({"policy_factory": lambda: None}, "either policy= or policy_factory="),
        ({"seed": 1}, "seed=1, so all answers to a prompt are the same: leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(engine: FakeAsyncVLLM, arguments: dict[str, Any], message: str) -> None:
    if "seed" in arguments:
        arguments = {"policy": vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 6, **arguments})}
    with pytest.raises(ValueError, match=message):
        collector_of(engine, **arguments)


def test_a_pool_of_environments_has_no_place_for_versions_as_in_torchrl(engine: FakeAsyncVLLM) -> None:
    pool = AsyncEnvPool([partial(chat, 1), partial(chat, 1)], backend="threading", stack="lazy")
    with pytest.raises(ValueError, match="track_policy_version=True: TorchRL's AsyncEnvPool takes no transform"):
        LLMCollector(pool, policy=policy_of(engine), dialog_turns_per_batch=4, track_policy_version=True)
    pool.close()


def test_a_state_is_of_before_a_batch_or_after_it(engine: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the moment in which the buffer has a batch and its prompts are forgotten."""
    reached, go_on = threading.Event(), threading.Event()
    buffer = ReplayBuffer(storage=LazyStackStorage(64))
    collector = collector_of(engine, replay_buffer=buffer)
    delivered = collector._delivered

    def slowly() -> None:
        reached.set()
        go_on.wait(60)
        delivered()

    monkeypatch.setattr(collector, "_delivered", slowly)
    batch = in_thread(collector.next)
    assert reached.wait(60)
    state = in_thread(collector.state_dict)
    until(lambda: collector._pausing or state.done())
    go_on.set()
    batch.result(60)
    assert state.result(60)["frames"] == len(buffer) == 4
