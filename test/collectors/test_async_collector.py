"""Batches are whole groups, as TorchRL's collector gives them, none too old, and no failure is silent."""

from __future__ import annotations

import math
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv

from support.collecting import TOKENIZER, Questions, chat, new_weights, policy_of, queries
from support.services import submitted
from support.waiting import HOUR, in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, async_collector, rollouts
from torchrl_moe.collectors.async_collector import snapshots
from torchrl_moe.collectors.workflow import Ask
from torchrl_moe.errors import CollectionError, CollectionStalledError, EngineError
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM

Collect = Callable[..., AsyncLLMCollector]


# -- batches ----------------------------------------------------------------------------------------------------------


def test_only_last_turns_can_be_kept(collect: Collect) -> None:
    batch = next(iter(collect(lambda: chat(1, turns=2), yield_only_last_steps=True)))
    assert (batch.batch_size, batch["next", "step_count"].flatten().tolist()) == ((2,), [2, 2])


def test_an_environment_of_a_group_that_continues_is_refused(collect: Collect) -> None:
    with pytest.raises(ValueError, match="0 of 2 samples of a group are done"):
        next(iter(collect(chat(2, turns=2))))


def test_it_ends_after_so_many_rows(collect: Collect) -> None:
    collector = collect(groups_per_batch=2, total_dialog_turns=10)
    assert [batch.numel() for batch in collector] == [4, 4, 4]
    assert collector.stats()["completed"]


# -- staleness --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("order", "window", "staleness"), [("fifo", 0.3, 1), ("window", 0.3, 3), ("window", 1.0, 0)])
def test_no_token_is_older_than_promised(collect: Collect, order: Any, window: float, staleness: int) -> None:
    """Answers of 1 to 12 ms, three groups a batch, an update after each."""

    def token_seconds(request: Any) -> float:
        return int(request.prompt_token_ids.sum()) % 5 * 5e-4 + 1e-4

    with FakeAsyncVLLM(token_seconds=token_seconds) as engine:
        settings = {"groups_per_batch": 3, "max_staleness": staleness, "order": order, "window": window}
        collector, ages, seen = collect(policy=policy_of(engine), **settings), [], []
        for version, batch in enumerate(islice(collector, 8)):
            ages.append(version - int(batch["policy_version"].min()))
            seen += queries(batch)[::2]
            new_weights(engine, version + 1)
        width = max(1, int(window * (staleness + 1) * 3)) if order == "window" else 1
        stats = collector.stats()
        collector.shutdown()
    assert max(ages) <= staleness + math.ceil((width - 1) / 3)
    assert len(set(seen)) == len(seen) == 24
    if order == "fifo":
        assert seen == [f"q{i}" for i in range(24)]
    assert stats["inference/staleness_max"] == ages[-1]


def test_requests_ask_for_weights_that_are_new_enough(collect: Collect, engine: FakeAsyncVLLM) -> None:
    """At version 5 with S = 1: the batch that is awaited may be one behind, the one after it may not."""
    new_weights(engine, 5)
    asked: list[int | None] = []
    generate = engine.agenerate

    async def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("min_version"))
        return await generate(*args, **kwargs)

    engine.agenerate = noted  # type: ignore[method-assign]
    next(iter(collect(groups_per_batch=2, max_staleness=1, order="fifo")))
    until(lambda: len(asked) >= 8)
    assert sorted(asked[:8]) == [4] * 4 + [5] * 4


def test_groups_that_became_too_old_are_dropped_and_replaced(collect: Collect, engine: FakeAsyncVLLM) -> None:
    collector = collect(groups_per_batch=2, max_staleness=1, on_stale="drop")
    batches = iter(collector)
    next(batches)
    until(lambda: collector._schedule.ready_groups >= 2)
    for version in (1, 2, 3):
        new_weights(engine, version)
    batch = next(batches)
    assert int(batch["policy_version"].min()) >= 2
    assert collector.stats()["collector/groups_dropped/stale"] >= 2


def test_no_more_answers_are_generated_at_a_time_than_asked_for(collect: Collect, engine: FakeAsyncVLLM) -> None:
    most, now, generate = [0], [0], engine.agenerate

    async def counted(*args: Any, **kwargs: Any) -> Any:
        now[0] += 1
        most[0] = max(most[0], now[0])
        try:
            return await generate(*args, **kwargs)
        finally:
            now[0] -= 1

    engine.agenerate = counted  # type: ignore[method-assign]
    slow(engine, 1e-3)
    list(islice(collect(group_size=4, groups_per_batch=2, max_in_flight=3), 3))
    assert most[0] == 3


# -- failures ---------------------------------------------------------------------------------------------------------
def slow(engine: FakeAsyncVLLM, token_seconds: float) -> None:
    for replica in engine.replicas:
        replica.token_seconds = token_seconds


def is_odd(rows: Any) -> bool:
    return int(rows[0]["query"][1:]) % 2 == 1


def test_groups_that_teach_nothing_are_replaced_one_for_one(collect: Collect) -> None:
    collector = collect(groups_per_batch=2, group_filter=is_odd, order="fifo", max_staleness=0)
    assert [queries(batch)[::2] for batch in islice(collector, 2)] == [["q1", "q3"], ["q5", "q7"]]
    assert collector.stats()["collector/groups_dropped/filtered"] == 4


@pytest.mark.parametrize(("groups_per_batch", "calls"), [(1, 9), (12, 13)])
def test_failures_end_early_while_nothing_has_succeeded(collect: Collect, groups_per_batch: int, calls: int) -> None:
    asked = []

    def always(query: str) -> float:
        asked.append(query)
        raise ZeroDivisionError(query)

    collector = collect(
        chat(1, reward=always), group_size=1, groups_per_batch=groups_per_batch, max_staleness=0, max_failures=1000
    )
    for _ in range(2):  # the error is raised each time, with its prompt
        with pytest.raises(ZeroDivisionError, match=r"q\d") as caught:
            next(iter(collector))
        assert f"at prompt {caught.value.args[0][1:]}: query='{caught.value}'" in caught.value.__notes__
    assert collector.stats()["collector/failures"] == calls
    assert len(asked) < calls + groups_per_batch


def test_once_something_has_succeeded_failures_have_their_own_limit(collect: Collect) -> None:
    def mostly(query: str) -> float:
        return 1 / (query in ("q0", "q40"))

    collector = collect(chat(2, reward=mostly), max_staleness=0, max_failures=40)
    assert [queries(batch)[0] for batch in islice(collector, 2)] == ["q0", "q40"]


def test_a_filter_that_rejects_everything_ends_the_collection(collect: Collect) -> None:
    with pytest.raises(CollectionError, match=r"8 groups were dropped .* group_filter rejects them"):
        next(iter(collect(group_filter=lambda rows: False, groups_per_batch=2, max_dropped_groups=7)))
    odd = collect(group_filter=is_odd, max_dropped_groups=1, max_staleness=0)
    assert len(list(islice(odd, 4))) == 4  # one in a row is within the limit


def test_an_environment_that_is_never_done_is_ended(collect: Collect) -> None:
    bare = ChatEnv(batch_size=(1,), tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match=r"not done after max_turns=5: .*StepCounter\(max_steps=\.\.\.\)"):
        next(iter(collect(bare, group_size=1, max_turns=5)))
    batch = next(iter(collect(lambda: chat(1, turns=3), max_turns=3)))
    assert batch.batch_size == (6,)
    with pytest.raises(ValueError, match="after max_turns=2"):
        next(iter(collect(lambda: chat(1, turns=3), max_turns=2)))


def test_answers_of_a_group_have_seeds_of_their_own(collect: Collect, engine: FakeAsyncVLLM) -> None:
    policy = policy_of(engine).get_new_version(generate_kwargs={"max_new_tokens": 2, "seed": 5})
    next(iter(collect(policy=policy, groups_per_batch=3, max_staleness=0)))
    assert sorted(request.sampling_params["seed"] for request in submitted(engine)) == [5, 6, 7, 8, 9, 10]


def test_a_collection_in_which_nothing_moves_says_what_it_waits_for(collect: Collect, engine: FakeAsyncVLLM) -> None:
    collector = collect(heartbeat_timeout=0.5)
    for replica in engine.replicas:
        replica.stall()
    # how many answers had begun by then depends on the machine
    waits = r"3 groups are running \(the oldest is 0\), 0 are ready, 1 make a batch; \d answers .* SERVING"
    with pytest.raises(CollectionStalledError, match=rf"nothing has moved for 0\.5 s: {waits}"):
        next(iter(collector))


def test_a_dead_engine_ends_the_collection(collect: Collect, engine: FakeAsyncVLLM) -> None:
    batches = iter(collect(groups_per_batch=2))
    next(batches)
    for replica in engine.replicas:
        replica.die()
    with pytest.raises(Exception, match=r"died|replica"):
        for _ in range(10):
            next(batches)


def test_a_killed_replica_does_not_end_it(collect: Collect, engine: FakeAsyncVLLM) -> None:
    slow(engine, 1e-3)
    batches = iter(collect(groups_per_batch=4))
    seen = queries(next(batches))
    engine.replicas[0].die()
    seen += [query for _ in range(3) for query in queries(next(batches))]
    assert sorted(Counter(seen).values()) == [2] * 16


def test_an_answer_that_somebody_aborts_is_no_answer(collect: Collect, engine: FakeAsyncVLLM) -> None:
    slow(engine, HOUR)
    waiting = in_thread(lambda: next(iter(collect())))
    until(lambda: submitted(engine))
    engine.abort([request.request_id for request in submitted(engine)])
    with pytest.raises(EngineError, match=r"request '.*' was aborted") as caught:
        waiting.result(60)
    assert len(caught.value.partial) == 1  # type: ignore[attr-defined]


# -- buffers, pauses, ends --------------------------------------------------------------------------------------------


def test_its_own_thread_is_so_many_batches_ahead_of_the_weight_updates(
    collect: Collect, engine: FakeAsyncVLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "UPDATE_SECONDS", 0.0)
    buffer = ReplayBuffer(storage=LazyStackStorage(64))
    collector = collect(replay_buffer=buffer, max_staleness=1, heartbeat_timeout=0.5)
    collector.start()
    until(lambda: "it continues after the next update" in caplog.text)  # and that is no stall
    assert buffer.write_count == 4
    for version in (1, 2, 3):
        new_weights(engine, version)
        collector.increment_version()
        until(lambda: buffer.write_count == 4 + 2 * version)  # noqa: B023  it is over before the next round
    until(lambda: not collector._rollouts._tasks)
    assert (buffer.write_count, buffer[:]["policy_version"].tolist()) == (10, [0] * 4 + [1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("is_nested", [False, True])
def test_nothing_begins_during_a_pause(collect: Collect, engine: FakeAsyncVLLM, is_nested: bool) -> None:
    collector = collect(groups_per_batch=2)
    batches = iter(collector)
    next(batches)
    with collector.pause():
        with collector.pause() if is_nested else nullcontext():
            pass
        until(lambda: collector._schedule.ready_groups == collector._schedule.in_line)
        asked = len(submitted(engine))
        next(batches)
        time.sleep(0.05)
        assert len(submitted(engine)) == asked
    for _ in range(3):
        next(batches)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 3])
def test_a_restored_collector_continues_from_the_last_tokens(
    collect: Collect, engine: FakeAsyncVLLM, turns: int
) -> None:
    """Answers are cut in their second half; what they had, whole turns too, is not generated twice."""

    def is_held(entry: Any) -> bool:
        """At 25 tokens of the last turn that this test lets begin: the first, or the second of three."""
        return entry.tokens >= 25 and (turns == 1 or len(entry.request.prompt_token_ids) > 40)

    def make() -> AsyncLLMCollector:
        env = chat(2) if turns == 1 else lambda: chat(1, turns)
        return collect(env, policy=policy_of(engine, 40), groups_per_batch=2)

    def generated() -> int:
        return sum(len(output.token_ids) for one in snapshots(engine).values() for output in one.outputs)

    def most_turns() -> int:
        return max(
            (len(turns) for group in first._rollouts.groups.copy().values() for turns in group.turns.copy().values()),
            default=0,
        )

    for replica in engine.replicas:
        replica.token_seconds = 1e-4
        replica._holds = is_held  # type: ignore[method-assign]
    first, second = make(), make()
    waiting = in_thread(lambda: next(iter(first)))
    until(lambda: generated() >= 100 and most_turns() >= min(turns, 2))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    first.shutdown()
    assert isinstance(waiting.exception(60), StopIteration)
    assert turns == 1 or first.state_dict()["answers"]  # whole ones are still there
    had = {
        (position, sample, turn): output.token_ids.tolist()
        for position, samples in state["answers"].items()
        for sample, answers in samples.items()
        for turn, (answer, _) in answers.items()
        for output in answer.outputs
    }
    assert turns == 1 or 40 in map(len, had.values())  # whole ones
    assert sum(len(tokens) for tokens in had.values()) > 60
    for replica in engine.replicas:
        replica.submitted.clear()
        del replica._holds
    second.load_state_dict(state)
    batches = [next(second.iterator()) for _ in range(2)]
    second.shutdown()
    for batch in batches:
        for number, row in enumerate(batch.unbind(0)):
            position, sample, turn = int(row["query"][1:]), number // turns % 2, number % turns
            tokens = had.get((position, sample, turn), [])
            assert row["tokens", "response"].tolist()[: len(tokens)] == tokens
            is_cut = any(0 < len(had.get((position, sample, one), [])) < 40 for one in range(turn + 1))
            assert (row["resume"], len(row["tokens", "response"])) == ("forced" if is_cut else "none", 40)
    asked = {tuple(map(int, one.request_id.split("-")[1:])): one.resume for one in submitted(engine)}
    for place, tokens in had.items():
        if len(tokens) == 40:
            assert place not in asked
        elif tokens and place in asked:  # later groups may not have begun again
            assert asked[place].outputs[0].token_ids.tolist() == tokens


async def two_turns(data: TensorDictBase, ask: Ask) -> float:
    answer = await ask(data["query"])
    await ask(answer["history"].full.append(History(role="user", content="and then?"), inplace=False, dim=-1))
    return 1.0


@pytest.mark.parametrize(
    ("env", "arguments", "asked", "how"),
    [
        (lambda: chat(1, turns=2), {}, {}, "forced"),
        (two_turns, {}, {}, "forced"),
        (two_turns, {}, {"on_resume": "live"}, "live"),
        (two_turns, {"forced_routing_unavailable_reason": "it speculates"}, {}, "live"),
    ],
    ids=["environment", "function", "live", "unable"],
)
def test_rows_of_answers_in_parts_say_so(
    collect: Collect, env: Any, arguments: Any, asked: Any, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """First turns are cut after 3 of 6 tokens and continue under newer weights; second turns have the first in them."""
    with FakeAsyncVLLM(token_seconds=HOUR, **arguments) as engine:
        (replica,) = engine.replicas
        policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 6, **asked})
        first, second = (collect(env, policy=policy, groups_per_batch=1, order="fifo") for _ in range(2))
        waiting = in_thread(lambda: next(iter(first)))
        until(lambda: len(replica._running) == 6)  # max_staleness=2: three groups
        for running in list(replica._running.values()):
            running.tokens = 3
        state = first.state_dict()
        first.shutdown()
        assert isinstance(waiting.exception(60), StopIteration)
        replica.token_seconds = 0.0
        new_weights(engine, 1)
        second.load_state_dict(state)
        batches = list(islice(second, 3))
        second.show_samples(1)
        batches += islice(second, 1)
        table = second.to_pandas()
        second.shutdown()
    assert [list(batch["resume"]) for batch in batches] == [[how] * 4] * 3 + [["none"] * 4]
    assert [batch["num_segments"].tolist() for batch in batches] == [[2] * 4] * 3 + [[1] * 4]
    assert batches[0][0]["policy_versions", "full"][-6:].tolist() == [0, 0, 0, 1, 1, 1]
    assert table["collector/max_segments"].tolist() == [2, 2, 2, 1]
    assert re.search(r"0 to 1 +2 +length", capsys.readouterr().out)


def test_a_state_can_be_loaded_after_weights_were_pushed_and_numbers_continue(
    collect: Collect, engine: FakeAsyncVLLM
) -> None:
    first = collect(groups_per_batch=2, max_staleness=1, order="fifo")
    groups = next(iter(first)).get("group_id").tolist()
    until(lambda: first._schedule.ready_groups == 2)
    state = first.state_dict()
    first.shutdown()
    second = collect(groups_per_batch=2, max_staleness=1, order="fifo")
    new_weights(engine, 40)
    second.increment_version()
    second.state_dict()
    with second.pause():
        pass
    second.load_state_dict(state)
    for batch in islice(second, 3):
        groups += batch.get("group_id").tolist()
        assert second.stats()["inference/queue_age"] < 60
    assert (groups, set(Counter(groups).values())) == (sorted(groups), {2})
    with pytest.raises(RuntimeError, match="before the first batch"):
        second.load_state_dict(state)


def test_the_data_ends_after_the_last_whole_batch(collect: Collect) -> None:
    batches = iter(collect(groups_per_batch=3, dataloader=iter(list(Questions(7))), order="fifo"))
    assert queries(next(batches))[::2] == ["q0", "q1", "q2"]
    assert queries(next(batches))[::2] == ["q3", "q4", "q5"]
    with pytest.raises(ValueError, match="the dataloader yields nothing"):
        next(batches)


def test_when_the_holder_of_the_newest_weights_dies_others_are_waited_for(
    collect: Collect, engine: FakeAsyncVLLM
) -> None:
    batches = iter(collect(groups_per_batch=2, max_staleness=0))
    next(batches)
    engine.replicas[0].version = 1
    engine.replica_table.set_version(0, 1)
    engine.replicas[0].die()
    late = threading.Timer(0.3, new_weights, (engine, 1))
    late.start()
    assert next(batches).get("policy_version").tolist() == [1] * 4
    late.join()


def test_a_filter_may_ask_the_collector(collect: Collect) -> None:
    asked: list[Any] = []
    collector = collect(groups_per_batch=2, group_filter=lambda rows: asked.append(collector.state_dict()) or True)
    next(iter(collector))
    assert len(asked) >= 2


def test_an_async_function_that_blocks_the_loop_is_found(collect: Collect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_collector, "JOIN_SECONDS", 0.5)

    over = threading.Event()

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        await ask(data["query"])
        return float(over.wait(60))

    collector = collect(episode, groups_per_batch=2, heartbeat_timeout=0.5)
    with pytest.raises(CollectionStalledError, match=r"has stood still .*, in .*wait .*to_thread"):
        in_thread(lambda: next(iter(collector))).result(50)
    over.set()


# -- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"yield_completed_trajectories": False}, "only whole groups"),
        ({"async_envs": True}, "stepped in threads anyway"),
        ({"flatten_data": False}, "batches are flat"),
        ({"queue": object()}, "lose the oldest data"),
        ({"on_weight_update": "drain"}, r"VLLMWeightSyncScheme\(mode=...\)"),
        ({"dataloader": None}, "there is no data"),
        ({"env": two_turns, "dataloader": None}, "there is no data: pass dataloader="),
        ({"group_size": 0}, "group_size must be an integer from 1"),
        ({"dialog_turns_per_batch": 5}, "no multiple of group_size=2"),
        ({"dialog_turns_per_batch": 4, "groups_per_batch": 3}, r"groups_per_batch \* group_size = 6"),
        ({"max_failures": -1}, "max_failures must be an integer of at least 0"),
        ({"max_dropped_groups": -1}, "max_dropped_groups must be an integer of at least 0"),
        ({"max_turns": 0}, "max_turns must be an integer of at least 1"),
        ({"max_in_flight": 0}, "max_in_flight must be an integer of at least 1"),
        ({"reward_timeout": 0.0}, "reward_timeout must be a finite number above 0"),
        ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout must be a finite number above 0"),
        ({"max_in_flight": "all"}, "max_in_flight must be an integer of at least 1"),
        ({"over_sample": 1.5}, "needs on_stale='drop'"),
        ({"total_dialog_turns": -2}, "total_dialog_turns must be"),
        ({"on_stale": "keep"}, "on_stale must be 'wait' or 'drop'"),
        ({"policy": None}, "either policy= or policy_factory="),
        ({"policy": print}, "must be a torchrl_moe vLLMWrapper"),
        ({"num_samples": 2}, "group_size instead"),
        ({"env": 3}, "env must be an environment, a callable that makes one, or an async"),
        ({"track_policy_version": object()}, "leave the transform out"),
    ],
)
def test_what_makes_no_sense_is_refused(engine: FakeAsyncVLLM, kwargs: dict[str, Any], words: str) -> None:
    policy = policy_of(engine, **{name: kwargs.pop(name) for name in ("num_samples",) if name in kwargs})
    arguments = {"env": chat(2), "policy": policy, "dataloader": Questions(), "group_size": 2, **kwargs}
    kind = TypeError if kwargs in ({"policy": print}, {"env": 3}) else ValueError
    with pytest.raises(kind, match=words):
        AsyncLLMCollector(**arguments)


def test_a_checkpoint_counts_ages_from_the_newest_weights(collect: Collect, engine: FakeAsyncVLLM) -> None:
    """Those of groups that a restored collector has not put in line yet, too; what is too old is dropped by them."""

    def ages(collector: AsyncLLMCollector) -> list[int]:
        return [entry["age"] for entry in collector.state_dict()["ready"]]

    first = collect(groups_per_batch=1, max_staleness=3, order="fifo")
    next(iter(first))
    until(lambda: first._schedule.ready_groups == 3)
    new_weights(engine, 2)
    assert ages(first) == [2, 2, 2]
    second = collect(groups_per_batch=1, max_staleness=0, order="fifo")  # has one group in line at a time
    second.load_state_dict(first.state_dict())
    next(iter(second))
    new_weights(engine, 3)
    assert ages(second) == [3, 3]
