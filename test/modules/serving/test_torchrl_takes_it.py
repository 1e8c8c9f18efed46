"""TorchRL's own wrapper takes an engine of ours for a Ray actor; Ray is real, the engine is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens, vLLMWrapper

from torchrl_moe.testing import FakeAsyncVLLM

pytestmark = pytest.mark.ray

PROMPTS = ["Hi, world", "1+1="]
SAMPLING = {"max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
def engine(ray_cluster: Any) -> Iterator[FakeAsyncVLLM]:
    """It answers a prompt as it ever does: what was sampled depends on the seed and the prompt alone."""
    with FakeAsyncVLLM(seed=3) as engine, set_list_to_stack(True):
        yield engine


def ids_of(engine: FakeAsyncVLLM) -> list[torch.Tensor]:
    return [torch.tensor(engine.get_tokenizer().encode(prompt)) for prompt in PROMPTS]


def expected(engine: FakeAsyncVLLM, **params: Any) -> list[Any]:
    asked = {"max_tokens": 6, "logprobs": 0, "ignore_eos": True, **params}
    return [one.outputs for one in engine.generate(PROMPTS, asked, use_tqdm=False)]


def test_it_generates_from_text(engine: FakeAsyncVLLM) -> None:
    policy = vLLMWrapper(engine, input_mode="text", generate_kwargs=SAMPLING)
    out = policy(TensorDict(text=Text(prompt=PROMPTS, batch_size=2), batch_size=2))
    for row, prompt, (answer,) in zip(out.unbind(0), PROMPTS, expected(engine), strict=True):
        assert row["text", "full"] == prompt + row["text", "response"]
        assert row["tokens", "response"].tolist() == answer.token_ids.tolist()
        assert row["log_probs", "response"].tolist() == answer.logprobs.tolist()


def test_it_generates_several_answers_and_pads(engine: FakeAsyncVLLM) -> None:
    td = TensorDict(text=Text(prompt=PROMPTS, batch_size=2), batch_size=2)
    policy = vLLMWrapper(engine, input_mode="text", generate_kwargs=SAMPLING, num_samples=3, pad_output=True)
    out = policy(td)
    assert out["log_probs", "response"].shape == (2, 3, 6)
    wanted = [[answer.token_ids.tolist() for answer in answers] for answers in expected(engine, n=3)]
    assert out["tokens", "response"].tolist() == wanted


def test_it_generates_from_tokens_with_the_prompts_log_probs(engine: FakeAsyncVLLM) -> None:
    ids = ids_of(engine)
    td = lazy_stack([TensorDict(tokens=Tokens(prompt=one, batch_size=())) for one in ids])
    out = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=SAMPLING)(td)
    for row, one, (answer,) in zip(out.unbind(0), ids, expected(engine), strict=True):
        assert row["tokens", "full"].tolist() == [*one.tolist(), *answer.token_ids.tolist()]
        scores = engine.score(one.tolist())
        assert row["log_probs", "full"][1:].tolist() == [*scores[1:].tolist(), *answer.logprobs.tolist()]


def test_it_scores_tokens(engine: FakeAsyncVLLM) -> None:
    ids = ids_of(engine)
    td = lazy_stack([TensorDict(tokens=Tokens(full=one, batch_size=())) for one in ids])
    out = vLLMWrapper(engine, input_mode="tokens", generate=False, return_log_probs=True)(td)
    for row, one in zip(out.unbind(0), ids, strict=True):
        assert row["log_probs", "full"][1:].tolist() == engine.score(one.tolist())[1:].tolist()


def test_it_generates_from_a_chat(engine: FakeAsyncVLLM) -> None:
    chats = History.from_chats([[{"role": "user", "content": prompt}] for prompt in PROMPTS])
    out = vLLMWrapper(engine, input_mode="history", generate_kwargs=SAMPLING)(
        TensorDict(history=ChatHistory(prompt=chats), batch_size=2)
    )
    assert [len(row["tokens", "response"]) for row in out.unbind(0)] == [6, 6]
    assert [text.startswith(prompt) for text, prompt in zip(out["text", "full"], out["text", "prompt"], strict=True)]
