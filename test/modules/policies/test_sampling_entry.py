"""What a rollout says of its sampling: temperatures and words by hand, turns joined, batches padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_moe.data import KeptTokens
from torchrl_moe.modules.backends.replica import KeptIds
from torchrl_moe.modules.policies.rollout import (
    check_earlier_turn,
    refuse_changed_values,
    sampling_entry,
)

NUCLEUS = {"top_p": 0.9, "logprobs": 0}


def ids(words: list[int], sizes: list[int]) -> KeptIds:
    """As an engine gives them: nothing is writable."""
    arrays = np.array(words, np.int32), np.array(sizes, np.int32)
    for array in arrays:
        array.flags.writeable = False
    return KeptIds(*arrays)


def entry(
    params: dict[str, Any], kept: KeptIds | None = None, prompt: int = 2, total: int = 4, **turn: Any
) -> TensorDictBase:
    return sampling_entry(params, kept, prompt, total, turn.get("earlier"), turn.get("real"))


def check(one: TensorDictBase, words: list[int], sizes: list[int]) -> None:
    kept = one["kept"]
    assert type(kept) is KeptTokens
    assert (kept.ids.dtype, kept.sizes.dtype) == (torch.int32, torch.int32)
    assert (kept.ids.tolist(), kept.sizes.tolist()) == (words, sizes)


# parameters


def test_without_log_probs_nobody_knows_which_words_were_kept() -> None:
    params = {"top_p": 0.9}
    assert "kept" not in sampling_entry(params, None, 2, 4, None, None).keys()  # noqa: SIM118  a TensorDict iterates over its batch
    check(sampling_entry({**params, "logprobs": 0}, None, 2, 4, None, None), [], [0, 0, 0, 0])


@pytest.mark.parametrize("params", [{}, {"top_k": 5, "top_p": 0.9}, {"bad_words": ["x"], "temperature": 0.3}])
def test_what_changes_none_is_not(params: dict[str, Any]) -> None:
    neutral = {"repetition_penalty": 1, "presence_penalty": 0.0, "frequency_penalty": None, "logit_bias": {}}
    refuse_changed_values({**params, **neutral})


# one answer


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, 1.0), ({"temperature": None}, 1.0), ({"temperature": 0.75}, 0.75), ({"temperature": 0}, 0.0)],
)
def test_the_temperature(params: dict[str, Any], expected: float) -> None:
    one = entry(params)
    assert set(one.keys()) == {"temperature"}
    assert (one["temperature"].dtype, one["temperature"].shape) == (torch.float32, ())
    assert one["temperature"] == expected


@pytest.mark.needs_vllm
@pytest.mark.parametrize("given", [0.0, 1e-7, 1e-3, 0.01, 0.5])
def test_the_temperature_is_the_one_that_vllm_samples_at(given: float) -> None:
    """It raises those that are nearly 0."""
    from vllm import SamplingParams

    used = SamplingParams(temperature=given).temperature
    assert float(entry({"temperature": given})["temperature"]) == pytest.approx(used, rel=1e-6)


def test_an_entry_owns_its_memory() -> None:
    source = ids([7, 3, 5], [2, -1])
    one = entry(NUCLEUS, source)
    one["kept"].ids.zero_()
    one["kept"].sizes.zero_()
    assert (source.ids.tolist(), source.sizes.tolist()) == ([7, 3, 5], [2, -1])


# later turns


def turn(one: TensorDictBase) -> TensorDict:
    return TensorDict(sampling=one)


def real(*mask: int) -> torch.Tensor:
    return torch.tensor(mask).bool()


def test_words_of_other_tokens_than_the_earlier_turns_are_refused() -> None:
    first = turn(entry(NUCLEUS, ids([7, 3, 5], [2, -1])))
    with pytest.raises(ValueError, match=r"\('sampling', 'kept'\) of the turn before is for 4 tokens, and it has 3"):
        check_earlier_turn(NUCLEUS, first, real(1, 1, 1))
    check_earlier_turn(NUCLEUS, first, real(1, 1, 1, 1))


def test_another_temperature_in_a_later_turn_is_refused() -> None:
    first = turn(entry({"temperature": 0.5}))
    for params, word in (({"temperature": 0.7}, "0.7"), ({}, "1")):
        with pytest.raises(ValueError, match=rf"this turn's temperature is {word}, that of the turn before 0.5"):
            check_earlier_turn({**params, "logprobs": 0}, first, real(1, 1))
        check_earlier_turn(params, first, real(1, 1))  # without log-probs it is scored by nobody
    check_earlier_turn({"temperature": 0.5, "logprobs": 0}, first, real(1, 1))


def test_temperatures_are_compared_as_they_are_stored() -> None:
    """In float32, and as vLLM raises those that are nearly 0."""
    for given in (0.7, 0.1, 1e-7):
        check_earlier_turn({"temperature": given, "logprobs": 0}, turn(entry({"temperature": given})), real(1, 1))


def test_a_turn_that_says_nothing_of_its_sampling_is_taken() -> None:
    params = {"temperature": 0.5, "logprobs": 0}
    check_earlier_turn(params, TensorDict(), real(1, 1))
    check(entry(params, ids([9], [1]), 3, 4, earlier=TensorDict(), real=real(1, 1)), [9], [0, 0, 0, 1])


# batches
