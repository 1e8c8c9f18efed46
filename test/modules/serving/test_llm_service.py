"""A ``vllm.LLM`` under the names of a service: the arguments that it keeps, and those it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.fake_llm import LLM, NEW
from torchrl_moe.modules.serving.llm_service import LLMService, is_llm
from torchrl_moe.testing import FakeAsyncVLLM


def test_it_is_known_by_its_class_and_those_derived_from_it() -> None:
    class Mine(LLM):
        pass

    assert is_llm(LLM())
    assert is_llm(Mine())
    assert not is_llm(FakeAsyncVLLM())
    assert not is_llm(type("LLM", (), {})())  # somebody else's


def test_one_prompt_gives_one_answer_and_several_a_list() -> None:
    llm = LLM()
    service = LLMService(llm)
    params = {"max_tokens": NEW}
    assert service.generate([5, 6], params, use_tqdm=False).outputs[0].token_ids.tolist() == [11, 12, 13]
    first, second = service.generate(prompt_token_ids=[[5], [6]], sampling_params=params, use_tqdm=False)
    assert [one.outputs[0].token_ids[0] for one in (first, second)] == [5, 6]
    assert first.request_id != second.request_id
    assert service.get_tokenizer() is llm.tokenizer
    assert service.routing_layout is None


def test_scores_are_tensors() -> None:
    service = LLMService(LLM())
    one = service.score([5, 6, 7])
    torch.testing.assert_close(one, torch.tensor([float("nan"), -0.1, -0.2]), equal_nan=True)
    assert [len(row) for row in service.score([[5, 6], [7]], temperature=[1.0, 1.0], kept=[None, None])] == [2, 1]
    with pytest.raises(ValueError, match="scores at temperature 1 and over all words"):
        service.score([5, 6], temperature=0.5)


@pytest.mark.parametrize(
    "accepted",
    [
        {"session_ids": ["s"], "group_ids": ["g"], "request_context": [{"k": 1}]},  # there is one engine to choose
        {"actor_index": 0},
        {"min_version": [None], "timeout_seconds": None, "on_resume": None},
    ],
)
def test_what_asks_for_nothing_or_is_so_anyway_is_accepted(accepted: dict[str, Any]) -> None:
    assert len(LLMService(LLM()).generate([[5]], use_tqdm=False, **accepted)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_version", [3]),
        ("actor_index", 1),
        ("timeout_seconds", 5.0),
        ("on_resume", "live"),
        ("routed_experts", torch.zeros(1, 3, 2)),
        ("resume", object()),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(name: str, value: Any) -> None:
    llm = LLM()
    with pytest.raises(ValueError, match=rf"^{name}: a vllm\.LLM is one engine in this process, .*AsyncVLLM"):
        LLMService(llm).generate([[5]], use_tqdm=False, **{name: value})
    assert not llm.asked
    if name in ("min_version", "actor_index", "timeout_seconds"):
        with pytest.raises(ValueError, match=f"^{name}: "):
            LLMService(llm).score([[5]], **{name: value})
