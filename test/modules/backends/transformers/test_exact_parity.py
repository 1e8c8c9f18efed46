"""parity="exact": the engine's log-probs and a scorer's are equal bit by bit, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.engines import EngineShelf
from torchrl_moe._compat_transformers import one_shape_of_experts
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper

pytestmark = pytest.mark.filterwarnings("ignore:the batch has the experts that an engine recorded")

WIDTH = 40
PROMPTS = ("1 + 1 =", "A mixture of experts", "x")
Started = Callable[..., AsyncVLLM]


@pytest.fixture(scope="module")
def started(shelf: EngineShelf) -> Iterator[Started]:
    with ExitStack() as engines:
        kept: dict[str, AsyncVLLM] = {}

        def start(family: str, **arguments: Any) -> AsyncVLLM:
            name = f"{family} {arguments}"
            if name not in kept:
                made = AsyncVLLM.from_pretrained(
                    shelf.folder(family), engine="transformers", dtype="float32", max_model_len=WIDTH, **arguments
                )
                kept[name] = engines.enter_context(made)
            return kept[name]

        yield start


def answers(engine: AsyncVLLM, **sampling: Any) -> TensorDictBase:
    kwargs = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, **sampling}
    policy = vLLMWrapper(engine, input_mode="tokens", num_samples=3, generate_kwargs=kwargs)
    tokenizer = engine.get_tokenizer()
    prompts = [TensorDict(tokens=Tokens(prompt=torch.tensor(tokenizer(text)["input_ids"]))) for text in PROMPTS]
    return lazy_stack([one for group in policy(lazy_stack(prompts)).unbind(0) for one in group.unbind(0)])


def model_of(shelf: EngineShelf, family: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(shelf.folder(family), dtype=torch.float32).eval()
    return model


def gaps(actor: TransformersWrapper, batch: TensorDictBase) -> Tensor:
    """|scorer - engine| of all sampled tokens."""
    scores = actor.score(batch.copy(), entropy=False)[0]
    found = []
    for row, own in zip(batch.unbind(0), scores, strict=True):
        sampled = row["log_probs", "full"]
        gap = (own[len(own) - len(sampled) :] - sampled).abs()
        found.append(gap[sampled.isfinite()])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "replay", "sampling"),
    [
        ("qwen3_moe", "none", {}),
        ("qwen3_moe", "R3", {"temperature": 1.3, "top_p": 0.8}),
        pytest.param("mixtral", "R3", {}, marks=pytest.mark.parity),
        pytest.param("olmoe", "none", {}, marks=pytest.mark.parity),
        pytest.param("qwen3_moe", "R3", {}, marks=pytest.mark.parity),
        pytest.param("qwen3_moe", "R3", {"top_k": 5}, marks=pytest.mark.parity),
    ],
)
def test_log_probs_are_equal_bit_by_bit(
    started: Started, shelf: EngineShelf, family: str, replay: Any, sampling: dict[str, Any]
) -> None:
    batch = answers(started(family, parity="exact"), **sampling)
    actor = TransformersWrapper(model_of(shelf, family), replay=replay, pad_model_input=WIDTH)
    with torch.no_grad():
        found = gaps(actor, batch)
    assert len(found) == len(PROMPTS) * 3 * 12
    assert float(found.max()) == 0.0
    # with gradients too: what a loss reads is the same
    assert float(gaps(actor, batch).detach().max()) == 0.0


def test_scores_in_rows_of_fixed_width_are_the_usual_ones_to_rounding(shelf: EngineShelf) -> None:
    model = model_of(shelf, "qwen3_moe")
    rows = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 9, 7)]
    for td in (
        lazy_stack([TensorDict(tokens=Tokens(full=row)) for row in rows]),
        TensorDict(tokens=Tokens(full=torch.stack([row[:4] for row in rows])), batch_size=[3]),
    ):
        usual, fixed = (TransformersWrapper(model, replay="R2", pad_model_input=width) for width in (None, 16))
        one, other = td.copy(), td.copy()
        with torch.no_grad():
            scores = usual.score(one, router_logits=True), fixed.score(other, router_logits=True)
            for wanted, got in zip(*scores, strict=True):
                assert wanted is not None and got is not None
                torch.testing.assert_close(wanted, got, atol=1e-4, rtol=1e-4)
        for i in range(3):
            assert torch.equal(one[i]["train_routed_experts", "full"], other[i]["train_routed_experts", "full"])
        # the second pass follows what the first one wrote
        loss = fixed.score(other, entropy=False)[0].sum()
        loss.backward()
        assert other["routing", "fallback"].shape == (3,)


def test_a_width_that_is_none_and_a_sequence_that_is_longer_are_refused(shelf: EngineShelf) -> None:
    model = model_of(shelf, "qwen3_moe")
    for width in (0, -3):
        with pytest.raises(ValueError, match=f"None or a number of tokens, got {width}"):
            TransformersWrapper(model, pad_model_input=width)
    actor = TransformersWrapper(model, replay="none", pad_model_input=3)
    with pytest.raises(ValueError, match="a sequence has 4 tokens, and pad_model_input=3"):
        actor.score(lazy_stack([TensorDict(tokens=Tokens(full=torch.arange(4)))]))


def test_an_engine_that_cannot_be_exact_is_refused(shelf: EngineShelf) -> None:
    class Own:
        """A model with code of its own for experts."""

    for arguments, said in (
        ({"parity": "near", "max_model_len": 8}, "parity must be one of None, exact, got 'near'"),
        ({"parity": "exact"}, "parity='exact' reads each answer in a row of max_model_len tokens: pass max_model_len"),
    ):
        with pytest.raises(ValueError, match=said):
            AsyncVLLM.from_pretrained(shelf.folder("qwen3_moe"), engine="transformers", **arguments)
    with pytest.raises(ValueError, match="Own computes its experts in code of its own"):
        one_shape_of_experts(Own())
