"""What a call keeps of its requests, and with which words they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.completions import cut
from torchrl_moe.errors import NoReplicaError, ReplicaDiedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.in_flight import Call, InFlight
from torchrl_moe.modules.serving.requests import Placement
from torchrl_moe.testing.fake_engine import FakeReplica


def in_flight(
    params: Any = None, placement: Placement | None = None, state: str = "SERVING", **fields: Any
) -> InFlight:
    fields.setdefault("prompt_token_ids", np.array([1, 2], np.int32))
    balancer = LoadBalancer(["a replica"], "requests")
    balancer.replica_table[0].state = ReplicaState[state]
    requests = [Request(request_id=name, sampling_params=params, **fields) for name in "pqrs"]
    return Call(balancer, requests, [placement or Placement()] * 4).requests[3]


def test_deaths_are_counted_and_the_last_one_is_reported() -> None:
    one = in_flight()
    for name in ("first", "second"):
        one.died(ReplicaDiedError(name))
    assert str(one.given_up()) == "request 3 ('s') was given up: 2 replicas died under it. The last one: second"


@pytest.mark.parametrize("params", [{"n": 2, "logprobs": 0}, SimpleNamespace(n=2, logprobs=0)], ids=["dict", "object"])
def test_an_answer_without_an_engine_has_the_shapes_of_one(params: Any) -> None:
    completion = in_flight(params).cut_short()
    assert (completion.request_id, completion.aborted, completion.prompt_token_ids.tolist()) == ("s", True, [1, 2])
    assert [output.index for output in completion.outputs] == [0, 1]
    for output in completion.outputs:
        assert (output.token_ids.dtype, output.policy_versions.dtype) == (np.int64, np.int32)
        assert (len(output.token_ids), len(output.policy_versions), output.text) == (0, 0, "")
        assert output.logprobs is not None
        assert (output.logprobs.dtype, output.logprobs.shape) == (np.float32, (0,))


def test_an_answer_without_an_engine_to_a_text_has_no_ids() -> None:
    completion = in_flight(None, prompt_token_ids=None, prompt="hi").cut_short()
    assert (completion.prompt, len(completion.prompt_token_ids)) == ("hi", 0)
    assert [output.logprobs for output in completion.outputs] == [None]


def answer() -> Completion:
    return FakeReplica().submit([Request(request_id="old", sampling_params=None, prompt="hi")])[0].result()


def test_what_was_resumed_and_no_engine_had_more_of_is_as_it_was() -> None:
    partial = cut(answer(), 2)
    completion = in_flight(resume=partial).cut_short()
    assert (completion.request_id, completion.prompt) == ("s", "hi")
    assert completion.outputs is partial.outputs


def test_requests_whose_answers_are_whole_are_over_from_the_start() -> None:
    done = answer()
    one = in_flight(resume=done)
    assert one.is_over and one.finished
    assert one.call.unfinished == 0
    assert [completion is done for completion in one.call.partial()] == [True] * 4
    assert [completion is done for completion in one.call.result()] == [True] * 4


@pytest.mark.parametrize(
    ("refusal", "state", "placement", "kind", "words"),
    [
        (NoReplicaError("nobody"), "DEAD", {}, NoReplicaError, "nobody"),
        (StaleReplicaError("too old"), "SERVING", {"actor_index": 0}, StaleReplicaError, "too old"),
        (NoReplicaError("busy"), "SYNCING", {"actor_index": 0}, NoReplicaError, "busy"),
        (
            NoReplicaError("nobody"),
            "DEAD",
            {"actor_index": 0},
            ReplicaDiedError,
            "replica 0, which actor_index names, is dead: its process is gone",
        ),
    ],
)
def test_the_words_at_the_end(refusal: Any, state: str, placement: Any, kind: type[Exception], words: str) -> None:
    one = in_flight(placement=Placement(**placement), state=state)
    one.refusal = refusal
    error = one.not_placed()
    assert (type(error), str(error)) == (kind, words)


def test_a_death_before_is_told_too() -> None:
    one = in_flight(state="DEAD")
    one.died(ReplicaDiedError("out of memory"))
    one.refusal = NoReplicaError("nobody")
    assert str(one.not_placed()) == "nobody. It had started on another replica: out of memory"
