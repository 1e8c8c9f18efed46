"""Rows by hand, and those of the policy in each of its modes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens

from support.collecting import TOKENIZER, policy_of
from torchrl_moe.collectors.reports import SampleReader
from torchrl_moe.render.tokens import rows_of
from torchrl_moe.testing import FakeAsyncVLLM

READER = SampleReader(SimpleNamespace(tokenizer=TOKENIZER))


def ids(text: str) -> torch.Tensor:
    return torch.tensor(TOKENIZER.encode(text, add_special_tokens=False))


def row(answer: str = "42", reward: Any = 1.0, group: int = 7, **changed: Any) -> TensorDictBase:
    return TensorDict(
        {
            "text": TensorDict({"prompt": NonTensorData("1+1="), "response": NonTensorData(answer)}),
            "tokens": TensorDict({"prompt": ids("1+1="), "response": ids(answer)}),
            "next": TensorDict({"reward": torch.tensor(reward)}),
            "group_id": torch.tensor(group),
            "policy_versions": TensorDict({"full": torch.tensor([-1, -1, 3, 3, 5])}),
            "num_segments": torch.tensor(2),
            "finish_reason": NonTensorData("stop"),
            **changed,
        }
    )


def test_the_cells_of_a_row() -> None:
    cells = dict(zip(SampleReader.COLUMNS, READER.cells(row(reward=[[0.25]]), 80), strict=True))
    assert cells == {
        "group": "7",
        "prompt": "1+1=",
        "answer": "42",
        "reward": "0.25",
        "tokens": "2",
        "version": "3 to 5",
        "segments": "2",
        "finish_reason": "stop",
    }


def test_what_a_row_lacks_is_left_open() -> None:
    assert READER.cells(TensorDict(), 80) == ("–", "–", "–", "–", "0", "–", "–", "–")
    assert READER.cells(TensorDict({"policy_version": torch.tensor([4])}), 80)[5] == "4"
    unknown = row().exclude("num_segments")
    unknown["policy_versions", "full"][:] = -1
    assert READER.cells(unknown, 80)[5:7] == ("–", "–")


def test_any_text_stays_in_one_line_of_so_many_characters() -> None:
    answer = READER.cells(row("[red]\x1b[2J\n" + "x" * 100_000 + "end"), 40)[2]
    assert len(answer) == 40
    assert answer.startswith("[red]\\x1b[2J\\n") and answer.endswith("xend")
    assert READER.cells(row(""), 40)[2] == ""


def test_figures_of_a_batch() -> None:
    rows = [row("ab", 0.0), row("abcd", [[1.0]]), row("", [[0.5], [0.5], [2.0]], group=8)]  # one with token rewards
    found = READER.metrics(lazy_stack(rows))
    assert found == {
        "rows": 3,
        "groups": 2,
        "tokens": 6,
        "reward_mean": pytest.approx(4 / 3),
        "reward_std": pytest.approx(math.sqrt((16 + 1 + 25) / 9 / 3)),  # 0, 1 and 3 about 4/3
    }


def test_without_rewards_their_mean_is_nan() -> None:
    found = READER.metrics(lazy_stack([TensorDict(), TensorDict()]))
    assert (found["rows"], found["groups"], found["tokens"]) == (2, 0, 0)
    assert math.isnan(found["reward_mean"]) and math.isnan(found["reward_std"])


def test_rows_that_nobody_expects_are_counted_too() -> None:
    assert READER.metrics(lazy_stack([row()])[:0])["rows"] == 0
    strange = row(group_id=torch.tensor([1, 2]), next=TensorDict({"reward": NonTensorData("good")}))
    found = READER.metrics(lazy_stack([strange, row(group_id=NonTensorData("a"))]))
    assert (found["groups"], found["reward_mean"]) == (2, 1.0)
    assert READER.cells(strange, 80)[0] == "[1, 2]"
    assert READER.cells(strange, 80)[3] == "–"


def test_padding_is_no_token_and_no_text() -> None:
    """Two rows: a prompt of 3 and an answer of 2, and 1 and 4."""
    full = torch.tensor([[65, 66, 67, 97, 98, 0, 0], [0, 0, 68, 99, 100, 101, 102]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    tokens = Tokens(prompt=full[:, :3], response=full[:, 3:], full=full, padded=True, batch_size=[2])
    masks = Masks(all_attention_mask=mask, padded=True, batch_size=[2])
    padded = TensorDict({"tokens": tokens, "masks": masks}, [2])
    assert READER.metrics(padded)["tokens"] == 6
    decoded = [TOKENIZER.decode(part) for part in ([65, 66, 67], [97, 98], [68], [99, 100, 101, 102])]
    assert [READER.cells(one, 80)[1:3] for one in rows_of(padded)] == [tuple(decoded[:2]), tuple(decoded[2:])]
    assert [READER.cells(one, 80)[4] for one in rows_of(padded)] == ["2", "4"]
    bare = SampleReader(SimpleNamespace(tokenizer=None))
    assert bare.cells(padded[1], 80)[1:3] == ("[68]", "[99, 100, 101, 102]")


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("pad_output", [False, True])
def test_every_mode_shows_the_same_answer(mode: Literal["history", "text", "tokens"], pad_output: bool) -> None:
    texts = ["1+1=", "a longer question"]
    with FakeAsyncVLLM() as engine:
        policy = policy_of(engine, input_mode=mode, pad_output=pad_output)
        if mode == "history":
            chats = [History(role=["user"], content=[text], batch_size=[1]) for text in texts]
            given = TensorDict({"history": ChatHistory(prompt=lazy_stack(chats), batch_size=[2])}, [2])
        elif mode == "text":
            given = TensorDict({"text": Text(prompt=texts, batch_size=[2])}, [2])
        else:
            prompts = [Tokens(prompt=ids(text)) for text in texts]
            given = lazy_stack([TensorDict({"tokens": prompt}) for prompt in prompts])
        done = policy(given)
        reader = SampleReader(policy)
        assert reader.metrics(done)["tokens"] == 12
        for one, text in zip(rows_of(done), texts, strict=True):
            cells = dict(zip(SampleReader.COLUMNS, reader.cells(one, 200), strict=True))
            shown = f"<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n" if mode == "history" else text
            assert cells["prompt"] == shown
            answer = one["tokens", "response"].tolist()
            assert cells["answer"] == TOKENIZER.decode(answer)
            assert (cells["tokens"], cells["version"], cells["finish_reason"]) == ("6", "0", "length")
            assert cells["segments"] == "1"
