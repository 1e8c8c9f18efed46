"""An answer beside its prompt: ids, and per-token values of the right number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.testing.conformance import Answer, NotOffered, Sampling
from torchrl_moe.testing.conformance.judge import Sampled
from torchrl_moe.testing.conformance.report import DoesNotHold


def sampled(**given: Any) -> Sampled:
    return Sampled((5, 6), Sampling(), Answer(token_ids=np.array([7, 8]), **given))


def test_ids_are_prompt_and_answer() -> None:
    assert sampled().tokens == [7, 8]
    assert sampled().ids.tolist() == [5, 6, 7, 8]


def test_values_may_be_lists_arrays_or_tensors() -> None:
    for values in ([-0.5, -1], np.array([-0.5, -1], np.float32), torch.tensor([-0.5, -1])):
        assert sampled(log_probs=values).log_probs.tolist() == [-0.5, -1]
    assert sampled(versions=torch.tensor([3, 4])).versions == [3, 4]


@pytest.mark.parametrize("name", ["log_probs", "versions"])
def test_what_is_not_there_is_not_offered_and_another_number_is_a_fault(name: str) -> None:
    with pytest.raises(NotOffered, match=r"answers have no (log-probs|versions)"):
        getattr(sampled(), name)
    with pytest.raises(DoesNotHold, match=r"3 (log-probs|versions) for 2 tokens"):
        getattr(sampled(**{name: [1, 2, 3]}), name)


def test_other_routes_leave_the_rest() -> None:
    other = sampled(log_probs=[-1, -2]).with_routes(np.zeros((3, 1, 1), np.int8))
    assert other.answer.routed_experts.shape == (3, 1, 1)
    assert other.answer.log_probs == [-1, -2]
