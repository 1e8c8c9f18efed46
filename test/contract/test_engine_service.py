"""What an engine promises to who calls it: two replicas of the fake, plain transformers, vLLM, and vLLM's in Ray.

That its log-probs, routes and weights are the model's is in ``test/testing/conformance/test_service.py``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from support.actors import kill
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe.data import RoutedExperts
from torchrl_moe.errors import EngineError, GenerationTimeout, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM

IDS = [72, 105, 44, 32, 119, 111, 114, 108, 100]
LONG = 120
GREEDY = {"temperature": 0.0}
VLLM = pytest.param("engine", marks=pytest.mark.engine("qwen3_moe", num_replicas=2), id="vllm")
RAY = pytest.param("ray_pair", marks=[pytest.mark.ray, pytest.mark.engine("qwen3_moe")], id="ray")
CLOSE = 1e-4
"""Of log-probs that two batches of different shapes compute."""


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(2, token_seconds=0.002) as made:
        yield made


@pytest.fixture(params=["fake", pytest.param("second_engine", id="transformers"), VLLM, RAY])
def service(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine that serves; whatever a test did, nothing of it is left in a replica."""
    made = request.getfixturevalue(request.param)
    yield made
    until(lambda: all(row["running"] + row["waiting"] + row["inflight"] == 0 for row in made.stats()))
    assert made.get_num_unfinished_requests() == [0, 0]
    assert made.admission.taken == 0
    assert len(ask(made, IDS, 2).outputs[0].token_ids) == 2


def ask(service: Any, prompts: Any, max_tokens: int = 6, **kwargs: Any) -> Any:
    params = {"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True, **kwargs.pop("params", {})}
    return service.generate(prompts, params, use_tqdm=False, **kwargs)


def caught(attempt: Callable[[float], Any]) -> Any:
    """What an attempt that must meet a request while it runs brings; on a busy machine it comes too late, or early."""
    for seconds in (0.05, 0.1, 0.2, 0.3, 0.05, 0.5, 0.8, 0.02, 1.5):
        if (found := attempt(seconds)) is not None:
            return found
    return pytest.fail("each run was over, or had not begun, when something was to be done to it")


def others_than(service: Any, rows: Any) -> Any:
    """Routes that the model did not choose: each expert's next number; -1 where a layer has no router."""
    layout = service.routing_layout
    found = (rows.astype(np.int16) + 1) % layout.num_experts
    found[:, layout.dense_layers] = -1
    return found


# -- answers ----------------------------------------------------------------------------------------------------------


def test_each_answer_is_whole_and_in_its_place(service: Any) -> None:
    layout, prompts = service.routing_layout, [[65 + i] * (1 + i % 3) for i in range(20)]
    completions = ask(service, prompts, 3, params={"n": 2})
    assert [completion.prompt_token_ids.tolist() for completion in completions] == prompts
    assert {completion.metrics.replica for completion in completions} == {0, 1}
    for completion in completions:
        times = completion.metrics
        assert 0 <= times.queue_seconds <= times.first_token_seconds <= times.total_seconds
        assert [output.index for output in completion.outputs] == [0, 1]
        for output in completion.outputs:
            tokens = len(completion.prompt_token_ids) + 3
            assert (len(output.token_ids), output.finish_reason, len(set(output.policy_versions))) == (3, "length", 1)
            assert (output.logprobs.dtype, output.logprobs.shape) == (np.float32, (3,))
            assert (output.logprobs <= 0).all()
            assert output.routed_experts.shape == (tokens - 1, layout.num_layers, layout.top_k)
            RoutedExperts.from_vllm(output.routed_experts, num_tokens=tokens, layout=layout).validate(layout)


def test_a_text_is_its_ids_and_what_nobody_asked_for_does_not_come(service: Any) -> None:
    assert service.get_tokenizer().encode("Hi, world") == IDS
    by_text, by_ids = (ask(service, prompt, 8, params=GREEDY) for prompt in ("Hi, world", IDS))
    assert (by_text.prompt, by_text.prompt_token_ids.tolist()) == ("Hi, world", IDS)
    (one,), (two,) = by_text.outputs, by_ids.outputs
    assert (one.token_ids.tolist(), one.text) == (two.token_ids.tolist(), two.text)
    assert one.logprobs == pytest.approx(two.logprobs, abs=CLOSE)
    (bare,) = service.generate(IDS, {"max_tokens": 2}, use_tqdm=False, return_routed_experts=False).outputs
    assert (bare.logprobs, bare.routed_experts) == (None, None)


def test_threads_and_tasks_each_get_their_own(service: Any) -> None:
    async def tasks() -> list[Any]:
        params = {"max_tokens": 3, "ignore_eos": True}
        return await asyncio.gather(*(service.agenerate([65 + i], params) for i in range(20)))

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(ask, service, [[97 + i, j + 1] for j in range(6)], 3) for i in range(5)]
        asynchronous = pool.submit(lambda: asyncio.run(tasks()))
        for i, call in enumerate(calls):
            found = [completion.prompt_token_ids.tolist() for completion in call.result(PATIENCE)]
            assert found == [[97 + i, j + 1] for j in range(6)]
        assert [c.prompt_token_ids.tolist() for c in asynchronous.result(PATIENCE)] == [[65 + i] for i in range(20)]


def test_the_named_replica_answers_and_both_answer_alike(service: Any) -> None:
    answers = [ask(service, IDS, 8, actor_index=i, params=GREEDY) for i in range(2)]
    assert [answer.metrics.replica for answer in answers] == [0, 1]
    one, two = (answer.outputs[0] for answer in answers)
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert np.array_equal(one.routed_experts, two.routed_experts)
    with pytest.raises(IndexError, match="actor index 2"):
        ask(service, IDS, actor_index=2)


def test_a_refused_request_is_named_and_the_others_finish(service: Any) -> None:
    layout = service.routing_layout
    rows = np.full((1, layout.num_layers, layout.top_k), -1, np.int16)
    rows[:, layout.moe_layers] = layout.num_experts + np.arange(layout.top_k)  # no such experts
    with pytest.raises(RequestRefusedError, match="request 1") as error:
        ask(service, [IDS] * 3, routed_experts=[None, rows, None])
    assert [len(one.outputs[0].token_ids) for one in error.value.partial] == [6, 0, 6]


@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_two_engines_give_the_same_greedy_answers(engine: AsyncVLLM, second_engine: AsyncVLLM) -> None:
    """But where two words, or two experts, are as good as each other: then either goes its own way from there."""
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 0}
    prompts = [np.random.default_rng(seed).integers(0, 256, 4 + seed).tolist() for seed in range(8)]
    ours, theirs = (one.generate(prompts, params, use_tqdm=False) for one in (second_engine, engine))
    apart = []
    for one, other in zip(ours, theirs, strict=True):
        (a,), (b,) = one.outputs, other.outputs
        same = int((a.token_ids == b.token_ids).cumprod().sum())
        assert np.abs(a.logprobs - b.logprobs)[:same].max(initial=0.0) <= 1e-5
        rows = slice(0, len(one.prompt_token_ids) + same - 1)
        assert (np.sort(a.routed_experts[rows], -1) == np.sort(b.routed_experts[rows], -1)).all()
        assert a.routed_experts.dtype == b.routed_experts.dtype
        assert (a.text == b.text) == (same == 16)
        apart += [same] if same < 16 else []
    assert len(apart) <= 1


# -- ends that come early ---------------------------------------------------------------------------------------------


def test_a_deadline_aborts_what_is_late(service: Any) -> None:
    service.pause()  # now nothing can finish in time
    try:
        with pytest.raises(GenerationTimeout, match="2 of 2") as error:
            ask(service, [IDS, IDS], timeout_seconds=0.2)
    finally:
        service.resume()
    assert [completion.aborted for completion in error.value.partial] == [True, True]


def test_what_an_abort_cut_continues_as_if_it_never_was(service: Any) -> None:
    whole = ask(service, IDS, LONG, params=GREEDY)
    params = {"max_tokens": LONG, "logprobs": 0, "ignore_eos": True, **GREEDY}

    async def cut(seconds: float) -> Any:
        task = asyncio.create_task(service.agenerate(IDS, params, request_id="mine"))
        await asyncio.sleep(seconds)
        service.abort("mine")
        completion = await task
        return completion if 0 < len(completion.outputs[0].token_ids) < LONG else None

    first = caught(lambda seconds: asyncio.run(cut(seconds)))
    (before,), (expected,) = first.outputs, whole.outputs
    tokens = len(before.token_ids)
    assert (before.finish_reason, len(before.logprobs), len(before.policy_versions)) == ("abort", tokens, tokens)
    assert len(before.routed_experts) == len(IDS) + tokens - 1
    done = ask(service, None, LONG, params=GREEDY, resume=first)
    (output,) = done.outputs
    for name in ("token_ids", "policy_versions", "logprobs", "routed_experts"):  # bit by bit
        assert np.array_equal(getattr(output, name)[: len(getattr(before, name))], getattr(before, name)), name
    assert (output.token_ids.tolist(), output.text) == (expected.token_ids.tolist(), expected.text)
    assert output.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)
    assert np.array_equal(np.sort(output.routed_experts), np.sort(expected.routed_experts))
    assert (output.finish_reason, output.resume) == ("length", "forced")


def test_a_task_that_is_cancelled_leaves_no_request(service: Any) -> None:
    async def main() -> None:
        params = {"max_tokens": LONG, "ignore_eos": True}
        tasks = [asyncio.create_task(service.agenerate(IDS, params)) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    before = sum(row["generated_tokens"] for row in service.stats())
    asyncio.run(main())
    until(lambda: not any(row["running"] for row in service.stats()))
    assert sum(row["generated_tokens"] for row in service.stats()) - before < 20 * LONG / 2


# -- pauses -----------------------------------------------------------------------------------------------------------


def running(service: Any, seconds: float) -> Any:
    """A call of four requests that has run for so long."""
    call = in_thread(lambda: ask(service, [IDS] * 4, LONG))
    until(lambda: call.done() or sum(row["running"] for row in service.stats()))
    time.sleep(seconds)
    return call


@pytest.mark.parametrize("clear_cache", [False, True])
def test_keep_freezes_what_runs_and_a_resume_finishes_it(service: Any, clear_cache: bool) -> None:
    def attempt(seconds: float) -> Any:
        call = running(service, seconds)
        service.pause("keep", clear_cache=clear_cache)
        made = [row["generated_tokens"] for row in service.stats()]
        time.sleep(0.3)
        frozen = not call.done() and [row["generated_tokens"] for row in service.stats()] == made
        service.resume()
        done = call.result(PATIENCE)
        return done if frozen else None

    for completion in caught(attempt):
        (output,) = completion.outputs
        assert (len(output.token_ids), output.finish_reason) == (LONG, "length")
        assert len(output.routed_experts) == len(IDS) + LONG - 1


def test_wait_lets_what_runs_finish_and_holds_what_comes(service: Any) -> None:
    call = in_thread(lambda: ask(service, [IDS] * 4, 40))
    until(lambda: call.done() or sum(row["running"] for row in service.stats()) == 4)  # what comes later is held
    service.pause("wait")
    try:
        assert {completion.outputs[0].finish_reason for completion in call.result(PATIENCE)} == {"length"}
        with pytest.raises(GenerationTimeout):
            ask(service, IDS, timeout_seconds=0.3)
    finally:
        service.resume()


def test_abort_cuts_what_runs(service: Any) -> None:
    def attempt(seconds: float) -> Any:
        call = running(service, seconds)
        service.pause("abort")
        service.resume()
        done = call.result(PATIENCE)
        return done if all(completion.aborted for completion in done) else None

    assert len(caught(attempt)) == 4


# -- recorded experts -------------------------------------------------------------------------------------------------


def test_recorded_experts_are_followed_and_scored(service: Any) -> None:
    layout, ids = service.routing_layout, IDS[:4]
    own = ask(service, ids, params=GREEDY).outputs[0].routed_experts
    rows = others_than(service, own[:4])
    rows[0] = -1
    (output,) = ask(service, ids, params=GREEDY, routed_experts=rows).outputs
    routed = list(layout.moe_layers)
    assert output.routed_experts.dtype == own.dtype
    assert np.array_equal(np.sort(output.routed_experts[0, routed]), np.sort(own[0, routed]))
    assert np.array_equal(np.sort(output.routed_experts[1:4, routed]), np.sort(rows[1:, routed]))
    if service.infos[0].model == "fake":
        return  # its scores know nothing of experts
    free, followed = service.score([ids, ids], routed_experts=[None, rows])
    assert np.isnan([float(free[0]), float(followed[0])]).all()
    assert float((free - followed)[1:].abs().max()) > 100 * CLOSE


# -- parts ------------------------------------------------------------------------------------------------------------


def told(parts: list[Any], index: int = 0) -> tuple[list[int], str, list[float]]:
    """What parts say of an answer: tokens, text and log-probs."""
    outputs = [output for part in parts for output in part.outputs if output.index == index]
    tokens = [int(token) for output in outputs for token in output.token_ids]
    return tokens, "".join(output.text for output in outputs), [float(one) for o in outputs for one in o.logprobs]


@pytest.mark.parametrize("streaming", ["fake", VLLM, RAY])
@pytest.mark.parametrize("how", ["plain", "stop strings", "paused meanwhile"])
def test_parts_are_the_beginning_of_the_answer(streaming: str, how: str, request: pytest.FixtureRequest) -> None:
    service, parts = request.getfixturevalue(streaming), []
    params = {"max_tokens": LONG, "logprobs": 0, "ignore_eos": True, "n": 2}
    if how == "stop strings":
        params |= {"top_p": 0.9, "stop": ["qqq", "\x00\x00"]}

    def pause() -> None:
        service.pause("keep", clear_cache=True)  # what runs is read again
        service.resume()

    def take(part: Any) -> None:
        parts.append(part)
        if how == "paused meanwhile" and len(parts) == 3:
            threading.Thread(target=pause).start()

    whole = asyncio.run(service.agenerate(IDS, params, on_part=take))
    assert len(parts) > 1
    assert not any(part.finished for part in parts)
    assert [part.prompt_token_ids.tolist() for part in parts] == [IDS] + [[]] * (len(parts) - 1)
    for output in whole.outputs:
        tokens, text, logprobs = told(parts, output.index)
        assert len(tokens) > 10
        assert tokens == output.token_ids.tolist()[: len(tokens)]
        assert output.text.startswith(text)
        assert logprobs == output.logprobs[: len(tokens)].tolist()
        mine = [one for part in parts for one in part.outputs if one.index == output.index]
        made_by = np.concatenate([one.policy_versions for one in mine])
        assert made_by.tolist() == output.policy_versions[: len(tokens)].tolist()
        if output.kept is not None and streaming != "fake":
            sizes = np.concatenate([one.kept.sizes for one in mine])
            assert sizes.tolist() == output.kept.sizes[: len(tokens)].tolist()


@pytest.mark.parametrize(
    "streaming", ["fake", VLLM, pytest.param(*RAY.values, marks=[*RAY.marks, pytest.mark.soak], id="ray")]
)
def test_a_death_loses_no_request_and_no_part(streaming: str, request: pytest.FixtureRequest) -> None:
    """The stream goes on where its replica left it, and no token of it is told twice."""

    async def ask_all(service: Any, parts: list[Any], killed: list[int]) -> list[Any]:
        def take(part: Any) -> None:
            parts.append(part)
            if not killed and len(told(parts)[0]) >= 5:
                killed.append(part.metrics.replica)
                kill(service.replica_table[killed[0]].replica)

        params = {"max_tokens": LONG, "logprobs": 0, "ignore_eos": True, **GREEDY}
        others = [service.agenerate([65 + i], params) for i in range(4)]
        # those under which a replica died are tried again one by one, the last sent first
        return await asyncio.gather(*others, service.agenerate(IDS, params, on_part=take))

    with FakeAsyncVLLM(2, token_seconds=0.003) as mortal:
        service = mortal if streaming == "fake" else request.getfixturevalue(streaming)
        for _ in range(8):
            parts: list[Any] = []
            killed: list[int] = []
            *others, streamed = asyncio.run(ask_all(service, parts, killed))
            if streaming != "fake":  # it comes back
                until(lambda: [row["state"] for row in service.stats()] == ["SERVING"] * 2)
            if streamed.outputs[0].resume == "live":
                break  # else the whole answer was on its way already
        (answer,), (tokens, text, logprobs) = streamed.outputs, told(parts)
        assert (len(answer.token_ids), answer.finish_reason, answer.resume) == (LONG, "length", "live")
        assert tokens == answer.token_ids.tolist()[: len(tokens)]
        assert answer.text.startswith(text)
        assert logprobs == answer.logprobs[: len(tokens)].tolist()
        assert len(answer.routed_experts) == len(IDS) + LONG - 1
        assert [one.prompt_token_ids.tolist() for one in others] == [[65 + i] for i in range(4)]
        assert {len(one.outputs[0].token_ids) for one in others} == {LONG}
        assert Counter(one.metrics.replica for one in others)[killed[0]] < len(others)
        if streaming == "fake":  # others restart the replica, which may then go on with the stream itself
            assert streamed.metrics.replica == 1 - killed[0]


@pytest.mark.parametrize("streaming", ["fake", VLLM])
def test_routes_that_were_delivered_before_a_stream_stay_when_its_replica_dies(
    streaming: str, request: pytest.FixtureRequest
) -> None:
    params = {"max_tokens": LONG, "logprobs": 0, "ignore_eos": True, "n": 2}

    async def ask_on(service: Any, given: Any, parts: list[Any], killed: list[int]) -> Any:
        def take(part: Any) -> None:
            parts.append(part)
            if not killed and len(told(parts, 1)[0]) >= 5:
                killed.append(part.metrics.replica)
                kill(service.replica_table[killed[0]].replica)

        return await service.agenerate(resume=given, sampling_params=params, on_part=take, on_resume="forced")

    with FakeAsyncVLLM(2, token_seconds=0.003) as mortal:
        service = mortal if streaming == "fake" else request.getfixturevalue(streaming)
        given = ask(service, IDS, 6, params={"n": 2})
        for output in given.outputs:  # which no engine would choose by itself
            output.routed_experts = np.abs(others_than(service, output.routed_experts)).astype(np.uint8)
        given.outputs[1].finish_reason = "abort"
        for _ in range(8):
            parts: list[Any] = []
            killed: list[int] = []
            whole = asyncio.run(ask_on(service, given, parts, killed))
            if streaming != "fake":  # it comes back
                until(lambda: [row["state"] for row in service.stats()] == ["SERVING"] * 2)
            if whole.outputs[1].resume == "live":
                break  # else the whole answer was on its way already
        for before, after in zip(given.outputs, whole.outputs, strict=True):
            rows = before.routed_experts
            assert after.routed_experts[: len(rows)].tolist() == rows.tolist()
            assert after.token_ids[:6].tolist() == before.token_ids.tolist()
        finished, grown = whole.outputs
        assert len(finished.token_ids) == 6
        assert len(grown.token_ids) == LONG and len(grown.routed_experts) == len(IDS) + LONG - 1
        assert grown.resume == "live"  # tokens that were only streamed had no routes yet
        assert grown.token_ids[6:].tolist()[: len(told(parts, 1)[0])] == told(parts, 1)[0]


# -- what is asked of all replicas ------------------------------------------------------------------------------------


def test_an_engine_says_what_it_is_and_counts_what_it_did(service: Any) -> None:
    layout = service.routing_layout
    assert layout == service.infos[0].layout
    assert repr(service).splitlines()[1].startswith("  #0 SERVING, ")  # a breaker half-open after a kill is named next
    before = service.metrics.summary(), service.stats()
    ask(service, [IDS, IDS], 5, params={"n": 2})
    after = service.metrics.summary(), service.stats()
    moved = [after[0][name] - before[0].get(name, 0) for name in ("requests", "completed", "sequences")]
    assert moved == [2, 2, 4]
    counts = {
        name: sum(row[name] for row in after[1]) - sum(row[name] for row in before[1])
        for name in ("requests", "completions", "prompt_tokens", "generated_tokens")
    }
    assert counts == {"requests": 2, "completions": 4, "prompt_tokens": 18, "generated_tokens": 20}
    assert len(service.get_cache_usage()) == 2
    assert service.reset_prefix_cache() is True
    assert service.set_seed(3) == 5


def test_an_engine_without_a_command_says_so_and_serves_on(service: Any) -> None:
    with pytest.raises((EngineError, ValueError)):
        service.collective_rpc("no_such_method")
