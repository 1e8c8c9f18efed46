"""Batches are whole groups, as TorchRL's collector gives them, none too old, and no failure is silent."""

from __future__ import annotations

import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from support.collecting import TOKENIZER, Questions, chat, new_weights, policy_of, queries
from support.services import submitted
from support.values import VALUES
from support.waiting import HOUR, in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, async_collector, rollouts
from torchrl_moe.collectors.async_collector import snapshots
from torchrl_moe.collectors.rollouts import Settings
from torchrl_moe.collectors.schedule import Schedule
from torchrl_moe.collectors.workflow import Ask, source_of
from torchrl_moe.errors import CollectionError, CollectionStalledError, EngineError
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM

Collect = Callable[..., AsyncLLMCollector]


# -- staleness --------------------------------------------------------------------------------------------------------
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


def slow(engine: FakeAsyncVLLM, token_seconds: float) -> None:
    for replica in engine.replicas:
        replica.token_seconds = token_seconds


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


# -- data, filters, seeds ---------------------------------------------------------------------------------------------
def test_the_data_ends_after_the_last_whole_batch(collect: Collect) -> None:
    batches = iter(collect(groups_per_batch=3, dataloader=iter(list(Questions(7))), order="fifo"))
    assert queries(next(batches))[::2] == ["q0", "q1", "q2"]
    assert queries(next(batches))[::2] == ["q3", "q4", "q5"]
    with pytest.raises(ValueError, match="the dataloader yields nothing"):
        next(batches)


def dataset_env() -> Any:
    env = DatasetChatEnv.from_dataloader(Questions(8), repeats=4, batch_size=(16,), tokenizer=TOKENIZER)
    return env.append_transform(StepCounter(max_steps=1))


def test_an_environment_brings_its_data_and_its_repeats_and_what_is_given_wins() -> None:
    env, given = dataset_env(), Questions(3)
    source = source_of(env, None, None)
    assert (source.env.batch_size, source.make, source.group_size) == ((4,), None, 4)
    assert isinstance(source.dataloader, Questions)
    assert [type(transform) for transform in source.env.transform][1:] == [StepCounter]
    assert (env.batch_size, len(env.transform), len(env.reset().get("query"))) == ((16,), 2, 16)  # it is left alone
    fewer = source_of(dataset_env(), given, 2)
    assert (fewer.env.batch_size, fewer.group_size, fewer.dataloader) == ((2,), 2, given)
    make = source_of(dataset_env, None, None).make
    assert make is not None and make().batch_size == (4,) and make() is not make()
    assert source_of(lambda: chat(1), Questions(), 8).env.batch_size == (1,)  # one of one sample stays so


def is_odd(rows: Any) -> bool:
    return int(rows[0]["query"][1:]) % 2 == 1


def test_a_filter_may_ask_the_collector(collect: Collect) -> None:
    asked: list[Any] = []
    collector = collect(groups_per_batch=2, group_filter=lambda rows: asked.append(collector.state_dict()) or True)
    next(iter(collector))
    assert len(asked) >= 2


def test_answers_of_a_group_have_seeds_of_their_own(collect: Collect, engine: FakeAsyncVLLM) -> None:
    policy = policy_of(engine).get_new_version(generate_kwargs={"max_new_tokens": 2, "seed": 5})
    next(iter(collect(policy=policy, groups_per_batch=3, max_staleness=0)))
    assert sorted(request.sampling_params["seed"] for request in submitted(engine)) == [5, 6, 7, 8, 9, 10]


def test_and_so_have_the_turns_of_each(engine: FakeAsyncVLLM, collect: Collect) -> None:
    async def twice(data: Any, ask: Any) -> float:
        first, second = await ask(data["query"]), await ask(data["query"])
        return float(first["text"].response != second["text"].response)

    policy = policy_of(engine, input_mode="text").get_new_version(generate_kwargs={"max_new_tokens": 6, "seed": 5})
    batch = next(iter(collect(twice, policy=policy, groups_per_batch=1, max_staleness=0)))
    assert [float(row["next", "reward"]) for row in batch][1::2] == [1.0, 1.0]
    assert len({request.sampling_params["seed"] for request in submitted(engine)}) == 4


# -- failures ---------------------------------------------------------------------------------------------------------
ENDLESS = r"not done after max_turns=5: .*StepCounter\(max_steps=\.\.\.\)"
DROPPED = r"8 groups were dropped .* group_filter rejects them"


@pytest.mark.parametrize(("groups_per_batch", "calls"), [(1, 9), (12, 13)])
def test_failures_end_early_while_nothing_has_succeeded(collect: Collect, groups_per_batch: int, calls: int) -> None:
    asked = []

    def mostly(query: str) -> float:
        asked.append(query)
        if query in good:
            return 1.0
        raise ZeroDivisionError(query)

    good: set[str] = set()
    given = {"group_size": 1, "max_staleness": 0, "groups_per_batch": groups_per_batch}
    collector = collect(chat(1, reward=mostly), **given, max_failures=1000)
    for _ in range(2):  # the error is raised each time, with its prompt
        with pytest.raises(ZeroDivisionError, match=r"q\d") as caught:
            next(iter(collector))
        assert f"at prompt {caught.value.args[0][1:]}: query='{caught.value}'" in caught.value.__notes__
    assert collector.stats()["collector/failures"] == calls
    assert len(asked) < calls + groups_per_batch
    good |= {"q0", "q40"}  # once something has succeeded, they have their own limit
    collector = collect(chat(2, reward=mostly), max_staleness=0, max_failures=40)
    assert [queries(batch)[0] for batch in islice(collector, 2)] == ["q0", "q40"]


@pytest.mark.parametrize(
    ("env", "given", "kind", "words"),
    [
        (chat(2, turns=2), {}, ValueError, "0 of 2 samples of a group are done"),
        (ChatEnv(batch_size=(1,), tokenizer=TOKENIZER), {"group_size": 1, "max_turns": 5}, ValueError, ENDLESS),
        (lambda: chat(1, turns=3), {"max_turns": 2}, ValueError, "after max_turns=2"),
        (None, {"group_filter": lambda rows: False, "max_dropped_groups": 7}, CollectionError, DROPPED),
    ],
)
def test_what_gives_no_batch_ends_the_collection(collect: Collect, env: Any, given: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        next(iter(collect(env, **given)))


def test_what_is_just_within_its_limits_gives_batches(collect: Collect) -> None:
    odd = collect(group_filter=is_odd, max_dropped_groups=1, max_staleness=0)
    assert len(list(islice(odd, 4))) == 4
    for only_last, steps in ((False, [1, 2, 3] * 2), (True, [3, 3])):
        batch = next(iter(collect(lambda: chat(1, turns=3), max_turns=3, yield_only_last_steps=only_last)))
        assert batch["next", "step_count"].flatten().tolist() == steps


def test_a_collection_in_which_nothing_moves_says_what_it_waits_for(collect: Collect, engine: FakeAsyncVLLM) -> None:
    collector = collect(heartbeat_timeout=0.5)
    for replica in engine.replicas:
        replica.stall()
    # how many answers had begun by then depends on the machine
    waits = r"3 groups are running \(the oldest is 0\), 0 are ready, 1 make a batch; \d answers .* SERVING"
    with pytest.raises(CollectionStalledError, match=rf"nothing has moved for 0\.5 s: {waits}"):
        next(iter(collector))


def test_a_killed_replica_does_not_end_it_and_a_dead_engine_does(collect: Collect, engine: FakeAsyncVLLM) -> None:
    slow(engine, 1e-3)
    batches = iter(collect(groups_per_batch=4))
    seen = queries(next(batches))
    engine.replicas[0].die()
    seen += [query for _ in range(3) for query in queries(next(batches))]
    assert sorted(Counter(seen).values()) == [2] * 16
    engine.replicas[1].die()
    with pytest.raises(Exception, match=r"died|replica"):
        list(islice(batches, 10))


def test_an_answer_that_somebody_aborts_is_no_answer(collect: Collect, engine: FakeAsyncVLLM) -> None:
    slow(engine, HOUR)
    waiting = in_thread(lambda: next(iter(collect())))
    until(lambda: submitted(engine))
    engine.abort([request.request_id for request in submitted(engine)])
    with pytest.raises(EngineError, match=r"request '.*' was aborted") as caught:
        waiting.result(60)
    assert len(caught.value.partial) == 1  # type: ignore[attr-defined]


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


def test_an_async_function_that_blocks_the_loop_is_found_and_no_batch_is_lost(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of ``iterator()``, which does not shut the collector down as ``iter`` does."""
    monkeypatch.setattr(async_collector, "JOIN_SECONDS", 0.5)
    over = threading.Event()

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        await ask(data["query"])
        return float(over.wait(60))

    collector = collect(episode, groups_per_batch=1, group_size=1, max_staleness=0, heartbeat_timeout=6.0)
    with pytest.raises(CollectionStalledError, match=r"has stood still .*, in .*wait .*to_thread"):
        in_thread(lambda: next(collector.iterator())).result(50)
    over.set()
    batches = collector.iterator()
    found = in_thread(lambda: [queries(next(batches)) for _ in range(3)]).result(50)
    assert found == [["q0"], ["q1"], ["q2"]]


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


def test_nothing_begins_during_a_pause(collect: Collect, engine: FakeAsyncVLLM) -> None:
    collector = collect(groups_per_batch=2)
    batches = iter(collector)
    next(batches)
    with collector.pause():
        with collector.pause():
            pass
        until(lambda: collector._schedule.ready_groups == collector._schedule.in_line)
        before = len(submitted(engine)), collector._schedule.begun
        next(batches)
        collector.state_dict()  # its loop has come around
        assert (len(submitted(engine)), collector._schedule.begun) == before
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
        groups = first._rollouts.groups.copy().values()
        return max((len(turns) for group in groups for turns in group.turns.copy().values()), default=0)

    for replica in engine.replicas:
        replica.token_seconds = 1e-4
        replica._holds = is_held  # type: ignore[method-assign]
    first, second = make(), make()
    waiting = in_thread(lambda: next(iter(first)))
    until(lambda: generated() >= 100 and most_turns() >= min(turns, 2))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    first.shutdown()
    assert isinstance(waiting.exception(60), StopIteration)
    had = {
        (position, sample, turn): output.token_ids.tolist()
        for position, samples in state["answers"].items()
        for sample, answers in samples.items()
        for turn, (answer, _) in answers.items()
        for output in answer.outputs
    }
    assert turns == 1 or (40 in map(len, had.values()) and first.state_dict()["answers"])  # whole ones, still there
    assert sum(len(tokens) for tokens in had.values()) > 60
    for replica in engine.replicas:
        replica.submitted.clear()
        del replica._holds
    second.load_state_dict(state)
    rows = [(number, row) for batch in islice(second, 2) for number, row in enumerate(batch.unbind(0))]
    second.shutdown()
    for number, row in rows:
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
        ({"group_size": 0}, "group_size must be an integer from 1"),
        ({"dialog_turns_per_batch": 5}, "no multiple of group_size=2"),
        ({"dialog_turns_per_batch": 4, "groups_per_batch": 3}, r"groups_per_batch \* group_size = 6"),
        ({"max_failures": -1}, "max_failures must be an integer of at least 0"),
        ({"max_dropped_groups": -1}, "max_dropped_groups must be an integer of at least 0"),
        ({"max_turns": 0}, "max_turns must be an integer of at least 1"),
        ({"max_in_flight": 0}, "max_in_flight must be an integer of at least 1"),
        ({"reward_timeout": 0.0}, "reward_timeout must be a finite number above 0"),
        ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout must be a finite number above 0"),
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
    of_policy = {name: value for name, value in kwargs.items() if name == "num_samples"}
    given = {name: value for name, value in kwargs.items() if name not in of_policy}
    policy = policy_of(engine, **of_policy)
    arguments = {"env": chat(2), "policy": policy, "dataloader": Questions(), "group_size": 2, **given}
    kind = TypeError if kwargs in ({"policy": print}, {"env": 3}) else ValueError
    with pytest.raises(kind, match=words):
        AsyncLLMCollector(**arguments)


def test_in_history_mode_later_turns_send_the_ids_of_earlier_ones_and_torchrls_other_values_are_taken(
    collect: Collect, engine: FakeAsyncVLLM
) -> None:
    history, tokens = policy_of(engine), policy_of(engine, input_mode="tokens")
    assert collect(policy=history).policy.prefer_tokens and not history.prefer_tokens
    assert collect(policy=None, policy_factory=lambda: tokens).policy is tokens
    given = {"yield_completed_trajectories": True, "async_envs": False, "flatten_data": True}
    assert collect(**given, reset_at_each_iter=True, yield_only_last_steps=True).settings.only_last_turns


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_each_setting_takes_a_value_or_refuses_it_by_its_name(name: str) -> None:
    for value in VALUES:
        try:
            settings = Settings(**{name: value})
            Schedule(settings.groups_per_batch, settings.max_staleness, settings.order, settings.window)
        except ValueError as error:
            assert name in str(error), (value, str(error))
