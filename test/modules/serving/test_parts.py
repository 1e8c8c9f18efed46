"""An answer comes in parts: no token twice, none left out, over the death of its replica too."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from support.processes import process_of
from support.waiting import until
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.testing import FakeAsyncVLLM

PARAMS = {"max_tokens": 12, "logprobs": 0}


def told(parts: list[Completion], index: int = 0) -> tuple[list[int], str, list[float]]:
    """What parts say of an answer: tokens, text and log-probs."""
    outputs = [output for part in parts for output in part.outputs if output.index == index]
    tokens = [int(token) for output in outputs for token in output.token_ids]
    logprobs = [float(one) for output in outputs if output.logprobs is not None for one in output.logprobs]
    return tokens, "".join(output.text for output in outputs), logprobs


def test_parts_are_the_beginning_of_the_answer() -> None:
    parts: list[Completion] = []
    with FakeAsyncVLLM(token_seconds=0.01) as engine:
        whole = asyncio.run(engine.agenerate("1+1=", {**PARAMS, "n": 2}, on_part=parts.append))
    assert len(parts) > 1
    assert not any(part.finished for part in parts)
    assert parts[0].prompt_token_ids.tolist() == [ord(one) for one in "1+1="]
    assert all(not len(part.prompt_token_ids) for part in parts[1:])
    for output in whole.outputs:
        tokens, text, logprobs = told(parts, output.index)
        assert tokens == output.token_ids.tolist()[: len(tokens)]
        assert len(tokens) >= 8
        assert output.text.startswith(text)
        assert logprobs == pytest.approx(output.logprobs[: len(tokens)])


def test_without_on_part_nothing_is_told() -> None:
    with FakeAsyncVLLM(token_seconds=0.001) as engine:
        asyncio.run(engine.agenerate("1+1=", PARAMS))
        assert [request.stream for request in engine.replicas[0].submitted] == [False]


def test_an_answer_goes_on_where_its_dead_replica_left_it() -> None:
    parts: list[Completion] = []
    with FakeAsyncVLLM(2, token_seconds=0.01) as engine:
        for number, replica in enumerate(engine.replicas):
            replica.version = number  # so that each would give another answer
        first = None

        def take(part: Completion) -> None:
            nonlocal first
            parts.append(part)
            if first is None and len(told(parts)[0]) >= 4:
                first = part.metrics.replica
                threading.Thread(target=engine.replicas[first].die).start()

        whole = asyncio.run(engine.agenerate("1+1=", PARAMS, on_part=take))
    assert first is not None
    assert whole.metrics.replica == 1 - first
    tokens, text, logprobs = told(parts)
    (answer,) = whole.outputs
    assert tokens == answer.token_ids.tolist()[: len(tokens)]
    assert answer.text.startswith(text)
    assert logprobs == pytest.approx(answer.logprobs[: len(tokens)])
    versions = answer.policy_versions.tolist()
    switch = versions.index(1 - first)
    assert 4 <= switch < 12
    assert versions == [first] * switch + [1 - first] * (12 - switch)
    # rows were not told: all were read again
    assert answer.routed_experts is not None
    assert answer.routed_experts.shape == (4 + 12 - 1, 4, 2)
    assert answer.resume == "live"


def test_the_end_of_a_task_ends_its_request() -> None:
    parts: list[Completion] = []

    async def leave(engine: FakeAsyncVLLM) -> None:
        task = asyncio.create_task(engine.agenerate("1+1=", {"max_tokens": 10_000}, on_part=parts.append))
        while not parts:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with FakeAsyncVLLM(token_seconds=0.005) as engine:
        asyncio.run(leave(engine))
        until(lambda: engine.replicas[0].last_stats.running == 0)
        count = len(parts)
        time.sleep(0.05)
        assert len(parts) == count
        assert np.all([part.request_id == parts[0].request_id for part in parts])


@pytest.mark.engine
@pytest.mark.parametrize("stop", [None, ["qqq", "\x00\x00"]])
def test_parts_of_a_real_engine(engine: AsyncVLLM, stop: list[str] | None) -> None:
    parts: list[Completion] = []
    params = {"max_tokens": 300, "n": 2, "logprobs": 0, "top_p": 0.9, "ignore_eos": True, "stop": stop}
    whole = asyncio.run(engine.agenerate(prompt_token_ids=[5, 6, 7], sampling_params=params, on_part=parts.append))
    assert len(parts) > 2
    assert parts[0].prompt_token_ids.tolist() == [5, 6, 7]
    for output in whole.outputs:
        tokens, text, logprobs = told(parts, output.index)
        assert len(tokens) > 50
        assert tokens == output.token_ids.tolist()[: len(tokens)]
        assert output.text.startswith(text)
        assert logprobs == output.logprobs[: len(tokens)].tolist()
        kept = [one.kept for part in parts for one in part.outputs if one.index == output.index]
        assert output.kept is not None
        assert np.concatenate([one.sizes for one in kept]).tolist() == output.kept.sizes[: len(tokens)].tolist()
        ids = np.concatenate([one.ids for one in kept])
        assert ids.tolist() == output.kept.ids[: len(ids)].tolist()
        versions = np.concatenate([o.policy_versions for p in parts for o in p.outputs if o.index == output.index])
        assert versions.tolist() == output.policy_versions[: len(tokens)].tolist()


@pytest.mark.engine
def test_what_may_start_again_comes_at_once(engine: AsyncVLLM) -> None:
    parts: list[Completion] = []
    params = {"max_tokens": 100, "ignore_eos": True, "presence_penalty": 0.1}
    whole = asyncio.run(engine.agenerate(prompt_token_ids=[5, 6, 7], sampling_params=params, on_part=parts.append))
    assert not parts
    assert len(whole.outputs[0].token_ids) == 100


@pytest.mark.engine
def test_an_answer_that_a_pause_cuts_continues_its_parts(engine: AsyncVLLM) -> None:
    """As a weight update in the mode "abort" does, but for the weights."""
    parts: list[Completion] = []
    params = {"max_tokens": 300, "logprobs": 0, "ignore_eos": True}

    async def run() -> Completion:
        task = asyncio.create_task(
            engine.agenerate(prompt_token_ids=[5, 6, 7], sampling_params=params, on_part=parts.append)
        )
        while len(told(parts)[0]) < 30:
            await asyncio.sleep(0.01)
        engine.pause("keep", clear_cache=True)
        engine.resume()
        return await task

    whole = asyncio.run(run())
    tokens, text, logprobs = told(parts)
    assert len(tokens) > 50
    assert tokens == whole.outputs[0].token_ids.tolist()[: len(tokens)]
    assert whole.outputs[0].text.startswith(text)
    assert logprobs == whole.outputs[0].logprobs[: len(tokens)].tolist()


@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_the_stream_of_a_killed_engine_goes_on(engine: AsyncVLLM) -> None:
    parts: list[Completion] = []
    params = {"max_tokens": 300, "logprobs": 0, "ignore_eos": True, "top_p": 0.9}
    killed = []

    def take(part: Completion) -> None:
        parts.append(part)
        if not killed and len(told(parts)[0]) >= 30:
            killed.append(part.metrics.replica)
            process_of(engine.replica_table[part.metrics.replica].replica).kill()

    whole = asyncio.run(engine.agenerate(prompt_token_ids=[5, 6, 7], sampling_params=params, on_part=take))
    (answer,), (tokens, text, logprobs) = whole.outputs, told(parts)
    assert whole.metrics.replica != killed[0]
    assert len(answer.token_ids) == 300
    assert tokens == answer.token_ids.tolist()[: len(tokens)]
    assert answer.text.startswith(text)
    assert logprobs == answer.logprobs[: len(tokens)].tolist()
    assert answer.kept is not None
    assert len(answer.kept.sizes) == 300
    assert np.count_nonzero(answer.kept.sizes) > 250  # the first part's, too
    assert answer.routed_experts.shape[0] == 3 + 300 - 1
    assert answer.resume == "live"
    until(lambda: all(entry.state is ReplicaState.SERVING for entry in engine.replica_table))
