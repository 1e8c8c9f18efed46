"""One answer as it grows, who joins the batch, what is drawn; the batch against the model by itself."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.plain import TOLERANCE, answers, check_output, chosen, loaded, log_probs, save, step
from support.processes import ids_request
from torchrl_moe._compat_transformers import cache_argument
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import CompletionMetrics, CompletionOutput, KeptIds, Scoring, nothing_yet
from torchrl_moe.modules.backends.transformers import answer as sampling
from torchrl_moe.modules.backends.transformers.answer import Answer, Draw, LockedTokenizer, Sampling, read_sampling
from torchrl_moe.modules.backends.transformers.decoder import BatchDecoder, Loaded, Sampler
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe

# -- text --------------------------------------------------------------------------------------------------------------
TOKENIZER = ByteTokenizer()


def test_text_becomes_ids_and_ids_become_text() -> None:
    words = LockedTokenizer(TOKENIZER)
    assert words.encode("Hi") == [72, 105]
    stream = words.stream([72, 105], True)
    assert [stream.step(token) for token in (33, 0xC3, 0xA9, 65)] == ["!", "", "é", "A"]  # é has two bytes
    assert stream.step(TOKENIZER.eos_token_id) == ""
    assert stream.step(5000) == ""  # a model may have more words than its tokenizer
    assert words.stream([5000, 72], True).step(65) == "A"
    shown = words.stream([], False)
    assert shown.step(TOKENIZER.eos_token_id) == TOKENIZER.eos_token


def test_the_models_own_configuration_may_name_more_tokens_that_end() -> None:
    for named, more in ((None, set()), (7, {7}), ([TOKENIZER.eos_token_id, 7, 9], {7, 9})):
        words = LockedTokenizer(TOKENIZER, SimpleNamespace(eos_token_id=named))
        assert (words.eos, words.more_eos) == (TOKENIZER.eos_token_id, more)
    with pytest.raises(ValueError, match="needs a fast tokenizer, got SimpleNamespace"):
        LockedTokenizer(SimpleNamespace(eos_token_id=None))


# -- sampling parameters -----------------------------------------------------------------------------------------------
@pytest.mark.needs_vllm
def test_each_field_of_vllms_is_served_or_refused_or_changes_nothing() -> None:
    """Of vLLM's ``SamplingParams``, read from its source, where a default is a literal."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "sampling_params.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    nodes = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    named = {ast.unparse(node.target): node.value for node in nodes}
    known = sampling.KNOWN | sampling.REFUSED.keys() | sampling.WITHOUT_EFFECT
    assert {name for name in named if not name.startswith("_")} - known == set()
    plain = {name: value.value for name, value in named.items() if name in known and isinstance(value, ast.Constant)}
    ours = {name: getattr(Sampling(), name) for name in plain if name in sampling.KNOWN}
    ours |= {"stop": None, "stop_token_ids": None, "logprobs": None}
    assert ours == {name: value for name, value in plain.items() if name in sampling.KNOWN}
    # as they are when a user passes a ``SamplingParams``
    assert read_sampling({**plain, "stop": [], "output_kind": 2, "bad_words": []}) == read_sampling(None) == Sampling()


def test_what_means_the_same_is_the_same() -> None:
    assert read_sampling({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}) == Sampling(temperature=0.0)
    for low in (1e-3, 1e-6, 5e-324):  # as vLLM raises them; only 0 is greedy
        assert read_sampling({"temperature": low, "top_k": 5}) == Sampling(temperature=0.01, top_k=5)
    assert read_sampling({"top_k": -1, "seed": -1, "stop": "x"}) == Sampling(stop=("x",))
    assert read_sampling({"logprobs": 0}).logprobs
    assert not read_sampling({"logprobs": None}).logprobs
    assert read_sampling({"max_tokens": None}).max_tokens is None
    leaving = [read_sampling(one).leaves_ids_out for one in ({}, {"top_k": 5}, {"temperature": 0, "top_k": 5})]
    assert leaving == [False, True, False]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"bad_words": ["a"]}, "does not serve bad_words=.*; vLLM does"),
        ({"logit_bias": {1: 2.0}}, "does not serve logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "does not serve structured_outputs"),
        ({"nonsense": 1}, "unknown nonsense; known: detokenize, frequency_penalty"),
        ({"stop": [""]}, "stop.* must be "),
        ({"stop": b"x"}, "stop.* must be "),
        ({"top_p": 0}, "top_p.* must be "),  # the service's checks, see its tests
        ({"logprobs": 5}, "logprobs=5: a completion has the log-probs of its sampled tokens only"),
        ({"temperature": "hot"}, "sampling_params: "),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is more than max_tokens=4"),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0 would give one answer several times"),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True"),
        ("greedy", "must be a mapping, got str"),
    ],
)
def test_what_is_invalid_or_not_served_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_sampling(spec)


# -- answers -----------------------------------------------------------------------------------------------------------
EOS = TOKENIZER.eos_token_id
LOCKED = LockedTokenizer(TOKENIZER)
LAYOUT = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)


def growing(max_model_len: int = 100, layout: RoutingLayout | None = LAYOUT, index: int = 0, **params: Any) -> Answer:
    return Answer([1, 2, 3], read_sampling(params), index, LOCKED, max_model_len, layout)


def grow(one: Answer, tokens: Any, version: int = 0, step: Any = ()) -> Answer:
    """Add tokens, or the bytes of a text, until it ends."""
    for token in tokens.encode() if isinstance(tokens, str) else tokens:
        if one.finish_reason is None:
            one.add(Draw(token, -float(token), np.array(step, np.int32)), version)
    return one


def row(*experts: int) -> Any:
    """A row of the second layer; the first is dense."""
    return [[-1, -1], list(experts)]


# -- ends -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "tokens", "count", "reason", "stop_reason", "text"),
    [
        ({"max_tokens": 3}, "abcd", 3, "length", None, "abc"),
        ({}, [97, EOS, 98], 2, "stop", None, "a"),
        ({"ignore_eos": True, "max_tokens": 3}, [97, EOS, 98], 3, "length", None, "ab"),
        ({"stop_token_ids": [99]}, "abcd", 3, "stop", 99, "ab"),
        ({"stop_token_ids": [99], "include_stop_str_in_output": True}, "abcd", 3, "stop", 99, "abc"),
        ({"stop": "bc"}, "abcd", 3, "stop", "bc", "a"),
        ({"stop": ["cd", "bcd"]}, "abcd", 4, "stop", "bcd", "a"),  # of two that end together the longer begins first
        ({"stop": "bc", "include_stop_str_in_output": True}, "abcd", 3, "stop", "bc", "abc"),
        ({"stop": "é"}, "aéb", 3, "stop", "é", "a"),  # the second of its two bytes ends it
        ({"stop": "b", "min_tokens": 2}, "abcb", 4, "stop", "b", "abc"),  # the first came too early
        ({"stop": "b", "max_tokens": 2}, "ab", 2, "stop", "b", "a"),  # as the last one that there may be
        ({"max_tokens": 2}, [97, EOS], 2, "stop", None, "a"),
        ({"detokenize": False, "max_tokens": 2}, "ab", 2, "length", None, ""),
        ({"max_tokens": 2}, [97, 0xC3], 2, "length", None, "a"),  # half a character is not shown
        ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 1}, [EOS], 1, "length", None, "<eos>"),
        ({"max_model_len": 7, "max_tokens": None}, "abcdefgh", 4, "length", None, "abcd"),  # where the model does
    ],
)
def test_an_answer_ends(
    params: dict[str, Any], tokens: Any, count: int, reason: str, stop_reason: Any, text: str
) -> None:
    one = grow(growing(**params), tokens)
    output = one.output(True)
    assert one.longest == min(3 + (one.sampling.max_tokens or 100), params.get("max_model_len", 100))
    assert len(output.token_ids) == count
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert output.text.replace(TOKENIZER.eos_token, "<eos>") == text


# -- reading again ----------------------------------------------------------------------------------------------------
def given(**fields: Any) -> CompletionOutput:
    defaults: dict[str, Any] = {
        "token_ids": np.array([97, 0xC3]),
        "policy_versions": np.array([1, 2], np.int32),
        "logprobs": np.array([-0.5, -1.5], np.float32),
        "routed_experts": np.array([[[0, 0], [0, 1]]] * 4, np.uint8),
        "kept": KeptIds(np.array([97], np.int32), np.array([1, 0], np.int32)),
    }
    return CompletionOutput(index=0, text="a", finish_reason="abort", **{**defaults, **fields})


def test_it_continues_from_what_there_was() -> None:
    one = growing(logprobs=0, max_tokens=4, stop="éb")
    one.go_on_from(given())
    one.note_read()
    rows = one.rows_to_follow()
    assert rows is not None
    assert rows[:, 0].tolist() == [[-1, -1]] * 5  # 0 on a dense layer is no route
    assert rows[:, 1].tolist() == [[0, 1]] * 4 + [[-1, -1]]
    one.add_rows(np.array([row(7, 7)] * 4 + [row(2, 3)], np.int16))
    grow(one, [0xA9], 5, [0xA9, 1])
    one.add_rows(np.array([row(4, 5)], np.int16))
    output = grow(one, [98], 5).output(True)
    assert output.token_ids.tolist() == [97, 0xC3, 0xA9, 98]
    assert output.policy_versions.tolist() == [1, 2, 5, 5]
    assert output.logprobs is not None and output.logprobs.tolist() == [-0.5, -1.5, -0xA9, -98]
    assert output.kept is not None
    assert (output.kept.ids.tolist(), output.kept.sizes.tolist()) == ([97, 0xA9, 1], [1, 0, 2, 0])
    assert output.routed_experts is not None
    assert output.routed_experts[:, 1].tolist() == [[0, 1]] * 4 + [[2, 3], [4, 5]]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "éb")  # across the cut
    assert output.resume == "forced"


def test_what_had_no_log_probs_continues_without_and_rows_that_it_lacks_are_those_that_are_read_again() -> None:
    one = growing(logprobs=0)
    one.go_on_from(given(routed_experts=None, logprobs=None, kept=None))
    one.note_read()
    assert one.rows_to_follow() is None
    one.add_rows(np.array([row(0, 1)] * 5, np.int16))
    output = grow(one, [98]).output(True)
    assert output.logprobs is output.kept is None
    assert output.routed_experts.tolist() == [[[0, 0], [0, 1]]] * 5
    assert (output.resume, len(output.token_ids)) == ("live", 3)
    with pytest.raises(ValueError, match="answer 3 to resume has 2 tokens already: max_tokens=2 must be larger"):
        growing(index=3, max_tokens=2).go_on_from(given())


# -- a request that is read --------------------------------------------------------------------------------------------
def resumed(plain: Loaded, changes: Any = None, **fields: Any) -> Any:
    """A request for two answers, the first of which was whole; the second with changes."""
    rows = np.zeros((2, 4, 4), np.uint8) + np.arange(4, dtype=np.uint8)
    first = {"token_ids": np.array([97]), "policy_versions": np.array([-3], np.int32), "routed_experts": rows}
    cut = replace(given(**first, logprobs=None, kept=None), index=1)
    whole = replace(cut, index=0, finish_reason="stop", text="whole")
    before = nothing_yet(ids_request("before", [65, 66], sampling_params={"n": 2}))
    outputs = [whole, replace(cut, **(changes or {}))]
    before = replace(before, prompt="AB", outputs=outputs, metrics=CompletionMetrics(total_seconds=100.0))
    return plain.read(ids_request("a", [65, 66], sampling_params={"n": 2, "seed": 1}, resume=before, **fields))


def test_what_was_whole_stays_and_what_was_cut_continues(plain: Loaded) -> None:
    running = resumed(plain)
    (answer,) = running.answers
    assert (answer.index, answer.tokens, running.kept) == (1, [97], 1)
    done = running.completion()
    assert (done.request_id, done.prompt) == ("a", "AB")
    assert [output.text for output in done.outputs] == ["whole", "a"]
    assert done.metrics.total_seconds >= 100.0
    assert answer.generator is not None
    assert answer.generator.initial_seed() == 1 + 1 + 1  # its index, and the token that it has
    assert [answer.how, resumed(plain, on_resume="live").answers[0].how] == ["forced", "live"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": np.array([259])}, r"names token 259; the model has 0\.\.258"),
        ({"routed_experts": np.zeros((2, 4, 4), np.uint8)}, "token 0, layer 1"),
    ],
)
def test_a_first_part_that_cannot_be_read_again_is_refused(plain: Loaded, changes: dict[str, Any], words: str) -> None:
    """In the batch it would end the engine, and with it all other requests."""
    with pytest.raises(ValueError, match=words):
        resumed(plain, changes)
    if "routed_experts" in changes:  # nobody follows them
        assert resumed(plain, changes, on_resume="live").answers[0].tokens == [97]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_request": {"lora_name": "a"}}, "lora_request: engine='transformers' serves no adapters"),
        ({"guided_options": {"regex": "a"}}, "no structured outputs"),
        ({"sampling_params": {"top_p": 2}}, "top_p must be a finite number above 0 and of at most 1, got 2"),
        ({"ids": list(range(128))}, "1 to 127 tokens, got 128: max_model_len"),
        ({"ids": []}, "1 to 127 tokens, got 0"),
        ({"ids": [65, 5000]}, r"names token 5000; the model has 0\.\.258"),
        ({"ids": [-1]}, "names token -1"),
        ({"routed_experts": np.zeros((1, 1, 1), np.int8)}, "routed_experts"),
        ({"sampling_params": {"max_tokens": 8}}, "11 tokens of prompt and answer need 22528 bytes of keys"),
    ],
)
def test_what_cannot_be_served_is_refused(plain: Loaded, fields: dict[str, Any], words: str) -> None:
    arguments = replace(plain.arguments, kv_cache_memory_bytes=10 * plain.decoder.token_bytes)
    limited = replace(plain, arguments=arguments)
    fields = {"ids": [1, 2, 3], "sampling_params": {"max_tokens": 7}, **fields}
    with pytest.raises(ValueError, match=words):
        limited.read(ids_request("a", fields.pop("ids"), **fields))
    assert limited.read(ids_request("a", [1, 2, 3], sampling_params={"max_tokens": 7})).answers


# -- what is drawn -----------------------------------------------------------------------------------------------------
PROBABILITIES = [0.4, 0.3, 0.2, 0.1]
LOGITS = torch.tensor(PROBABILITIES).log()


def drawing(count: int, **params: Any) -> list[Answer]:
    return [Answer([0], read_sampling({"logprobs": 0, **params}), 0, LOCKED, 100, None) for _ in range(count)]


def draw(count: int = 1, logits: Tensor = LOGITS, **params: Any) -> list[Draw]:
    drawn: list[Draw] = Sampler(torch.device("cpu"), 0)(logits.repeat(count, 1), drawing(count, **params))
    return drawn


def drawn_from(one: Draw) -> list[int]:
    """The words that a token was drawn from."""
    ids = one.mask.tolist()
    if not ids:
        return [0, 1, 2, 3]
    return ids if ids[0] >= 0 else [word for word in range(4) if ~word not in ids]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),  # 0.4 + 0.3 reach it
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.49}, [4 / 9, 3 / 9, 2 / 9, 0]),  # 0.2 is half of 0.4
        ({"min_p": 0.51}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.2}, [16 / 29, 9 / 29, 4 / 29, 0]),  # of the probabilities at that temperature
        ({"top_k": 3, "top_p": 0.8}, [4 / 9, 3 / 9, 2 / 9, 0]),  # of the three that are left 0.4 + 0.3 is less
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.86}, [16 / 25, 9 / 25, 0, 0]),
        ({"repetition_penalty": 2.0}, [0.4**2 / 0.76, 0.3 / 0.76, 0.2 / 0.76, 0.1 / 0.76]),  # 0 is in the prompt
    ],
)
def test_tokens_come_from_the_distribution_of_their_log_probs(params: dict[str, Any], expected: list[float]) -> None:
    count = 4000
    drawn = draw(count, **params)
    counts = Counter(one.token for one in drawn)
    for word, probability in enumerate(expected):
        spread = math.sqrt(probability * (1 - probability) / count)
        assert abs(counts[word] / count - probability) <= 5 * spread + 1e-12, word
    for one in drawn[:50]:
        assert one.log_prob == pytest.approx(math.log(expected[one.token]), abs=1e-5)
        assert drawn_from(one) == [word for word, probability in enumerate(expected) if probability]


def test_a_greedy_token_is_the_likeliest_and_its_log_prob_is_of_temperature_one() -> None:
    (one,) = draw(temperature=0)
    assert (one.token, len(one.mask)) == (0, 0)
    assert one.log_prob == pytest.approx(math.log(0.4), abs=1e-6)
    (penalised,) = draw(temperature=0, repetition_penalty=2.0)
    assert penalised.token == 1
    assert penalised.log_prob == pytest.approx(math.log(0.3 / 0.76), abs=1e-5)
    # words of the answer so far are penalised by how often they came
    (one,) = drawing(1, temperature=0, frequency_penalty=0.5, presence_penalty=0.25)
    one.tokens += [0, 0, 3]
    (drawn,) = Sampler(torch.device("cpu"), 0)(LOGITS[None], [one])
    left = [0.4 * math.exp(-1.25), 0.3, 0.2, 0.1 * math.exp(-0.75)]
    assert drawn.token == 1
    assert drawn.log_prob == pytest.approx(math.log(0.3 / sum(left)), abs=1e-5)


def test_words_are_masked_until_there_are_enough_tokens() -> None:
    logits = torch.zeros(EOS + 1)
    logits[EOS] = 100.0
    (one,) = draw(logits=logits, min_tokens=1, stop_token_ids=[5, 100_000])  # the model has no such word
    assert one.mask.tolist() == [~5, ~EOS]
    assert one.log_prob == pytest.approx(-math.log(EOS - 1), abs=1e-4)
    (free,) = draw(logits=logits, min_tokens=0)
    assert free.token == EOS


def test_rows_that_sample_differently_do_not_mix() -> None:
    rows = [*drawing(2), *drawing(2, temperature=0), *drawing(2, top_k=1), *drawing(1)]
    order = [rows[i] for i in (0, 2, 4, 1, 3, 5, 6)]
    drawn = Sampler(torch.device("cpu"), 0)(LOGITS.repeat(7, 1), order)
    assert [drawn[i].token for i in (1, 4, 2, 5)] == [0, 0, 0, 0]
    assert [drawn[i].log_prob for i in (2, 5)] == [0.0, 0.0]
    assert [len(drawn[i].mask) for i in (0, 1, 2)] == [0, 0, 1]
    for i in (0, 3, 6):
        assert drawn[i].log_prob == pytest.approx(math.log(PROBABILITIES[drawn[i].token]), abs=1e-5)


# -- the batch ---------------------------------------------------------------------------------------------------------
GREEDY = {"temperature": 0.0}


def test_answers_that_join_and_leave_at_any_time_are_those_of_the_model_alone(plain: Loaded) -> None:
    one, two, three, four = (answers(plain, range(65, 65 + count), GREEDY)[0] for count in (3, 9, 1, 5))
    step(plain, one, two, times=2)
    step(plain, three, four, times=3)
    plain.decoder.leave([two])  # the longest: columns that only it had go, too
    assert plain.decoder.columns == max(len(answer.ids) - 1 for answer in (one, three, four))
    step(plain, times=3)
    assert [len(answer.tokens) for answer in (one, two, three, four)] == [8, 5, 6, 6]
    for answer in (one, two, three, four):
        check_output(plain, answer.prompt_ids, answer.output(True))
        assert (log_probs(plain.decoder.model, answer).argmax(-1) == torch.tensor(answer.tokens)).all()
    plain.decoder.leave([one, three, four])
    assert plain.decoder.answers == []
    assert plain.decoder.columns == 0


def test_nothing_that_transformers_calls_deprecated_is_used(plain_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*deprecated.*", FutureWarning)
        engine = loaded(plain_folder)
        (answer,) = answers(engine, [70, 71, 72], GREEDY)
        step(engine, answer, times=2)
        engine.decoder.score(answer.ids, Scoring())


def test_answers_to_one_prompt_are_read_once_and_differ(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives them again in any batch."""
    seen: list[tuple[int, ...]] = []
    forward = plain.decoder._forward
    monkeypatch.setattr(
        plain.decoder, "_forward", lambda ids, *rest: seen.append(tuple(ids.shape)) or forward(ids, *rest)
    )
    params = {"n": 4, "temperature": 2.0, "seed": 5}
    group, (other,) = answers(plain, [70, 71, 72], params), answers(plain, [70, 71])
    step(plain, *group, other, times=3)
    assert seen == [(2, 3), (5, 1), (5, 1)]
    assert [answer.index for answer in group] == [0, 1, 2, 3]
    assert len({tuple(answer.tokens) for answer in group}) == 4
    for answer in group:
        check_output(plain, answer.prompt_ids, answer.output(True), 2.0)
    plain.decoder.empty()
    again, others = answers(plain, [70, 71, 72], params), answers(plain, range(60, 80), {"n": 3})
    seeded = answers(plain, [70, 71, 72], {**params, "seed": 6})
    step(plain, *others, times=2)
    step(plain, *again, *seeded, times=3)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in group]
    assert [answer.tokens for answer in seeded] != [answer.tokens for answer in group]


# -- forced routes ----------------------------------------------------------------------------------------------------
def other_rows(plain: Loaded, ids: list[int]) -> Any:
    """Routes that the model would not choose."""
    with torch.no_grad(), plain.decoder.replay.record() as recording:  # type: ignore[union-attr]
        plain.decoder.model(torch.tensor([ids]))
    rows = (recording.routed_experts[0].numpy() + 1) % 16
    rows[:, 0] = -1
    return rows.astype(np.int8)


def following(plain: Loaded, ids: list[int], rows: Any) -> Tensor:
    """Logits of the model that follows these rows, and routes by itself where there are none."""
    whole = np.full((1, len(ids), 4, 4), -1, np.int16)
    whole[0, : len(rows)] = rows
    with torch.no_grad(), plain.decoder.replay.replay(torch.from_numpy(whole)):  # type: ignore[union-attr]
        logits: Tensor = plain.decoder.model(torch.tensor([ids])).logits[0]
    return logits


def check_following(plain: Loaded, answer: Answer, rows: Any) -> None:
    log_probs = following(plain, answer.ids, rows).log_softmax(-1)[len(answer.prompt_ids) - 1 : -1]
    assert answer.output(True).logprobs == pytest.approx(chosen(log_probs, answer), abs=TOLERANCE)


def test_what_is_read_again_follows_its_own_experts_or_not(plain: Loaded) -> None:
    """With rows that the model would not choose the two ways differ."""
    ids = [70, 71, 72, 73]
    rows = other_rows(plain, ids)
    some = [answers(plain, ids, GREEDY, routed_experts=rows, on_resume=how)[0] for how in ("forced", "live")]
    step(plain, *some, times=3)
    for answer in some:
        answer.followed = None  # not the user's any more: its own
    step(plain, *plain.decoder.empty(), times=3)
    forced, live = (answer.output(True) for answer in some)
    assert (forced.resume, live.resume) == ("forced", "live")
    assert forced.routed_experts is not None and live.routed_experts is not None and live.logprobs is not None
    assert (forced.routed_experts[:6] == live.routed_experts[:6]).all()  # the rows delivered first win
    check_following(plain, some[0], rows)
    tail = chosen(log_probs(plain.decoder.model, some[1]), some[1])[3:]
    assert live.logprobs[3:] == pytest.approx(tail, abs=TOLERANCE)


# -- scores -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", [256, 3])
def test_scores_are_the_models_log_probs_however_cut(plain: Loaded, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr("torchrl_moe.modules.backends.transformers.decoder.SCORED_TOKENS", part)
    ids = list(range(70, 82))
    rows = other_rows(plain, ids)[:5]
    kept = KeptIds(np.array([75, 1, 2, 9], np.int32), np.array([0] * 5 + [3, -1] + [0] * 5, np.int32))
    free, forced = following(plain, ids, rows[:0]), following(plain, ids, rows)
    masked = free.clone() / 0.5
    masked[4, [word for word in range(len(masked[4])) if word not in (75, 1, 2)]] = -math.inf
    masked[5, 9] = -math.inf
    for logits, scores in (
        (free, plain.decoder.score(ids, Scoring())),
        (forced, plain.decoder.score(ids, Scoring(), rows)),
        (masked, plain.decoder.score(ids, Scoring(temperature=0.5, kept=kept))),
    ):
        expected = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
        assert math.isnan(scores[0])
        assert scores[1:] == pytest.approx(expected, abs=TOLERANCE)
    assert np.isnan(plain.decoder.score([70], Scoring())).all()


# -- which models -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "config"),
    [("mixtral", {"sliding_window": 4}), ("deepseek_v3", {}), ("olmoe", {}), ("qwen3", {})],
)
def test_other_families_are_decoded_alike(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    engine = loaded(save(tmp_path, family, **config))
    some = [answers(engine, range(65, 65 + count), GREEDY)[0] for count in (3, 9)]
    step(engine, *some, times=6)  # past the window
    for answer in some:
        expected = chosen(log_probs(engine.decoder.model, answer), answer)
        assert answer.output(True).logprobs == pytest.approx(expected, abs=TOLERANCE)


class Blind(torch.nn.Module):
    """A model whose pads are seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.device, self.config = model, model.device, model.config

    def forward(self, input_ids: Any, attention_mask: Any, past_key_values: Any, use_cache: bool) -> Any:
        name = cache_argument(inspect.signature(self.model.forward).parameters)
        return self.model(input_ids=input_ids, use_cache=use_cache, **{name: past_key_values})


def test_a_model_that_sees_pads_or_keeps_more_than_keys_and_values_is_refused() -> None:
    blind: Any = Blind(make_tiny_moe("qwen3"))
    with pytest.raises(ValueError, match=r"cannot serve Blind: in a padded batch its logits are off by \d"):
        BatchDecoder(blind, None, Sampler(torch.device("cpu"), 0))
    config = AutoConfig.for_model("mamba", vocab_size=32, hidden_size=16, num_hidden_layers=1, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="cannot serve MambaForCausalLM"):  # some releases fail in the forward pass
        BatchDecoder(model, None, Sampler(torch.device("cpu"), 0))
