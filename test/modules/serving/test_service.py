"""The generation service over fake replicas: everything that a user of an engine calls, and every way it can end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import sys
import threading
import weakref
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.completions import assert_same_answers, cut
from support.services import HOUR, QUICK, ask, submitted
from support.strategies import Says
from support.waiting import in_thread, until
from torchrl_moe.errors import EngineError, GenerationTimeout, NoReplicaError, RequestRefusedError
from torchrl_moe.modules.backends.replica import Completion, ReplicaStats, Request
from torchrl_moe.modules.serving import dispatch
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.replica_table import ReplicaState
from torchrl_moe.modules.serving.service import GenerationService, Progress
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def test_sampling_parameters_default_to_the_services(serve: Any) -> None:
    (output,) = serve().generate("hi", use_tqdm=False).outputs
    assert len(output.token_ids) == 16
    assert output.logprobs is not None
    engine = serve(sampling_params={"max_tokens": 2})
    assert len(engine.generate("hi", use_tqdm=False).outputs[0].token_ids) == 2
    assert len(engine.generate("hi", {"max_tokens": 3}, use_tqdm=False).outputs[0].token_ids) == 3


def test_every_word_about_a_request_reaches_its_replica(serve: Any) -> None:
    engine, params = serve(), {"max_tokens": 2}
    same = {"lora_request": object(), "priority": 3, "return_routed_experts": False, "on_resume": "live"}
    guided = {"regex": "a+"}
    engine.generate(["a", [1]], params, guided_options_request=guided, request_ids=["x", "y"], use_tqdm=False, **same)
    first, second = submitted(engine)
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("x", "a", None)
    assert (second.request_id, second.prompt, second.prompt_token_ids.tolist()) == ("y", None, [1])
    for request in (first, second):
        assert request.sampling_params is params  # one object for all: it crosses once
        assert request.guided_options is guided
        assert {name: getattr(request, name) for name in same} == same


def test_requests_without_names_get_different_ones_across_calls_and_services(serve: Any) -> None:
    one, two = serve(), serve()
    for engine in (one, two):
        ask(engine, ["a", "b"])
        ask(engine, "c")
        asyncio.run(engine.agenerate("d"))
    names = [request.request_id for engine in (one, two) for request in submitted(engine)]
    assert len(set(names)) == len(names) == 8


def test_each_prompt_has_a_version_a_session_a_context_and_a_turn_of_its_own(serve: Any) -> None:
    engine, ear = serve(2), Says()
    engine.replica_table.set_version(1, 4)
    engine.create_load_balancer(ear)
    asked = {"min_version": [4, None], "request_context": [None, {"tenant": "b"}], "priority": np.array([7, -7])}
    fresh, _ = ask(engine, ["a", "b"], session_ids=["s", None], **asked)
    assert fresh.metrics.replica == 1
    # the more urgent one was placed first, and had the choice
    assert [(candidates, context.session_id, context.request_context) for candidates, context in ear.asked] == [
        ([0, 1], None, {"tenant": "b"}),
        ([1], "s", {}),
    ]
    assert [(request.prompt, request.priority) for request in submitted(engine)] == [("b", -7), ("a", 7)]
    ask(engine, "a", session_ids="t")  # one name will do for one prompt
    asyncio.run(engine.agenerate("a", session_id="u"))
    assert [context.session_id for _, context in ear.asked[2:]] == ["t", "u"]


ANSWERS = {"max_tokens": 12, "logprobs": 0, "n": 2}
QUESTIONS = ["answered", "cut", "half", "waits"]


def answers(engine: FakeAsyncVLLM, prompts: Any = None, **kwargs: Any) -> Any:
    return engine.generate(prompts, ANSWERS, use_tqdm=False, **kwargs)


@pytest.fixture
def whole(serve: Any) -> list[Completion]:
    return list(answers(serve(), QUESTIONS))


@pytest.fixture
def partial(whole: list[Completion]) -> list[Completion]:
    """One with its answers, one with two that are cut, one with one that is, and one that no engine had."""
    nothing = replace(cut(whole[3], 0, 0), prompt_token_ids=np.empty(0, np.int64))
    return [whole[0], cut(whole[1], 3, 7), cut(whole[2], 5, None), nothing]


def test_what_a_timeout_left_is_finished_as_if_there_had_been_none(serve: Any, whole: list[Completion]) -> None:
    engine = serve(token_seconds=lambda r: 0.0 if r.prompt == "answered" else HOUR, max_concurrent_requests=2)
    call = in_thread(lambda: answers(engine, QUESTIONS, timeout_seconds=0.5))
    running = engine.replicas[0]._running
    until(lambda: len(running) == 2)
    for request in list(running.values()):
        request.tokens = 5
    with pytest.raises(GenerationTimeout) as caught:
        call.result()
    left = caught.value.partial
    assert [completion.aborted for completion in left] == [False, True, True, True]
    assert len(left[1].outputs[0].token_ids) == 5
    assert [len(completion.prompt_token_ids) for completion in left] == [8, 3, 4, 0]
    other = serve(2)
    done = answers(other, resume=left)
    assert done[0] is left[0]
    for got, expected in zip(done, whole, strict=True):
        assert_same_answers(got, expected)
    assert sorted(request.prompt or "ids" for request in submitted(other)) == ["ids", "ids", "waits"]


def test_each_answer_continues_by_itself_and_what_is_whole_asks_nobody(
    serve: Any, whole: list[Completion], partial: list[Completion]
) -> None:
    engine = serve()
    done = answers(engine, resume=partial, request_ids=list("abcd"), priority=[0, 3, 2, 1])
    for got, expected in zip(done, whole, strict=True):
        assert_same_answers(got, expected)
    assert done[0] is partial[0]
    assert [completion.request_id for completion in done[1:]] == list("bcd")
    assert [(request.request_id, request.priority) for request in submitted(engine)] == [("d", 1), ("c", 2), ("b", 3)]
    assert done[2].outputs[1] is partial[2].outputs[1]
    assert [len(output.token_ids) for output in partial[1].outputs] == [3, 7]  # what was passed is left as it was
    counts = engine.metrics.summary()
    assert (counts["requests"], counts["completed"], counts["sequences"]) == (3, 3, 6)
    assert engine.stats()[0]["generated_tokens"] == 6 * 12 - 3 - 7 - 5 - 12


def test_one_completion_is_resumed_as_one(serve: Any, whole: list[Completion], partial: list[Completion]) -> None:
    engine = serve()
    engine.replicas[0].version = 4
    for one in (answers(engine, resume=partial[1]), asyncio.run(engine.agenerate(None, ANSWERS, resume=partial[1]))):
        # a token keeps the version that made it
        assert [output.policy_versions.tolist() for output in one.outputs] == [[0] * 3 + [4] * 9, [0] * 7 + [4] * 5]
    assert asyncio.run(engine.agenerate(None, ANSWERS, resume=partial[0])) is partial[0]
    with pytest.raises(ValueError, match="agenerate takes one prompt, got a list of 1"):
        asyncio.run(engine.agenerate(None, ANSWERS, resume=partial[:1]))


def test_a_refusal_names_the_place_in_the_whole_list(serve: Any, partial: list[Completion]) -> None:
    engine = serve(refuse=lambda r: "no" if r.prompt == "waits" else None)
    with pytest.raises(RequestRefusedError, match=r"^request 3 was refused: no") as caught:
        answers(engine, resume=partial)
    assert [completion.aborted for completion in caught.value.partial] == [False, False, False, True]


def test_a_bar_is_shown_by_default_where_somebody_looks(
    serve: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve()
    engine.generate(["a", "b", "c"])
    assert capsys.readouterr() == ("", "")  # a log file
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    engine.generate(["a", "b", "c"])
    out, err = capsys.readouterr()
    assert out == ""
    assert [words in err for words in ("generate: 100%", "3/3", "tok/s")] == [True] * 3

    def broken(progress: Progress, completion: Completion) -> None:
        raise BrokenPipeError("stderr is closed")

    monkeypatch.setattr(Progress, "add", broken)
    assert len(engine.generate(["a", "b", "c"])) == 3  # a bar that cannot be drawn ends no call


def test_late_scores_cannot_be_resumed(serve: Any) -> None:
    with pytest.raises(GenerationTimeout, match=r"2 of 2 requests were not .* score fewer tokens at once") as caught:
        serve(1, token_seconds=1.0).score([[1, 2], [3, 4]], timeout_seconds=0.1, actor_index=0)
    assert "resume" not in str(caught.value)


def test_a_new_balancer_is_used_from_now_on(serve: Any) -> None:
    engine = serve(2)
    balancer = engine.create_load_balancer(["round_robin"])
    assert isinstance(balancer, LoadBalancer)
    assert engine.load_balancer is balancer
    assert [ask(engine).metrics.replica for _ in range(3)] == [0, 1, 0]
    assert balancer.get_stats()["actor_stats"][0]["decisions"] == 2
    with pytest.raises(ValueError, match="valid strategies"):
        engine.create_load_balancer("fastest")
    assert engine.load_balancer is balancer


def test_a_named_replica_is_remembered_for_its_prefix(serve: Any) -> None:
    engine = serve(4)
    ask(engine, "x" * 100, actor_index=2)
    assert ask(engine, "x" * 100).metrics.replica == 2
    engine.reset_prefix_cache()
    assert ask(engine, "x" * 100).metrics.replica == 0
    engine.pause(clear_cache=True)
    engine.resume()
    assert ask(engine, "x" * 100).metrics.replica == 1


def test_a_balancer_goes_by_the_stats_that_replicas_sent_and_asks_none(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(3)
    engine.create_load_balancer("kv-cache")
    monkeypatch.setattr(FakeReplica, "call", lambda *_: pytest.fail("asked"))
    usage = {0: 0.5, 1: 0.125, 2: 0.25}
    sent = {index: ReplicaStats(cache_usage=share) for index, share in usage.items()}
    monkeypatch.setattr(FakeReplica, "last_stats", property(lambda replica: sent[replica.index]))
    assert ask(engine).metrics.replica == 1
    sent[1] = ReplicaStats(cache_usage=0.75)
    assert ask(engine).metrics.replica == 2
    assert [row["cache_usage"] for row in engine.load_balancer.get_stats()["actor_stats"]] == [0.5, 0.75, 0.25]


USES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("get_cache_usage", "get_random_actor_index", "get_model_metadata", "get_tokenizer"), ()),
    **dict.fromkeys(("get_num_unfinished_requests", "get_tp_size", "init_weight_update_group", "add_replicas"), ()),
    **dict.fromkeys(("pause", "resume", "sleep", "wake_up", "prometheus", "stats", "to_pandas", "routing_layout"), ()),
    **dict.fromkeys(("reset_prefix_cache", "save_model_params"), ()),
    "abort": ("x",),
    "agenerate": ("hi",),
    "collective_rpc": ("method",),
    "create_load_balancer": ("requests",),
    "generate": ("hi",),
    "register_prometheus": (object(),),
    "remove_replica": (0,),
    "score": ([1, 2],),
    "set_seed": (3,),
    "update_weights": ([("w", torch.ones(1))],),
    "validate_model_params": (lambda saved, model: True,),
}
ALWAYS = {"actors", "get_master_address", "get_master_port", "is_frozen", "is_running", "log_paths", "num_replicas"}
ALWAYS |= {"ready", "register_weight_sync", "shutdown", "weight_sync"}


def use(service: GenerationService, name: str) -> None:
    found = getattr(service, name)  # a property raises here
    if inspect.isawaitable(what := found(*USES[name])):
        asyncio.run(awaited(what))


async def awaited(what: Awaitable[object]) -> object:
    return await what


def test_every_public_name_is_tried_below() -> None:
    assert {name for name in vars(GenerationService) if not name.startswith("_")} == USES.keys() | ALWAYS


@pytest.mark.parametrize("name", USES)
def test_use_after_shutdown_is_refused(name: str) -> None:
    engine = FakeAsyncVLLM()
    engine.get_tokenizer()
    engine.shutdown()
    with pytest.raises(RuntimeError, match=r"the service is not running"):
        use(engine, name)
    assert not engine.is_running


def test_shutdown_under_calls_ends_them() -> None:
    engine = FakeAsyncVLLM(2, token_seconds=HOUR, max_concurrent_requests=3)
    call = in_thread(lambda: ask(engine, ["a", "b"]))
    task = in_thread(lambda: asyncio.run(engine.agenerate("c")))
    until(lambda: sum(row["running"] for row in engine.stats()) == 3)
    waits = in_thread(lambda: ask(engine, ["d"]))  # for a place, which the others leave
    until(lambda: len(engine._dispatcher._open) == 4)
    engine.shutdown()
    for future in (call, task, waits):
        with pytest.raises(EngineError, match=r"^the service was shut down$") as caught:
            future.result(60.0)
        assert [len(answer.outputs) for answer in caught.value.partial] in ([1], [1, 1])
    assert [entry.inflight for entry in engine.replica_table] == [0, 0]


def test_commands_with_every_replica_dead_say_so(serve: Any) -> None:
    engine = serve(2)
    for replica in engine.replicas:
        replica.die()
    for name in ("get_tokenizer", "pause", "reset_prefix_cache", "resume"):
        with pytest.raises(NoReplicaError, match=r"no replica is alive: .*#1 DEAD.* Make a new service"):
            use(engine, name)
    with pytest.raises(NoReplicaError, match="no replica is serving"):
        ask(engine)
    assert [row["state"] for row in engine.stats()] == ["DEAD", "DEAD"]


@pytest.mark.parametrize("way", ["generate", "agenerate", "retried"])
def test_answers_go_with_their_last_user_without_waiting_for_the_garbage_collector(fleet: Any, way: str) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, die_under=lambda r: way == "retried" and n == 0))
    gc.disable()
    try:
        completion = asyncio.run(service.agenerate("hi")) if way == "agenerate" else ask(service)
        tokens = weakref.ref(completion.outputs[0].token_ids)
        del completion
        until(lambda: tokens() is None)
    finally:
        gc.enable()
    assert service.restarts == [int(way == "retried")]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 60))])
def test_under_deaths_stalls_and_aborts_every_request_comes_back_once_with_its_own_answer(
    fleet: Any, seed: int
) -> None:
    rng = random.Random(seed)
    faults = replace(QUICK, max_restarts=10**6, attempts=10**6, probe=0.02, patience=0.02)
    service = fleet(3, lambda i, n: FakeReplica(i, token_seconds=0.001), faults, max_concurrent_requests=40)
    expected = FakeReplica()
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(rng.uniform(0.0, 0.05)):
            replica = service.replica_table[rng.randrange(3)].replica
            rng.choice([replica.die, replica.die, replica.stall])()

    def call(number: int) -> None:
        prompts = [f"{number} {i}" for i in range(20)]
        for prompt, completion in zip(prompts, ask(service, prompts, max_tokens=8, priority=number % 2), strict=True):
            check(prompt, completion)

    def check(prompt: str, completion: Completion) -> None:
        request = Request(request_id="r", sampling_params={"max_tokens": 8, "logprobs": 0}, prompt=prompt)
        (future,) = expected.submit([request])
        want, got = future.result().outputs[0], completion.outputs[0]
        assert (completion.prompt, got.text, got.finish_reason) == (prompt, want.text, "length")
        assert np.array_equal(got.routed_experts, want.routed_experts)

    async def tasks() -> None:
        names = [f"task {i}" for i in range(60)]
        params = {"max_tokens": 8, "logprobs": 0}
        made = [asyncio.create_task(service.agenerate(name, params, request_id=name)) for name in names]
        await asyncio.sleep(0.02)
        for task in made[:10]:
            task.cancel()
        service.abort(names[10:20])
        done = await asyncio.gather(*made, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) or not one.aborted for one in done[:10])
        for name, completion in zip(names[20:], done[20:], strict=True):
            check(name, completion)

    with ThreadPoolExecutor(7) as pool:
        disturber = pool.submit(disturb)
        calls = [pool.submit(call, number) for number in range(5)] + [pool.submit(lambda: asyncio.run(tasks()))]
        try:
            for future in calls:
                future.result(60.0)
        finally:
            stop.set()
        disturber.result(60.0)
    assert sum(service.restarts) >= 1


def test_a_random_replica_is_one_that_serves(serve: Any) -> None:
    engine = serve(4)
    engine.replica_table.set_state(1, ReplicaState.DRAINING)
    assert {engine.get_random_actor_index() for _ in range(200)} == {0, 2, 3}
    for index in (0, 2, 3):
        engine.replica_table.set_state(index, ReplicaState.SYNCING)
    with pytest.raises(NoReplicaError, match="no replica is serving"):
        engine.get_random_actor_index()


# -- parts of answers -------------------------------------------------------------------------------------------------


def tokens_of(parts: list[Completion]) -> list[int]:
    return [int(token) for part in parts for token in part.outputs[0].token_ids]


def test_a_part_of_a_replica_that_was_ended_is_told_to_nobody_once_another_has_the_request(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tells, parts = serve(2, token_seconds=0.01), {}, []
    for replica in engine.replicas:

        def submit(requests: Any, tell: Any = None, replica: Any = replica, submit: Any = replica.submit) -> Any:
            tells[replica.index] = tell
            return submit(requests, tell)

        monkeypatch.setattr(replica, "submit", submit)

    async def ask_on() -> Completion:
        answer = asyncio.ensure_future(engine.agenerate([1, 2], {"max_tokens": 40}, on_part=parts.append))
        while not parts:
            await asyncio.sleep(0.005)
        (first,) = tells
        engine.replicas[first].die()
        while len(tells) < 2:
            await asyncio.sleep(0.005)
        tells[first]([parts[0]])
        return await answer

    whole = asyncio.run(ask_on()).outputs[0].token_ids.tolist()
    assert tokens_of(parts) == whole[: len(tokens_of(parts))]


def test_what_a_call_has_at_its_deadline_is_what_it_was_told_where_the_replica_says_no_more(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ABORT_GRACE_SECONDS", 0.1)
    engine, parts = serve(token_seconds=0.01), []

    def take(part: Completion) -> None:
        parts.append(part)
        engine.replicas[0].stall()

    with pytest.raises(GenerationTimeout) as caught:
        asyncio.run(engine.agenerate([1, 2], {"max_tokens": 10**6}, on_part=take, timeout_seconds=3.0))
    (partial,) = caught.value.partial
    assert partial.outputs[0].token_ids.tolist() == tokens_of(parts) != []
    assert (partial.outputs[0].finish_reason, partial.prompt_token_ids.tolist()) == ("abort", [1, 2])
    engine.replicas[0].die()
