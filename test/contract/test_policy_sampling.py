"""Real vLLM samples from less than all words, and a scorer computes the same log-probs: float32, R3, every token."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from support.adapters import save_adapted
from support.completions import cut
from support.engines import ADAPTED, EngineShelf
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GSPOLoss

BOUND = 1e-5
CRAMPED = 1 << 21  # bytes of a KV cache: some 750 tokens
NEW = 16
WORDS = 259
SAMPLING: dict[str, tuple[dict[str, Any], float]] = {
    # what is asked of vLLM, and by how much log-probs over all words would be off, at least
    "temperature": ({"temperature": 0.7}, 0.0),
    "top_p": ({"top_p": 0.95}, 1e-2),
    "Qwen3": ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, 1e-2),
    "min_p": ({"min_p": 0.05}, 1e-2),
    "min_tokens": ({"min_tokens": NEW}, 1e-4),
    "bans": ({"bad_words": ["a", "e"], "top_p": 0.99}, 1e-3),
    "allowed": ({"allowed_token_ids": [*range(65, 91)]}, 1e-1),
    "grammar": ({"structured_outputs": {"regex": "[0-9]{16}"}}, 1e-1),
}


@lru_cache(maxsize=1)
def scorer_of(folder: Path) -> TransformersWrapper:
    return TransformersWrapper(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), replay="R3")


def prompts(*lengths: int, seed: int = 0) -> TensorDictBase:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows])


def policy(engine: AsyncVLLM, params: dict[str, Any], **kwargs: Any) -> vLLMWrapper:
    params = {"max_new_tokens": NEW, **params}
    return vLLMWrapper(engine, input_mode="tokens", generate_kwargs=params, inplace=False, **kwargs)


def gaps(batch: TensorDictBase, scorer: TransformersWrapper) -> torch.Tensor:
    """|log-prob, scorer - engine| of all sampled tokens."""
    with torch.no_grad():
        scores = scorer.score(batch.copy(), entropy=False)[0]
    sampled = batch.get(("log_probs", "full"), as_padded_tensor=True, padding_side="left", padding_value=torch.nan)
    known = sampled.isfinite()
    assert known.any()
    return (scores - sampled)[known].abs()


def without_words(batch: TensorDictBase) -> TensorDictBase:
    """As if nobody had said which words were kept."""
    return lazy_stack([row.exclude(("sampling", "kept")) for row in batch.unbind(0)])


def check_words(batch: TensorDictBase) -> None:
    for row in batch.unbind(0):
        tokens = row["tokens", "full"]
        row["sampling", "kept"].validate(vocabulary=WORDS, num_tokens=len(tokens), tokens=tokens)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.engine("qwen3_moe")),
        pytest.param("deepseek_v3", marks=[pytest.mark.engine("deepseek_v3"), pytest.mark.parity]),
    ],
)
def test_scores_are_of_the_words_that_were_kept(family: str, name: str, engine: AsyncVLLM, shelf: EngineShelf) -> None:
    params, off = SAMPLING[name]
    scorer = scorer_of(shelf.folder(family))
    batch = policy(engine, params)(prompts(1, 5, 33, 64, 17, 2))
    assert gaps(batch, scorer).max() <= BOUND
    temperature = params.get("temperature", 1.0)
    assert [float(row["sampling", "temperature"]) for row in batch.unbind(0)] == [pytest.approx(temperature)] * 6
    if not off:
        assert all(("sampling", "kept") not in row.keys(True) for row in batch.unbind(0))
        return
    check_words(batch)
    assert gaps(without_words(batch), scorer).max() > off


@pytest.mark.engine("qwen3_moe")
def test_plain_and_truncated_requests_run_side_by_side(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """In one step of the engine; each row has its own ids."""
    asked = [{}, {"top_k": 3}, {"min_tokens": 4}, {"temperature": 0.5, "top_p": 0.8}, {}]
    (questions,) = prompts(9).unbind(0)
    requests = [policy(engine, params).requests(questions)[0] for params in asked]

    async def ask() -> list[Any]:
        bare = engine.agenerate(prompt_token_ids=[65, 66], sampling_params={"top_k": 5, "max_tokens": 2 * NEW})
        return list(await asyncio.gather(*(engine.agenerate(**request.arguments) for request in requests), bare))

    *completions, bare = asyncio.run(ask())
    assert bare.outputs[0].kept is None  # it wants no log-probs, and others did in some of its steps only
    rows = [
        policy(engine, params).answer(request, completion)
        for params, request, completion in zip(asked, requests, completions, strict=True)
    ]
    batch = lazy_stack(rows)
    assert gaps(batch, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND
    assert [("sampling", "kept") in row.keys(True) for row in rows] == [False, True, True, True, False]
    assert set(rows[1]["sampling", "kept"].sizes[9:].tolist()) == {3}
    assert (rows[2]["sampling", "kept"].sizes[9:13] == -1).all()  # the end of the text
    assert not rows[2]["sampling", "kept"].sizes[13:].any()


@pytest.mark.engine("qwen3_moe")
def test_an_answer_that_was_cut_keeps_its_words(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    wrapper = policy(engine, {"top_p": 0.9, "temperature": 0.8})
    (request,) = wrapper.requests(prompts(12, seed=1))
    whole = engine.generate(
        prompt_token_ids=request.arguments["prompt_token_ids"],
        sampling_params=request.arguments["sampling_params"],
        use_tqdm=False,
    )
    first = cut(whole, 5, decode=lambda ids: "")
    assert len(first.outputs[0].kept.sizes) == 5
    joined = engine.generate(sampling_params=request.arguments["sampling_params"], resume=[first], use_tqdm=False)[0]
    row = wrapper.answer(request, joined)
    assert row["tokens", "response"][:5].tolist() == whole.outputs[0].token_ids[:5].tolist()
    batch = lazy_stack([row])
    check_words(batch)
    assert gaps(batch, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND


@pytest.mark.engine("qwen3_moe")
def test_reference_and_losses_use_the_same_words(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """On policy, with the right words, no ratio is away from 1: GSPO, whose bounds are the narrowest, clips nothing."""
    scorer = scorer_of(shelf.folder("qwen3_moe"))
    batch = policy(engine, SAMPLING["Qwen3"][0])(prompts(3, 9, 27, 40, seed=7))
    assert gaps(batch, scorer.reference(replay=True)).max() <= BOUND
    for row, sign in zip(batch.unbind(0), (1.0, -1.0, 1.0, -1.0), strict=True):
        row["advantage"] = torch.full((len(row["tokens", "full"]), 1), sign)
    clipped = [float(GSPOLoss(scorer, entropy_bonus=False)(one).clip_fraction) for one in (batch, without_words(batch))]
    assert clipped == [0.0, 1.0]


@pytest.mark.engine("qwen3_moe")
def test_each_turn_keeps_its_words(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    wrapper = policy(engine, {"top_k": 10})
    first = wrapper(prompts(7, 20, seed=2))
    later = lazy_stack([row.clone() for row in first.unbind(0)])
    for row in later.unbind(0):
        row["tokens"] = Tokens(
            prompt=torch.cat([row["tokens", "full"], torch.tensor([10, 66])]), full=row["tokens", "full"]
        )
    second = wrapper(later)
    check_words(second)
    for was, row in zip(first.unbind(0), second.unbind(0), strict=True):
        count = len(was["tokens", "full"])
        assert row["sampling", "kept"].sizes[:count].tolist() == was["sampling", "kept"].sizes.tolist()
        assert row["sampling", "kept"].sizes[count : count + 2].tolist() == [0, 0]
    assert gaps(second, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND


@pytest.mark.engine("qwen3_moe")
def test_siblings_and_padded_rows_have_their_own_ids(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    batch = policy(engine, {"top_p": 0.9}, num_samples=3, pad_output=True)(prompts(40, 7, seed=3)).reshape(-1)
    assert gaps(batch, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND
    assert len({tuple(row["sampling", "kept"].sizes.tolist()) for row in batch.unbind(0)}) == 6


@pytest.mark.engine("qwen3_moe", kv_cache_memory_bytes=CRAMPED, max_num_batched_tokens=64, max_num_seqs=8)
def test_prompts_that_are_prefilled_in_chunks_do_not_shift_them(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    batch = policy(engine, {"top_p": 0.9}, num_samples=2)(prompts(400, 150, 65, 64, 63, 5, seed=5)).reshape(-1)
    assert len(batch) == 12
    check_words(batch)
    assert gaps(batch, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND


@pytest.mark.engine("qwen3_moe", kv_cache_memory_bytes=CRAMPED, max_num_batched_tokens=64, max_num_seqs=8)
def test_requests_that_are_preempted_keep_their_words(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """Eight answers that cannot all be held at once; what was taken from one is read again later, in chunks."""
    before = engine.stats()[0]["preemptions"]
    batch = policy(engine, {"top_p": 0.9, "max_new_tokens": 90, "ignore_eos": True}, num_samples=2)(
        prompts(60, 90, 33, 100, seed=8)
    ).reshape(-1)
    assert engine.stats()[0]["preemptions"] > before
    assert {len(row["tokens", "response"]) for row in batch.unbind(0)} == {90}
    check_words(batch)
    assert gaps(batch, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersWrapper, dict[str, Any]]:
    """A scorer of the engine's model with an adapter on its attention, and how requests name the adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    model = save_adapted("qwen3_moe", folder)
    fields = {"lora_name": "words", "lora_int_id": 17, "lora_path": str(folder)}
    return TransformersWrapper(model, replay="R3"), fields


@pytest.mark.engine("qwen3_moe", **ADAPTED)
def test_requests_with_an_adapter_have_its_words(
    engine: AsyncVLLM, shelf: EngineShelf, adapter: tuple[TransformersWrapper, dict[str, Any]]
) -> None:
    scorer, fields = adapter
    plain = scorer_of(shelf.folder("qwen3_moe"))
    for lora_request, own, other in ((fields, scorer, plain), (None, plain, scorer)):
        batch = policy(engine, {"top_p": 0.9}, lora_request=lora_request)(prompts(3, 20, 41, 9, seed=9))
        check_words(batch)
        assert gaps(batch, own).max() <= BOUND
        assert gaps(batch, other).max() > 1e-2


@pytest.mark.engine("qwen3_moe")
def test_a_stop_string_ends_words_where_it_ends_tokens(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    batch = policy(engine, {"top_p": 0.9, "stop": ["a", "b", "c", "d", "0", "1", "2", "3"], "max_new_tokens": 64})(
        prompts(4, 9, 16, 25, seed=6)
    )
    assert "stop" in batch["finish_reason"]
    check_words(batch)
    assert gaps(batch, scorer_of(shelf.folder("qwen3_moe"))).max() <= BOUND
