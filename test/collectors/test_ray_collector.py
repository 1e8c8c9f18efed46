"""Collectors in Ray do what local ones do, and what happens in their actor reaches the driver.

Most tests use one actor again and again. The last part has two over one engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import ray
import torch
import torchrl.collectors.llm
from tensordict import TensorDict
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.trainers import Trainer

from support.actors import toy_actors
from support.collecting import TOKENIZER, Questions, chat, new_weights, plain, policy_of, queries
from support.html_table import TableReader
from support.processes import PYTHONPATH, is_gone
from support.remote_hosts import (
    BufferClient,
    BufferOfRay,
    dataset,
    fake_policy,
    joined_policy,
    placing,
    run,
    stall,
    start_actors,
)
from support.toy_engine import bring
from support.waiting import in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector, RayAsyncLLMCollector, RayLLMCollector
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.collectors.ray_collectors import RayCollector
from torchrl_moe.errors import CollectionError, CollectionStalledError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM

pytestmark = pytest.mark.ray

Make = Callable[..., RayAsyncLLMCollector]
InTurns = Callable[..., RayLLMCollector]


@pytest.fixture(scope="module")
def actor(clusters: Any, shelf: Any) -> Iterator[Any]:
    shelf.clear()
    clusters.start()
    (actor,) = start_actors(1)
    yield actor
    ray.kill(actor)


@pytest.fixture
def ended(actor: Any) -> Iterator[list[Any]]:
    """The actors that collectors ended; they find their place in the shared one, which lives on."""
    with placing(actor) as ended:
        yield ended


@pytest.fixture
def collect(ended: list[Any]) -> Iterator[Make]:
    """Makes collectors of groups of 2 over questions, in their order, and shuts them down."""
    made: list[Any] = []

    def make(env: Any = None, kind: Any = RayAsyncLLMCollector, **kwargs: Any) -> Any:
        arguments = {"policy_factory": fake_policy(num_replicas=2), "dataloader": Questions(40), "group_size": 2}
        if kind is RayAsyncLLMCollector:
            arguments["order"] = "fifo"
        made.append(kind(chat(2) if env is None else env, **{**arguments, **kwargs}))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyStackStorage(64))


def failing_from(first: int) -> Callable[[str], float]:
    """A reward that cannot be given from a question on."""

    def reward(query: str) -> float:
        if int(query[1:]) >= first:
            raise ZeroDivisionError(f"no reward for {query}")
        return 1.0

    return reward


# -- batches ----------------------------------------------------------------------------------------------------------
def local_of(engine: FakeAsyncVLLM, **kwargs: Any) -> AsyncLLMCollector:
    arguments = {"policy": policy_of(engine), "dataloader": Questions(40), "group_size": 2, "order": "fifo"}
    return AsyncLLMCollector(chat(2), **arguments, **kwargs)


def check_same(found: Iterable[Any], expected: Iterable[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.batch_size == other.batch_size
        assert list(map(plain, one.reshape(-1).unbind(0))) == list(map(plain, other.reshape(-1).unbind(0)))


def test_batches_are_those_of_the_local_collector(collect: Make) -> None:
    found = list(islice(collect(groups_per_batch=2), 3))
    with FakeAsyncVLLM(num_replicas=2) as engine:
        local = local_of(engine, groups_per_batch=2)
        check_same(found, islice(local, 3))
        local.shutdown()
    tokens = found[0][0]["tokens", "response"]
    before = tokens.clone()
    tokens += 1  # the driver's own memory
    assert torch.equal(tokens, before + 1)


def test_it_ends_after_so_many_rows_and_says_how_far_it_is_and_what_it_has(
    collect: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"query": [f"q{i}"]} for i in range(40)]
    data = torch.utils.data.DataLoader(rows, shuffle=True, collate_fn=lambda batch: batch[0])
    collector = collect(total_dialog_turns=5, dataloader=data)
    assert isinstance(collector.set_seed(1), int)
    assert (collector.dialog_turns_per_batch, collector.total_dialog_turns, len(collector)) == (2, 5, 3)
    assert collector.init_random_frames == 0  # TorchRL's trainer asks
    with pytest.raises(RuntimeError, match="pass replay_buffer="):
        collector.start()
    asked = queries(collector.next())
    asked += [query for batch in collector for query in queries(batch)]
    stream = PromptStream(data)  # is shuffled so, too
    stream.seed(1)
    assert asked[::2] == [prompt.data["query"] for prompt in islice(stream, 3)] != ["q0", "q1", "q2"]
    assert collector.next() is None
    stats = collector.stats()
    assert (stats["frames"], stats["batches"], stats["completed"]) == (6, 3, True)
    collector.show_samples(1)
    shown = capsys.readouterr().out
    assert "batch 2, 1 of 2 samples" in shown and asked[-1] in shown
    collector.show_samples(1, color="versions")
    assert "response, version 0" in capsys.readouterr().out
    assert collector.to_pandas()["rows"].tolist() == [2, 2, 2]
    assert (collector.getattr_policy("input_mode"), collector.getattr_env("batch_size")) == ("history", (2,))
    with pytest.raises(TypeError, match="cannot be pickled"):
        collector.getattr_policy("model")
    assert repr(collector).startswith("RayAsyncLLMCollector(AsyncLLMCollector(1 groups of 2 a batch")
    assert "group_size" in collector._repr_html_()
    monkeypatch.setattr(collector, "_is_done", lambda reference, seconds: False)
    for words in ("its actor gave no answer within 5 s", "the collector was shut down"):
        assert words in repr(collector)
        assert TableReader(collector._repr_html_()).other[-1] == words
        collector.shutdown()


def test_an_evaluation_has_the_collectors_limit_of_turns(collect: Make) -> None:
    with pytest.raises(ValueError, match="after max_turns=2"):
        collect(max_turns=2).evaluate(lambda: chat(1, turns=3), 1, dataloader=Questions(1))


def test_what_the_local_collector_refuses_is_refused_and_the_actor_ended(
    collect: Make, ended: list[Any], actor: Any
) -> None:
    with pytest.raises(ValueError, match=r"dialog_turns_per_batch=5 is no multiple of group_size=2") as caught:
        collect(dialog_turns_per_batch=5)
    assert type(caught.value) is ValueError
    assert ended == [actor]


class Loss(torch.nn.Module):
    """Counts what a trainer trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows: list[int] = []

    def forward(self, batch: Any) -> TensorDict:
        self.rows.append(batch.numel())
        return TensorDict(loss=self.weight * batch.numel())


@pytest.mark.parametrize("is_async", [False, True])
def test_torchrls_trainer_takes_it(collect: Make, is_async: bool) -> None:
    collector, loss = collect(groups_per_batch=2, replay_buffer=buffer() if is_async else None), Loss()
    trainer = Trainer(
        collector=collector,
        total_frames=1 << 40,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), 1e-3),
        progress_bar=False,
        seed=3,
        async_collection=is_async,
    )
    if is_async:
        trainer.register_op("process_optim_batch", lambda batch: collector.replay_buffer.sample(3))
    trainer.register_op("post_steps", lambda: len(loss.rows) == 3 and trainer.request_stop())
    trainer.train()
    assert loss.rows == [3 if is_async else 4] * 3
    assert repr(collector) == "RayAsyncLLMCollector(the collector was shut down)"


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda client: client, BufferOfRay], ids=["client", "buffer"])
def test_a_buffer_elsewhere_is_extended_by_the_actor(collect: Make, actor: Any, wrap: Callable[[Any], Any]) -> None:
    collector = collect(replay_buffer=wrap(BufferClient()))
    assert list(islice(collector, 2)) == [None, None]
    assert run(actor, lambda local: local.replay_buffer.seen) == ["q0", "q0", "q1", "q1"]
    collector.start()
    until(lambda: run(actor, lambda local: len(local.replay_buffer.seen)) >= 8)


# -- errors -----------------------------------------------------------------------------------------------------------
def test_an_error_in_the_actor_has_its_type_and_notes_and_the_state_can_still_be_saved(collect: Make) -> None:
    collector = collect(chat(2, reward=failing_from(1)))
    assert queries(collector.next()) == ["q0", "q0"]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="no reward for q1") as caught:
            next(iter(collector))
        assert type(caught.value) is ZeroDivisionError
        assert "at prompt 1: query='q1'" in caught.value.__notes__
    assert collector.state_dict()["frames"] == 2


def test_an_error_of_ours_has_its_type_and_one_that_cannot_be_pickled_its_words(collect: Make, actor: Any) -> None:
    def unpicklable(query: str) -> float:
        error = ZeroDivisionError("no reward")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(CollectionError, match=r"(?s)ZeroDivisionError isn't serializable.*no reward"):
        collect(chat(2, reward=unpicklable)).next()
    collector = collect(heartbeat_timeout=0.5)
    run(actor, stall)
    with pytest.raises(CollectionStalledError, match=r"nothing has moved for 0\.5 s: 3 groups are running") as caught:
        collector.next()
    assert type(caught.value) is CollectionStalledError


def test_a_batch_that_a_buffer_of_this_process_did_not_take_comes_again(collect: Make) -> None:
    full, errors = buffer(), [OSError("No space left on device")]

    def extend(batch: Any, extend: Any = full.extend) -> Any:
        if errors:
            raise errors.pop()
        return extend(batch)

    full.extend = extend  # type: ignore[method-assign]
    collector = collect(replay_buffer=full)
    with pytest.raises(OSError, match="No space left"):
        collector.next()
    assert [row["query"] for batch in collector.state_dict()["ahead"] for row in batch] == ["q0", "q0"]
    collector.next()
    assert [row["query"] for row in full[:]] == ["q0", "q0"]


def test_an_error_reaches_who_waits_for_the_buffer(collect: Make) -> None:
    collector = collect(chat(2, reward=failing_from(0)), replay_buffer=buffer())
    collector.start()
    with pytest.raises(ZeroDivisionError):
        until(lambda: collector.getattr_rb("write_count") > 0)  # TorchRL's trainer spins like this
    until(lambda: not collector.is_running())


def test_ctrl_c_leaves_it_usable_and_no_batch_is_lost(collect: Make, interrupt: Callable[..., None]) -> None:
    collector = collect()
    with collector.pause():  # so that no batch comes
        interrupt(lambda: collector._awaited is not None)
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert (collector.state_dict()["ahead"], collector.stats()["batches"]) == ([], 0)  # calls do not wait for it
        collector.increment_version()
    until(lambda: [queries(batch) for batch in collector.state_dict()["ahead"]] == [["q0", "q0"]])
    assert [queries(collector.next()) for _ in range(2)] == [["q0", "q0"], ["q1", "q1"]]


# -- control ----------------------------------------------------------------------------------------------------------
def test_nothing_begins_during_a_pause(collect: Make, actor: Any) -> None:
    def figures() -> list[int]:
        """What was written here; groups that were begun, and pauses, there."""
        return [
            collector.getattr_rb("write_count"),
            *run(actor, lambda one: [one._schedule.begun, one._rollouts.pauses]),
        ]

    def update(version: int) -> None:
        run(actor, lambda local: new_weights(local.policy.model, version))
        collector.increment_version()

    collector = collect(replay_buffer=buffer())
    collector.start()
    until(lambda: collector.getattr_rb("write_count") == 6)  # 3 batches ahead of the updates
    with collector.pause():
        with collector.pause():
            pass
        update(1)
        collector.state_dict()
        assert (figures(), collector.is_running()) == ([6, 3, 1], True)
    until(lambda: collector.getattr_rb("write_count") == 8)
    with collector.pause(resume=False):
        update(2)
    assert figures() == [8, 4, 1]
    collector.shutdown()
    assert not collector.is_running()


def test_weight_updates_are_counted(collect: Make, actor: Any) -> None:
    def bring(local: Any) -> None:
        for replica in local.policy.model.replicas:
            replica.version += 3

    class Updater(WeightUpdaterBase):
        pushed: Any = None

        def push_weights(self, *args: Any, **kwargs: Any) -> None:
            self.pushed = (args, kwargs)

        def _get_server_weights(self) -> Any: ...
        def _sync_weights_with_worker(self, *args: Any, **kwargs: Any) -> Any: ...
        def _maybe_map_weights(self, *args: Any) -> Any: ...
        def all_worker_ids(self) -> Any: ...

    collector = collect(weight_updater=Updater)
    assert collector.policy_version == 0
    run(actor, bring)
    collector.increment_version()
    assert collector.policy_version == collector.get_policy_version() == 3
    run(actor, bring)
    collector.update_policy_weights_("weights", worker_ids=[0])
    assert collector.weight_updater.pushed == (("weights",), {"worker_ids": [0]})
    assert collector.weight_updater.collector is collector
    assert (collector.policy_version, collector.next().get("policy_version").tolist()) == (6, [6, 6])


# -- state ------------------------------------------------------------------------------------------------------------
def test_a_restored_collector_uses_each_prompt_once_and_local_ones_take_its_state_too(collect: Make) -> None:
    first = collect(groups_per_batch=4)
    seen = [query for batch in islice(first, 3) for query in queries(batch)[::2]]
    state = first.state_dict()
    assert next(iter(first)) is not None  # lost by the crash
    first.shutdown()
    with FakeAsyncVLLM() as engine:
        local = local_of(engine, groups_per_batch=4)
        local.load_state_dict(state)
        taken = queries(next(iter(local)))[::2]
        local.shutdown()
    assert state.pop("ahead") == []
    second = collect(groups_per_batch=4)
    second.load_state_dict(state)  # as a local collector's is
    batches = [queries(batch)[::2] for batch in islice(second, 7)]
    assert batches[0] == taken
    assert sorted(sum(batches, seen)) == sorted(f"q{i}" for i in range(40))


# -- ends -------------------------------------------------------------------------------------------------------------
def test_a_collector_that_was_shut_down_says_so(collect: Make, ended: list[Any], actor: Any) -> None:
    collector = collect(replay_buffer=buffer())
    collector.next()
    collector.async_shutdown()
    collector.shutdown()
    assert ended == [actor]
    assert run(actor, lambda local: local._is_over)
    assert (list(iter(collector)), repr(collector)) == ([], "RayAsyncLLMCollector(the collector was shut down)")
    collector.increment_version()  # a sender may continue
    assert collector.getattr_rb("write_count") == 2
    with pytest.raises(CollectionError, match="the collector was shut down"):
        collector.stats()


DRIVER = """
import os, sys, time
import ray, torch
from support.collecting import Questions, chat
from support.remote_hosts import fake_policy
from torchrl_moe.collectors import RayAsyncLLMCollector
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
collector = RayAsyncLLMCollector(chat(2), policy_factory=fake_policy(), dataloader=Questions(), group_size=2)
collector.set_post_collect_hook(lambda batch: batch.set("pid", torch.full(batch.shape, os.getpid())))
print(int(collector.next().get("pid")[0]), flush=True)
if sys.argv[2] == "forgets":
    del collector
time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.parametrize("how", ["forgets", "is killed"])
def test_the_actor_ends_with_its_driver_and_when_the_collector_is_forgotten(ray_cluster: Any, how: str) -> None:
    command = [sys.executable, "-c", DRIVER, ray_cluster.address, how]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        try:
            pid = int(driver.stdout.readline())
            if how == "is killed":
                driver.kill()
            until(lambda: is_gone(pid))
        finally:
            driver.kill()


# -- the other local collector ----------------------------------------------------------------------------------------
@pytest.fixture
def collect_in_turns(collect: Make) -> InTurns:
    """Makes collectors of two prompts a batch, each twice."""

    def in_turns(env: Any, *, group_size: None, dataloader: None, **kwargs: Any) -> RayLLMCollector:
        return RayLLMCollector(env, dialog_turns_per_batch=4, **kwargs)

    given = {"policy_factory": fake_policy(), "group_size": None, "dataloader": None}
    return lambda **kwargs: collect(dataset, in_turns, **{**given, **kwargs})


@pytest.mark.parametrize("sync_iter", [True, False])
def test_the_other_collector_gives_the_batches_of_its_local_one(collect_in_turns: InTurns, sync_iter: bool) -> None:
    local = LLMCollector(dataset, policy_factory=fake_policy(), dialog_turns_per_batch=4)
    check_same(islice(collect_in_turns(sync_iter=sync_iter), 3), islice(local, 3))
    local.shutdown()


def test_the_other_collector_fills_a_buffer_of_this_process_with_flat_rows_while_its_state_is_saved(
    collect_in_turns: InTurns,
) -> None:
    collector = collect_in_turns(replay_buffer=buffer(), total_dialog_turns=40)
    assert collector.total_dialog_turns == 40
    collector.start()
    frames = []
    while collector.is_running():
        state = collector.state_dict()
        frames.append((state["frames"], state["ahead"]))
    assert (collector.getattr_rb("write_count"), collector.replay_buffer[:].batch_size) == (40, (40,))
    assert (collector.stats()["frames"], [ahead for _, ahead in frames if ahead]) == (40, [])
    assert frames == sorted(frames)


def asked(batch: Any) -> list[str]:
    return queries(batch.reshape(-1))[::2]


def test_a_batch_that_was_asked_for_ahead_is_part_of_the_state(collect_in_turns: InTurns) -> None:
    collector = collect_in_turns(sync_iter=False)
    assert asked(collector.next()) == ["q0", "q1"]
    state = collector.state_dict()
    assert [asked(batch) for batch in state["ahead"]] == [["q2", "q3"]]
    assert asked(collector.next()) == ["q2", "q3"]  # the state has a copy
    collector.shutdown()
    restored = collect_in_turns(sync_iter=False)
    assert asked(restored.next()) == ["q0", "q1"]
    restored.load_state_dict(state)
    assert [asked(batch) for batch in restored.state_dict()["ahead"]] == [["q2", "q3"]]
    assert [asked(restored.next()) for _ in range(3)] == [["q2", "q3"], ["q4", "q5"], ["q6", "q7"]]


def test_a_state_is_not_loaded_while_a_batch_is_made(
    collect_in_turns: InTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, Any] = {}
    whole = []

    def begin(collector: RayCollector, method: str, *arguments: Any) -> Any:
        if "load_state_dict" in arguments:  # calls of an actor run side by side, and may start in another order
            whole.append(collector._is_done(begun["next"]))
        begun[method] = plain_begin(collector, method, *arguments)
        return begun[method]

    plain_begin = RayCollector._begin
    monkeypatch.setattr(RayCollector, "_begin", begin)
    collector = collect_in_turns(policy_factory=fake_policy(token_seconds=0.05), sync_iter=False)
    start = collector.state_dict()
    assert asked(collector.next()) == ["q0", "q1"]  # and the next batch is requested
    collector.load_state_dict(start)
    assert (asked(collector.next()), whole) == (["q0", "q1"], [True])


def test_nothing_is_asked_for_ahead_during_a_pause_nor_at_the_end(collect_in_turns: InTurns) -> None:
    collector = collect_in_turns(sync_iter=False, total_dialog_turns=16)
    assert asked(collector.next()) == ["q0", "q1"]
    with collector.pause():
        assert (asked(collector.next()), collector.stats()["frames"]) == (["q2", "q3"], 8)
        with pytest.raises(RuntimeError, match="the collector is paused"):
            collector.next()
    assert [asked(batch) for batch in collector] == [["q4", "q5"], ["q6", "q7"]]
    assert collector.next() is None


# -- over an engine in Ray --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def toys(actor: Any) -> Iterator[AsyncVLLM]:
    """A service over the toy engine, under the name "shared"."""
    with toy_actors():
        engine = AsyncVLLM({"model": "toy"}, backend="ray", resources={"CPU": 1}, name="shared").start()
        yield engine
        engine.shutdown()


def two_over(name: str, actor: Any, **settings: Any) -> list[RayAsyncLLMCollector]:
    """Two collectors of the even and the odd questions; the first in the shared actor, the second in one of its own."""
    made, policy = [], joined_policy(name, **settings)
    for part in range(2):
        data = [{"query": [f"q{i}"]} for i in range(part, 20, 2)]
        given = {"dataloader": data, "group_size": 2, "max_staleness": 0, "num_cpus": 0}
        with placing(actor) if part == 0 else nullcontext():
            made.append(RayAsyncLLMCollector(chat(2), policy_factory=policy, **given))
    return made


def test_two_share_an_engine_and_one_whose_actor_is_killed_says_so(actor: Any, toys: AsyncVLLM) -> None:
    first, second = two_over("shared", actor, return_log_probs=False)
    seen = [[queries(batch)[0] for batch in islice(collector, 3)] for collector in (first, second)]
    assert seen == [["q0", "q2", "q4"], ["q1", "q3", "q5"]]
    toys.replica_table[0].replica.call(bring, 20.0, version=57)  # as this driver's sender would
    for collector in (first, second):
        collector.increment_version()
        assert collector.policy_version == 57
    second.set_post_collect_hook(lambda batch: batch.set("pid", torch.full(batch.shape, os.getpid())))
    pid = int(second.next().get("pid")[0])
    waiting = in_thread(lambda: [batch for batch in second])
    until(lambda: second._awaited is not None)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CollectionError, match=r"the collector's actor gave no answer: .*died"):
        waiting.result(60)
    with pytest.raises(CollectionError, match="gave no answer"):
        second.stats()
    assert repr(second).startswith("RayAsyncLLMCollector(the collector's actor gave no answer")
    second.increment_version()  # so that a sender continues
    assert first.next().get("policy_version").tolist() == [57, 57]
    second.shutdown()
    with placing(actor):
        first.shutdown()


@pytest.mark.parametrize(
    "placed", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["ours", "torchrl's"]
)  # TorchRL's has an actor of its own class, so one more process
def test_a_policy_over_an_engine_in_ray_is_sent_as_it_is(actor: Any, toys: AsyncVLLM, placed: bool) -> None:
    policy = policy_of(toys, tokenizer=TOKENIZER, return_log_probs=False)
    kind = RayLLMCollector if placed else torchrl.collectors.llm.RayLLMCollector
    with placing(actor):
        collector = kind(dataset, policy=policy, remote_config={"num_cpus": 0}, dialog_turns_per_batch=4)
    for batch in islice(collector, 2):  # TorchRL's leaves the first two questions out
        assert list(Counter(queries(batch.reshape(-1))).values()) == [2, 2]
    collector.shutdown()
    assert toys.generate([1], use_tqdm=False).outputs[0].token_ids.tolist() == [2]  # it continues
