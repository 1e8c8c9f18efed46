"""What vLLMWrapper writes is what transformers computes of the same model: float32, teacher-forced, every row.

Log-probs are those over the words that vLLM kept, by a stock model and by our scorer under R3. float32 proves the
mapping, and it holds exactly; what bf16 does to it is a matter for benchmarks.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from support.adapters import save_adapted
from support.completions import cut
from support.engines import ADAPTED, EngineShelf
from support.reference import TOLERANCE, Reference, route_mismatches
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GSPOLoss

CRAMPED = 1 << 21  # bytes of a KV cache: some 750 tokens
NEW = 16
WORDS = 259
SAMPLING: dict[str, tuple[dict[str, Any], float]] = {
    # what is asked of vLLM, and by how much log-probs over all words would be off, at least
    "temperature": ({"temperature": 0.7, "ignore_eos": True}, 0.0),
    "top_p": ({"top_p": 0.95}, 1e-2),
    "Qwen3": ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, 1e-2),
    "min_p": ({"min_p": 0.05}, 1e-2),
    "min_tokens": ({"min_tokens": NEW}, 1e-4),
    "bans": ({"bad_words": ["a", "e"], "top_p": 0.99}, 1e-3),
    "allowed": ({"allowed_token_ids": [*range(65, 91)]}, 1e-1),
    "grammar": ({"structured_outputs": {"regex": "[0-9]{16}"}}, 1e-1),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@lru_cache(maxsize=1)
def scorer_of(folder: Path) -> TransformersWrapper:
    return TransformersWrapper(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), replay="R3")


@lru_cache(maxsize=1)
def reference_of(folder: Path) -> Reference:
    return Reference(folder)


def prompts(*lengths: int, seed: int = 0) -> TensorDictBase:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows])


def policy(engine: AsyncVLLM, params: dict[str, Any], **kwargs: Any) -> vLLMWrapper:
    params = {"max_new_tokens": NEW, **params}
    return vLLMWrapper(engine, input_mode="tokens", generate_kwargs=params, inplace=False, **kwargs)


def gaps(batch: TensorDictBase, scorer: TransformersWrapper) -> Tensor:
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


def words_of(row: TensorDictBase) -> Tensor | None:
    """The words that each token was sampled from, bool ``[T, V]``; ``None``: all."""
    if ("sampling", "kept") not in row.keys(True):
        return None
    tokens = row["tokens", "full"]
    kept = row["sampling", "kept"].validate(vocabulary=WORDS, num_tokens=len(tokens), tokens=tokens)
    words, start = torch.ones(len(tokens), WORDS, dtype=torch.bool), 0
    for one, size in zip(words, kept.sizes.tolist(), strict=True):
        if size:
            one[:] = size < 0
            one[kept.ids[start : start + abs(size)].long()] = size > 0
        start += abs(size)
    return words


def check(batch: TensorDictBase, folder: Path) -> None:
    """Every answer has the log-probs of what was sampled, and the routes of every token but the last."""
    reference, worst, wrong, total = reference_of(folder), 0.0, 0, 0
    for row in batch.unbind(0):
        real, words = row["masks", "all_attention_mask"], words_of(row)
        names = ("tokens", "log_probs", "routed_experts", "policy_versions")
        ids, sampled, routes, versions = (row[name, "full"][real] for name in names)
        temperature = float(row["sampling", "temperature"])
        log_probs, chosen = reference(ids, temperature, routes, words=None if words is None else words[real])
        made = versions >= 0
        assert made[-1] and sampled.isfinite().equal(made)
        worst = max(worst, float((sampled - log_probs)[made].abs().max()))
        mismatches = route_mismatches(routes, chosen, slice(0, -1))
        wrong, total = wrong + mismatches[0], total + mismatches[1]
        dense = sorted(set(range(reference.num_layers)) - set(chosen))
        assert all(rows.eq(-1).all() for rows in (routes[-1], routes[:, dense], row["routed_experts", "full"][~real]))
    print(f"max |dlogp| {worst:.1e}, {wrong} of {total} rows differ")
    assert wrong == 0
    assert worst <= TOLERANCE
    assert gaps(batch, scorer_of(folder)).max() <= TOLERANCE


@pytest.fixture
def folder(shelf: EngineShelf) -> Path:
    return shelf.folder("qwen3_moe")


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
    batch = policy(engine, params)(prompts(1, 5, 33, 64, 17, 2))
    check(batch, shelf.folder(family))
    temperature = params.get("temperature", 1.0)
    assert [float(row["sampling", "temperature"]) for row in batch.unbind(0)] == [pytest.approx(temperature)] * 6
    assert [("sampling", "kept") in row.keys(True) for row in batch.unbind(0)] == [off > 0] * 6
    if off:
        assert gaps(without_words(batch), scorer_of(shelf.folder(family))).max() > off


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(f, marks=pytest.mark.engine(f)) for f in ("qwen3_moe", "deepseek_v3")),
        *(pytest.param(f, marks=[pytest.mark.engine(f), pytest.mark.parity]) for f in ("mixtral", "olmoe")),
    ],
)
def test_rows_are_those_of_the_family_cached_or_not(family: str, engine: AsyncVLLM, shelf: EngineShelf) -> None:
    engine.reset_prefix_cache()
    asked, folder = prompts(1, 2, 5, 17, 300, 280, 100, 3, seed=1), shelf.folder(family)
    cold, warm = (policy(engine, {"temperature": 0.7, "ignore_eos": True})(asked) for _ in range(2))
    for out in (cold, warm):
        assert set(out["finish_reason"]) == {"length"}
        check(out, folder)
    assert cold["num_cached_tokens"].tolist() == [0] * 8
    cached = warm["num_cached_tokens"].tolist()
    assert min(cached[4:6]) >= 128 or family != "qwen3_moe"
    for count, first, second in zip(cached, cold.unbind(0), warm.unbind(0), strict=True):
        assert second["routed_experts", "full"][:count].equal(first["routed_experts", "full"][:count])
    # rows that slipped by one would show
    reference, layout = reference_of(folder), engine.routing_layout
    _, chosen = reference(cold[6]["tokens", "full"])
    wrong, total = route_mismatches(cold[6]["routed_experts", "full"].roll(1, 0), chosen, slice(1, None))
    assert wrong > total // 2
    assert list(layout.moe_layers) == sorted(chosen)
    assert (layout.num_layers, layout.top_k) == (reference.num_layers, next(iter(chosen.values())).shape[-1])
    assert layout.num_experts == next(filter(None, (getattr(reference.model.config, key, 0) for key in EXPERTS)))


@pytest.mark.engine("qwen3_moe")
def test_plain_and_truncated_requests_run_side_by_side(engine: AsyncVLLM, folder: Path) -> None:
    """In one step of the engine; each row has its own ids."""
    asked = [{}, {"top_k": 3}, {"min_tokens": 4}, {"temperature": 0.5, "top_p": 0.8}, {}]
    (questions,) = prompts(9).unbind(0)
    requests = [policy(engine, params).requests(questions)[0] for params in asked]

    async def ask() -> list[Any]:
        bare = engine.agenerate(prompt_token_ids=[65, 66], sampling_params={"top_k": 5, "max_tokens": 2 * NEW})
        return list(await asyncio.gather(*(engine.agenerate(**request.arguments) for request in requests), bare))

    *completions, bare = asyncio.run(ask())
    assert bare.outputs[0].kept is None  # it wants no log-probs, and others did in some of its steps only
    answered = zip(asked, requests, completions, strict=True)
    rows = [policy(engine, params).answer(request, completion) for params, request, completion in answered]
    check(lazy_stack(rows), folder)
    assert [("sampling", "kept") in row.keys(True) for row in rows] == [False, True, True, True, False]
    assert set(rows[1]["sampling", "kept"].sizes[9:].tolist()) == {3}
    assert (rows[2]["sampling", "kept"].sizes[9:13] == -1).all()  # the end of the text
    assert not rows[2]["sampling", "kept"].sizes[13:].any()


@pytest.mark.engine("qwen3_moe")
def test_an_answer_that_was_cut_keeps_its_words(engine: AsyncVLLM, folder: Path) -> None:
    wrapper = policy(engine, {"top_p": 0.9, "temperature": 0.8})
    (request,) = wrapper.requests(prompts(12, seed=1))
    ids, params = (request.arguments[name] for name in ("prompt_token_ids", "sampling_params"))
    whole = engine.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
    first = cut(whole, 5, decode=lambda ids: "")
    assert len(first.outputs[0].kept.sizes) == 5
    joined = engine.generate(sampling_params=params, resume=[first], use_tqdm=False)[0]
    row = wrapper.answer(request, joined)
    assert row["tokens", "response"][:5].tolist() == whole.outputs[0].token_ids[:5].tolist()
    check(lazy_stack([row]), folder)


@pytest.mark.engine("qwen3_moe")
def test_reference_and_losses_use_the_same_words(engine: AsyncVLLM, folder: Path) -> None:
    """On policy, with the right words, no ratio is away from 1: GSPO, whose bounds are the narrowest, clips nothing."""
    scorer = scorer_of(folder)
    batch = policy(engine, SAMPLING["Qwen3"][0])(prompts(3, 9, 27, 40, seed=7))
    assert gaps(batch, scorer.reference(replay=True)).max() <= TOLERANCE
    for row, sign in zip(batch.unbind(0), (1.0, -1.0, 1.0, -1.0), strict=True):
        row["advantage"] = torch.full((len(row["tokens", "full"]), 1), sign)
    clipped = [float(GSPOLoss(scorer, entropy_bonus=False)(one).clip_fraction) for one in (batch, without_words(batch))]
    assert clipped == [0.0, 1.0]


@pytest.mark.engine("qwen3_moe")
def test_rows_of_a_later_turn_are_right_although_both_turns_wrote_some(engine: AsyncVLLM, folder: Path) -> None:
    wrapper = policy(engine, {"top_k": 10, "ignore_eos": True})
    first = wrapper(prompts(30, 11, seed=4))
    later = lazy_stack([row.clone() for row in first.unbind(0)])
    for row in later.unbind(0):
        had = row["tokens", "full"]
        row["tokens"] = Tokens(prompt=torch.cat([had, torch.tensor([10, 65, 66])]), full=had)
    second = wrapper(later)
    check(second, folder)
    for was, row in zip(first.unbind(0), second.unbind(0), strict=True):
        old, p = len(was["tokens", "full"]), len(row["tokens", "prompt"])
        written = row["log_probs", "full"].isfinite().nonzero()[:, 0].tolist()
        assert written == [*range(old - NEW, old), *range(p, p + NEW)]
        sizes = row["sampling", "kept"].sizes.tolist()
        assert sizes[:p] == [*was["sampling", "kept"].sizes.tolist(), 0, 0, 0]


@pytest.mark.engine("qwen3_moe")
def test_siblings_and_padded_rows_have_their_own_ids(engine: AsyncVLLM, folder: Path) -> None:
    batch = policy(engine, {"top_p": 0.9}, num_samples=3, pad_output=True)(prompts(40, 7, 21, seed=3))
    assert batch.batch_size == torch.Size([3, 3])
    answers = batch.reshape(-1)
    assert not all(bool(row["masks", "all_attention_mask"].all()) for row in answers.unbind(0))
    check(answers, folder)
    for key in (("sampling", "kept"), ("tokens", "full")):
        found = [row[key].sizes if key[1] == "kept" else row[key] for row in answers.unbind(0)]
        assert len({tuple(one.tolist()) for one in found}) == 9


@pytest.mark.engine("qwen3_moe", kv_cache_memory_bytes=CRAMPED, max_num_batched_tokens=64, max_num_seqs=8)
def test_prompts_that_are_prefilled_in_chunks_do_not_shift_rows(engine: AsyncVLLM, folder: Path) -> None:
    batch = policy(engine, {"top_p": 0.9}, num_samples=2)(prompts(400, 150, 65, 64, 63, 5, seed=5)).reshape(-1)
    assert len(batch) == 12
    check(batch, folder)


@pytest.mark.engine("qwen3_moe", kv_cache_memory_bytes=CRAMPED, max_num_batched_tokens=64, max_num_seqs=8)
def test_requests_that_are_preempted_keep_their_words(engine: AsyncVLLM, folder: Path) -> None:
    """Eight answers that cannot all be held at once; what was taken from one is read again later, in chunks."""
    before = engine.stats()[0]["preemptions"]
    wrapper = policy(engine, {"top_p": 0.9, "max_new_tokens": 90, "ignore_eos": True}, num_samples=2)
    batch = wrapper(prompts(60, 90, 33, 100, seed=8)).reshape(-1)
    assert engine.stats()[0]["preemptions"] > before
    assert {len(row["tokens", "response"]) for row in batch.unbind(0)} == {90}
    check(batch, folder)


@pytest.mark.engine("qwen3_moe", **ADAPTED)
def test_requests_with_an_adapter_have_its_words(engine: AsyncVLLM, folder: Path, tmp_path: Path) -> None:
    adapted = TransformersWrapper(save_adapted("qwen3_moe", tmp_path), replay="R3")
    adapter = {"lora_name": "words", "lora_int_id": 17, "lora_path": str(tmp_path)}
    plain = scorer_of(folder)
    for lora_request, own, other in ((adapter, adapted, plain), (None, plain, adapted)):
        batch = policy(engine, {"top_p": 0.9}, lora_request=lora_request)(prompts(3, 20, 41, 9, seed=9))
        assert all(words_of(row) is not None for row in batch.unbind(0))
        assert gaps(batch, own).max() <= TOLERANCE
        assert gaps(batch, other).max() > 1e-2


@pytest.mark.engine("qwen3_moe")
def test_a_stop_string_ends_words_where_it_ends_tokens(engine: AsyncVLLM, folder: Path) -> None:
    params = {"top_p": 0.9, "stop": ["a", "b", "c", "d", "0", "1", "2", "3"], "max_new_tokens": 64}
    batch = policy(engine, params)(prompts(4, 9, 16, 25, seed=6))
    assert "stop" in batch["finish_reason"]
    check(batch, folder)
