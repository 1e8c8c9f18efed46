"""An engine scores given tokens: the arguments by hand, and the real engine against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.data import KeptTokens
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import Completion, KeptIds, Scoring
from torchrl_moe.modules.serving.requests import normalise_prompts, scores_of, scorings

ONE = normalise_prompts([5, 6, 7])
TWO = normalise_prompts([[5, 6, 7], [8]])
KEPT = KeptTokens(ids=torch.tensor([4, 9, -1]), sizes=torch.tensor([0, 2, 0]))

NO_TEMPERATURES = (0.0, float("nan"), float("inf"), "hot", True, None)

# -- arguments --------------------------------------------------------------------------------------------------------


def test_each_sequence_is_scored_at_its_own_temperature_and_over_its_own_ids() -> None:
    assert scorings(ONE, 1.0, None) == [Scoring()]
    assert scorings(TWO, 0.5, None) == [Scoring(temperature=0.5)] * 2
    first, second = scorings(TWO, torch.tensor([0.5, 2.0]), [KEPT, None])
    assert (first.temperature, second.temperature, second.kept) == (0.5, 2.0, None)
    assert isinstance(first.kept, KeptIds)
    assert (first.kept.ids.tolist(), first.kept.sizes.tolist()) == ([4, 9], [0, 2, 0])  # what pads held is gone
    assert first.kept.ids.dtype == first.kept.sizes.dtype == np.int32


@pytest.mark.parametrize(
    ("batch", "temperature", "kept", "words"),
    [
        (normalise_prompts("text"), 1.0, None, "takes token ids"),
        *((ONE, bad, None, f"temperature must be a finite number above 0, got {bad!r}") for bad in NO_TEMPERATURES),
        (ONE, 1.0, 5, r"kept\[0\] must be the KeptTokens of one sequence, or None, got 5"),
        (TWO, 1.0, 5, "kept must be a list with KeptTokens or None for each sequence, got 5"),
        (TWO, 1.0, KEPT, "kept must be a list with KeptTokens or None for each sequence"),
        (ONE, 1e-40, None, "temperature must be a finite number of at least 1e-20, got 1e-40"),
        (TWO, [1.0], None, "temperature must have one entry per sequence: got 1 for 2"),
        (TWO, [[1.0, 1.0]], None, r"one per sequence, got shape \[1, 2\]"),
        (TWO, [1.0, 1.0, 1.0], None, "temperature must have one entry per sequence: got 3 for 2"),
        (TWO, 1.0, [KEPT], "kept must have one entry per sequence: got 1 for 2"),
        (ONE, 1.0, KeptTokens(ids=torch.tensor([4]), sizes=torch.tensor([0, 2, 0])), "1 ids, and its sizes say 2"),
        (TWO, 1.0, [None, KEPT], r"kept\[1\] is for 3 tokens, and there are 1"),
    ],
)
def test_bad_arguments_are_named(batch: Any, temperature: Any, kept: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scorings(batch, temperature, kept)


def test_a_request_that_was_aborted_has_no_scores() -> None:
    ids: Any = np.arange(2)
    whole = Completion(
        request_id="a",
        prompt=None,
        prompt_token_ids=ids,
        num_cached_tokens=0,
        outputs=[],
        prompt_logprobs=np.array([np.nan, -1], np.float32),
    )
    assert scores_of([whole])[0][1] == -1
    cut = Completion(request_id="b", prompt=None, prompt_token_ids=ids, num_cached_tokens=0, outputs=[])
    with pytest.raises(EngineError, match="'b' was aborted"):
        scores_of([whole, cut])
