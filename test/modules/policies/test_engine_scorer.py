"""Log-probs of rollouts by an engine, as ``vLLMWrapper(generate=False)`` writes them: the fake one, and real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf
from torchrl_moe._errors import ReplayError, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def fake() -> FakeAsyncVLLM:
    return FakeAsyncVLLM()


def prompts(*lengths: int) -> TensorDictBase:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows])


def rollout(engine: Any, *lengths: int, pad: bool = False, **params: Any) -> TensorDictBase:
    kwargs = {"max_new_tokens": 6, "ignore_eos": True, **params}
    policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=kwargs, inplace=False, pad_output=pad)
    return policy(prompts(*lengths))


def scorer(engine: Any, **kwargs: Any) -> vLLMWrapper:
    return vLLMWrapper(engine, **{"generate": False, "input_mode": "tokens", "log_probs_key": "old", **kwargs})


def check(batch: TensorDictBase, bound: float = 1e-6) -> None:
    """What was sampled has the log-probs that it was sampled with; pads and first tokens have 0."""
    for row in batch.unbind(0):
        sampled, scored = row["log_probs", "full"], row["old", "full"]
        real, answer = row["masks", "all_attention_mask"], row["masks", "all_assistant_mask"]
        assert scored.dtype == torch.float32
        assert scored.shape == sampled.shape
        torch.testing.assert_close(scored[answer], sampled[answer], rtol=0, atol=bound)
        assert not scored[~real].any()
        assert scored[real][0] == 0
        assert (scored[real][1:] < 0).all()


@pytest.mark.parametrize("pad", [False, True])
def test_scores_are_written_as_long_as_a_samples_tokens(pad: bool, fake: FakeAsyncVLLM) -> None:
    batch = rollout(fake, 3, 9, 1, pad=pad)
    before = set(batch.keys())
    out = scorer(fake)(batch)
    assert out is batch
    assert set(batch.keys()) == before | {"old"}
    check(batch)


def test_a_batch_of_any_size_and_another_place_to_write(fake: FakeAsyncVLLM) -> None:
    batch = lazy_stack([rollout(fake, 3, 9), rollout(fake, 2, 2)])
    out = scorer(fake, inplace=False)(batch)
    assert out.batch_size == batch.batch_size == torch.Size([2, 2])
    assert list(out.keys()) == ["old"]
    assert out[1, 0]["old", "full"].shape == (8,)
    one = scorer(fake)(rollout(fake, 4)[0])
    torch.testing.assert_close(one["old", "full"][4:], one["log_probs", "full"][4:])


def test_what_the_batch_says_reaches_the_engine(fake: FakeAsyncVLLM) -> None:
    (replica,) = fake.replicas
    batch = rollout(fake, 3, 5, temperature=0.5, top_k=2)
    for row, version in zip(batch.unbind(0), (-1, 0), strict=True):
        row["min_version"] = torch.tensor(version)
    replica.submitted.clear()
    scorer(fake)(batch)
    for row, request in zip(batch.unbind(0), replica.submitted, strict=True):
        assert request.prompt_token_ids.tolist() == row["tokens", "full"].tolist()
        assert request.scoring is not None
        assert request.scoring.temperature == 0.5
        kept = row["sampling", "kept"]
        assert request.scoring.kept.ids.tolist() == kept.ids.tolist()
        assert request.scoring.kept.sizes.tolist() == kept.sizes.tolist()
        assert torch.equal(torch.from_numpy(request.routed_experts.copy()), row["routed_experts", "full"])


def test_pads_are_no_tokens_of_a_request(fake: FakeAsyncVLLM) -> None:
    """Prompts are padded on the left, answers on the right; routes and kept words with them."""
    (replica,) = fake.replicas
    padded = rollout(fake, 3, 5, pad=True, top_k=2)
    replica.submitted.clear()
    scorer(fake)(padded)
    assert [len(request.prompt_token_ids) for request in replica.submitted] == [9, 11]
    for request in replica.submitted:
        assert request.scoring is not None
        assert len(request.scoring.kept.sizes) == len(request.prompt_token_ids) == len(request.routed_experts)
        assert (request.routed_experts[:-1, 1:] >= 0).all()
        assert abs(request.scoring.kept.sizes).sum() == len(request.scoring.kept.ids) == 12


def test_without_replay_the_engine_routes(fake: FakeAsyncVLLM) -> None:
    (replica,) = fake.replicas
    batch = rollout(fake, 3)
    replica.submitted.clear()
    bare = lazy_stack([row.exclude("routed_experts", "sampling") for row in batch.unbind(0)])
    with pytest.warns(UserWarning, match="no 'sampling' to say"), pytest.raises(ReplayError, match="replay='none'"):
        scorer(fake)(bare)
    scorer(fake, replay="none", temperature=2.0)(bare)
    (request,) = replica.submitted
    assert request.routed_experts is None
    assert request.scoring.temperature == 2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_mode": "history"}, "text may be encoded to other tokens"),
        ({"replay": "R2"}, "an engine records no R2"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"num_samples": 2}, "num_samples=2 is of generating"),
        ({"pad_output": True}, "pad_output=True is of generating"),
        ({"return_log_probs": False}, "return_log_probs=False is of generating"),
        ({"generate": True, "replay": "R3"}, "replay is of scoring"),
        ({"generate": True, "temperature": 1.0}, "temperature is of scoring"),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(
    arguments: dict[str, Any], words: str, fake: FakeAsyncVLLM
) -> None:
    with pytest.raises(ValueError, match=words):
        scorer(fake, **arguments)


def test_a_batch_that_cannot_be_scored_is_named(fake: FakeAsyncVLLM) -> None:
    batch = rollout(fake, 3, 5)
    with pytest.raises(ValueError, match="is to be scored at 2"):
        scorer(fake, temperature=2.0)(batch)
    with pytest.raises(ValueError, match="are of generating"):
        scorer(fake)(batch, max_new_tokens=3)
    for row in batch.unbind(0):
        row["masks", "all_attention_mask"][:] = False
    with pytest.raises(ValueError, match="sample 0 has no tokens but pads"):
        scorer(fake)(batch)


def test_an_engine_that_cannot_follow_says_so() -> None:
    able, unable = FakeAsyncVLLM(), FakeAsyncVLLM(why_live="FancyRouter")
    batch = rollout(able, 3)
    with pytest.raises(RequestRefusedError, match="FancyRouter"):
        scorer(unable)(batch)
    scorer(unable, replay="none")(batch)


# -- the real engine --------------------------------------------------------------------------------------------------


@pytest.mark.engine("qwen3_moe")
@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}])
def test_engine_and_trainer_score_a_rollout_alike(
    params: dict[str, Any], engine: AsyncVLLM, shelf: EngineShelf
) -> None:
    batch = rollout(engine, 3, 40, 17, pad=True, **params)
    scorer(engine)(batch)
    check(batch, 1e-5)
    actor = TransformersWrapper(model_of(shelf.folder("qwen3_moe")), replay="R3")
    with torch.no_grad():
        expected = actor.score(batch.copy(), entropy=False)[0]
    torch.testing.assert_close(batch["old", "full"], expected, rtol=0, atol=1e-5)


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
