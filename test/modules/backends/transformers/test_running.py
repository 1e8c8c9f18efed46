"""A request that is read: what it becomes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.processes import ids_request
from torchrl_moe.modules.backends.replica import CompletionMetrics, CompletionOutput, Scoring, nothing_yet
from torchrl_moe.modules.backends.transformers.loading import Loaded


def test_a_request_becomes_its_answers(plain: Loaded) -> None:
    running = plain.reader(ids_request("a", [65, 66], sampling_params={"n": 3, "seed": 5, "max_tokens": 4}))
    assert [answer.index for answer in running.answers] == [0, 1, 2]
    assert all(answer.prompt_ids == [65, 66] and answer.limit == 4 for answer in running.answers)
    assert not running.is_done
    states = [tuple(answer.generator.get_state().tolist()) for answer in running.answers if answer.generator]
    assert len(set(states)) == 3
    (text,) = plain.reader(replace(ids_request("b"), prompt_token_ids=None, prompt="AB")).answers
    assert text.prompt_ids == [65, 66]


def test_scores_need_no_answers(plain: Loaded) -> None:
    running = plain.reader(ids_request("a", [65, 66], scoring=Scoring()))
    assert running.answers == []
    assert not running.is_done
    assert running.completion().outputs[0].finish_reason == "abort"
    running.scores = np.zeros(2, np.float32)
    assert running.is_done
    done = running.completion()
    assert (done.outputs[0].finish_reason, len(done.outputs[0].token_ids)) == ("length", 0)
    assert done.prompt_logprobs is running.scores


def resumed(plain: Loaded, changes: Any = None, **fields: Any) -> Any:
    """A request for two answers, the first of which was whole; the second with changes."""
    tokens: Any = np.array([97])
    cut = CompletionOutput(
        index=1,
        token_ids=tokens,
        text="a",
        finish_reason="abort",
        policy_versions=np.array([-3], np.int32),
        routed_experts=np.zeros((2, 4, 4), np.uint8) + np.arange(4, dtype=np.uint8),
    )
    whole = replace(cut, index=0, finish_reason="stop", text="whole")
    given = nothing_yet(ids_request("before", [65, 66], sampling_params={"n": 2}))
    cut = replace(cut, **(changes or {}))
    given = replace(given, prompt="AB", outputs=[whole, cut], metrics=CompletionMetrics(total_seconds=100.0))
    return plain.reader(ids_request("a", [65, 66], sampling_params={"n": 2, "seed": 1}, resume=given, **fields))


def test_what_was_whole_stays_and_what_was_cut_continues(plain: Loaded) -> None:
    running = resumed(plain)
    (answer,) = running.answers
    assert (answer.index, answer.tokens) == (1, [97])
    assert (running.kept, running.generated) == (1, 0)
    done = running.completion()
    assert (done.request_id, done.prompt) == ("a", "AB")
    assert [output.text for output in done.outputs] == ["whole", "a"]
    assert done.metrics.total_seconds >= 100.0
    (fresh,) = plain.reader(ids_request("a", [65, 66], sampling_params={"seed": 2})).answers
    assert fresh.generator is not None
    assert answer.generator is not None
    assert answer.generator.initial_seed() == 1 + 1 + 1  # its index, and the token that it has
    assert answer.how == "forced"
    assert resumed(plain, on_resume="live").answers[0].how == "live"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": np.array([259])}, r"names token 259; the model has 0\.\.258"),
        ({"routed_experts": np.zeros((2, 4, 4), np.uint8)}, "token 0, layer 1"),
    ],
)
def test_a_first_part_that_the_model_cannot_read_again_is_refused(
    plain: Loaded, changes: dict[str, Any], words: str
) -> None:
    """In the batch it would end the engine, and with it all other requests."""
    with pytest.raises(ValueError, match=words):
        resumed(plain, changes)
    if "routed_experts" in changes:  # nobody follows them
        assert resumed(plain, changes, on_resume="live").answers[0].tokens == [97]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_request": {"lora_name": "a"}}, "lora_request: engine='transformers' serves no adapters"),
        ({"guided_options": {"regex": "a"}}, "no structured outputs"),
        ({"sampling_params": {"top_p": 2}}, "top_p must be a finite number above 0 and of at most 1, got 2"),
        ({"ids": list(range(128))}, "1 to 127 tokens, got 128: max_model_len"),
        ({"ids": []}, "1 to 127 tokens, got 0"),
        ({"ids": [65, 5000]}, r"names token 5000; the model has 0\.\.258"),
        ({"ids": [-1]}, "names token -1"),
        ({"routed_experts": np.zeros((1, 1, 1), np.int8)}, "routed_experts"),
        ({"routed_experts": np.zeros((9, 4, 4), np.int8)}, "at most a row per prompt token, 3"),
    ],
)
def test_what_cannot_be_served_is_refused(plain: Loaded, fields: dict[str, Any], words: str) -> None:
    ids = fields.pop("ids", [1, 2, 3])
    with pytest.raises(ValueError, match=words):
        plain.reader(ids_request("a", ids, **fields))


def test_a_sequence_to_score_may_be_as_long_as_the_model_takes(plain: Loaded) -> None:
    assert plain.reader(ids_request("a", list(range(128)), scoring=Scoring())).prompt_ids == list(range(128))
    with pytest.raises(ValueError, match="1 to 128 tokens, got 129"):
        plain.reader(ids_request("a", list(range(129)), scoring=Scoring()))


def test_what_never_fits_is_refused(plain: Loaded) -> None:
    arguments = replace(plain.arguments, kv_cache_memory_bytes=10 * plain.decoder.token_bytes)
    reader = replace(plain.reader, arguments=arguments)
    assert reader(ids_request("a", [1] * 5, sampling_params={"max_tokens": 5})).answers
    with pytest.raises(ValueError, match="11 tokens of prompt and answer need 22528 bytes of keys"):
        reader(ids_request("a", [1] * 5, sampling_params={"max_tokens": 6}))
