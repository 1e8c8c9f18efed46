"""Requests in one loop: what joins, what is cut, what waits, and what of it comes back."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.plain import TOLERANCE, Bench, check_output, chosen, log_probs, serve
from torchrl_moe.modules.backends.replica import Completion, Scoring
from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.loading import Loaded

LONG = {"max_tokens": 60}


def test_each_request_is_answered_and_counted(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a")
        bench.start("b", [70], params={"n": 3, "max_tokens": 2})
        bench.start("bad", params={"logit_bias": {1: 1.0}})
        bench.start("s", [70, 71, 72], scoring=Scoring(temperature=0.5))
        await bench.until(lambda: len(bench.sent) == 3)

    bench = serve(plain, script)
    assert list(bench.refused) == ["bad"]
    assert [len(output.token_ids) for output in bench.sent["b"].outputs] == [2, 2, 2]
    assert bench.sent["a"].outputs[0].finish_reason == "length"
    scores = bench.sent["s"].prompt_logprobs
    assert scores is not None
    assert scores[1:] == pytest.approx(plain.decoder.score([70, 71, 72], Scoring(temperature=0.5))[1:], abs=TOLERANCE)
    assert bench.requests.counts == {"requests": 3, "completions": 4, "prompt_tokens": 6, "generated_tokens": 8 + 6}
    metrics = bench.sent["a"].metrics
    assert 0 <= metrics.queue_seconds <= metrics.first_token_seconds <= metrics.total_seconds
    assert bench.requests.seconds >= metrics.total_seconds
    assert (bench.requests.load.running, bench.requests.load.waiting, len(bench.requests)) == (0, 0, 0)
    assert bench.requests.load.tokens == 14


def test_an_abort_gives_what_there_is_with_its_rows(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a", [65, 66, 67], params={**LONG, "n": 2})
        bench.start("b", [70])
        await bench.tokens("a", 3)
        bench.requests.abort(["a", "unknown"])
        await bench.until(lambda: len(bench.sent) == 2)
        bench.start("a", [65], params={"max_tokens": 2})  # the id is free again
        await bench.until(lambda: len(bench.order) == 3)

    bench = serve(plain, script)
    assert bench.order[-1] == "a"
    assert len(bench.sent["a"].outputs[0].token_ids) == 2
    assert bench.sent["b"].outputs[0].finish_reason == "length"


def test_an_abort_that_comes_too_late_spares_the_next_request_of_that_id(
    plain: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on, step = threading.Event(), threading.Event(), plain.decoder.step

    def slow_step(*arguments: Any) -> None:
        step(*arguments)
        inside.set()
        go_on.wait(60.0)

    monkeypatch.setattr(plain.decoder, "step", slow_step)

    async def script(bench: Bench) -> None:
        def take(completion: Completion) -> None:
            bench._take(completion)
            if len(bench.order) == 1:
                bench.start("a", params={"max_tokens": 2})

        bench.requests._send = take
        bench.start("a", params={"max_tokens": 1})
        await bench.until(inside.is_set)
        bench.requests.abort(["a"])  # its only token is there already
        go_on.set()
        await bench.until(lambda: len(bench.order) == 2)
        assert not bench.sent["a"].aborted
        assert len(bench.sent["a"].outputs[0].token_ids) == 2

    serve(plain, script)


def test_cut_answers_are_those_of_the_model(plain: Loaded) -> None:
    answers: list[Answer] = []

    async def script(bench: Bench) -> None:
        bench.start("a", [65, 66, 67], params=LONG)
        await bench.tokens("a", 4)
        answers.extend(plain.decoder.answers)
        bench.requests.abort(["a"])
        await bench.until(lambda: bench.sent)

    (output,) = serve(plain, script).sent["a"].outputs
    (answer,) = answers
    assert output.finish_reason == "abort"
    tokens = len(output.token_ids)
    assert tokens >= 4
    assert output.routed_experts is not None
    assert len(output.routed_experts) == 3 + tokens - 1
    assert output.logprobs == pytest.approx(chosen(log_probs(plain.decoder.model, answer), answer), abs=TOLERANCE)


def test_what_is_cut_continues_as_if_it_never_was(plain: Loaded) -> None:
    params = {"temperature": 0.0, "max_tokens": 12}

    async def script(bench: Bench) -> None:
        bench.start("whole", [65, 66, 67], params=params)
        await bench.until(lambda: bench.sent)
        bench.start("a", [65, 66, 67], params=params)
        await bench.tokens("a", 3)
        bench.requests.abort(["a"])
        await bench.until(lambda: "a" in bench.sent)
        bench.start("b", [65, 66, 67], params=params, resume=bench.sent["a"])
        await bench.until(lambda: "b" in bench.sent)

    bench = serve(plain, script)
    whole, again = bench.sent["whole"].outputs[0], bench.sent["b"].outputs[0]
    assert bench.sent["a"].outputs[0].finish_reason == "abort"
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    assert again.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
    assert again.routed_experts is not None
    assert whole.routed_experts is not None
    assert (np.sort(again.routed_experts, -1) == np.sort(whole.routed_experts, -1)).all()
    assert (again.text, again.resume) == (whole.text, "forced")
    assert bench.requests.counts["generated_tokens"] == 12 + 12


# -- pauses -----------------------------------------------------------------------------------------------------------


def test_keep_freezes_and_a_snapshot_shows_what_there_is(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a", params=LONG)
        await bench.tokens("a", 2)
        await bench.requests.pause("keep", False)
        bench.start("b")
        (one, two) = await bench.requests.snapshot()
        await asyncio.sleep(0.05)
        (same, _) = await bench.requests.snapshot()
        assert one.outputs[0].token_ids.tolist() == same.outputs[0].token_ids.tolist()
        assert (one.aborted, two.aborted, len(two.outputs[0].token_ids)) == (True, True, 0)
        assert two.outputs[0].routed_experts is None
        assert bench.requests.is_frozen
        bench.requests.abort(["b"])  # also in a pause
        await bench.until(lambda: "b" in bench.sent)
        bench.requests.resume()
        assert not bench.requests.is_frozen
        await bench.until(lambda: "a" in bench.sent)

    bench = serve(plain, script)
    assert bench.sent["b"].aborted
    (output,) = bench.sent["a"].outputs
    assert (len(output.token_ids), output.resume) == (60, "none")


def test_a_cache_that_is_cleared_is_read_again(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("plain", params={"temperature": 0.0, "max_tokens": 20})
        await bench.until(lambda: bench.sent)
        bench.start("a", params={"temperature": 0.0, "max_tokens": 20})
        await bench.tokens("a", 2)
        await bench.requests.pause("keep", True)
        assert plain.decoder.answers == []
        bench.requests.resume()
        await bench.until(lambda: "a" in bench.sent)

    bench = serve(plain, script)
    (before,), (after,) = bench.sent["plain"].outputs, bench.sent["a"].outputs
    assert before.token_ids.tolist() == after.token_ids.tolist()
    assert (before.resume, after.resume) == ("none", "forced")


def test_wait_lets_what_runs_finish_and_holds_what_comes(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a", params={"max_tokens": 30})
        pausing = asyncio.create_task(bench.requests.pause("wait", False))
        await asyncio.sleep(0)
        bench.start("b")
        await pausing
        assert bench.order == ["a"]
        await asyncio.sleep(0.05)
        assert bench.order == ["a"]
        bench.requests.resume()
        await bench.until(lambda: len(bench.sent) == 2)

    assert not any(one.aborted for one in serve(plain, script).sent.values())


def test_abort_cuts_all_that_there_is(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a", params=LONG)
        await bench.tokens("a", 1)
        bench.start("b", [70, 71], scoring=Scoring())
        await bench.requests.pause("abort", False)
        assert set(bench.sent) == {"a", "b"}

    bench = serve(plain, script)
    assert bench.sent["a"].aborted


def test_who_takes_the_turn_finds_no_step_half_done(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a", params=LONG)
        await bench.tokens("a", 1)
        for _ in range(5):
            async with bench.requests.between_steps("keep"):
                (answer,) = plain.decoder.answers
                had = len(answer.tokens)
                await asyncio.sleep(0.01)
                assert len(answer.tokens) == had
            await bench.tokens("a", had + 1)
        bench.start("late")
        async with bench.requests.between_steps("wait"):
            assert {"a", "late"} == set(bench.sent)

    serve(plain, script)


def test_an_error_of_the_model_ends_the_engine(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(plain.decoder, "step", fail)

    async def script(bench: Bench) -> None:
        bench.start("a")
        await bench.until(lambda: bench.requests.failure)

    assert str(serve(plain, script).requests.failure) == "out of memory"


def test_whatever_comes_between_each_answer_is_what_the_model_makes_of_it(plain: Loaded) -> None:
    """Prompts of any lengths in a batch with too little room, some aborted, all paused now and then, and read again."""
    rng = random.Random(0)
    reader = replace(plain.reader, arguments=replace(plain.arguments, max_num_seqs=5, max_num_batched_tokens=40))
    prompts = {f"r{i}": [rng.randrange(256) for _ in range(rng.randint(1, 30))] for i in range(14)}

    async def script(bench: Bench) -> None:
        for name, ids in prompts.items():
            bench.start(name, ids, params={"n": rng.randint(1, 3), "max_tokens": rng.randint(1, 20)})
        for i in range(6):
            await asyncio.sleep(rng.random() * 0.02)
            if i % 2:
                bench.requests.abort([f"r{rng.randrange(14)}"])
            else:
                await bench.requests.pause("keep", i % 4 == 0)
                bench.requests.resume()
        await bench.until(lambda: len(bench.sent) == 14)

    sent = serve(replace(plain, reader=reader), script).sent
    for name, completion in sent.items():
        for output in completion.outputs:
            assert completion.aborted or output.finish_reason == "length"
            if len(output.token_ids):
                check_output(plain, prompts[name], output)
