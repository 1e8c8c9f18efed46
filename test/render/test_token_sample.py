"""What is read from rollouts, against entries set by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from support.token_rollouts import TOKENIZER, rollout
from torchrl_moe.render.tokens import TokenSample, read_samples, rows_of


def read(td: Any, n: int = 4, most: int = 256, **kwargs: Any) -> list[TokenSample]:
    return read_samples(td, n, most, tokenizer=TOKENIZER, **kwargs)


def test_every_entry_of_a_token() -> None:
    (sample,) = read(rollout("ab", "cd", versions=[3, 4]))
    assert sample.title == "sample 0: 2 prompt, 2 response tokens"
    first, _, third, last = sample.shown
    assert (first.text, first.part, first.log_prob, first.version, first.kept) == ("a", "prompt", None, None, None)
    assert (third.text, third.part, third.log_prob, third.version, third.kept) == ("c", "response", -0.5, 3, 3)
    assert first.experts == {1: (0, 1), 2: (0, 1)}  # layer 0 is dense
    assert third.experts == {1: (2, 3), 2: (2, 3)}
    assert last.experts == {} and last.version == 4
    assert [token.position for token in sample.shown] == [0, 1, 2, 3]


def test_the_last_rows_of_any_batch_are_read() -> None:
    rows = [rollout("q", answer) for answer in ("a", "bc", "def", "ghij")]
    assert [s.index for s in read(lazy_stack(rows), n=2)] == [2, 3]
    nested = lazy_stack([lazy_stack(rows[:2]), lazy_stack(rows[2:])])
    assert ["".join(token.text for token in s.shown) for s in read(nested, n=9)] == ["qa", "qbc", "qdef", "qghij"]
    assert len(rows_of(nested)) == 4 and rows_of(rows[0]) == [rows[0]]


def test_pads_are_left_out() -> None:
    row = rollout("ab", "c").exclude("routed_experts", "sampling")
    padded = TensorDict(
        {
            key: torch.cat([value[:1], value[:1], value]) if key[-1] in ("full", "prompt") else value
            for key, value in row.items(include_nested=True, leaves_only=True)
            if key[0] != "masks"
        }
    )
    padded["masks", "all_attention_mask"] = torch.tensor([False, False, True, True, True])
    (sample,) = read(padded)
    assert "".join(token.text for token in sample.shown) == "abc"
    assert [token.part for token in sample.shown] == ["prompt", "prompt", "response"]


@pytest.mark.parametrize("known", ["versions", "assistant", "log_probs", "prompt"])
def test_what_was_sampled_is_known_by_any_entry(known: str) -> None:
    row = rollout("ab", "cd")
    if known != "versions":
        del row["policy_versions"]
    if known in ("log_probs", "prompt"):
        del row["masks", "all_assistant_mask"]
    if known == "log_probs":
        del row["tokens", "prompt"]
    (sample,) = read(row)
    assert [token.part for token in sample.shown] == ["prompt", "prompt", "response", "response"]


def test_tokens_between_turns_are_observations() -> None:
    row = rollout("ab", "cdef")
    row["policy_versions", "full"] = torch.tensor([-1, -1, 0, -1, 1, -1], dtype=torch.int32)
    (sample,) = read(row)
    assert [t.part for t in sample.shown] == ["prompt"] * 2 + ["response", "observation", "response", "observation"]
    assert sample.title == "sample 0: 2 prompt, 2 response, 2 observation tokens"


@pytest.mark.parametrize(
    ("prompt", "answer", "most", "expected"),
    [
        ("abcd", "efgh", 8, "abcdefgh"),
        ("abcdefgh", "ij", 4, [6, "gh", "ij"]),
        ("abcdefgh", "ijklmnop", 8, [6, "gh", "ijk", 2, "nop"]),
        ("a", "bcdefghij", 5, ["a", "bc", 5, "ij"]),
        ("ab", "cd", 1, [2, "c", 1]),
    ],
)
def test_a_long_rollout_is_cut(prompt: str, answer: str, most: int, expected: Any) -> None:
    (sample,) = read(rollout(prompt, answer), most=most)
    parts: list[Any] = []
    for token in sample.tokens:
        if isinstance(token, int):
            parts.append(token)
        elif parts and isinstance(parts[-1], list) and parts[-1][0] == token.part:
            parts[-1].append(token.text)
        else:
            parts.append([token.part, token.text])
    found = [part if isinstance(part, int) else "".join(part[1:]) for part in parts]
    assert found == expected or "".join(map(str, found)) == expected
    assert sum(part if isinstance(part, int) else len(part) for part in found) == len(prompt + answer)
    assert len(sample.shown) <= most


def test_the_policy_names_keys_and_has_the_tokenizer() -> None:
    row = rollout("a", "b")
    row["words"] = row.pop("tokens")
    policy = SimpleNamespace(tokens_key="words", masks_key=None, tokenizer=TOKENIZER)
    (sample,) = read_samples(row, 1, 9, policy=policy)
    assert [token.text for token in sample.shown] == ["a", "b"]
    with pytest.raises(ValueError, match=r"no tokens at \('tokens', 'full'\)"):
        read(row)


def test_a_reward_is_summed() -> None:
    row = rollout("a", "bc")
    row["next", "reward"] = torch.tensor([[0.5], [1.0]], dtype=torch.bfloat16)
    assert read(row)[0].title.endswith("reward 1.5")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": 1.5}, "n must be an integer of at least 1, got 1.5"),
        ({"most": None}, "tokens must be an integer of at least 1, got None"),
        ({"most": 0}, "tokens must be an integer of at least 1, got 0"),
    ],
)
def test_bad_numbers_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(rollout("a", "b"), **arguments)


def test_an_entry_of_another_length_is_refused() -> None:
    row = rollout("a", "bc")
    row["policy_versions", "full"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"\('policy_versions', 'full'\) has 2 rows, and there are 3 tokens"):
        read(row)
