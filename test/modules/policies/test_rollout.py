"""Every key of the contract, by hand: one answer, stacks of answers, padded answers, and answers of a later turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_moe.data import KeptTokens, RoutedExperts, RoutingLayout
from torchrl_moe.errors import RouteShapeError
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds
from torchrl_moe.modules.policies.rollout import (
    RolloutKeys,
    answer_tensordict,
    check_earlier_turn,
    pad_answers,
    sampling_entry,
    stack_answers,
)

NAN = float("nan")
U = -1
PAD = 99
LAYOUT = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)
KEYS = RolloutKeys()
DENSE = [U, U]
"""The dense layer's columns."""


def output(
    ids: list[int], log_probs: list[float] | None, rows: Any, versions: list[int], reason: str = "stop"
) -> CompletionOutput:
    """As an engine gives it: a row per token but the last, zeros on the dense layer, and nothing writable."""
    given: dict[str, Any] = {"token_ids": fixed(ids, np.int64), "policy_versions": fixed(versions, np.int32)}
    given["logprobs"] = None if log_probs is None else fixed(log_probs, np.float32)
    given["routed_experts"] = None if rows is None else fixed([[[0, 0], row] for row in rows], np.uint8)
    return CompletionOutput(index=0, text="", finish_reason=reason, **given)


def fixed(values: Any, dtype: Any) -> Any:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


def completion(prompt: list[int], *outputs: CompletionOutput, cached: int = 0) -> Completion:
    given: dict[str, Any] = {"prompt_token_ids": fixed(prompt, np.int64), "outputs": list(outputs)}
    return Completion(request_id="r", prompt=None, num_cached_tokens=cached, **given)


SHORT = completion([10, 11], output([12], [-0.5], [[5, 3], [0, 1]], [7]))
LONG = completion(
    [20, 21, 22],
    output([23, 24, 25], [-1, 0, -2], [[1, 2], [3, 4], [5, 6], [7, 0], [2, 1]], [9, 8, 9], "length"),
    cached=2,
)


def answer(
    source: Completion,
    keys: RolloutKeys = KEYS,
    layout: RoutingLayout | None = LAYOUT,
    earlier: TensorDictBase | None = None,
    params: Any = None,
) -> TensorDict:
    return answer_tensordict(source, source.outputs[0], layout, keys, params or {}, earlier)


def assert_values(tensor: torch.Tensor, values: Any, dtype: torch.dtype) -> None:
    assert tensor.dtype == dtype
    torch.testing.assert_close(tensor, torch.tensor(values, dtype=dtype), rtol=0, atol=0, equal_nan=True)


def test_an_answer_by_hand() -> None:
    td = answer(LONG)
    assert td.batch_size == torch.Size([])
    tokens, masks, log_probs = td["tokens"], td["masks"], td["log_probs"]
    assert (type(tokens), type(masks), type(log_probs)) == (Tokens, Masks, LogProbs)
    assert (tokens.padded, masks.padded, log_probs.padded, log_probs.prompt) == (False, False, False, None)
    assert_values(tokens.prompt, [20, 21, 22], torch.int64)
    assert_values(tokens.response, [23, 24, 25], torch.int64)
    assert_values(tokens.full, [20, 21, 22, 23, 24, 25], torch.int64)
    assert_values(masks.all_attention_mask, [True] * 6, torch.bool)
    assert_values(masks.all_assistant_mask, [False] * 3 + [True] * 3, torch.bool)
    assert_values(log_probs.response, [-1, 0, -2], torch.float32)
    assert_values(log_probs.full, [NAN, NAN, NAN, -1, 0, -2], torch.float32)
    assert type(td["routed_experts"]) is RoutedExperts
    rows = [[1, 2], [3, 4], [5, 6], [7, 0], [2, 1], [U, U]]
    assert_values(td["routed_experts", "full"], [[DENSE, row] for row in rows], torch.int8)
    assert_values(td["policy_versions", "full"], [U, U, U, 9, 8, 9], torch.int32)
    assert_values(td["policy_version"], 8, torch.int64)
    assert_values(td["num_segments"], 3, torch.int64)  # 9, 8, 9
    assert (td["resume"], td["finish_reason"]) == ("none", "length")
    assert_values(td["num_cached_tokens"], 2, torch.int64)
    assert set(td["routed_experts"].keys()) == {"full"}
    assert set(td.keys()) == {
        *("tokens", "masks", "log_probs", "routed_experts", "policy_versions", "policy_version"),
        *("num_segments", "resume", "finish_reason", "num_cached_tokens", "sampling"),
    }
    again = answer(LONG)  # each owns its memory
    for key in (("tokens", "full"), ("log_probs", "response"), ("log_probs", "full"), ("policy_versions", "full")):
        td[key].fill_(0)
    assert LONG.outputs[0].token_ids.tolist() == [23, 24, 25]
    assert td["tokens", "prompt"].tolist() == [20, 21, 22]
    assert_values(again["log_probs", "response"], [-1, 0, -2], torch.float32)


def test_missing_rows_are_unset_and_those_that_do_not_fit_refused() -> None:
    source = completion([10, 11], output([12], [-0.5], None, [7]))
    assert_values(answer(source)["routed_experts", "full"], [[DENSE, DENSE]] * 3, torch.int8)
    source = completion([10, 11, 12], SHORT.outputs[0])
    with pytest.raises(RouteShapeError, match="must have 3 rows, got 2"):
        answer(source)
    layout = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=129)
    assert answer(SHORT, layout=layout)["routed_experts", "full"].dtype == torch.int16


def test_an_answer_without_a_token_has_no_version() -> None:
    td = answer(completion([10, 11], output([], [], [[5, 3]], [])))
    assert_values(td["policy_version"], U, torch.int64)
    assert_values(td["num_segments"], 0, torch.int64)
    assert_values(td["tokens", "full"], [10, 11], torch.int64)
    assert_values(td["routed_experts", "full"][:, 1], [[5, 3], [U, U]], torch.int8)
    with pytest.raises(ValueError, match="the engine returned no log-probs"):
        answer(completion([10, 11], output([12], None, [[5, 3], [0, 1]], [7])))


KEPT = ("sampling", "kept")


def sampled(source: Completion, ids: list[int], sizes: list[int]) -> Completion:
    """The same answer, over less than all words."""
    kept = KeptIds(np.array(ids, np.int32), np.array(sizes, np.int32))
    return replace(source, outputs=[replace(source.outputs[0], kept=kept)])


def words_of(td: TensorDictBase) -> tuple[list[Any], list[Any]]:
    kept = td.get(KEPT)
    assert type(kept) is KeptTokens
    return kept.ids.tolist(), kept.sizes.tolist()


def test_the_sampling_of_an_answer_by_hand() -> None:
    td = answer(sampled(LONG, [24, 3, 7], [0, -2, 1]), params={"temperature": 0.5, "top_k": 4})
    assert_values(td["sampling", "temperature"], 0.5, torch.float32)
    assert words_of(td) == ([24, 3, 7], [0, 0, 0, 0, -2, 1])
    assert set(answer(LONG)["sampling"].keys()) == {"temperature"}
    # all words were kept, and might not have been
    assert words_of(answer(LONG, params={"top_p": 0.9, "logprobs": 0})) == ([], [0] * 6)
    stack = stack_answers([answer(sampled(SHORT, [12], [1])), answer(sampled(LONG, [24, 3, 7], [0, -2, 1]))], (2,))
    assert [words_of(one) for one in stack.unbind(0)] == [([12], [0, 0, 1]), ([24, 3, 7], [0, 0, 0, 0, -2, 1])]


def test_padding_by_hand() -> None:
    td = pad_answers([answer(SHORT), answer(LONG)], PAD, KEYS, (2,))
    assert (type(td), td.batch_size) == (TensorDict, torch.Size([2]))
    tokens, masks, log_probs = td["tokens"], td["masks"], td["log_probs"]
    assert (type(tokens), type(masks), type(log_probs)) == (Tokens, Masks, LogProbs)
    assert (tokens.padded, masks.padded, log_probs.padded, log_probs.prompt) == (True, True, True, None)
    assert_values(tokens.prompt, [[PAD, 10, 11], [20, 21, 22]], torch.int64)
    assert_values(tokens.response, [[12, PAD, PAD], [23, 24, 25]], torch.int64)
    assert_values(tokens.full, [[PAD, 10, 11, 12, PAD, PAD], [20, 21, 22, 23, 24, 25]], torch.int64)
    assert_values(masks.all_attention_mask, [[False] + [True] * 3 + [False] * 2, [True] * 6], torch.bool)
    assert_values(masks.all_assistant_mask, [[False] * 3 + [True] + [False] * 2, [False] * 3 + [True] * 3], torch.bool)
    assert_values(log_probs.response, [[-0.5, 0, 0], [-1, 0, -2]], torch.float32)
    assert_values(log_probs.full, [[0, NAN, NAN, -0.5, 0, 0], [NAN, NAN, NAN, -1, 0, -2]], torch.float32)
    assert type(td["routed_experts"]) is RoutedExperts
    short, long = [DENSE, [5, 3], [0, 1], DENSE, DENSE, DENSE], [[1, 2], [3, 4], [5, 6], [7, 0], [2, 1], DENSE]
    rows = [[[DENSE, row] for row in sample] for sample in (short, long)]
    assert_values(td["routed_experts", "full"], rows, torch.int8)
    assert_values(td["policy_versions", "full"], [[U, U, U, 7, U, U], [U, U, U, 9, 8, 9]], torch.int32)
    for key, values in {"policy_version": [7, 8], "num_segments": [1, 3], "num_cached_tokens": [0, 2]}.items():
        assert_values(td[key], values, torch.int64)
    assert list(td["finish_reason"]) == ["stop", "length"]


TURN = answer(SHORT)
"""Ids 10, 11 | 12."""
NEXT = completion([10, 11, 12, 30], output([31], [-4], [[7, 6], [6, 5], [5, 4], [4, 3]], [9]))
"""A later turn, by newer weights, on other experts."""


PER_TOKEN = (("routed_experts", "full"), ("log_probs", "full"), ("policy_versions", "full"))


def test_an_earlier_turn_keeps_its_routes_log_probs_and_versions() -> None:
    td = answer(NEXT, earlier=TURN)
    # the last token of the earlier turn was never forwarded then, so its row is of now
    rows = [[5, 3], [0, 1], [5, 4], [4, 3], [U, U]]
    assert_values(td["routed_experts", "full"], [[DENSE, row] for row in rows], torch.int8)
    assert_values(td["log_probs", "full"], [NAN, NAN, -0.5, NAN, -4], torch.float32)
    assert_values(td["policy_versions", "full"], [U, U, 7, U, 9], torch.int32)
    # what is of this turn alone stays so, and the earlier turn is left as it was
    assert_values(td["log_probs", "response"], [-4], torch.float32)
    assert_values(td["tokens", "prompt"], [10, 11, 12, 30], torch.int64)
    assert_values(td["masks", "all_assistant_mask"], [False] * 4 + [True], torch.bool)
    assert td["policy_version"] == 9
    # nor does it matter how the earlier turn is padded, or in which dtype its routes are
    wide = TURN.clone()
    wide["routed_experts"] = RoutedExperts(full=TURN["routed_experts", "full"].to(torch.int64))
    padded = pad_answers([TURN, answer(LONG)], PAD, KEYS, (2,))[0]
    for key in PER_TOKEN:
        torch.testing.assert_close(TURN[key], answer(SHORT)[key], equal_nan=True)
        for earlier in (wide, padded):
            torch.testing.assert_close(answer(NEXT, earlier=earlier)[key], td[key], equal_nan=True)
    # and a third one
    third = completion([10, 11, 12, 30, 31], output([32], [-6], [[1, 0], [1, 0], [1, 0], [1, 0], [2, 3]], [11]))
    td = answer(third, earlier=td)
    assert td["routed_experts", "full"][:, 1].tolist() == [[5, 3], [0, 1], [5, 4], [4, 3], [2, 3], [U, U]]
    assert_values(td["log_probs", "full"], [NAN, NAN, -0.5, NAN, -4, -6], torch.float32)
    assert_values(td["policy_versions", "full"], [U, U, 7, U, 9, 11], torch.int32)


FIRST, SECOND = sampled(SHORT, [12, 5], [2]), sampled(NEXT, [31], [1])
"""The turn and the next one, over less than all words."""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (FIRST, SECOND, ([12, 5, 31], [0, 0, 2, 0, 1])),
        (FIRST, NEXT, ([12, 5], [0, 0, 2, 0, 0])),
        (SHORT, SECOND, ([31], [0, 0, 0, 0, 1])),
    ],
)
@pytest.mark.parametrize("beside", [None, LONG, sampled(LONG, [1, 2, 3, 4], [4, 0, 0])])
def test_words_of_turns_join(first: Completion, second: Completion, expected: Any, beside: Completion | None) -> None:
    """Alone, and padded beside a longer answer without and with words left out."""
    earlier: TensorDictBase = answer(first)
    if beside is not None:
        earlier = pad_answers([earlier, answer(beside)], PAD, KEYS, (2,))[0]
    assert words_of(answer(second, earlier=earlier)) == expected


def resumed(source: Completion, how: Any) -> Completion:
    """The same answer, of which a later part read the earlier ones so."""
    return replace(source, outputs=[replace(source.outputs[0], resume=how)])


@pytest.mark.parametrize(
    ("first", "second", "worst"), [("none", "none", "none"), ("none", "forced", "forced"), ("live", "forced", "live")]
)
@pytest.mark.parametrize("padded", [False, True])
def test_turns_say_how_the_worst_of_them_was_resumed(first: str, second: str, worst: str, padded: bool) -> None:
    earlier: TensorDictBase = answer(resumed(SHORT, first))
    if padded:
        earlier = pad_answers([earlier, answer(LONG)], PAD, KEYS, (2,))[0]
    td = answer(resumed(NEXT, second), earlier=earlier)
    assert td["resume"] == worst
    assert_values(td["num_segments"], 2, torch.int64)  # 7 and 9
    assert answer(resumed(NEXT, second), earlier=earlier.exclude("resume"))["resume"] == second


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_were_resumed_otherwise_stand_in_one_batch(padded: bool, tmp_path: Path) -> None:
    """Also once they were saved, in any shape."""
    answers = [answer(resumed(SHORT, how)) for how in ("none", "live", "forced", "none")]
    for shape in ((4,), (2, 2)):
        td = pad_answers(answers, PAD, KEYS, shape) if padded else stack_answers(answers, shape)
        folder = tmp_path / f"{len(shape)}"
        td.memmap(str(folder))
        for one in (td, TensorDict.load_memmap(str(folder))):
            assert list(one.reshape(-1)["resume"]) == ["none", "live", "forced", "none"]
            assert one["num_segments"].tolist() == torch.ones(shape).tolist()


@pytest.mark.parametrize(
    "prompt", [[10, 11, 13, 30], [10, 11], [11, 12, 30]], ids=["rendered again", "the same once more", "cut in front"]
)
def test_another_prompt_keeps_nothing(prompt: list[int]) -> None:
    source = completion(prompt, output([12], [-4], [[7, 6]] * len(prompt), [9]))
    earlier = answer(resumed(FIRST, "live"))
    fresh, td = answer(source), answer(source, earlier=earlier)
    for key in (*PER_TOKEN, "num_segments"):
        torch.testing.assert_close(td[key], fresh[key], equal_nan=True)
    assert (td["resume"], td.get(KEPT, None)) == ("none", None)
    assert words_of(answer(sampled(source, [12], [1]), earlier=earlier)) == ([12], [0] * len(prompt) + [1])


def test_rows_of_other_tokens_than_the_ids_are_not_trusted_and_a_turn_may_have_none() -> None:
    earlier = TURN.clone()
    earlier["log_probs"] = LogProbs(full=torch.tensor([-9.0, -9.0]))  # of two tokens, and the turn has three
    for one in (earlier, TURN.exclude("log_probs")):
        td = answer(NEXT, earlier=one)
        assert_values(td["log_probs", "full"], [NAN] * 4 + [-4], torch.float32)
        assert_values(td["policy_versions", "full"], [U, U, 7, U, 9], torch.int32)


@pytest.mark.needs_vllm
@pytest.mark.parametrize("given", [0.0, 1e-7, 1e-3, 0.01, 0.5, None, "default"])
def test_the_temperature_is_the_one_that_vllm_samples_at(given: Any) -> None:
    """It raises those that are nearly 0."""
    from vllm import SamplingParams

    params = {} if given == "default" else {"temperature": given}
    one = sampling_entry(params, None, 2, 4, None, None)
    used = 1.0 if given is None else SamplingParams(**params).temperature
    assert_values(one["temperature"], used, torch.float32)


def test_words_of_other_tokens_than_the_earlier_turns_are_refused() -> None:
    check_earlier_turn({}, answer(FIRST), torch.ones(3).bool())
    with pytest.raises(ValueError, match=r"\('sampling', 'kept'\) of the turn before is for 3 tokens, and it has 2"):
        check_earlier_turn({}, answer(FIRST), torch.ones(2).bool())
