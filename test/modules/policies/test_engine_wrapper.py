"""What TorchRL's code asks of a wrapper besides ``forward``, and a ``vllm.LLM`` as its model."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictSequential
from torchrl.modules.llm.policies import Text, Tokens
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLWrapper

from support.fake_llm import LLM, NEW
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

SHORT: dict[str, Any] = {"max_new_tokens": NEW}


@pytest.fixture
def fake() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM() as engine:
        yield engine


def texts(*prompts: str) -> TensorDictBase:
    return lazy_stack([TensorDict(text=Text(prompt=prompt)) for prompt in prompts])


# -- TorchRL's names --------------------------------------------------------------------------------------------------


def test_it_says_what_it_returns(fake: FakeAsyncVLLM) -> None:
    names = ("return_history", "return_text", "return_tokens", "return_masks", "return_log_probs")
    found = {mode: [getattr(vLLMWrapper(fake, input_mode=mode), name) for name in names] for mode in MODES}
    assert found == {"history": [True] * 5, "text": [False, *[True] * 4], "tokens": [False, False, *[True] * 3]}


MODES: tuple[Any, ...] = ("history", "text", "tokens")


def test_what_copies_out_keys_only_can_have_ours_too(fake: FakeAsyncVLLM) -> None:
    """As ``TensorDictSequential`` does where it is given a place to write."""
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=SHORT)

    def copied() -> set[Any]:
        target = TensorDict(batch_size=[1])
        return set(TensorDictSequential(policy)(texts("ab"), tensordict_out=target).keys())

    torchrls = {"text", "masks", "tokens", "log_probs"}
    assert copied() == torchrls
    policy.out_keys += policy.extra_keys
    assert copied() == torchrls | set(policy.extra_keys)


@pytest.mark.parametrize(("given", "written"), [(None, True), (True, True), (False, False)])
def test_log_probs_are_written_unless_they_are_declined(fake: FakeAsyncVLLM, given: Any, written: bool) -> None:
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=SHORT, return_log_probs=given)
    assert ("log_probs" in policy(texts("ab")).keys()) is written  # noqa: SIM118
    assert policy.return_log_probs is written


@pytest.mark.needs_vllm
def test_sampling_parameters_read_as_vllms(fake: FakeAsyncVLLM) -> None:
    kwargs = {"max_tokens": 20, "max_new_tokens": 10, "n": 2, "num_return_sequences": 1, "temperature": 0.7}
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=kwargs)
    params = policy.sampling_params
    assert (params.max_tokens, params.n, params.temperature, params.top_p) == (20, 2, 0.7, 1.0)
    with pytest.raises(AttributeError, match="would change nothing"):
        params.temperature = 0.0


def test_another_tokenizer_can_be_set(fake: FakeAsyncVLLM) -> None:
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=SHORT)
    assert policy.padding_value == 256
    other = ByteTokenizer()
    other.pad_token = "<|im_start|>"
    policy.set_tokenizer(other)
    assert (policy.tokenizer, policy.padding_value) == (other, 257)
    assert vLLMWrapper(fake, tokenizer=other, input_mode="text").padding_value == 257


def test_what_reads_the_wrapper_at_a_call_sees_what_was_set(fake: FakeAsyncVLLM) -> None:
    policy = vLLMWrapper(fake, input_mode="tokens", generate_kwargs=SHORT, inplace=False)
    td = TensorDict(tokens=Tokens(prompt=torch.tensor([[5, 6]]), batch_size=[1]), mine=torch.tensor([[0, 1]]))
    policy.attention_mask_key = "mine"
    td.batch_size = [1]
    policy(td)
    assert fake.replicas[0].submitted[-1].prompt_token_ids.tolist() == [6]


@pytest.mark.needs_vllm
def test_vllms_completions_as_a_tensorclass_are_torchrls() -> None:
    assert vLLMWrapper.CompletionOutput_tc is TorchRLWrapper.CompletionOutput_tc


@pytest.mark.parametrize("name", ["get_dist", "_get_sft_dist", "_get_rlhf_dist", "_get_generic_dist"])
def test_an_engine_has_no_distribution(fake: FakeAsyncVLLM, name: str) -> None:
    scoring = vLLMWrapper(fake, input_mode="text", generate=False)
    td = TensorDict(text=Text(full=["ab"], batch_size=[1]), batch_size=[1])
    with pytest.raises(NotImplementedError, match=r"vLLM does not return logits, .*TransformersWrapper"):
        getattr(scoring, name)(td)
    with pytest.raises(NotImplementedError, match="generate=True"):
        getattr(scoring.get_new_version(generate=True), name)(td)
    with pytest.raises(NotImplementedError, match="vLLM does not return logits"):
        scoring(td, logits_only=True)


def test_a_wrapper_is_pickled_with_an_engine_that_is() -> None:
    policy = vLLMWrapper(Pickled(), input_mode="text", generate_kwargs=SHORT, pad_output=True)
    other = pickle.loads(pickle.dumps(policy))
    assert (other.sampling_params, other.out_keys, other.extra_keys) == (
        policy.sampling_params,
        policy.out_keys,
        policy.extra_keys,
    )
    out = other(texts("ab"))
    assert out[0]["tokens", "response"].shape == (NEW,)


class Pickled(FakeAsyncVLLM):
    """An engine that another process can reach."""

    def __reduce__(self) -> Any:
        return Pickled, ()


# -- batching ---------------------------------------------------------------------------------------------------------


def test_calls_of_several_threads_share_one(fake: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    generate = fake.generate
    monkeypatch.setattr(fake, "generate", lambda **kw: calls.append(len(kw["prompt_token_ids"])) or generate(**kw))
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=SHORT, min_batch_size=3, inplace=False)
    assert policy.get_batching_state()["batching_enabled"] is True
    assert callable(vLLMWrapper.forward.__wrapped__)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(policy, [texts("a"), texts("bc", "def")])
    assert calls == [3]
    assert [td["text"].prompt for td in (*one.unbind(0), *two.unbind(0))] == ["a", "bc", "def"]
    assert policy.get_batching_state()["queue_size"] == 0


def test_scores_can_be_shared_too(fake: FakeAsyncVLLM) -> None:
    policy = vLLMWrapper(fake, input_mode="text", generate=False, batching=True)
    td = policy(TensorDict(text=Text(full="ab")))
    assert td["log_probs", "full"].tolist() == [0.0, fake.score([97, 98])[1].item()]


# -- a vllm.LLM -------------------------------------------------------------------------------------------------------


@pytest.mark.needs_vllm
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("routes", [False, True])
def test_a_vllm_llm_generates(routes: bool, pad: bool) -> None:
    llm = LLM(routes=routes)
    policy = vLLMWrapper(llm, input_mode="text", generate_kwargs=SHORT, pad_output=pad)
    assert policy.model is llm
    out = policy(texts("ab", "c"))
    extra = {"resume", "finish_reason", "num_cached_tokens", "sampling"} | ({"routed_experts"} if routes else set())
    assert set(policy.extra_keys) == extra  # nobody counts the versions of its weights
    assert set(out.keys()) == {"text", "masks", "tokens", "log_probs"} | extra
    pads = [0, 1] if pad else [0, 0]
    for row, prompt, left in zip(out.unbind(0), ([97, 98], [99]), pads, strict=True):
        answer = [(sum(prompt) + t) % 256 for t in range(NEW)]
        assert row["tokens", "full"].tolist() == [256] * left + prompt + answer
        assert row["log_probs", "response"].tolist() == [-1.0, -2.0, -3.0]
        if routes:
            rows = row["routed_experts", "full"][left:]
            assert rows[:-1].tolist() == [[[-1, -1], [1, 2], [1, 2]]] * (len(rows) - 1)
            assert rows[-1].eq(-1).all()


@pytest.mark.needs_vllm
def test_a_vllm_llm_scores_in_every_mode() -> None:
    llm = LLM()
    for mode, td in {
        "text": TensorDict(text=Text(full=["abc"], batch_size=[1]), batch_size=[1]),
        "tokens": TensorDict(tokens=Tokens(full=torch.tensor([[97, 98, 99]]), batch_size=[1]), batch_size=[1]),
    }.items():
        out = vLLMWrapper(llm, input_mode=mode, generate=False)(td)
        torch.testing.assert_close(out["log_probs", "full"][0], torch.tensor([0.0, -0.1, -0.2]))
    with pytest.raises(ValueError, match="'R3', which None means where routes are captured, and a vllm"):
        vLLMWrapper(LLM(routes=True), input_mode="tokens", generate=False)
    assert vLLMWrapper(LLM(routes=True), input_mode="tokens", generate=False, replay="none").scorer.replay == "none"


@pytest.mark.needs_vllm
def test_a_later_turn_of_a_vllm_llm_keeps_what_the_first_wrote() -> None:
    policy = vLLMWrapper(LLM(), input_mode="tokens", generate_kwargs=SHORT, inplace=False)
    first = policy(TensorDict(tokens=Tokens(prompt=torch.tensor([[5, 6]]), batch_size=[1]), batch_size=[1]))
    turn = first.clone()
    turn[0]["tokens"] = Tokens(prompt=torch.cat([first[0]["tokens", "full"], torch.tensor([7])]))
    turn[0]["tokens", "full"] = first[0]["tokens", "full"]
    out = policy(turn)[0]
    assert out["log_probs", "full"][2:5].tolist() == [-1.0, -2.0, -3.0]
    assert out["log_probs", "full"][5].isnan()
    assert out["log_probs", "full"][6:].tolist() == [-1.0, -2.0, -3.0]


def test_a_vllm_llm_refuses_what_it_cannot_keep() -> None:
    td = texts("ab")
    td[0]["min_version"] = torch.tensor(1)
    with pytest.raises(ValueError, match="min_version: a vllm"):
        vLLMWrapper(LLM(), input_mode="text")(td)
    with pytest.raises(ValueError, match="timeout_seconds: a vllm"):
        vLLMWrapper(LLM(), input_mode="text", timeout_seconds=1.0)(texts("ab"))
    with pytest.raises(TypeError, match="model is a LLM, which answers one call at a time: make it an AsyncVLLM"):
        AsyncLLMCollector(lambda: None, policy=vLLMWrapper(LLM(), input_mode="text"))
