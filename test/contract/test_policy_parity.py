"""What vLLMWrapper writes is what the same model computes in transformers: float32, teacher-forced, every row.

float32 proves the mapping, and it holds exactly; what bf16 does to it is a matter for benchmarks.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens

from support.engines import EngineShelf
from support.reference import TOLERANCE, Reference, route_mismatches
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper

TEMPERATURE = 0.7
NEW = 12
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@lru_cache(maxsize=1)
def reference_of(folder: Path) -> Reference:
    return Reference(folder)


def prompts(*lengths: int, seed: int = 0) -> TensorDictBase:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows])


def policy(engine: AsyncVLLM, **kwargs: Any) -> vLLMWrapper:
    sampling = {"max_new_tokens": NEW, "temperature": TEMPERATURE, "ignore_eos": True}
    return vLLMWrapper(engine, input_mode="tokens", generate_kwargs=sampling, inplace=False, **kwargs)


def assert_parity(answers: list[TensorDictBase], reference: Reference) -> None:
    """Every answer, unpadded, has the log-probs of its response and the routes of every token but the last."""
    worst, wrong, total = 0.0, 0, 0
    for answer in answers:
        ids, routes = answer["tokens", "full"], answer["routed_experts", "full"]
        p = len(answer["tokens", "prompt"])
        log_probs, chosen = reference(ids, TEMPERATURE, routes)
        assert len(ids) == len(routes) == len(answer["policy_versions", "full"])
        assert answer["log_probs", "full"][:p].isnan().all()
        worst = max(worst, float((answer["log_probs", "full"][p:] - log_probs[p:]).abs().max()))
        mismatches = route_mismatches(routes, chosen, slice(0, -1))
        wrong, total = wrong + mismatches[0], total + mismatches[1]
        assert routes[-1].eq(-1).all()
        dense = sorted(set(range(reference.num_layers)) - set(chosen))
        assert routes[:, dense].eq(-1).all()
    print(f"max |dlogp| {worst:.1e}, {wrong} of {total} rows differ")
    assert wrong == 0
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(f, marks=pytest.mark.engine(f)) for f in ("qwen3_moe", "deepseek_v3")),
        *(pytest.param(f, marks=[pytest.mark.engine(f), pytest.mark.parity]) for f in ("mixtral", "olmoe")),
    ],
)
def test_log_probs_and_routes_are_those_of_transformers(family: str, engine: AsyncVLLM, shelf: EngineShelf) -> None:
    reference = reference_of(shelf.folder(family))
    out = policy(engine)(prompts(1, 2, 5, 17, 33, 64, 100, 3))
    assert set(out["finish_reason"]) == {"length"}
    assert_parity(list(out.unbind(0)), reference)
    ids, routes = out[6]["tokens", "full"], out[6]["routed_experts", "full"]
    _, chosen = reference(ids)
    wrong, total = route_mismatches(routes.roll(1, 0), chosen, slice(1, None))
    assert wrong > total // 2  # rows that slipped by one would show
    layout = engine.routing_layout
    assert list(layout.moe_layers) == sorted(chosen)
    assert (layout.num_layers, layout.top_k) == (reference.num_layers, next(iter(chosen.values())).shape[-1])
    assert layout.num_experts == next(filter(None, (getattr(reference.model.config, key, 0) for key in EXPERTS)))


@pytest.mark.engine("qwen3_moe")
def test_rows_of_cached_tokens_are_right(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    engine.reset_prefix_cache()
    long = prompts(300, 280, seed=1)
    cold, warm = policy(engine)(long), policy(engine)(long)
    assert cold["num_cached_tokens"].tolist() == [0, 0]
    assert all(cached >= 128 for cached in warm["num_cached_tokens"].tolist())
    reference = reference_of(shelf.folder("qwen3_moe"))
    assert_parity([*cold.unbind(0), *warm.unbind(0)], reference)
    for first, second in zip(cold.unbind(0), warm.unbind(0), strict=True):
        cached = int(second["num_cached_tokens"])
        assert second["routed_experts", "full"][:cached].equal(first["routed_experts", "full"][:cached])


@pytest.mark.engine("qwen3_moe")
def test_every_sample_of_a_prompt_has_its_own_rows(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    out = policy(engine, num_samples=3)(prompts(40, 7, seed=2))
    assert out.batch_size == torch.Size([2, 3])
    answers = [out[i, j] for i in range(2) for j in range(3)]
    assert len({tuple(answer["tokens", "response"].tolist()) for answer in answers}) == 6
    assert_parity(answers, reference_of(shelf.folder("qwen3_moe")))


@pytest.mark.engine("qwen3_moe")
def test_padded_rows_are_the_same_rows(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    out = policy(engine, num_samples=2, pad_output=True)(prompts(40, 7, 21, seed=3))
    answers = []
    for sample in out.reshape(-1).unbind(0):
        real = sample["masks", "all_attention_mask"]
        prompt = sample["tokens", "full"][real & ~sample["masks", "all_assistant_mask"]]
        full = {key: {"full": sample[key, "full"][real]} for key in ("log_probs", "routed_experts", "policy_versions")}
        answers.append(TensorDict({**full, "tokens": {"prompt": prompt, "full": sample["tokens", "full"][real]}}))
        assert sample["routed_experts", "full"][~real].eq(-1).all()
    assert_parity(answers, reference_of(shelf.folder("qwen3_moe")))


@pytest.mark.engine("qwen3_moe")
def test_rows_of_a_later_turn_are_right_although_both_turns_wrote_some(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    first = policy(engine)(prompts(30, 11, seed=4))
    later = lazy_stack(
        [
            TensorDict(
                {
                    **{key: td[key] for key in ("routed_experts", "log_probs", "policy_versions")},
                    "tokens": Tokens(
                        prompt=torch.cat([td["tokens", "full"], torch.tensor([10, 65, 66])]), full=td["tokens", "full"]
                    ),
                }
            )
            for td in first.unbind(0)
        ]
    )
    reference = reference_of(shelf.folder("qwen3_moe"))
    for was, td in zip(first.unbind(0), policy(engine)(later).unbind(0), strict=True):
        old, p = len(was["tokens", "full"]), len(td["tokens", "prompt"])
        routes = td["routed_experts", "full"]
        log_probs, chosen = reference(td["tokens", "full"], TEMPERATURE, routes)
        assert route_mismatches(routes, chosen, slice(0, -1))[0] == 0
        written = td["log_probs", "full"].isfinite()
        assert written.nonzero()[:, 0].tolist() == [*range(old - NEW, old), *range(p, p + NEW)]
        assert (td["log_probs", "full"] - log_probs)[written].abs().max() <= TOLERANCE


@pytest.mark.engine("qwen3_moe", max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True)
def test_rows_of_prompts_prefilled_in_chunks_are_right(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    out = policy(engine)(prompts(400, 150, 65, 64, 63, 5, seed=5))
    assert_parity(list(out.unbind(0)), reference_of(shelf.folder("qwen3_moe")))
