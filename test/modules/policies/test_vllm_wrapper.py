"""vLLMWrapper over a fake engine: every key in every mode, whatever goes in; and what it refuses.

The values of single answers are checked by hand in ``test_rollout.py``, real ones in ``test_policy_sampling.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Iterator, Sequence
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

from support.strategies import Says
from torchrl_moe.data import KeptTokens, RoutedExperts
from torchrl_moe.errors import EngineError, GenerationTimeout
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, Request
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

MODES: tuple[Any, ...] = ("history", "text", "tokens")
PAD, START, END = 256, 257, 258
PROMPTS = ("ab", "cdefg", "h")
NEW = 4
ROOT = {"tokens", "masks", "log_probs", "routed_experts", "policy_versions", "policy_version"}
KEYS = ROOT | {"num_segments", "resume", "finish_reason", "num_cached_tokens", "sampling"}
OWN = {"history": {"text", "history"}, "text": {"text"}, "tokens": set()}
"""What a mode writes besides."""
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
    return vLLMWrapper(engine, input_mode=mode, generate_kwargs={"max_new_tokens": NEW}, **kwargs)


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


def direct(
    engine: FakeAsyncVLLM, rows: Sequence[list[int]], n: int = 1, **sampling: Any
) -> list[tuple[list[int], CompletionOutput]]:
    """Prompt ids and outputs as the engine itself gives them, flat."""
    params = {"max_tokens": NEW, "logprobs": 0, "n": n, **sampling}
    completions = engine.generate(prompt_token_ids=[list(row) for row in rows], sampling_params=params, use_tqdm=False)
    return [(list(row), out) for row, done in zip(rows, completions, strict=True) for out in done.outputs]


def leaf(td: TensorDictBase, *key: str) -> torch.Tensor:
    value = td.get(key if len(key) > 1 else key[0])
    assert isinstance(value, torch.Tensor)
    return value


def assert_answer(td: TensorDictBase, prompt: list[int], output: CompletionOutput, pads: int = 0) -> None:
    """``td`` is the answer, behind so many pads, of a model of four layers, the first of them dense."""
    p, response = pads + len(prompt), output.token_ids.tolist()
    assert leaf(td, "tokens", "prompt").tolist() == [PAD] * pads + prompt
    assert leaf(td, "tokens", "response").tolist() == response
    assert leaf(td, "tokens", "full").tolist() == [PAD] * pads + prompt + response
    assert leaf(td, "masks", "all_attention_mask").tolist() == [False] * pads + [True] * (len(prompt) + NEW)
    assert leaf(td, "masks", "all_assistant_mask").tolist() == [False] * p + [True] * NEW
    assert leaf(td, "log_probs", "response").tolist() == output.logprobs.tolist()
    log_probs, routes = leaf(td, "log_probs", "full"), leaf(td, "routed_experts", "full")
    assert log_probs[:pads].eq(0).all()
    assert log_probs[pads:p].isnan().all()
    assert log_probs[p:].tolist() == output.logprobs.tolist()
    assert routes[:pads].eq(-1).all()
    assert routes[pads:-1, 1:].tolist() == output.routed_experts[:, 1:].tolist()
    assert routes[-1].eq(-1).all()
    assert routes[:, 0].eq(-1).all()
    assert leaf(td, "policy_versions", "full").tolist() == [-1] * p + [0] * NEW
    assert leaf(td, "policy_version").tolist() == 0
    assert leaf(td, "num_segments").tolist() == 1
    assert (td["resume"], td["finish_reason"]) == ("none", "length")
    assert leaf(td, "num_cached_tokens").tolist() == 0
    if output.kept is None:
        assert set(td["sampling"].keys()) == {"temperature"}
        return
    kept = td["sampling", "kept"]
    assert type(kept) is KeptTokens
    assert kept.ids.tolist() == output.kept.ids.tolist()
    assert kept.sizes.tolist() == [0] * p + output.kept.sizes.tolist()


def assert_text(td: TensorDictBase, mode: str, prompt: str, output: CompletionOutput) -> None:
    """What the modes write besides."""
    assert set(td.keys()) == KEYS | OWN[mode]
    if mode == "tokens":
        return
    rendered = bytes(i for i in ids_of(mode, prompt) if i < PAD).decode()
    text = td["text"]
    assert type(text) is Text
    assert text.prompt.replace("<|im_start|>", "").replace("<|im_end|>", "") == rendered
    assert text.response == output.text
    assert text.full == text.prompt + text.response
    if mode == "history":
        history = td["history"]
        assert type(history) is ChatHistory
        assert (history.prompt.batch_size, history.response.batch_size) == (torch.Size([1]), torch.Size([1]))
        assert (history.response.role, history.response.content) == (["assistant"], [output.text])
        assert history.full.role == ["user", "assistant"]
        assert history.full.content == [prompt, output.text]


# every key, in every mode


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_k": 2}])
@pytest.mark.parametrize("num_samples", [None, 2])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("build", [stacked, dense])
@pytest.mark.parametrize("mode", MODES)
def test_answers_to_each_prompt(
    fake: FakeAsyncVLLM, mode: str, build: Any, pad_output: bool, num_samples: int | None, sampling: dict[str, Any]
) -> None:
    n, rows = num_samples or 1, [ids_of(mode, prompt) for prompt in PROMPTS]
    policy = wrapper(fake, mode, inplace=False, pad_output=pad_output, num_samples=num_samples)
    out = policy(build(mode, *PROMPTS), **sampling)
    assert out.batch_size == torch.Size([3] if num_samples is None else [3, n])
    assert type(out) is (TensorDict if pad_output else LazyStackedTensorDict)
    if pad_output:
        types = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs, "routed_experts": RoutedExperts}
        assert {name: type(out[name]) for name in types} == types
        assert all(out[name].padded is True for name in ("tokens", "masks", "log_probs"))
    answers = direct(fake, rows, n, **sampling)
    assert len({tuple(output.token_ids) for _, output in answers}) == 3 * n
    for i, (td, (prompt, output)) in enumerate(zip(out.reshape(-1).unbind(0), answers, strict=True)):
        assert_answer(td, prompt, output, (max(map(len, rows)) - len(prompt)) * pad_output)
        assert_text(td, mode, PROMPTS[i // n], output)
        assert td["sampling", "temperature"] == sampling.get("temperature", 1.0)


FULL = [
    ("tokens", "full"),
    ("masks", "all_attention_mask"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "full"),
    ("routed_experts", "full"),
    ("policy_versions", "full"),
]


@pytest.mark.parametrize("mode", MODES)
def test_the_keys_are_announced(fake: FakeAsyncVLLM, mode: str) -> None:
    policy = wrapper(fake, mode, batching=False, batching_timeout=3.0)
    assert policy.in_keys == [(mode, "prompt")]
    assert policy.out_keys == OUT_KEYS[mode]
    assert set(policy.out_keys + policy.extra_keys) == KEYS | OWN[mode]
    assert isinstance(policy, LLMWrapperBase)
    assert (policy.generate, policy.batching, policy.collector) == (True, False, None)
    returned = {name for name in ("history", "text", "tokens", "masks", "log_probs") if vars(policy)[f"return_{name}"]}
    assert returned == set(OUT_KEYS[mode])
    assert policy.get_batching_state()["batching_enabled"] is False
    policy.cleanup_batching(flush=True)


# batch sizes


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_without_a_batch_dimension(fake: FakeAsyncVLLM, mode: str, pad_output: bool) -> None:
    td = one(mode, "cdefg")
    out = wrapper(fake, mode, pad_output=pad_output)(td)
    assert out is td
    assert out.batch_size == torch.Size([])
    ((prompt, output),) = direct(fake, [ids_of(mode, "cdefg")])
    assert_answer(out, prompt, output)
    assert_text(out, mode, "cdefg", output)


def two_dims(build: str) -> TensorDictBase:
    if build == "dense":
        return dense("text", "ab", "cdefg", "h", "ij").reshape(2, 2)
    if build == "lazy":
        return lazy_stack([stacked("text", "ab", "cdefg"), stacked("text", "h", "ij")])
    return lazy_stack([stacked("text", "ab", "h"), stacked("text", "cdefg", "ij")], 1)


@pytest.mark.parametrize("num_samples", [None, 1, 2])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("build", ["dense", "lazy", "stacked along the last dimension"])
def test_two_batch_dimensions(fake: FakeAsyncVLLM, build: str, pad_output: bool, num_samples: int | None) -> None:
    td = two_dims(build)
    out = wrapper(fake, pad_output=pad_output, num_samples=num_samples)(td)
    assert (out is td) == ("tokens" in td.keys()) == (num_samples is None)  # noqa: SIM118  it iterates over its batch
    assert out.batch_size == torch.Size([2, 2] if num_samples is None else [2, 2, num_samples])
    answers = direct(fake, [ids_of("text", prompt) for prompt in ("ab", "cdefg", "h", "ij")], num_samples or 1)
    for place, (prompt, output) in zip(itertools.product(*map(range, out.batch_size)), answers, strict=True):
        assert leaf(out[place], "tokens", "response").tolist() == output.token_ids.tolist()
        assert leaf(out[place], "tokens", "prompt").tolist()[-len(prompt) :] == prompt


def test_the_number_of_samples_may_come_with_the_generate_kwargs_and_is_not_changed_by_a_call(
    fake: FakeAsyncVLLM,
) -> None:
    for name in ("n", "num_return_sequences"):
        policy = vLLMWrapper(fake, input_mode="text", generate_kwargs={name: 2, "max_tokens": 2})
        assert (policy.num_samples, policy.inplace) == (2, False)
        assert policy(stacked("text", "ab")).batch_size == torch.Size([1, 2])
        with pytest.raises(ValueError, match=r"num_samples=3 differs from generate_kwargs\['n'\]=2"):
            vLLMWrapper(fake, generate_kwargs={name: 2}, num_samples=3)
    assert vLLMWrapper(fake, generate_kwargs={"n": 1}).num_samples is None
    with pytest.raises(ValueError, match=r"n=2 differs from the wrapper's num_samples=None"):
        wrapper(fake)(stacked("text", "ab"), num_return_sequences=2)
    with pytest.raises(ValueError, match=r"n=3 differs from the wrapper's num_samples=2"):
        wrapper(fake, num_samples=2)(stacked("text", "ab"), n=3)
    for inplace in (True, "empty"):
        with pytest.raises(ValueError, match=f"inplace must be False .*, got inplace={inplace!r}"):
            wrapper(fake, num_samples=2, inplace=inplace)


# where the output goes


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("build", [stacked, dense])
@pytest.mark.parametrize("inplace", [True, None, False, "empty"])
def test_in_place_is_the_default(fake: FakeAsyncVLLM, build: Any, inplace: Any, pad_output: bool) -> None:
    td = build("text", *PROMPTS).set("extra", torch.arange(3))
    out = wrapper(fake, inplace=inplace, pad_output=pad_output)(td)
    if inplace in (True, None):
        assert out is td
        assert set(td.keys()) == KEYS | {"text", "extra"}
        assert [len(ids) for ids in td.get(("tokens", "response"), as_list=True)] == [NEW] * 3
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
    out = wrapper(fake, inplace=inplace)(td, tensordict_out=target)
    assert out is target
    assert set(td.keys()) == {"text"}
    assert set(out.keys()) == KEYS | {"text", "mine"}
    assert out[2]["tokens", "prompt"].tolist() == [104]
    many = TensorDict(batch_size=[3, 2])
    assert wrapper(fake, num_samples=2, pad_output=True)(td, tensordict_out=many) is many
    assert many["tokens", "response"].shape == (3, 2, NEW)


@pytest.mark.parametrize("pad_output", [False, True])
def test_keys_may_be_renamed(fake: FakeAsyncVLLM, pad_output: bool) -> None:
    names = {"history": "h", "text": "x", "tokens": "t", "masks": "m", "log_probs": "l", "routed_experts": "r"}
    keys = {f"{name}_key": short for name, short in names.items()}
    policy = wrapper(fake, "history", input_key=("mine", "chat"), pad_output=pad_output, **keys)
    assert policy.in_keys == [("mine", "chat")]
    td = TensorDict(mine=TensorDict(chat=chats(*PROMPTS), batch_size=[3]), batch_size=[3])
    out = policy(td)
    own = KEYS - names.keys() | {"mine"}
    assert set(out.keys()) == set(names.values()) | own
    assert [type(out[0][name]) for name in "tmlrxh"] == [Tokens, Masks, LogProbs, RoutedExperts, Text, ChatHistory]
    assert {*policy.out_keys, *policy.extra_keys, "mine"} == set(out.keys())


def test_the_output_goes_to_the_device(fake: FakeAsyncVLLM) -> None:
    for device, where in [(None, None), ("cpu", torch.device("cpu")), (torch.device("cpu"), torch.device("cpu"))]:
        policy = wrapper(fake, inplace=False, device=device)
        assert policy.device == where
        assert policy(stacked("text", "ab")).device == where
    out = wrapper(fake, inplace=False, device="meta", pad_output=True)(stacked("text", "ab"))
    assert {out[key].device.type for key in FULL} == {"meta"}


# less of it


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
    td = policy(stacked("text", *PROMPTS)) if not pad_output else policy(dense("text", *PROMPTS))
    assert policy(td, return_routed_experts=False) is td
    assert set(td.keys()) == (KEYS | {"text"}) - {"routed_experts"}
    assert fake.replicas[0].submitted[-1].return_routed_experts is False
    assert "routed_experts" in policy(stacked("text", *PROMPTS)).keys()  # noqa: SIM118


def test_a_dense_model_gives_the_same_without_routes(fake: FakeAsyncVLLM) -> None:
    with FakeAsyncVLLM(seed=3, layout=None) as engine:
        policy = wrapper(engine, pad_output=True, inplace=False)
        out = policy(stacked("text", *PROMPTS))
    moe = wrapper(fake, pad_output=True, inplace=False)(stacked("text", *PROMPTS))
    assert set(out.keys()) == {*policy.out_keys, *policy.extra_keys} == set(moe.keys()) - {"routed_experts"}
    for key in (*FULL[:4], ("log_probs", "response"), ("policy_versions", "full"), "policy_version"):
        torch.testing.assert_close(out[key], moe[key], rtol=0, atol=0, equal_nan=True)


# prompts


def test_pads_of_a_batch_never_reach_the_engine(fake: FakeAsyncVLLM) -> None:
    td = TensorDict(tokens=Tokens(prompt=torch.tensor([[PAD, 97, PAD, 98], [99, PAD, PAD, PAD]]), batch_size=[2]))
    td.batch_size = [2]
    wrapper(fake, "tokens", inplace=False)(td)
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


def test_a_tokenizer_of_another_model_is_refused(fake: FakeAsyncVLLM) -> None:
    other, renamed = ByteTokenizer(), ByteTokenizer()
    vocabulary = {token: 2 * number % 255 for token, number in other.get_vocab().items() if number < 255}
    other.get_vocab = lambda: vocabulary | {"more": 70_000}
    with pytest.raises(ValueError, match=r"^tokenizer: 254 of 255 ids stand for other tokens in the engine's"):
        wrapper(fake, tokenizer=other)
    renamed.get_vocab = lambda: {**ByteTokenizer().get_vocab(), "<|im_start|>": 300, "<think>": 257}
    assert wrapper(fake, tokenizer=renamed).tokenizer is renamed


@pytest.mark.parametrize("build", [stacked, dense])
def test_chats_are_rendered_by_the_tokenizers_own_template(fake: FakeAsyncVLLM, build: Any, tmp_path: Path) -> None:
    folder = tmp_path / "llama-deepseek-qwen-falcon"  # words by which TorchRL picks a template
    ByteTokenizer().save_pretrained(folder)
    for tokenizer in (None, str(folder)):
        wrapper(fake, "history", inplace=False, tokenizer=tokenizer)(build("history", "hi", "a"))
        assert asked(fake, 2) == [ids_of("history", "hi"), ids_of("history", "a")]


def test_chats_of_different_length_and_a_template_that_is_given(fake: FakeAsyncVLLM) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    long = TensorDict(history=ChatHistory(prompt=History.from_chats([turns])[0]))
    out = wrapper(fake, "history")(lazy_stack([one("history", "ab"), long]))
    assert [td["history"].full.batch_size for td in out.unbind(0)] == [torch.Size([2]), torch.Size([4])]
    assert out[1]["history"].full.role == ["user", "assistant", "user", "assistant"]
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}?"
    wrapper(fake, "history", inplace=False, chat_template=template)(dense("history", "hi"))
    assert asked(fake, 1) == [list(b"hi?")]
    wrapper(fake, "history", inplace=False, chat_template_name="qwen")(dense("history", "hi"))
    assert asked(fake, 1)[0][-len(ids_of("history", "hi")) :] == ids_of("history", "hi")


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


def asked(engine: FakeAsyncVLLM, count: int) -> list[list[int]]:
    """Prompts of the last requests."""
    return [request.prompt_token_ids.tolist() for request in engine.replicas[0].submitted[-count:]]


# answers


def script(
    monkeypatch: pytest.MonkeyPatch, engine: FakeAsyncVLLM, ids: list[int], versions: list[int] | None = None
) -> None:
    """Let the engine answer every prompt with ``ids``."""

    original = engine.generate

    def generate(**kwargs: Any) -> list[Completion]:
        kwargs["sampling_params"] = {**kwargs["sampling_params"], "max_tokens": len(ids), "ignore_eos": True}
        completions: list[Completion] = original(**kwargs)
        for completion in completions:
            (output,) = completion.outputs
            output.token_ids, output.finish_reason = np.array(ids, np.int64), "stop"
            output.policy_versions = np.array(versions or [0] * len(ids), np.int32)
        return completions

    monkeypatch.setattr(engine, "generate", generate)


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


def test_an_aborted_request_is_an_error_and_nothing_is_written() -> None:
    with FakeAsyncVLLM(token_seconds=0.02) as engine:
        td = stacked("text", "ab", "c")
        policy = vLLMWrapper(engine, input_mode="text", generate_kwargs={"max_tokens": 1000})
        replica = engine.replicas[0]

        def abort() -> None:
            while len(replica.submitted) < 2:
                threading.Event().wait(0.01)
            replica.abort([request.request_id for request in replica.submitted])

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(EngineError, match="2 of 2 requests were aborted") as caught:
            policy(td)
        assert [completion.aborted for completion in caught.value.partial] == [True, True]
        thread.join()
        assert set(td.keys()) == {"text"}


def test_a_late_batch_is_a_timeout_and_a_refused_request_says_which() -> None:
    with FakeAsyncVLLM(token_seconds=0.02) as engine:
        policy = vLLMWrapper(engine, input_mode="text", generate_kwargs={"max_tokens": 1000}, timeout_seconds=0.05)
        with pytest.raises(GenerationTimeout, match="1 of 1 requests were not finished"):
            policy(stacked("text", "ab"))
    engine = FakeAsyncVLLM(refuse=lambda request: "no" if len(request.prompt_token_ids) > 2 else None)
    with engine, pytest.raises(ValueError, match="request 1 was refused: no"):
        wrapper(engine)(stacked("text", "ab", "abc"))


# sampling parameters


def params_of(engine: FakeAsyncVLLM) -> dict[str, Any]:
    return dict(engine.replicas[0].submitted[-1].sampling_params)


def test_a_call_changes_sampling_for_itself_alone(fake: FakeAsyncVLLM) -> None:
    kwargs, tokenizer_kwargs = {"max_new_tokens": 6, "temperature": 0.7}, {"padding": True}
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=kwargs, tokenizer_kwargs=tokenizer_kwargs)
    out = policy(stacked("text", "ab"), max_new_tokens=2, do_sample=False, stop_sequences=["x"])
    assert len(out[0]["tokens", "response"]) == 2
    assert [params_of(fake)[name] for name in ("temperature", "stop", "detokenize")] == [0.0, ["x"], True]
    out = policy(stacked("text", "ab"))
    assert len(out[0]["tokens", "response"]) == 6
    always = {"detokenize": False, "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 0}
    assert params_of(fake) == {"max_tokens": 6, "temperature": 0.7, **always}
    assert (kwargs, tokenizer_kwargs) == ({"max_new_tokens": 6, "temperature": 0.7}, {"padding": True})
    vLLMWrapper(fake, input_mode="text", generate_kwargs={"logprobs": 2})(stacked("text", "ab"))
    assert params_of(fake) == {**always, "logprobs": 2}
    with pytest.raises(ValueError, match="logprobs is off, but return_log_probs=True"):
        policy(stacked("text", "ab"), logprobs=False)


CHANGES_VALUES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.1,
    "logit_bias": {65: 1.0},
    "thinking_token_budget": 8,
}


@pytest.mark.parametrize(("name", "value"), CHANGES_VALUES.items())
def test_what_changes_values_is_refused_with_log_probs_and_allowed_without(
    fake: FakeAsyncVLLM, name: str, value: Any
) -> None:
    given, td = {name: value}, stacked("text", "ab")
    before = len(fake.replicas[0].submitted)
    always = vLLMWrapper(fake, input_mode="text", generate_kwargs=given)
    calls = (
        lambda: always(td),
        lambda: wrapper(fake)(td, **given),
        lambda: wrapper(fake).requests(td, **given),
    )
    for call in calls:
        with pytest.raises(ValueError, match=rf"^{name}=.* or pass return_log_probs=False"):
            call()
    assert len(fake.replicas[0].submitted) == before
    policy = wrapper(fake, return_log_probs=False)
    (request,) = policy.requests(td, **given)
    assert request.arguments["sampling_params"][name] == value
    assert "log_probs" not in policy(td, **given).keys()  # noqa: SIM118  a TensorDict iterates over its batch
    assert params_of(fake)[name] == value


def test_another_temperature_in_a_later_turn_is_refused(fake: FakeAsyncVLLM) -> None:
    policy = wrapper(fake, "tokens")
    td = policy(stacked("tokens", "ab"), temperature=0.5)
    later = torch.cat([td[0]["tokens", "full"], torch.tensor([33])])
    again = td.clone()
    again[0]["tokens"] = Tokens(prompt=later, full=td[0]["tokens", "full"])
    asked = len(fake.replicas[0].submitted)
    for ask in (policy, policy.requests):
        with pytest.raises(ValueError, match=r"this turn's temperature is 0\.75, that of the turn before 0\.5"):
            ask(again.clone(), temperature=0.75)
    assert len(fake.replicas[0].submitted) == asked  # before anything is generated
    assert policy(again, temperature=0.5)[0]["sampling", "temperature"] == 0.5


# what a batch says of its requests


def requests_of(engine: FakeAsyncVLLM) -> list[Request]:
    return [request for replica in engine.replicas for request in replica.submitted]


def asks(build: str, **values: Any) -> TensorDictBase:
    """A batch of two with these keys: one value per sample."""
    td = {"dense": dense, "lazy": stacked}[build]("text", "ab", "c")
    for key, value in values.items():
        if build == "dense":
            td.set(key, value)
        else:
            for sample, one_value in zip(td.unbind(0), value, strict=True):
                sample.set(key, one_value)
    return td


@pytest.mark.parametrize("num_samples", [None, 3])
@pytest.mark.parametrize("build", ["dense", "lazy"])
def test_keys_of_a_batch_reach_the_service_one_value_per_sample(build: str, num_samples: int | None) -> None:
    with FakeAsyncVLLM(2, seed=3) as engine:
        ear = Says()
        engine.create_load_balancer(ear)
        engine.replica_table.set_version(1, 4)
        policy = wrapper(engine, num_samples=num_samples)
        policy(
            asks(
                build,
                session_id=NonTensorStack("s", "t"),
                group_id=torch.tensor([[7], [-1]]),
                priority=torch.tensor([5, -5]),
                min_version=torch.tensor([-1, 4]),
                request_context=NonTensorStack({"k": 1}, None),
            )
        )
        # the second sample is the more urgent; the first one's group goes to the newest version
        assert [(indices, c.session_id, c.request_context) for indices, c in ear.asked] == [
            ([1], "t", {}),
            ([1], "s", {"k": 1}),
        ]
        assert [request.priority for request in requests_of(engine)] == [-5, 5]
        assert engine.load_balancer.groups.version("7") == 4
        assert [request.sampling_params.get("n") for request in requests_of(engine)] == [num_samples] * 2


@pytest.mark.parametrize("where", ["argument", "generate_kwargs", "call"])
def test_the_replica_the_adapter_and_how_answers_continue_can_be_chosen(where: str) -> None:
    lora = {"lora_name": "a", "lora_int_id": 1, "lora_path": "folder"}
    arguments: dict[str, Any] = {"actor_index": 1, "lora_request": lora}
    asked = {**arguments, "on_resume": "live"}
    sampling: dict[str, Any] = {"max_tokens": NEW}
    with FakeAsyncVLLM(2, seed=3) as engine:
        kwargs = {
            "argument": {"generate_kwargs": {**sampling, "on_resume": "live"}, **arguments},
            "generate_kwargs": {"generate_kwargs": {**sampling, **asked}},
            "call": {"generate_kwargs": sampling},
        }[where]
        per_call = asked if where == "call" else {}
        policy = vLLMWrapper(engine, input_mode="text", inplace=False, **kwargs)
        out = policy(dense("text", "ab", "c"), **per_call)
        (request,) = policy.requests(one("text", "d"), **per_call)
        asyncio.run(engine.agenerate(**request.arguments))
        assert [len(replica.submitted) for replica in engine.replicas] == [0, 3]
        for asking in requests_of(engine):
            assert (asking.lora_request, asking.on_resume) == (lora, "live")
            assert not asked.keys() & set(asking.sampling_params)
        assert list(out["resume"]) == ["none", "none"]  # nothing cut them
        policy(dense("text", "ab"), actor_index=0, lora_request=None, on_resume=None)
        (other,) = engine.replicas[0].submitted
        assert (other.lora_request, other.on_resume) == (None, None)
        with pytest.raises(ValueError, match=r"on_resume must be .*, got 'frozen'"):
            policy(dense("text", "ab"), on_resume="frozen")
        with pytest.raises(ValueError, match="actor_index: given twice"):
            vLLMWrapper(engine, generate_kwargs={"actor_index": 1}, actor_index=0)


def test_a_folder_or_a_hub_name_starts_an_engine(fake: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda path: started.append(path) or fake)
    assert vLLMWrapper("org/model").model is fake
    assert vLLMWrapper(Path("folder")).model is fake
    assert started == ["org/model", Path("folder")]
    assert vLLMWrapper("org/model").get_new_version(inplace=False).model is fake
    assert len(started) == 3  # which it shares with the first


# new versions


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
    arguments = set(vars(vLLMWrapper(fake)._options))
    of_scoring = {"generate", "replay", "temperature"}
    assert set(CHANGES) | of_scoring | {"model", "pad_model_input", "num_samples"} == arguments
    with pytest.raises(TypeError, match=r"unknown arguments \['pad', 'x'\]; known: \['actor_index', 'attention_mask"):
        wrapper(fake).get_new_version(x=1, pad=True)


@pytest.mark.parametrize("name", [*CHANGES, "num_samples"])
def test_a_new_version_changes_one_argument_and_keeps_the_others(fake: FakeAsyncVLLM, name: str) -> None:
    every = {**CHANGES, "inplace": False, "num_samples": 2}
    others = {key: value for key, value in every.items() if key != name}
    also = {"input_key": every["input_key"]} if name == "input_mode" else {}  # else it is the new mode's own
    before = vLLMWrapper(fake, **others)
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


# tokens preferred to text


def test_known_tokens_are_not_encoded_again(fake: FakeAsyncVLLM) -> None:
    td = dense("history", "hi").set("tokens", Tokens(prompt=torch.tensor([[PAD, 1, PAD, 2]]), batch_size=[1]))
    out = wrapper(fake, "history", inplace=False, prefer_tokens=True)(td)
    assert asked(fake, 1) == [[1, PAD, 2]] == [out[0]["tokens", "prompt"].tolist()]
    wrapper(fake, "history", inplace=False)(td)
    assert asked(fake, 1) == [ids_of("history", "hi")]


@pytest.mark.parametrize("pad_output", [False, True])
def test_ids_of_an_earlier_turn_are_kept_and_its_rows_with_them(
    fake: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch, pad_output: bool
) -> None:
    env = ChatEnv(batch_size=(1,), input_mode="history", tokenizer=ByteTokenizer())
    policy = wrapper(fake, "history", prefer_tokens=True, pad_output=pad_output)
    with monkeypatch.context() as patch:
        script(patch, fake, [200, END], versions=[4, 4])  # a byte that is no UTF-8
        td = env.step(policy(env.reset(TensorDict(query=["hi"], batch_size=[1]))))
    out = policy(env.step_mdp(td))[0]
    turn = [*ids_of("history", "hi"), 200, END]
    assert asked(fake, 1) == [[*turn, *b"\n", START, *b"assistant\n"]]
    real = out["masks", "all_attention_mask"]
    assert out["policy_versions", "full"][real][len(turn) - 2 : len(turn)].tolist() == [4, 4]


def test_an_env_with_a_tokenizer_feeds_its_ids(fake: FakeAsyncVLLM) -> None:
    env = ChatEnv(batch_size=(1,), input_mode="history", tokenizer=ByteTokenizer(), with_tokenizer=True)
    policy = wrapper(fake, "history", prefer_tokens=True)
    td = policy(env.reset(TensorDict(query=["hi"], batch_size=[1])))
    first = td[0]["tokens", "full"].tolist()
    assert first[:-NEW] == ids_of("history", "hi")
    policy(env.step_mdp(env.step(td)))
    assert asked(fake, 1) == [[*first, END, *b"\n", START, *b"assistant\n"]]


# threads


def test_one_wrapper_serves_many_threads(fake: FakeAsyncVLLM) -> None:
    policy = wrapper(fake, inplace=False)
    texts = [f"{i}" * (i + 1) for i in range(8)]
    outs: dict[int, TensorDictBase] = {}
    threads = [
        threading.Thread(target=lambda i=i: outs.__setitem__(i, policy(stacked("text", texts[i])))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (prompt, output) in enumerate(direct(fake, [list(text.encode()) for text in texts])):
        assert_answer(outs[i][0], prompt, output)


# sample by sample


def questions() -> TensorDictBase:
    rows = stacked("tokens", "He", "llo")
    for i, row in enumerate(rows.unbind(0)):
        row.update({"session_id": f"s{i}", "priority": torch.tensor(i)})
    return rows


def test_answers_asked_for_one_by_one_are_those_of_forward() -> None:
    with FakeAsyncVLLM() as engine:
        policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs={"max_new_tokens": 5}, timeout_seconds=9.0)
        expected = policy(questions())
        for request, row in zip(policy.requests(questions()), expected.unbind(0), strict=True):
            answer = policy.answer(request, asyncio.run(engine.agenerate(**request.arguments)))
            for key in (("tokens", "full"), ("routed_experts", "full"), ("masks", "all_assistant_mask")):
                assert torch.equal(answer[key], row[key])
            assert torch.equal(answer["log_probs", "response"], row["log_probs", "response"])
        first, second = policy.requests(questions(), max_new_tokens=3, return_routed_experts=False)
        assert (first.index, second.index) == (0, 1)
        assert list(second.arguments["prompt_token_ids"]) == ids_of("tokens", "llo")
        assert (second.arguments["session_id"], second.arguments["priority"]) == ("s1", 1)
        assert second.arguments["sampling_params"]["max_tokens"] == 3
        assert second.arguments["timeout_seconds"] == 9.0
        assert not second.arguments["return_routed_experts"]
        assert second.keys.routed_experts is None
        with pytest.raises(ValueError, match="one answer per sample, but num_samples=2"):
            vLLMWrapper(engine, input_mode="tokens", num_samples=2).requests(questions())


# what TorchRL's code asks of a wrapper besides forward

SHORT: dict[str, Any] = {"max_new_tokens": 3}


def test_what_copies_out_keys_only_can_have_ours_too(fake: FakeAsyncVLLM) -> None:
    """As ``TensorDictSequential`` does where it is given a place to write."""
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=SHORT)

    def copied() -> set[Any]:
        target = TensorDict(batch_size=[1])
        return set(TensorDictSequential(policy)(stacked("text", "ab"), tensordict_out=target).keys())

    torchrls = {"text", "masks", "tokens", "log_probs"}
    assert copied() == torchrls
    policy.out_keys += policy.extra_keys
    assert copied() == torchrls | set(policy.extra_keys)


@pytest.mark.needs_vllm
def test_sampling_parameters_and_completions_read_as_vllms(fake: FakeAsyncVLLM) -> None:
    kwargs = {"max_tokens": 20, "max_new_tokens": 10, "n": 2, "num_return_sequences": 1, "temperature": 0.7}
    params = vLLMWrapper(fake, input_mode="text", generate_kwargs=kwargs).sampling_params
    assert (params.max_tokens, params.n, params.temperature, params.top_p) == (20, 2, 0.7, 1.0)
    with pytest.raises(AttributeError, match="would change nothing"):
        params.temperature = 0.0
    assert vLLMWrapper.CompletionOutput_tc is TorchRLWrapper.CompletionOutput_tc


def test_another_tokenizer_can_be_set(fake: FakeAsyncVLLM) -> None:
    policy = vLLMWrapper(fake, input_mode="text", generate_kwargs=SHORT)
    assert policy.padding_value == 256
    other = ByteTokenizer()
    other.pad_token = "<|im_start|>"
    policy.set_tokenizer(other)
    assert (policy.tokenizer, policy.padding_value) == (other, 257)
    assert vLLMWrapper(fake, tokenizer=other, input_mode="text").padding_value == 257


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
    assert all(getattr(other, name) == getattr(policy, name) for name in ("sampling_params", "out_keys", "extra_keys"))
    out = other(stacked("text", "ab"))
    assert out[0]["tokens", "response"].shape == (3,)


class Pickled(FakeAsyncVLLM):
    """An engine that another process can reach."""

    def __reduce__(self) -> Any:
        return Pickled, ()
