"""Text and chats as tokens, and the entries that stand beside scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.data import KeptTokens
from torchrl_moe.modules.policies.scoring import ScoringBatch
from torchrl_moe.modules.policies.scoring_wrapper import (
    encode,
    log_prob_entry,
    mask_entry,
    refuse_other_tokens,
    token_entry,
    without_pads,
)
from torchrl_moe.testing import ByteTokenizer

SOURCE = source_of("text", "full")
CHATS = replace(SOURCE, input_mode="history", input_key=("history", "full"))
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def chats() -> TensorDict:
    return TensorDict(history=ChatHistory(full=History.from_chats([CHAT, [*CHAT, *CHAT]][:1])), batch_size=[1])


def one_chat(*turns: str) -> TensorDict:
    roles = ["user", "assistant"] * len(turns)
    chat = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]
    return TensorDict(history=ChatHistory(full=History.from_chats([chat])), batch_size=[1])


def test_text() -> None:
    found = encode(TensorDict(text=Text(full=["hi", "é"]), batch_size=[2]), SOURCE)
    assert [ids.tolist() for ids in found.ids] == [[104, 105], [195, 169]]
    assert (found.texts, found.assistant) == (["hi", "é"], None)
    assert found.text_entry().full == ["hi", "é"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "yo<|im_end|>"),  # the tokenizer's own: the end of a turn is the assistant's to say
    ],
)
def test_chats_and_what_the_assistant_said(template: str | None, said: str) -> None:
    found = encode(chats(), replace(CHATS, chat_template=template))
    (ids,), (mask,) = found.ids, found.assistant or []
    assert TOKENIZER.decode(ids) == found.texts[0]
    assert TOKENIZER.decode(ids[mask]) == said
    assert not found.texts[0].endswith("assistant\n")  # no prompt to continue


PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
TRIMMED = PLAIN.replace("m.content", "(m.content | trim)")
ANSWERS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        (PLAIN, ["yes or no?", "no"], "no"),  # not the question's "no"
        (PLAIN, ["assistant:user", "user", "a", "r:a"], "userr:a"),
        (TRIMMED, ["no? ", " no\n"], "no"),
        (ANSWERS, ["hi", "yo"], "yo"),
        (PLAIN, ["hi", ""], ""),
    ],
)
def test_a_template_without_marks_says_where_it_puts_the_assistants_words(
    template: str, turns: list[str], said: str
) -> None:
    found = encode(one_chat(*turns), replace(CHATS, chat_template=template))
    (ids,), (mask,) = found.ids, found.assistant or []
    assert TOKENIZER.decode(ids[mask]) == said
    after = found.texts[0].index(";") + len(";assistant:")  # the first question ends before
    assert not mask[:after].any()


def test_words_that_a_template_changes_are_not_guessed_at() -> None:
    thoughts = one_chat("hi", "<think>no</think>yo")
    found = encode(thoughts, replace(CHATS, chat_template=ANSWERS))
    assert (found.texts, found.assistant) == (["user:hi;assistant:yo;"], None)


def test_one_of_a_tokenizers_templates_is_for_chats() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = {"default": PLAIN, "tool_use": "{{ tools }}"}
    assert encode(chats(), replace(CHATS, tokenizer=tokenizer)).texts == ["user:hi;assistant:yo;"]


def test_a_named_template() -> None:
    found = encode(chats(), replace(CHATS, chat_template_name="qwen"))
    assert found.texts[0].startswith("<|im_start|>system\nYou are a helpful assistant.")
    assert found.assistant is not None
    assert TOKENIZER.decode(found.ids[0][found.assistant[0]]) == "yo"


def test_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"Expected \('text', 'full'\) key in sample 0"):
        encode(chats(), SOURCE)
    with pytest.raises(TypeError, match="Expected History object"):
        encode(TensorDict(text=Text(full=["hi"]), batch_size=[1]), replace(SOURCE, input_mode="history"))


ROWS = [torch.tensor([1, 2, 3]), torch.tensor([4])]


def test_entries_as_a_lazy_stack() -> None:
    td = lazy_stack([TensorDict(), TensorDict()])
    td["tokens"] = token_entry(ROWS, None)
    td["masks"] = mask_entry([row > 0 for row in ROWS], [row > 1 for row in ROWS], False)
    assert [row.tolist() for row in td.get(("tokens", "full"), as_list=True)] == [[1, 2, 3], [4]]
    assert td[0]["masks", "all_assistant_mask"].tolist() == [False, True, True]
    assert not td[1]["tokens"].padded
    assert mask_entry([row > 0 for row in ROWS], None, False)[0].all_assistant_mask is None


def test_entries_as_one_tensor() -> None:
    tokens = token_entry(ROWS, 9)
    assert tokens.full.tolist() == [[1, 2, 3], [9, 9, 4]]
    masks = mask_entry([row > 0 for row in ROWS], [row > 1 for row in ROWS], True)
    assert masks.all_attention_mask.int().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert masks.all_assistant_mask.int().tolist() == [[0, 1, 1], [0, 0, 1]]
    assert mask_entry([row > 0 for row in ROWS], None, True).all_assistant_mask is None
    assert tokens.batch_size == masks.batch_size == (2,)
    assert tokens.padded is masks.padded is True


def test_log_probs_as_either() -> None:
    log_probs = torch.tensor([[0.0, -1.0, -2.0], [0.0, 0.0, -3.0]])
    batch = ScoringBatch(torch.ones(2, 3).long(), torch.ones(2, 3).bool(), (3, 1))
    ragged = log_prob_entry(batch, log_probs, False)
    assert [one.full.tolist() for one in ragged.unbind(0)] == [[0.0, -1.0, -2.0], [-3.0]]
    assert torch.equal(log_prob_entry(batch, log_probs, True).full, log_probs)


@pytest.mark.parametrize("own", [None, Tokens(full=torch.tensor([1, 2, 4]))])
def test_words_are_known_of_the_sampled_tokens_alone(own: Any) -> None:
    sample = TensorDict(sampling=TensorDict(temperature=torch.tensor(1.0)))
    if own is not None:
        sample["tokens"] = own
    td = lazy_stack([sample])
    refuse_other_tokens(td, "tokens", [ROWS[0]])
    td[0]["sampling", "kept"] = KeptTokens(ids=torch.tensor([3]), sizes=torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"sample 0 says from which words .* its text makes other tokens"):
        refuse_other_tokens(td, "tokens", [ROWS[0]])
    td[0]["tokens"] = Tokens(full=ROWS[0])
    refuse_other_tokens(td, "tokens", [ROWS[0]])


def test_pads_are_those_at_the_ends() -> None:
    ids = torch.tensor([[0, 3, 0, 4, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    assert without_pads(ids, 0).int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
