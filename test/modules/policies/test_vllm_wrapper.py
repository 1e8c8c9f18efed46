"""vLLMWrapper over a fake engine: every key in every mode, whatever goes in; and what it refuses.

How an answer is laid out is checked by hand in ``test_rollout.py``, real answers in ``test_policy_sampling.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictSequential
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLWrapper

from support.services import submitted
from support.strategies import Says
from support.waiting import until
from torchrl_moe.data import RoutedExperts
from torchrl_moe.errors import EngineError, GenerationTimeout
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.rollout import RolloutKeys, answer_tensordict, pad_answers
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

MODES: tuple[Any, ...] = ("history", "text", "tokens")
PAD, START, END = 256, 257, 258
PROMPTS = ("ab", "cdefg", "h")
NEW = 4
KEYS = {
    *("tokens", "masks", "log_probs", "routed_experts", "policy_versions", "policy_version"),
    *("num_segments", "resume", "finish_reason", "num_cached_tokens", "sampling"),
}
OUT_KEYS = {
    "history": ["text", "masks", "tokens", "log_probs", "history"],
    "text": ["text", "masks", "tokens", "log_probs"],
    "tokens": ["masks", "tokens", "log_probs"],
}
"""TorchRL's, in its order."""


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(seed=3) as engine:
        yield engine


def wrapper(engine: FakeAsyncVLLM, mode: str = "text", **kwargs: Any) -> vLLMWrapper:
    return vLLMWrapper(engine, **{"input_mode": mode, "generate_kwargs": {"max_new_tokens": NEW}, **kwargs})


def ids_of(mode: str, prompt: str) -> list[int]:
    """What the engine must be asked: the bytes, and in a chat the template around them."""
    if mode != "history":
        return list(prompt.encode())
    return [START, *b"user\n", *prompt.encode(), END, *b"\n", START, *b"assistant\n"]


def chats(*prompts: str) -> History:
    return History.from_chats([[{"role": "user", "content": prompt}] for prompt in prompts])


def one(mode: str, prompt: str) -> TensorDict:
    if mode == "history":
        return TensorDict(history=ChatHistory(prompt=chats(prompt)[0]))
    if mode == "text":
        return TensorDict(text=Text(prompt=prompt))
    return TensorDict(tokens=Tokens(prompt=torch.tensor(ids_of(mode, prompt))))


def stacked(mode: str, *prompts: str) -> LazyStackedTensorDict:
    return lazy_stack([one(mode, prompt) for prompt in prompts])


def dense(mode: str, *prompts: str) -> TensorDict:
    """The same as a TensorDict, tokens padded left."""
    batch = [len(prompts)]
    if mode == "history":
        return TensorDict(history=ChatHistory(prompt=chats(*prompts)), batch_size=batch)
    if mode == "text":
        return TensorDict(text=Text(prompt=list(prompts), batch_size=batch), batch_size=batch)
    rows = [ids_of(mode, prompt) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return TensorDict(tokens=Tokens(prompt=ids, batch_size=batch), batch_size=batch)


def direct(engine: FakeAsyncVLLM, rows: list[list[int]], n: int = 1, **sampling: Any) -> list[Completion]:
    """What the engine itself gives, one completion for each answer."""
    params = {"max_tokens": NEW, "logprobs": 0, "n": n, **sampling}
    completions = engine.generate(prompt_token_ids=rows, sampling_params=params, use_tqdm=False)
    return [replace(done, outputs=[output]) for done in completions for output in done.outputs]


def assert_answers(
    td: TensorDictBase, engine: FakeAsyncVLLM, found: list[Completion], pad: bool, **params: Any
) -> None:
    """``td`` has all of the answers in order, of a model of four layers, the first of them dense."""
    keys, layout = RolloutKeys(), engine.routing_layout
    answers = [answer_tensordict(done, done.outputs[0], layout, keys, {"logprobs": 0, **params}) for done in found]
    wanted = pad_answers(answers, PAD, keys, [len(answers)]) if pad else lazy_stack(answers)
    for got, answer in zip(td.reshape(-1).unbind(0) if td.ndim else [td], wanted.unbind(0), strict=True):
        for key in answer.keys(True, True):
            if isinstance(answer[key], torch.Tensor):
                torch.testing.assert_close(got[key], answer[key], rtol=0, atol=0, equal_nan=True, msg=str(key))
            else:
                assert got[key] == answer[key], key
        assert set(answer.keys(True, True)) <= set(got.keys(True, True))
        assert set(got["sampling"].keys()) == set(answer["sampling"].keys())


def assert_text(td: TensorDictBase, mode: str, prompt: str, output: CompletionOutput) -> None:
    """What the modes write besides."""
    assert set(td.keys()) == KEYS | set(OUT_KEYS[mode])
    if mode == "tokens":
        return
    text = td["text"]
    rendered = bytes(i for i in ids_of(mode, prompt) if i < PAD).decode()
    assert text.prompt.replace("<|im_start|>", "").replace("<|im_end|>", "") == rendered
    assert (type(text), text.response, text.full) == (Text, output.text, text.prompt + output.text)
    if mode == "history":
        history = td["history"]
        assert (type(history), history.prompt.batch_size) == (ChatHistory, torch.Size([1]))
        assert (history.response.role, history.response.content) == (["assistant"], [output.text])
        assert (history.full.role, history.full.content) == (["user", "assistant"], [prompt, output.text])


def asked(engine: FakeAsyncVLLM, count: int) -> list[list[int]]:
    """Prompts of the last requests."""
    return [request.prompt_token_ids.tolist() for request in engine.replicas[0].submitted[-count:]]


def params_of(engine: FakeAsyncVLLM) -> dict[str, Any]:
    return dict(engine.replicas[0].submitted[-1].sampling_params)


@pytest.mark.parametrize(("num_samples", "sampling"), [(None, {"temperature": 0.5, "top_k": 2}), (2, {})])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("build", [stacked, dense])
@pytest.mark.parametrize("mode", MODES)
def test_answers_to_each_prompt(
    fake: FakeAsyncVLLM, mode: str, build: Any, pad_output: bool, num_samples: int | None, sampling: dict[str, Any]
) -> None:
    n = num_samples or 1
    policy = wrapper(fake, mode, inplace=False, pad_output=pad_output, num_samples=num_samples)
    out = policy(build(mode, *PROMPTS), **sampling)
    assert out.batch_size == torch.Size([3] if num_samples is None else [3, n])
    assert type(out) is (TensorDict if pad_output else LazyStackedTensorDict)
    if pad_output:
        types = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs, "routed_experts": RoutedExperts}
        assert {name: type(out[name]) for name in types} == types
        assert all(out[name].padded is True for name in ("tokens", "masks", "log_probs"))
    answers = direct(fake, [ids_of(mode, prompt) for prompt in PROMPTS], n, **sampling)
    assert len({tuple(done.outputs[0].token_ids) for done in answers}) == 3 * n
    assert_answers(out, fake, answers, pad_output, **sampling)
    for i, (td, done) in enumerate(zip(out.reshape(-1).unbind(0), answers, strict=True)):
        assert_text(td, mode, PROMPTS[i // n], done.outputs[0])


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_alone_and_the_announced_keys(fake: FakeAsyncVLLM, mode: str, pad_output: bool) -> None:
    td, policy = one(mode, "cdefg"), wrapper(fake, mode, pad_output=pad_output, batching=False, batching_timeout=3.0)
    assert policy(td) is td
    assert td.batch_size == torch.Size([])
    answers = direct(fake, [ids_of(mode, "cdefg")])
    assert_answers(td, fake, answers, False)
    assert_text(td, mode, "cdefg", answers[0].outputs[0])
    assert (policy.in_keys, policy.out_keys) == ([(mode, "prompt")], OUT_KEYS[mode])
    assert set(policy.out_keys + policy.extra_keys) == set(td.keys())
    assert isinstance(policy, LLMWrapperBase)
    assert (policy.generate, policy.batching, policy.collector) == (True, False, None)
    returned = {name for name in ("history", "text", "tokens", "masks", "log_probs") if vars(policy)[f"return_{name}"]}
    assert returned == set(OUT_KEYS[mode])
    assert policy.get_batching_state()["batching_enabled"] is False
    policy.cleanup_batching(flush=True)


TWO_DIMENSIONS: dict[str, TensorDictBase] = {
    "dense": dense("text", "ab", "cdefg", "h", "ij").reshape(2, 2),
    "lazy": lazy_stack([stacked("text", "ab", "cdefg"), stacked("text", "h", "ij")]),
    "stacked along the last dimension": lazy_stack([stacked("text", "ab", "h"), stacked("text", "cdefg", "ij")], 1),
}


@pytest.mark.parametrize("num_samples", [None, 1, 2])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("build", TWO_DIMENSIONS)
def test_two_batch_dimensions(fake: FakeAsyncVLLM, build: str, pad_output: bool, num_samples: int | None) -> None:
    td = TWO_DIMENSIONS[build].clone()
    out = wrapper(fake, pad_output=pad_output, num_samples=num_samples)(td)
    assert (out is td) == ("tokens" in td.keys()) == (num_samples is None)  # noqa: SIM118  it iterates over its batch
    assert out.batch_size == torch.Size([2, 2] if num_samples is None else [2, 2, num_samples])
    answers = direct(fake, [ids_of("text", prompt) for prompt in ("ab", "cdefg", "h", "ij")], num_samples or 1)
    for place, done in zip(itertools.product(*map(range, out.batch_size)), answers, strict=True):
        assert out[place]["tokens", "response"].tolist() == done.outputs[0].token_ids.tolist()
        prompt = done.prompt_token_ids.tolist()
        assert out[place]["tokens", "prompt"].tolist()[-len(prompt) :] == prompt


def test_the_number_of_samples_is_the_wrappers(fake: FakeAsyncVLLM) -> None:
    for name in ("n", "num_return_sequences"):
        policy = wrapper(fake, generate_kwargs={name: 2, "max_tokens": 2})
        assert (policy.num_samples, policy.inplace) == (2, False)
        assert policy(stacked("text", "ab")).batch_size == torch.Size([1, 2])
        with pytest.raises(ValueError, match=r"num_samples=3 differs from generate_kwargs\['n'\]=2"):
            wrapper(fake, generate_kwargs={name: 2}, num_samples=3)
    assert wrapper(fake, generate_kwargs={"n": 1}).num_samples is None
    for num_samples, call in ((None, {"num_return_sequences": 2}), (2, {"n": 3})):
        (asked_for,) = call.values()
        with pytest.raises(ValueError, match=f"n={asked_for} differs from the wrapper's num_samples={num_samples}"):
            wrapper(fake, num_samples=num_samples)(stacked("text", "ab"), **call)
    for inplace in (True, "empty"):
        with pytest.raises(ValueError, match=f"inplace must be False .*, got inplace={inplace!r}"):
            wrapper(fake, num_samples=2, inplace=inplace)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("build", [stacked, dense])
@pytest.mark.parametrize("inplace", [True, None, False, "empty"])
def test_in_place_is_the_default(fake: FakeAsyncVLLM, build: Any, inplace: Any, pad_output: bool) -> None:
    td = build("text", *PROMPTS).set("extra", torch.arange(3))
    out = wrapper(fake, inplace=inplace, pad_output=pad_output)(td)
    assert [len(ids) for ids in out.get(("tokens", "response"), as_list=True)] == [NEW] * 3
    if inplace in (True, None):
        assert out is td
        assert set(td.keys()) == KEYS | {"text", "extra"}
    else:
        assert (set(td.keys()), set(td["text"].keys())) == ({"text", "extra"}, {"prompt"})
        assert set(out.keys()) == KEYS | {"text"}
        assert type(out) is type(td) or pad_output or inplace is False
    assert td["extra"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("inplace", [True, False, "empty"])
@pytest.mark.parametrize("target", [TensorDict(batch_size=[3]), TensorDict(batch_size=[3]).to_lazystack(0)])
def test_an_output_of_the_callers_own_is_written(fake: FakeAsyncVLLM, target: TensorDictBase, inplace: Any) -> None:
    td = stacked("text", *PROMPTS)
    target = target.copy().set("tokens", Tokens(prompt=torch.zeros(3, 9), batch_size=[3])).set("mine", torch.ones(3))
    assert wrapper(fake, inplace=inplace)(td, tensordict_out=target) is target
    assert (set(td.keys()), set(target.keys())) == ({"text"}, KEYS | {"text", "mine"})
    assert target[2]["tokens", "prompt"].tolist() == [104]
    many = TensorDict(batch_size=[3, 2])
    assert wrapper(fake, num_samples=2, pad_output=True)(td, tensordict_out=many) is many
    assert many["tokens", "response"].shape == (3, 2, NEW)


@pytest.mark.parametrize("pad_output", [False, True])
def test_keys_may_be_renamed(fake: FakeAsyncVLLM, pad_output: bool) -> None:
    names = {"history": "h", "text": "x", "tokens": "t", "masks": "m", "log_probs": "l", "routed_experts": "r"}
    keys = {f"{name}_key": short for name, short in names.items()}
    policy = wrapper(fake, "history", input_key=("mine", "chat"), pad_output=pad_output, **keys)
    assert policy.in_keys == [("mine", "chat")]
    out = policy(TensorDict(mine=TensorDict(chat=chats(*PROMPTS), batch_size=[3]), batch_size=[3]))
    assert set(out.keys()) == {*names.values(), *(KEYS - names.keys()), "mine"}
    assert [type(out[0][name]) for name in "tmlrxh"] == [Tokens, Masks, LogProbs, RoutedExperts, Text, ChatHistory]
    assert {*policy.out_keys, *policy.extra_keys, "mine"} == set(out.keys())


def test_the_output_goes_to_the_device(fake: FakeAsyncVLLM) -> None:
    for device, where in [(None, None), ("cpu", torch.device("cpu")), (torch.device("cpu"), torch.device("cpu"))]:
        policy = wrapper(fake, inplace=False, device=device)
        assert policy.device == policy(stacked("text", "ab")).device == where
    out = wrapper(fake, inplace=False, device="meta", pad_output=True)(stacked("text", "ab"))
    assert {value.device.type for value in out.values(True, True) if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("name", ["log_probs", "routed_experts"])
def test_log_probs_and_routes_can_be_left_out(fake: FakeAsyncVLLM, name: str, pad_output: bool) -> None:
    policy = wrapper(fake, **{f"return_{name}": False}, pad_output=pad_output, inplace=False)
    out = policy(stacked("text", *PROMPTS))
    assert set(out.keys()) == {*policy.out_keys, *policy.extra_keys} == (KEYS | {"text"}) - {name}
    request = fake.replicas[0].submitted[-1]
    assert ("logprobs" in request.sampling_params) == (name != "log_probs")
    assert request.return_routed_experts == (name != "routed_experts")
    # of one call, where those of an earlier one do not stay
    policy = wrapper(fake, pad_output=pad_output)
    td = policy((dense if pad_output else stacked)("text", *PROMPTS))
    assert policy(td, return_routed_experts=False) is td
    assert set(td.keys()) == (KEYS | {"text"}) - {"routed_experts"}
    assert fake.replicas[0].submitted[-1].return_routed_experts is False
    assert "routed_experts" in policy(stacked("text", *PROMPTS)).keys()  # noqa: SIM118


def test_a_dense_model_gives_the_same_without_routes(fake: FakeAsyncVLLM) -> None:
    with FakeAsyncVLLM(seed=3, layout=None) as engine:
        policy = wrapper(engine, inplace=False)
        out = policy(stacked("text", *PROMPTS))
        moe = wrapper(fake, inplace=False)(stacked("text", *PROMPTS))
        assert set(out.keys()) == {*policy.out_keys, *policy.extra_keys} == set(moe.keys()) - {"routed_experts"}
        for answers in (out, moe.exclude("routed_experts")):
            assert_answers(answers, engine, direct(engine, [ids_of("text", p) for p in PROMPTS]), False)
        with pytest.raises(ValueError, match="captures no routes"):
            wrapper(engine, return_routed_experts=True)


def test_pads_of_a_batch_never_reach_the_engine(fake: FakeAsyncVLLM) -> None:
    ids = torch.tensor([[PAD, 97, PAD, 98], [99, PAD, PAD, PAD]])
    wrapper(fake, "tokens")(TensorDict(tokens=Tokens(prompt=ids, batch_size=[2]), batch_size=[2]))
    assert asked(fake, 2) == [[97, PAD, 98], [99]]  # the pad inside a prompt is a token
    tokenizer = ByteTokenizer()
    tokenizer.pad_token = None
    policy = wrapper(fake, tokenizer=tokenizer, pad_output=True)
    assert policy(dense("text", "ab", "c"))["tokens", "prompt"].tolist() == [[97, 98], [END, 99]]


@pytest.mark.parametrize("key", ["attention_mask", ("my", "mask")])
def test_a_mask_decides_what_is_padding(fake: FakeAsyncVLLM, key: Any) -> None:
    td = dense("tokens", "ab", "cd").set(key, torch.tensor([[0, 1], [1, 1]]))
    policy = wrapper(fake, "tokens", inplace=False)
    policy.attention_mask_key = key  # it may be set later
    for one in (policy, wrapper(fake, "tokens", inplace=False, attention_mask_key=key)):
        one(td)
        assert asked(fake, 2) == [[98], [99, 100]]
        with pytest.raises(ValueError, match=r"sample 0: .* has shape \[3\] and the prompt \[2\]"):
            one(td.clone().set(key, torch.ones(2, 3)))


def test_a_tokenizer_may_be_given_named_and_set_and_is_the_engines_models(fake: FakeAsyncVLLM, tmp_path: Path) -> None:
    policy, mine = wrapper(fake), ByteTokenizer()
    assert policy.tokenizer is fake.get_tokenizer() and policy.padding_value == 256
    mine.pad_token = "<|im_start|>"
    policy.set_tokenizer(mine)
    assert (policy.tokenizer, policy.padding_value) == (mine, 257)
    assert policy.get_new_version(num_samples=2).tokenizer is mine
    assert wrapper(fake, tokenizer=mine).tokenizer is mine
    folder = tmp_path / "llama-deepseek-qwen-falcon"  # words by which TorchRL picks a template
    ByteTokenizer().save_pretrained(folder)
    wrapper(fake, "history", tokenizer=str(folder))(stacked("history", "hi"))
    assert asked(fake, 1) == [ids_of("history", "hi")]
    other, renamed = ByteTokenizer(), ByteTokenizer()
    vocabulary = {token: 2 * number % 255 for token, number in other.get_vocab().items() if number < 255}
    other.get_vocab = lambda: vocabulary | {"more": 70_000}
    with pytest.raises(ValueError, match=r"^tokenizer: 254 of 255 ids stand for other tokens in the engine's"):
        wrapper(fake, tokenizer=other)
    renamed.get_vocab = lambda: {**ByteTokenizer().get_vocab(), "<|im_start|>": 300, "<think>": 257}
    assert wrapper(fake, tokenizer=renamed).tokenizer is renamed


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_prompt_and_an_empty_one_are_refused_and_the_input_left_alone(fake: FakeAsyncVLLM, mode: str) -> None:
    told = rf"Expected \('{mode}', 'prompt'\) key in sample 1, .*input_mode='{mode}' .*\['other'\]"
    with pytest.raises(ValueError, match=told):
        wrapper(fake, mode)(lazy_stack([one(mode, "ab"), TensorDict(other=torch.zeros(1))]))
    for empty in (TensorDict(batch_size=[0]), TensorDict(batch_size=[2, 0])):
        with pytest.raises(ValueError, match=r"the input has no samples: its batch size is \[.*0\]"):
            wrapper(fake, mode)(empty)
    if mode != "history":  # whose template writes tokens around nothing
        td = dense(mode, "ab", "")
        with pytest.raises(ValueError, match=r"prompt_token_ids\[1\] is an empty prompt"):
            wrapper(fake, mode)(td)
        assert set(td.keys()) == {mode}


def script(patch: pytest.MonkeyPatch, engine: FakeAsyncVLLM, ids: list[int], version: int = 0) -> None:
    """Let the engine answer every prompt with ``ids``."""
    original = engine.generate

    def generate(**kwargs: Any) -> list[Completion]:
        kwargs["sampling_params"] = {**kwargs["sampling_params"], "max_tokens": len(ids), "ignore_eos": True}
        completions: list[Completion] = original(**kwargs)
        for completion in completions:
            (output,) = completion.outputs
            output.token_ids, output.finish_reason = np.array(ids, np.int64), "stop"
            output.policy_versions = np.full(len(ids), version, np.int32)
        return completions

    patch.setattr(engine, "generate", generate)


def test_the_end_of_turn_is_a_token_but_no_content(fake: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, fake, [*b"yes", END])
    td = wrapper(fake, "history")(stacked("history", "ab"))[0]
    assert td["tokens", "response"].tolist() == [*b"yes", END]
    assert td["text", "response"] == "yes<|im_end|>"
    assert td["history"].full.content == ["ab", "yes"]
    rendered = td["history"].full.apply_chat_template(
        tokenizer=ByteTokenizer(), chat_template=ByteTokenizer().chat_template, add_generation_prompt=False
    )
    assert rendered == td["text", "full"] + "\n"
    monkeypatch.undo()
    script(monkeypatch, fake, [200, 255])  # bytes that are no text keep their ids
    td = wrapper(fake)(stacked("text", "ab"))[0]
    assert td["tokens", "full"].tolist() == [97, 98, 200, 255]
    assert td["text", "response"] == "\ufffd\ufffd"


def test_an_aborted_request_and_a_late_one_are_errors_and_nothing_is_written() -> None:
    with FakeAsyncVLLM(token_seconds=0.02) as engine, ThreadPoolExecutor(1) as pool:
        td, replica = stacked("text", "ab", "c"), engine.replicas[0]
        policy = wrapper(engine, generate_kwargs={"max_tokens": 1000})

        def abort() -> None:
            until(lambda: len(replica.submitted) >= 2)
            replica.abort([request.request_id for request in replica.submitted])

        done = pool.submit(abort)
        with pytest.raises(EngineError, match="2 of 2 requests were aborted") as caught:
            policy(td)
        assert [completion.aborted for completion in caught.value.partial] == [True, True]
        done.result()
        with pytest.raises(GenerationTimeout, match="2 of 2 requests were not finished"):
            policy.get_new_version(timeout_seconds=0.05)(td)
        assert set(td.keys()) == {"text"}


def test_a_call_changes_sampling_for_itself_alone(fake: FakeAsyncVLLM) -> None:
    kwargs, tokenizer_kwargs = {"max_new_tokens": 6, "temperature": 0.7}, {"padding": True}
    policy = wrapper(fake, generate_kwargs=kwargs, tokenizer_kwargs=tokenizer_kwargs)
    out = policy(stacked("text", "ab"), max_new_tokens=2, do_sample=False, stop_sequences=["x"])
    assert len(out[0]["tokens", "response"]) == 2
    assert [params_of(fake)[name] for name in ("temperature", "stop", "detokenize")] == [0.0, ["x"], True]
    out = policy(stacked("text", "ab"))
    assert len(out[0]["tokens", "response"]) == 6
    always = {"detokenize": False, "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 0}
    assert params_of(fake) == {"max_tokens": 6, "temperature": 0.7, **always}
    assert (kwargs, tokenizer_kwargs) == ({"max_new_tokens": 6, "temperature": 0.7}, {"padding": True})
    wrapper(fake, generate_kwargs={"logprobs": 2})(stacked("text", "ab"))
    assert params_of(fake) == {**always, "logprobs": 2}
    with pytest.raises(ValueError, match="logprobs is off, but return_log_probs=True"):
        policy(stacked("text", "ab"), logprobs=False)


CHANGES_VALUES: dict[str, Any] = {
    **{"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.1},
    **{"logit_bias": {65: 1.0}, "thinking_token_budget": 8},
}


@pytest.mark.parametrize(("name", "value"), CHANGES_VALUES.items())
def test_what_changes_values_is_refused_with_log_probs(fake: FakeAsyncVLLM, name: str, value: Any) -> None:
    given, td = {name: value}, stacked("text", "ab")
    before = len(fake.replicas[0].submitted)
    for call, kwargs in (
        (wrapper(fake, generate_kwargs=given), {}),
        (wrapper(fake), given),
        (wrapper(fake).requests, given),
    ):
        with pytest.raises(ValueError, match=rf"^{name}=.* or pass return_log_probs=False"):
            call(td, **kwargs)
    assert len(fake.replicas[0].submitted) == before
    policy = wrapper(fake, return_log_probs=False)
    (request,) = policy.requests(td, **given)
    assert request.arguments["sampling_params"][name] == value
    assert "log_probs" not in policy(td, **given).keys()  # noqa: SIM118  a TensorDict iterates over its batch
    assert params_of(fake)[name] == value


def test_another_temperature_in_a_later_turn_is_refused(fake: FakeAsyncVLLM) -> None:
    policy = wrapper(fake, "tokens")
    again = policy(stacked("tokens", "ab"), temperature=0.5).clone()
    first = again[0]["tokens", "full"]
    again[0]["tokens"] = Tokens(prompt=torch.cat([first, torch.tensor([33])]), full=first)
    before = len(fake.replicas[0].submitted)
    for ask in (policy, policy.requests):
        with pytest.raises(ValueError, match=r"this turn's temperature is 0\.75, that of the turn before 0\.5"):
            ask(again.clone(), temperature=0.75)
    assert len(fake.replicas[0].submitted) == before  # before anything is generated
    assert policy(again, temperature=0.5)[0]["sampling", "temperature"] == 0.5


@pytest.mark.parametrize("num_samples", [None, 3])
def test_keys_of_a_batch_reach_the_service_one_value_per_sample(num_samples: int | None) -> None:
    with FakeAsyncVLLM(2, seed=3) as engine:
        ear = Says()
        engine.create_load_balancer(ear)
        engine.replica_table.set_version(1, 4)
        td = dense("text", "ab", "c").set("session_id", NonTensorStack("s", "t"))
        td["group_id"], td["priority"] = torch.tensor([[7], [-1]]), torch.tensor([5, -5])
        td["min_version"] = torch.tensor([-1, 4])
        td["request_context"] = NonTensorStack({"k": 1}, None)
        wrapper(engine, num_samples=num_samples)(td)
        # the second sample is the more urgent; the first one's group goes to the newest version
        assert [(indices, c.session_id, c.request_context) for indices, c in ear.asked] == [
            ([1], "t", {}),
            ([1], "s", {"k": 1}),
        ]
        assert [request.priority for request in submitted(engine)] == [-5, 5]
        assert engine.load_balancer.groups.version("7") == 4
        assert [request.sampling_params.get("n") for request in submitted(engine)] == [num_samples] * 2


@pytest.mark.parametrize("where", ["argument", "generate_kwargs", "call"])
def test_the_replica_the_adapter_and_how_answers_continue_can_be_chosen(where: str) -> None:
    lora = {"lora_name": "a", "lora_int_id": 1, "lora_path": "folder"}
    chosen: dict[str, Any] = {"actor_index": 1, "lora_request": lora, "on_resume": "live"}
    own = {name: chosen[name] for name in ("actor_index", "lora_request") if where == "argument"}
    sampling = {} if where == "call" else {name: chosen[name] for name in chosen.keys() - own.keys()}
    per_call = chosen if where == "call" else {}
    with FakeAsyncVLLM(2, seed=3) as engine:
        policy = wrapper(engine, inplace=False, generate_kwargs={"max_tokens": NEW, **sampling}, **own)
        out = policy(dense("text", "ab", "c"), **per_call)
        (request,) = policy.requests(one("text", "d"), **per_call)
        asyncio.run(engine.agenerate(**request.arguments))
        assert [len(replica.submitted) for replica in engine.replicas] == [0, 3]
        for asking in submitted(engine):
            assert (asking.lora_request, asking.on_resume) == (lora, "live")
            assert not chosen.keys() & set(asking.sampling_params)
        assert list(out["resume"]) == ["none", "none"]  # nothing cut them
        policy(dense("text", "ab"), actor_index=0, lora_request=None, on_resume=None)
        (other,) = engine.replicas[0].submitted
        assert (other.lora_request, other.on_resume) == (None, None)
        with pytest.raises(ValueError, match=r"on_resume must be .*, got 'frozen'"):
            policy(dense("text", "ab"), on_resume="frozen")
        with pytest.raises(ValueError, match="actor_index: given twice"):
            vLLMWrapper(engine, generate_kwargs={"actor_index": 1}, actor_index=0)


def test_a_folder_or_a_hub_name_starts_an_engine(fake: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda path: started.append(path) or fake)
    assert vLLMWrapper("org/model").get_new_version(inplace=False).model is fake  # shared with the first
    assert vLLMWrapper(Path("folder")).model is fake
    assert started == ["org/model", Path("folder")]


CHANGES: dict[str, Any] = {
    **{"tokenizer": ByteTokenizer(), "input_mode": "text", "input_key": ("mine", "prompt"), "device": "cpu"},
    **{"generate_kwargs": {"max_tokens": 3, "temperature": 0.5}, "tokenizer_kwargs": {"truncation": True}},
    **{"attention_mask_key": "mask", "pad_output": True, "inplace": "empty", "layout": torch.strided},
    **{"chat_template_name": "qwen", "chat_template": "{{ messages }}", "chat_template_kwargs": {"thinking": False}},
    **{"return_log_probs": False, "return_routed_experts": False, "history_key": "h", "text_key": "x"},
    **{"tokens_key": "t", "masks_key": "m", "log_probs_key": "l", "routed_experts_key": "r", "batching": False},
    **{"min_batch_size": None, "max_batch_size": False, "batching_timeout": 3.0, "prefer_tokens": True},
    **{"timeout_seconds": 7.0, "use_tqdm": True, "actor_index": 0},
    "lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "folder"},
}
"""Another value than the default for every argument that has one; ``num_samples`` goes with no ``inplace``."""


def visible(policy: vLLMWrapper) -> dict[str, Any]:
    """Everything a user can see of a wrapper, without nn.Module's own."""
    own = {*vars(torch.nn.Module())}
    return {name: value for name, value in vars(policy).items() if name not in own}


def test_the_table_of_changes_is_complete_and_others_are_named(fake: FakeAsyncVLLM) -> None:
    of_scoring = {"generate", "replay", "temperature"}
    assert set(CHANGES) | of_scoring | {"model", "pad_model_input", "num_samples"} == set(
        vars(vLLMWrapper(fake)._options)
    )
    with pytest.raises(TypeError, match=r"unknown arguments \['pad', 'x'\]; known: \['actor_index', 'attention_mask"):
        wrapper(fake).get_new_version(x=1, pad=True)


@pytest.mark.parametrize("name", [*CHANGES, "num_samples"])
def test_a_new_version_changes_one_argument_and_keeps_the_others(fake: FakeAsyncVLLM, name: str) -> None:
    every = {**CHANGES, "inplace": False, "num_samples": 2}
    also = {"input_key": every["input_key"]} if name == "input_mode" else {}  # else it is the new mode's own
    before = vLLMWrapper(fake, **{key: value for key, value in every.items() if key != name})
    changed = before.get_new_version(**{name: every[name], **also})
    assert type(changed) is vLLMWrapper and changed is not before
    assert visible(changed) == visible(vLLMWrapper(fake, **every))
    assert visible(changed.get_new_version()) == visible(changed)


@pytest.mark.parametrize("mode", MODES)
def test_what_only_the_other_kind_has_does_not_follow(fake: FakeAsyncVLLM, mode: str) -> None:
    generating = wrapper(fake, mode, input_key=("mine", "prompt"), num_samples=2, return_log_probs=False)
    scoring = generating.get_new_version(generate=False)
    assert (generating.generate, scoring.generate) == (True, False)
    assert (scoring.in_keys[0], scoring.return_log_probs, scoring.num_samples) == ((mode, "full"), True, None)
    if mode == "tokens":
        assert scoring.in_keys == [("tokens", "full"), ("routed_experts", "full")]
        assert (scoring.out_keys, scoring.extra_keys) == (["masks", "tokens", "log_probs"], [])
    again = scoring.get_new_version(generate=True, num_samples=3)
    assert (again.in_keys, again.return_log_probs, again.num_samples) == ([(mode, "prompt")], True, 3)
    assert generating.get_new_version(pad_output=True).in_keys == [("mine", "prompt")]
    assert scoring.get_new_version(generate=True, input_key=("my", "own")).in_keys == [("my", "own")]


def test_known_tokens_are_not_encoded_again(fake: FakeAsyncVLLM) -> None:
    td = dense("history", "hi").set("tokens", Tokens(prompt=torch.tensor([[PAD, 1, PAD, 2]]), batch_size=[1]))
    out = wrapper(fake, "history", inplace=False, prefer_tokens=True)(td)
    assert asked(fake, 1) == [[1, PAD, 2]] == [out[0]["tokens", "prompt"].tolist()]
    wrapper(fake, "history", inplace=False)(td)
    assert asked(fake, 1) == [ids_of("history", "hi")]


@pytest.mark.parametrize("pad_output", [False, True])
def test_an_earlier_turn_keeps_its_ids(fake: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch, pad_output: bool) -> None:
    env = ChatEnv(batch_size=(1,), input_mode="history", tokenizer=ByteTokenizer())
    policy = wrapper(fake, "history", prefer_tokens=True, pad_output=pad_output)
    with monkeypatch.context() as patch:
        script(patch, fake, [200, END], version=4)  # a byte that is no UTF-8
        td = env.step(policy(env.reset(TensorDict(query=["hi"], batch_size=[1]))))
    out = policy(env.step_mdp(td))[0]
    turn = [*ids_of("history", "hi"), 200, END]
    assert asked(fake, 1) == [[*turn, *b"\n", START, *b"assistant\n"]]
    real = out["masks", "all_attention_mask"]
    assert out["policy_versions", "full"][real][len(turn) - 2 : len(turn)].tolist() == [4, 4]


# threads, requests sent by others, and what TorchRL's code asks of a wrapper besides forward


def test_one_wrapper_serves_many_threads(fake: FakeAsyncVLLM) -> None:
    policy, texts = wrapper(fake, inplace=False), [f"{i}" * (i + 1) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda text: policy(stacked("text", text))[0], texts))
    assert_answers(lazy_stack(outs), fake, direct(fake, [list(text.encode()) for text in texts]), False)


def questions() -> TensorDictBase:
    rows = stacked("tokens", "He", "llo")
    for i, row in enumerate(rows.unbind(0)):
        row.update({"session_id": f"s{i}", "priority": torch.tensor(i)})
    return rows


def test_answers_asked_for_one_by_one_are_those_of_forward(fake: FakeAsyncVLLM) -> None:
    policy = wrapper(fake, "tokens", timeout_seconds=9.0)
    expected = policy(questions())
    for request, row in zip(policy.requests(questions()), expected.unbind(0), strict=True):
        answer = policy.answer(request, asyncio.run(fake.agenerate(**request.arguments)))
        for key in (("tokens", "full"), ("routed_experts", "full"), ("masks", "all_assistant_mask")):
            assert torch.equal(answer[key], row[key])
        assert torch.equal(answer["log_probs", "response"], row["log_probs", "response"])
    first, second = policy.requests(questions(), max_new_tokens=3, return_routed_experts=False)
    assert (first.index, second.index) == (0, 1)
    assert list(second.arguments["prompt_token_ids"]) == ids_of("tokens", "llo")
    wanted = {"session_id": "s1", "priority": 1, "timeout_seconds": 9.0, "return_routed_experts": False}
    assert {name: second.arguments[name] for name in wanted} == wanted
    assert second.arguments["sampling_params"]["max_tokens"] == 3
    assert second.keys.routed_experts is None
    with pytest.raises(ValueError, match="one answer per sample, but num_samples=2"):
        wrapper(fake, "tokens", num_samples=2).requests(questions())


def test_what_copies_out_keys_only_can_have_ours_too(fake: FakeAsyncVLLM) -> None:
    """As ``TensorDictSequential`` does where it is given a place to write."""
    policy = wrapper(fake)

    def copied() -> set[Any]:
        target = TensorDict(batch_size=[1])
        return set(TensorDictSequential(policy)(stacked("text", "ab"), tensordict_out=target).keys())

    assert copied() == set(OUT_KEYS["text"])
    policy.out_keys += policy.extra_keys
    assert copied() == KEYS | {"text"}


@pytest.mark.needs_vllm
def test_sampling_parameters_and_completions_read_as_vllms(fake: FakeAsyncVLLM) -> None:
    kwargs = {"max_tokens": 20, "max_new_tokens": 10, "n": 2, "num_return_sequences": 1, "temperature": 0.7}
    params = wrapper(fake, generate_kwargs=kwargs).sampling_params
    assert (params.max_tokens, params.n, params.temperature, params.top_p) == (20, 2, 0.7, 1.0)
    with pytest.raises(AttributeError, match="would change nothing"):
        params.temperature = 0.0
    assert vLLMWrapper.CompletionOutput_tc is TorchRLWrapper.CompletionOutput_tc


@pytest.mark.parametrize("name", ["get_dist", "_get_sft_dist", "_get_rlhf_dist", "_get_generic_dist"])
def test_an_engine_has_no_distribution(fake: FakeAsyncVLLM, name: str) -> None:
    scoring = wrapper(fake, generate=False)
    td = TensorDict(text=Text(full=["ab"], batch_size=[1]), batch_size=[1])
    with pytest.raises(NotImplementedError, match=r"vLLM does not return logits, .*TransformersWrapper"):
        getattr(scoring, name)(td)
    with pytest.raises(NotImplementedError, match="generate=True"):
        getattr(scoring.get_new_version(generate=True), name)(td)
    with pytest.raises(NotImplementedError, match="vLLM does not return logits"):
        scoring(td, logits_only=True)


class Pickled(FakeAsyncVLLM):
    """An engine that another process can reach."""

    def __reduce__(self) -> Any:
        return Pickled, ()


def test_a_wrapper_is_pickled_with_an_engine_that_is() -> None:
    policy = wrapper(Pickled(), pad_output=True)
    other = pickle.loads(pickle.dumps(policy))
    assert all(getattr(other, name) == getattr(policy, name) for name in ("sampling_params", "out_keys", "extra_keys"))
    assert other(stacked("text", "ab"))[0]["tokens", "response"].shape == (NEW,)
