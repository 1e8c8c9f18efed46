"""Parts of an answer put together, against what one whole answer would be."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds, Request
from torchrl_moe.modules.backends.vllm.continuation import can_continue, join, request_for_rest, sampling_for_rest

P = 4  # prompt tokens


@dataclass
class Params:
    n: int = 3
    max_tokens: int | None = 10
    min_tokens: int = 0
    seed: int | None = None
    stop: Any = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    routed_experts_prompt_start: int = 0
    presence_penalty: float = 0.0
    structured_outputs: Any = None
    bad_words: Any = None

    def clone(self) -> Params:
        return copy.copy(self)


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes; what is no character (yet) is shown as tokenizers do."""
    return bytes(ids).decode("utf-8", errors="replace")


def part(raw: bytes, start: int, version: int, reason: str = "length", text: str | None = None) -> CompletionOutput:
    """An answer's tokens ``start`` to ``start + len(raw)``; log-prob and row of each say its place."""
    places = np.arange(start, start + len(raw))
    rows = places + P - 1 if start else np.arange(P + len(raw) - 1)
    return CompletionOutput(
        index=0,
        token_ids=np.array(list(raw), np.int64),
        text=raw.decode("utf-8", errors="ignore") if text is None else text,
        finish_reason=reason,
        policy_versions=np.full(len(raw), version, np.int32),
        logprobs=-places.astype(np.float32),
        routed_experts=rows[:, None, None].astype(np.uint8),
    )


def joined(first: bytes, rest: bytes, params: Params, reason: str = "length", text: str | None = None) -> Any:
    one = part(first, 0, 3, "abort")
    return join(2, one, part(rest, len(first), 4, reason, text), params, decode)


def check(output: CompletionOutput, raw: bytes, text: str, first: int, reason: str) -> None:
    assert output.index == 2
    assert bytes(output.token_ids.tolist()) == raw
    assert output.text == text
    assert output.finish_reason == reason
    assert output.policy_versions.tolist() == [3] * first + [4] * (len(raw) - first)
    assert output.logprobs.tolist() == [-place for place in range(len(raw))]
    assert output.routed_experts[:, 0, 0].tolist() == list(range(P + len(raw) - 1))


def words(ids: list[int], sizes: list[int]) -> KeptIds:
    return KeptIds(np.array(ids, np.int32), np.array(sizes, np.int32))


def test_words_past_a_stop_string_fall_away() -> None:
    one, two = part(b"one STO", 0, 3, "abort"), part(b"P two", 7, 4)
    one.kept, two.kept = words([5], [0] * 6 + [1]), words([6, 7, 8], [1, 0, -2, 0, 0])
    kept = join(2, one, two, Params(stop="STOP"), decode).kept
    assert kept is not None
    assert (kept.ids.tolist(), kept.sizes.tolist()) == ([5, 6], [0] * 6 + [1, 1])


ROWS = np.full((3, 2, 2), 1, np.int8)


@pytest.mark.parametrize(("recorded", "expected"), [(ROWS + 1, ROWS + 1), (None, ROWS)])
def test_a_rest_follows_what_was_recorded_and_else_what_the_user_gave(recorded: Any, expected: Any) -> None:
    asked = Request(request_id="r", sampling_params=None, prompt_token_ids=np.arange(P), routed_experts=ROWS)
    rest = request_for_rest(asked, "r~1", np.arange(P), part(b"ab", 0, 1), recorded)
    assert rest.prompt_token_ids.tolist() == [0, 1, 2, 3, 97, 98]
    assert (rest.routed_experts == expected).all()
    again = request_for_rest(asked, "r~1", np.arange(P), None)
    assert (again.routed_experts == ROWS).all()


@pytest.mark.parametrize(
    ("before", "now", "after", "whole"),
    [
        ("none", "forced", "none", "forced"),
        ("forced", "forced", "none", "forced"),
        ("live", "forced", "none", "live"),
        ("none", "live", "none", "live"),
        ("none", "forced", "live", "live"),  # the rest lost its cache, and was routed again
    ],
)
def test_an_answer_says_the_worst_of_how_it_was_read_again(before: Any, now: Any, after: Any, whole: str) -> None:
    first, rest = part(b"ab", 0, 1), part(b"cd", 2, 2)
    first.resume, rest.resume = before, after
    assert join(0, first, rest, Params(), decode, now).resume == whole


def test_a_rest_that_was_cut_before_its_first_token_leaves_the_first_part_as_it_was() -> None:
    one, nothing = part(b"abc", 0, 3, "abort"), part(b"", 3, 4, "abort")
    nothing.routed_experts = nothing.logprobs = None  # as vLLM gives it
    check(join(2, one, nothing, Params(stop="c"), decode), b"abc", "abc", 3, "abort")


@pytest.mark.parametrize(
    ("first", "rest", "stop", "raw", "text"),
    [
        (b"one STO", b"P two", "STOP", b"one STOP", "one "),
        (b"one S", b"TOP two", ["STOP"], b"one STOP", "one "),
        (b"ab", b"cdcd", ["abcd", "bc"], b"abc", "a"),  # the one that ends first
        (b"aab", b"c", "bcd", b"aabc", "aabc"),
        (b"STOP one", b" two", "STOP", b"STOP one two", "STOP one two"),  # vLLM has let it pass: min_tokens
    ],
)
def test_a_stop_string_across_the_cut_ends_the_answer(
    first: bytes, rest: bytes, stop: Any, raw: bytes, text: str
) -> None:
    output = joined(first, rest, Params(stop=stop))
    check(output, raw, text, len(first), "length" if text == (first + rest).decode() else "stop")


def test_a_stop_string_may_stay_in_the_text() -> None:
    output = joined(b"one S", b"TOP two", Params(stop="STOP", include_stop_str_in_output=True))
    check(output, b"one STOP", "one STOP", 5, "stop")
    assert output.stop_reason == "STOP"


def test_a_stop_string_that_vllm_found_in_the_rest_stays_as_it_found_it() -> None:
    output = joined(b"one ", b"two.", Params(stop="."), "stop", "two")
    check(output, b"one two.", "one two", 4, "stop")


def test_a_stop_string_before_the_least_number_of_tokens_does_not_count() -> None:
    assert joined(b"S", b"TOP and on", Params(stop="STOP", min_tokens=6)).finish_reason == "length"
    assert joined(b"S", b"TOP and on", Params(stop="STOP", min_tokens=3)).finish_reason == "stop"


@pytest.mark.parametrize("cut", [5, 6])  # in the middle of a character of three bytes
def test_a_cut_inside_a_character_gives_the_whole_text(cut: int) -> None:
    raw = "a é€ b".encode()
    assert decode(raw[:cut]).endswith("\ufffd")
    output = joined(raw[:cut], raw[cut:], Params(), text="")  # vLLM was not asked for the rest's text
    check(output, raw, "a é€ b", cut, "length")


def test_half_a_character_at_the_end_has_no_text_as_in_vllm() -> None:
    one, two, three = "é".encode(), "ü".encode(), "ö".encode()
    check(joined(one[:1], one[1:] + two + three[:1], Params()), one + two + three[:1], "éü", 1, "length")


def test_a_token_that_ends_the_answer_has_no_text_after_a_cut_inside_a_character() -> None:
    raw = "é!".encode()
    assert joined(raw[:1], raw[1:], Params(), "stop", "").text == "é"
    assert joined(raw[:1], raw[1:], Params(include_stop_str_in_output=True), "stop", "").text == "é!"


def test_stop_strings_are_found_after_a_cut_inside_a_character() -> None:
    raw = "é and STOP and on".encode()
    check(joined(raw[:1], raw[1:], Params(stop="STOP"), text=""), raw[:11], "é and ", 1, "stop")


def test_the_rest_is_asked_for_with_what_is_left() -> None:
    params = Params(max_tokens=10, min_tokens=4, seed=100, stop="x")
    rest = sampling_for_rest(params, 2, P, part(b"abc", 0, 3), decode)
    assert (rest.n, rest.max_tokens, rest.min_tokens, rest.seed, rest.stop) == (1, 7, 1, 102, "x")
    assert rest.routed_experts_prompt_start == P + 2
    assert (params.n, params.max_tokens, params.seed) == (3, 10, 100)  # the user's own is left alone


@pytest.mark.parametrize("limit", [2, 3])
def test_an_answer_that_has_all_its_tokens_is_not_gone_on_with(limit: int) -> None:
    words = f"answer 1 to resume has 3 tokens already: max_tokens={limit} must be larger"
    with pytest.raises(ValueError, match=words):
        sampling_for_rest(Params(max_tokens=limit), 1, P, part(b"abc", 0, 3), decode)


@pytest.mark.parametrize(
    ("params", "can"),
    [
        (Params(), True),
        (Params(stop=["x"], seed=3), True),
        (Params(structured_outputs={"regex": "a"}), False),
        (Params(presence_penalty=0.1), False),
        (Params(bad_words=["two words"]), False),
    ],
)
def test_what_depends_on_where_the_answer_began_cannot_be_continued(params: Params, can: bool) -> None:
    assert can_continue(params) is can
