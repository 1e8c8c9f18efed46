"""An engine scores given tokens: the arguments by hand, and the real engine against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from support.engines import EngineShelf
from support.reference import TOLERANCE, Reference
from support.versions import random_ids
from torchrl_moe.data import KeptTokens
from torchrl_moe.errors import EngineError, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
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


# -- the engine -------------------------------------------------------------------------------------------------------


def check(scores: Any, expected: torch.Tensor) -> None:
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    assert bool(scores[0].isnan())
    if len(scores) > 1:
        assert float((scores - expected)[1:].abs().max()) <= TOLERANCE


CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}


@pytest.mark.parametrize(
    "spec", [pytest.param(one, marks=pytest.mark.engine("qwen3_moe", **one)) for one in ({}, CHUNKED)]
)
def test_scores_are_those_of_the_model(spec: Any, engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """Several at once, each at its own temperature, beside a request that generates; twice, for the prefix cache."""
    reference = Reference(shelf.folder("qwen3_moe"))
    sequences = [random_ids(seed, length).tolist() for seed, length in enumerate((2, 40, 150, 300, 1))]
    temperatures = [1.0, 0.7, 1.3, 0.6, 1.0]
    for _ in range(2):
        engine.generate(sequences[3], {"max_tokens": 4, "ignore_eos": True}, use_tqdm=False)
        found = engine.score(sequences, temperature=temperatures)
        for ids, temperature, scores in zip(sequences, temperatures, found, strict=True):
            check(scores, reference(ids, temperature)[0])


@pytest.mark.engine("qwen3_moe")
def test_scores_follow_experts_and_words_of_a_rollout(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """What an engine sampled it scores alike, with the experts that it recorded and over the words that it kept."""
    params = {"max_new_tokens": 24, "top_p": 0.9, "temperature": 0.8}
    policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=params, inplace=False)
    rows = [TensorDict(tokens=Tokens(prompt=torch.from_numpy(random_ids(i, 9 + i)))) for i in range(6)]
    batch = policy(lazy_stack(rows)).unbind(0)
    scores = engine.score(
        [row["tokens", "full"] for row in batch],
        [row["routed_experts", "full"] for row in batch],
        temperature=[float(row["sampling", "temperature"]) for row in batch],
        kept=[row["sampling", "kept"] for row in batch],
    )
    for row, one in zip(batch, scores, strict=True):
        sampled = row["log_probs", "full"]
        known = sampled.isfinite()
        assert int(known.sum()) == len(row["tokens", "response"])
        assert float((one - sampled)[known].abs().max()) <= TOLERANCE


@pytest.mark.engine("qwen3_moe")
def test_scores_follow_experts_that_no_router_would_choose(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    reference, ids = Reference(shelf.folder("qwen3_moe")), random_ids(5, 80)
    rng = np.random.default_rng(0)
    rows = np.full((80, 4, 4), -1, np.int8)
    rows[:60, 1:] = rng.permuted(np.tile(np.arange(16), (60, 3, 1)), axis=-1)[..., :4]
    scores = engine.score(ids.tolist(), rows)
    expected, _ = reference(ids, routes=rows, followed=torch.arange(80) < 60)
    check(scores, expected)
    live = engine.score(ids.tolist())
    assert float((live - scores)[1:].abs().max()) > 100 * TOLERANCE


@pytest.mark.engine("qwen3_moe")
def test_what_cannot_be_scored_is_refused(engine: AsyncVLLM) -> None:
    with pytest.raises(RequestRefusedError, match="512"):
        engine.score([65] * 512)
    assert len(engine.score([65] * 511)) == 511
    unknown = KeptTokens(ids=torch.tensor([66, 100000]), sizes=torch.tensor([0, 2]))
    with pytest.raises(RequestRefusedError, match="token id 100000; this engine has"):
        engine.score([65, 66], kept=unknown)
    with pytest.raises(RequestRefusedError, match="at most a row per prompt token"):
        engine.score([65, 66], np.full((3, 4, 4), -1, np.int8))
    with pytest.raises(ValueError, match="empty"):
        engine.score([])
