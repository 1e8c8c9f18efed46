"""What TorchRL's code asks of a wrapper besides ``forward``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictSequential
from torchrl.modules.llm.policies import Text, Tokens
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLWrapper

from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

SHORT: dict[str, Any] = {"max_new_tokens": 3}


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
    assert out[0]["tokens", "response"].shape == (3,)


class Pickled(FakeAsyncVLLM):
    """An engine that another process can reach."""

    def __reduce__(self) -> Any:
        return Pickled, ()


def test_calls_of_several_threads_are_not_joined(fake: FakeAsyncVLLM) -> None:
    policy = vLLMWrapper(fake, input_mode="text", batching=False, batching_timeout=3.0)
    assert policy.get_batching_state()["batching_enabled"] is False
    policy.cleanup_batching(flush=True)
