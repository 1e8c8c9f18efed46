"""What users' requests meet in a real engine: vLLM's Model Runner V2, with seeds, grammars and penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.completions import cut
from support.engines import EngineShelf
from support.reference import TOLERANCE, Reference
from support.versions import random_ids
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.modules import AsyncVLLM

CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}
PARAMS: dict[str, Any] = {"max_tokens": 20, "logprobs": 0, "ignore_eos": True}


def generate(engine: AsyncVLLM, prompts: Any = None, **params: Any) -> Any:
    kwargs = {name: params.pop(name) for name in ("resume", "guided_options_request") if name in params}
    return engine.generate(prompt_token_ids=prompts, sampling_params={**PARAMS, **params}, use_tqdm=False, **kwargs)


def tokens_of(completions: Any) -> list[list[int]]:
    return [output.token_ids.tolist() for one in completions for output in one.outputs]


@pytest.mark.engine("qwen3_moe", **CHUNKED)
def test_the_workers_run_model_runner_v2(engine: AsyncVLLM) -> None:
    from vllm.platforms import current_platform

    expected = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    if current_platform.is_cpu():
        expected = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert engine.collective_rpc("torchrl_moe_runner") == [[expected]]


@pytest.mark.engine("qwen3_moe", **CHUNKED)
def test_a_seed_gives_the_same_answers_alone_beside_others_and_in_chunks(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    prompts = [random_ids(seed, length).tolist() for seed, length in enumerate((300, 7, 65, 128))]
    first = generate(engine, prompts, seed=5, n=2)
    assert tokens_of(generate(engine, prompts, seed=5, n=2)) == tokens_of(first)
    assert tokens_of(generate(engine, prompts[2:3], seed=5, n=2)) == tokens_of(first[2:3])
    assert tokens_of(generate(engine, prompts, seed=6, n=2)) != tokens_of(first)
    one, other = tokens_of(first)[:2]
    assert one != other  # the answers of a request have seeds of their own
    assert Reference(shelf.folder("qwen3_moe")).distance(*first) <= TOLERANCE


@pytest.mark.engine("qwen3_moe", **CHUNKED)
def test_an_interrupted_answer_with_a_seed_becomes_what_it_would_have_been(
    engine: AsyncVLLM, shelf: EngineShelf
) -> None:
    whole = generate(engine, [random_ids(3, 40).tolist()], seed=9, n=2)
    again = generate(engine, resume=[cut(whole[0], 7, 12, decode=lambda ids: "")], seed=9, n=2)
    assert tokens_of(again) == tokens_of(whole)
    assert Reference(shelf.folder("qwen3_moe")).distance(*again) <= TOLERANCE


@pytest.mark.engine("qwen3_moe", **CHUNKED)
def test_set_seed_makes_answers_without_a_seed_repeatable(engine: AsyncVLLM) -> None:
    prompts = [random_ids(seed, 12).tolist() for seed in range(3)]
    found = []
    for seed in (1, 1, 2):
        engine.set_seed(seed)
        found.append(tokens_of(generate(engine, prompts)))
    assert found[0] == found[1] != found[2]


@pytest.mark.engine("qwen3_moe", **CHUNKED)
def test_eight_answers_that_follow_a_grammar_are_sampled_from_what_it_allows(
    engine: AsyncVLLM, shelf: EngineShelf
) -> None:
    (completion,) = generate(
        engine, [random_ids(4, 30).tolist()], n=8, ignore_eos=False, guided_options_request={"regex": "[a-d]{6}"}
    )
    reference = Reference(shelf.folder("qwen3_moe"))
    for output in completion.outputs:
        answer = output.token_ids.tolist()
        assert set(answer[:6]) <= set(b"abcd") and len(answer) == 7
        assert output.kept is not None
        assert output.kept.sizes.tolist() == [4] * 6 + [1]  # the last one ends it
        sizes = torch.cat([torch.zeros(30, dtype=torch.int32), torch.from_numpy(output.kept.sizes.copy())])
        words = dense_mask(torch.from_numpy(output.kept.ids.copy()), sizes, reference.model.config.vocab_size)
        ids = torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids]))
        log_probs, _ = reference(ids, routes=output.routed_experts, words=words)
        assert (torch.from_numpy(output.logprobs.copy()) - log_probs[30:]).abs().max() <= TOLERANCE


@pytest.mark.engine("qwen3_moe", **CHUNKED)
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"logit_bias": {65: 8.0, 66: 8.0}},
        {"temperature": 0.0},
    ],
)
def test_what_changes_logits_is_computed_by_the_same_runner(params: dict[str, Any], engine: AsyncVLLM) -> None:
    """A trainer does not replay penalties and biases, so wrappers refuse them with log-probs; an evaluation may."""
    prompts = [random_ids(seed, 20).tolist() for seed in range(3)]
    one, two = generate(engine, prompts, seed=4, **params), generate(engine, prompts, seed=4, **params)
    assert tokens_of(one) == tokens_of(two)
    if "logit_bias" in params:
        share = np.mean([token in (65, 66) for answer in tokens_of(one) for token in answer])
        assert share > 0.8
    if params.get("temperature") == 0.0:
        assert tokens_of(one) == tokens_of(generate(engine, prompts, temperature=0.0))
