"""A synchronous ``vllm.LLM`` runs requests: a stand-in says what it was asked, and vLLM's own answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import EngineShelf
from support.fake_llm import EXPERTS, LAYERS, LLM, NEW, TOP_K
from torchrl_moe._errors import EngineError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.replica import Request, Scoring
from torchrl_moe.modules.backends.vllm.sync_llm import NO_VERSION, SyncLLM


def request(*ids: int, **fields: Any) -> Request:
    params = fields.pop("sampling_params", {"logprobs": 0, "max_tokens": NEW})
    return Request(request_id="x", sampling_params=params, prompt_token_ids=np.array(ids, np.int32), **fields)


def test_requests_become_completions_in_their_order() -> None:
    llm = LLM()
    text = Request(request_id="t", sampling_params={"n": 2}, prompt="ab")
    one, two = SyncLLM(llm).complete([request(5, 6), text])
    assert one.prompt_token_ids.tolist() == [5, 6]
    (answer,) = one.outputs
    assert answer.token_ids.tolist() == [11, 12, 13]
    assert answer.logprobs is not None
    assert answer.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (answer.finish_reason, answer.routed_experts, answer.kept) == ("length", None, None)
    assert answer.policy_versions.tolist() == [NO_VERSION] * NEW
    assert (two.prompt, [output.index for output in two.outputs], two.outputs[1].logprobs) == ("ab", [0, 1], None)
    ((prompts, params, lora, priority),) = llm.asked
    assert prompts == [{"prompt_token_ids": [5, 6]}, {"prompt": "ab"}]
    assert [(one.max_tokens, one.n, one.logprobs) for one in params] == [(NEW, 1, 0), (16, 2, None)]
    assert (lora, priority) == (None, None)


def test_an_adapter_and_a_priority_reach_vllm() -> None:
    llm = LLM()
    adapter = {"lora_name": "a", "lora_int_id": 1, "lora_path": "folder"}
    SyncLLM(llm).complete([request(5, lora_request=adapter, priority=3), request(6)])
    ((_, _, lora, priority),) = llm.asked
    assert (lora[0].lora_name, lora[1], priority) == ("a", None, [3, 0])


def test_routes_come_with_the_layout_of_the_model_that_runs() -> None:
    engine = SyncLLM(LLM(routes=True))
    assert engine.layout == RoutingLayout(num_layers=LAYERS, moe_layers=(1, 2), top_k=TOP_K, num_experts=EXPERTS)
    (completion,) = engine.complete([request(5, 6)])
    assert completion.outputs[0].routed_experts.shape == (2 + NEW - 1, LAYERS, TOP_K)
    (without,) = engine.complete([request(5, 6, return_routed_experts=False)])
    assert without.outputs[0].routed_experts is None
    assert SyncLLM(LLM()).layout is None


def test_routes_that_cannot_be_read_are_refused() -> None:
    llm = LLM(routes=True)

    def refuses() -> list[Any]:
        raise TypeError("Object of type <class 'function'> is not serializable")

    llm.applies = refuses
    with pytest.raises(ValueError, match=r"VLLM_ALLOW_INSECURE_SERIALIZATION=1 .*AsyncVLLM \(Object of type"):
        SyncLLM(llm)
    with pytest.raises(ValueError, match="one of its pipeline stages"):
        SyncLLM(LLM(routes=True, pipeline=2))


def test_scores_are_the_prompts_own() -> None:
    llm = LLM()
    (completion,) = SyncLLM(llm).complete([request(5, 6, 7, sampling_params={"max_tokens": 1}, scoring=Scoring())])
    assert completion.prompt_logprobs is not None
    np.testing.assert_allclose(completion.prompt_logprobs, [np.nan, -0.1, -0.2])
    ((_, (params,), _, _),) = llm.asked
    assert params.skip_reading_prefix_cache is True


WORDS = KeptIds(np.array([1], np.int32), np.array([1, 0], np.int32))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scoring": Scoring(temperature=0.5)}, "at temperature 1 and over all words, .* at 0.5: exclude 'sampling'"),
        ({"scoring": Scoring(kept=WORDS)}, "sampled at 1, over fewer: exclude"),
        ({"routed_experts": np.zeros((1, 3, 2), np.int8)}, "follows no recorded experts"),
        ({"on_resume": "forced"}, "follows no recorded experts, and resumes nothing"),
        ({"sampling_params": {"logprobs": 0, "top_p": 0.9}}, r"top_p=0\.9 leaves words out, and a vllm\.LLM does not"),
        (
            {"sampling_params": {"logprobs": 0, "temperature": 0.7}},
            r"temperature=0\.7, and this .* logprobs_mode='p",
        ),
        ({"sampling_params": {"logprobs": 5}}, "log-probs of its sampled tokens only"),
    ],
)
def test_what_needs_an_engine_of_ours_is_refused(fields: dict[str, Any], words: str) -> None:
    llm = LLM()
    with pytest.raises(ValueError, match=words):
        SyncLLM(llm).complete([request(5, 6), request(5, 6, **fields)])
    assert not llm.asked


@pytest.mark.parametrize(
    ("mode", "params"),
    [
        ("raw_logprobs", {"temperature": 0.7, "top_p": 0.9}),  # no log-probs
        ("raw_logprobs", {"logprobs": 0, "temperature": 0.0}),  # greedy: nobody trains on it
        ("raw_logprobs", {"logprobs": 0, "temperature": 1.0}),
        ("processed_logprobs", {"logprobs": 0, "temperature": 0.7}),
    ],
)
def test_what_is_sampled_from_the_distribution_of_the_log_probs_is_not(mode: str, params: dict[str, Any]) -> None:
    assert len(SyncLLM(LLM(mode=mode)).complete([request(5, sampling_params=params)])) == 1


def test_logits_are_no_log_probs() -> None:
    with pytest.raises(ValueError, match="gives logits, logprobs_mode='raw_logits': make it with 'processed_logprobs'"):
        SyncLLM(LLM(mode="raw_logits"))


def test_answers_that_an_interrupted_call_left_are_not_taken_for_others() -> None:
    llm = LLM()
    engine = SyncLLM(llm)
    (params,) = [engine.complete([request(9)]) and llm.asked[0][1][0]]
    llm.left = [llm._output({"prompt_token_ids": [9]}, params)]
    with pytest.raises(EngineError, match=r"vLLM gave 2 answers to 1 prompts, .* call again"):
        engine.complete([request(5)])
    assert engine.complete([request(5)])[0].outputs[0].token_ids.tolist() == [5, 6, 7]


def test_one_call_at_a_time_over_all_wrappers() -> None:
    llm = LLM()
    engines = [SyncLLM(llm), SyncLLM(llm)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, engines[i % 2].complete([request(i)])))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert llm.most == 1
    assert [found[i][0].outputs[0].token_ids[0] for i in range(6)] == list(range(6))


# -- vLLM's own -------------------------------------------------------------------------------------------------------


@pytest.mark.engine("qwen3_moe")
def test_vllms_own_answers_as_an_engine_of_ours_does(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> None:
    """It is made in a process of its own, as a user's script would: this one has an engine already."""
    prompts = [[104, 105], list(b"what is 1+1?")]
    program = Path(__file__).parents[3] / "support" / "llm_program.py"
    command = [sys.executable, "-P", str(program), str(shelf.folder("qwen3_moe")), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, timeout=110)
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert found["layout"] == engine.routing_layout
    greedy = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    ours = engine.generate(prompt_token_ids=prompts, sampling_params=greedy, use_tqdm=False)
    scores = engine.score([one["tokens"].tolist() for one in found["answers"]])
    for one, completion, score, llm_score in zip(found["answers"], ours, scores, found["scores"], strict=True):
        (output,) = completion.outputs
        prompt = len(completion.prompt_token_ids)
        assert one["tokens"].tolist() == [*completion.prompt_token_ids, *output.token_ids]
        routed = list(found["layout"].moe_layers)
        routes = torch.from_numpy(np.asarray(output.routed_experts, np.int8))[:, routed]
        assert one["routes"][:-1, routed].sort(-1).values.equal(routes.sort(-1).values)
        assert one["routes"][:, found["layout"].dense_layers].eq(-1).all()
        torch.testing.assert_close(one["log_probs"][prompt:], torch.from_numpy(output.logprobs), rtol=0, atol=1e-5)
        torch.testing.assert_close(llm_score[1:], score[1:], rtol=0, atol=1e-5)
