"""What only a real vLLM engine can show: its model runner, stats, scores, and routers that follow recorded experts."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.completions import cut
from support.engines import EngineShelf
from support.processes import ids_request
from support.reference import TOLERANCE, Reference
from support.routes import rows_at_random
from support.versions import random_ids
from support.waiting import until
from torchrl_moe.data import KeptTokens
from torchrl_moe.errors import RequestRefusedError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.replica import Completion, Request

CHUNKED = pytest.mark.engine("qwen3_moe", max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True)
PARAMS: dict[str, Any] = {"max_tokens": 20, "logprobs": 0, "ignore_eos": True}


def generate(engine: AsyncVLLM, prompts: Any = None, params: Any = None, **kwargs: Any) -> Any:
    params = {**PARAMS, **(params or {})}
    return engine.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False, **kwargs)


def tokens_of(completions: Any) -> list[list[int]]:
    return [output.token_ids.tolist() for one in completions for output in one.outputs]


@CHUNKED
def test_the_workers_run_model_runner_v2(engine: AsyncVLLM) -> None:
    from vllm.platforms import current_platform

    expected = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    if current_platform.is_cpu():
        expected = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert engine.collective_rpc("torchrl_moe_runner") == [[expected]]


@CHUNKED
def test_a_seed_gives_the_same_answers_in_any_batch_and_after_a_cut(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    prompts = [random_ids(seed, length).tolist() for seed, length in enumerate((300, 7, 65, 128))]
    first = generate(engine, prompts, {"seed": 5, "n": 2})
    assert tokens_of(generate(engine, prompts, {"seed": 5, "n": 2})) == tokens_of(first)
    assert tokens_of(generate(engine, prompts[2:3], {"seed": 5, "n": 2})) == tokens_of(first[2:3])
    assert tokens_of(generate(engine, prompts, {"seed": 6, "n": 2})) != tokens_of(first)
    one, other = tokens_of(first)[:2]
    assert one != other  # the answers of a request have seeds of their own
    again = generate(engine, resume=[cut(first[2], 7, 12, decode=lambda ids: "")], params={"seed": 5, "n": 2})
    assert tokens_of(again) == tokens_of(first[2:3])
    assert Reference(shelf.folder("qwen3_moe")).distance(*first, *again) <= TOLERANCE


@CHUNKED
def test_set_seed_makes_answers_without_a_seed_repeatable(engine: AsyncVLLM) -> None:
    prompts = [random_ids(seed, 12).tolist() for seed in range(3)]
    found = []
    for seed in (1, 1, 2):
        engine.set_seed(seed)
        found.append(tokens_of(generate(engine, prompts)))
    assert found[0] == found[1] != found[2]


@CHUNKED
def test_a_bias_is_computed_by_the_same_runner(engine: AsyncVLLM) -> None:
    """A trainer does not replay biases, so wrappers refuse them with log-probs; an evaluation may."""
    prompts = [random_ids(seed, 20).tolist() for seed in range(3)]
    biased, again = (tokens_of(generate(engine, prompts, {"seed": 4, "logit_bias": {65: 8.0, 66: 8.0}})) for _ in "ab")
    assert biased == again
    assert np.mean([token in (65, 66) for answer in biased for token in answer]) > 0.8


# -- requests, from outside -------------------------------------------------------------------------------------------
@CHUNKED
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": np.zeros(513, np.int32)}, r"513 .*512|512.* 513"),
        ({"prompt_token_ids": np.array([1, 300], np.int32)}, "out of vocabulary"),
        ({"prompt_token_ids": np.zeros(0, np.int32)}, "empty"),
        ({"prompt": "hi", "sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"prompt": "hi", "guided_options": {"regex": "("}}, "regex|grammar"),
        (
            {"prompt": "hi", "lora_request": {"lora_name": "tiny", "lora_int_id": 1, "lora_path": "/nowhere"}},
            "(?i)lora is not enabled",
        ),
    ],
)
def test_a_bad_request_is_refused_in_vllms_words_alone(engine: Any, fields: dict[str, Any], message: str) -> None:
    bad = Request(request_id="bad", **{"sampling_params": {"max_tokens": 2}, **fields})
    good = ids_request("good", [1, 2, 3], sampling_params={"max_tokens": 2})
    refused, done = engine.replica_table[0].replica.submit([bad, good])
    with pytest.raises(ValueError, match=message):
        refused.result(60.0)
    assert done.result(60.0).outputs[0].finish_reason in ("length", "stop")


@CHUNKED
def test_stats_are_pushed_while_requests_run_and_say_when_they_are_over(engine: AsyncVLLM) -> None:
    replica, before, seen = engine.replica_table[0].replica, engine.stats()[0], []
    engine.reset_prefix_cache()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: [generate(engine, [[*range(40, 240)]], {"max_tokens": 150})[0] for _ in range(2)])
        while not call.done():
            seen.append(replica.last_stats)
            time.sleep(0.05)
        first, second = (completion.num_cached_tokens for completion in call.result())
    assert (first, second > 0) == (0, True)
    busy = [stats for stats in seen if stats is not None and stats.running == 1]
    assert busy  # nobody asked
    assert max(stats.tokens_per_second for stats in busy) > 0
    assert max(stats.cache_usage for stats in busy) > 0
    assert all(stats.waiting == 0 for stats in busy)
    until(lambda: replica.last_stats.requests == before["requests"] + 2)
    until(lambda: replica.last_stats.tokens_per_second == 0)
    last = replica.last_stats
    assert (last.running, last.cache_usage) == (0, 0.0)
    since = {name: getattr(last, name) - before[name] for name in ("cache_queries", "cache_hits", "preemptions")}
    assert since == {"cache_queries": 400, "cache_hits": second, "preemptions": 0}
    assert last.steps - before["steps"] >= 300
    assert abs(last.step_at - time.time()) < 60


@CHUNKED
def test_a_log_holds_no_line_for_a_request_and_no_bars(engine: AsyncVLLM) -> None:
    (path,) = engine.log_paths()
    assert path is not None
    before = path.read_text()
    engine.generate([[72], [72]], {"max_tokens": 4}, use_tqdm=True, request_ids=["marked-1", "marked-2"])
    assert path.read_text() == before
    assert "shards" not in before and "%" not in before


@CHUNKED
def test_parts_of_what_may_start_again_come_at_once(engine: AsyncVLLM) -> None:
    parts: list[Completion] = []
    params = {"max_tokens": 40, "ignore_eos": True, "presence_penalty": 0.1}
    whole = asyncio.run(engine.agenerate(prompt_token_ids=[5, 6, 7], sampling_params=params, on_part=parts.append))
    assert not parts
    assert len(whole.outputs[0].token_ids) == 40


@pytest.mark.engine("qwen3_moe", dtype="bfloat16", max_num_seqs=8)
def test_a_small_model_in_bfloat16_serves(engine: AsyncVLLM) -> None:
    """A CPU with AMX kills a process that has not asked for its tiles, and small products do not ask."""
    assert [len(tokens) for tokens in tokens_of(generate(engine, [[1, 2, 3]]))] == [20]
    assert [entry.restarts for entry in engine.replica_table] == [0]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("least", "most"),
    [
        pytest.param(1e-3, 1e-1, marks=pytest.mark.engine(dtype="bfloat16", enable_fp32_output=False), id="as it is"),
        pytest.param(0.0, 1e-5, marks=pytest.mark.engine(dtype="bfloat16", enable_fp32_output=True), id="float32"),
    ],
)
def test_a_float32_last_layer_rounds_no_logits(engine: AsyncVLLM, least: float, most: float) -> None:
    def error(saved: Any, model: Any) -> float:
        """How far the last layer's logits are from those in float32, for the same hidden states."""
        hidden = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        expected = hidden.float() @ model.lm_head.weight.float().T
        return (model.compute_logits(hidden).float() - expected[:, :259]).abs().max().item()

    assert least <= engine.validate_model_params(error)[0][0] < most
    assert len(tokens_of(generate(engine, [[72, 105]]))[0]) == 20


# -- scores -----------------------------------------------------------------------------------------------------------
def check_scores(scores: Any, expected: torch.Tensor) -> None:
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    assert bool(scores[0].isnan())
    if len(scores) > 1:
        assert float((scores - expected)[1:].abs().max()) <= TOLERANCE


@CHUNKED
def test_scores_are_those_of_the_model(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """Several at once, each at its own temperature, beside a request that generates; twice, for the prefix cache."""
    reference = Reference(shelf.folder("qwen3_moe"))
    sequences = [random_ids(seed, length).tolist() for seed, length in enumerate((2, 40, 150, 300, 1))]
    temperatures = [1.0, 0.7, 1.3, 0.6, 1.0]
    for _ in range(2):
        engine.generate(sequences[3], {"max_tokens": 4, "ignore_eos": True}, use_tqdm=False)
        found = engine.score(sequences, temperature=temperatures)
        for ids, temperature, scores in zip(sequences, temperatures, found, strict=True):
            check_scores(scores, reference(ids, temperature)[0])


@CHUNKED
def test_scores_follow_experts_that_no_router_would_choose(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    assert engine.routing_layout is not None
    reference, ids = Reference(shelf.folder("qwen3_moe")), random_ids(5, 80)
    rows = rows_at_random(engine.routing_layout, 80)
    rows[60:] = -1
    scores, live = engine.score(ids.tolist(), rows), engine.score(ids.tolist())
    check_scores(scores, reference(ids, routes=rows, followed=torch.arange(80) < 60)[0])
    assert float((live - scores)[1:].abs().max()) > 100 * TOLERANCE


@CHUNKED
def test_what_cannot_be_scored_is_refused(engine: AsyncVLLM) -> None:
    assert len(engine.score([65] * 511)) == 511
    unknown = KeptTokens(ids=torch.tensor([66, 100000]), sizes=torch.tensor([0, 2]))
    for ids, kept, words in (([65] * 512, None, "512"), ([65, 66], unknown, "token id 100000; this engine has")):
        with pytest.raises(RequestRefusedError, match=words):
            engine.score(ids, kept=kept)


# -- recorded experts -------------------------------------------------------------------------------------------------
def check_followed(reference: Reference, completion: Completion, rows: NDArray[Any] | None) -> None:
    """The engine recorded the rows that it followed, and transformers, which follows them too, finds its log-probs."""
    if rows is None:
        assert reference.distance(completion) <= TOLERANCE
        return
    moe = [layer for layer in range(rows.shape[1]) if (rows[:, layer] >= 0).any()]
    known = rows[:, moe[0], 0] >= 0
    for output in completion.outputs:
        recorded = output.routed_experts.astype(np.int64)
        assert (recorded[: len(rows)][known][:, moe] == rows[known][:, moe]).all()
        ids = torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids]))
        followed = torch.zeros(len(recorded), dtype=torch.bool)
        followed[: len(rows)] = torch.from_numpy(known)
        log_probs, routes = reference(ids, routes=recorded, followed=followed)
        off = (torch.from_numpy(output.logprobs.copy()) - log_probs[-len(output.token_ids) :]).abs()
        assert off.max() <= TOLERANCE
        for layer, expected in routes.items():
            assert (np.sort(recorded[:, layer]) == expected[: len(recorded)].sort(-1).values.numpy()).all()


def follow(engine: AsyncVLLM, prompts: Any, rows: Any, **params: Any) -> Any:
    return generate(engine, prompts, {"max_tokens": 12, **params}, routed_experts=rows)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=CHUNKED),
        pytest.param("deepseek_v3", marks=pytest.mark.engine("deepseek_v3")),
        *(pytest.param(name, marks=[pytest.mark.engine(name), pytest.mark.parity]) for name in ("mixtral", "olmoe")),
    ],
)
def test_an_engine_follows_experts_that_it_would_not_choose(family: str, engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """Whole prompts, parts of prompts, rows with gaps, several answers; beside a request that follows nothing."""
    layout, reference = engine.routing_layout, Reference(shelf.folder(family))
    assert layout is not None and engine.infos[0].forced_routing_unavailable_reason == ""
    prompts = [random_ids(seed, length).tolist() for seed, length in enumerate((40, 40, 200, 3, 40))]
    rows: list[Any] = [rows_at_random(layout, count, seed) for seed, count in enumerate((40, 17, 200, 3))]
    rows[2][np.random.default_rng(9).random(200) < 0.3] = -1
    completions = follow(engine, prompts, [*rows, None], n=2)
    for completion, one in zip(completions, [*rows, None], strict=True):
        check_followed(reference, completion, one)
    live = follow(engine, prompts[:1], [None])[0].outputs[0].routed_experts
    followed = completions[0].outputs[0].routed_experts
    assert (live[:40, layout.moe_layers] == followed[:40, layout.moe_layers]).mean() < 0.5


@pytest.mark.soak
@pytest.mark.engine("qwen3_moe", tensor_parallel_size=2)
def test_two_workers_of_one_model_follow_alike(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    layout, reference = engine.routing_layout, Reference(shelf.folder("qwen3_moe"))
    assert layout is not None
    prompts = [random_ids(40 + seed, length).tolist() for seed, length in enumerate((60, 60, 200, 33))]
    rows = [rows_at_random(layout, count, count) for count in (60, 0, 200, 9)]
    asked = [one if len(one) else None for one in rows]
    for completion, one in zip(follow(engine, prompts, asked, n=2), asked, strict=True):
        check_followed(reference, completion, one)
    for ids, one, scores in zip(prompts, rows, engine.score(prompts, asked), strict=True):
        whole = np.full((len(ids), layout.num_layers, layout.top_k), -1)
        whole[: len(one)] = one
        expected, _ = reference(ids, routes=whole, followed=torch.arange(len(ids)) < len(one))
        check_scores(scores, expected)


@CHUNKED
def test_blocks_are_shared_by_requests_that_follow_the_same_experts(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    layout, reference = engine.routing_layout, Reference(shelf.folder("qwen3_moe"))
    assert layout is not None
    rows, others = rows_at_random(layout, 300, 1), rows_at_random(layout, 300, 2)
    others[:128] = rows[:128]  # a block of the cache, and not the next one
    cached, nothing = [], np.full_like(rows, -1)
    for one in (rows, rows.astype(np.int16), others, None, None, nothing):
        completion = follow(engine, [random_ids(77, 300).tolist()], [one])[0]
        cached.append(completion.num_cached_tokens)
        check_followed(reference, completion, None if one is nothing else one)
    assert cached == [0, 256, 128, 0, 256, 256]
