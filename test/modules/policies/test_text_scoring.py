"""Full sequences of every kind, as tokens; the wrapper over an engine is in ``test_engine_scorer.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Tokens

from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.data import KeptTokens
from torchrl_moe.modules.policies.scoring_wrapper import encode, read_sequences, refuse_other_tokens


def one_chat(*turns: str) -> TensorDict:
    roles = ["user", "assistant"] * len(turns)
    chat = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]
    return TensorDict(history=ChatHistory(full=History.from_chats([chat])), batch_size=[1])


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
def test_a_template_without_marks_shows_the_assistants_words(template: str, turns: list[str], said: str) -> None:
    found = encode(one_chat(*turns), source_of("history", "full", chat_template=template))
    (ids,), (mask,) = found.ids, found.assistant or []
    assert TOKENIZER.decode(ids[mask]) == said
    after = found.texts[0].index(";") + len(";assistant:")  # the first question ends before
    assert not mask[:after].any()


def test_words_that_a_template_changes_are_not_guessed_at() -> None:
    thoughts = one_chat("hi", "<think>no</think>yo")
    found = encode(thoughts, source_of("history", "full", chat_template=ANSWERS))
    assert (found.texts, found.assistant) == (["user:hi;assistant:yo;"], None)
    found = encode(one_chat("hi", "yo"), source_of("history", "full", chat_template_name="qwen"))
    assert found.texts[0].startswith("<|im_start|>system\nYou are a helpful assistant.")
    assert TOKENIZER.decode(found.ids[0][found.assistant[0]]) == "yo"


IDS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("own", [None, Tokens(full=torch.tensor([1, 2, 4]))])
def test_words_are_known_of_the_sampled_tokens_alone(own: Any) -> None:
    sample = TensorDict(sampling=TensorDict(temperature=torch.tensor(1.0)))
    if own is not None:
        sample["tokens"] = own
    td = lazy_stack([sample])
    refuse_other_tokens(td, "tokens", [IDS])
    td[0]["sampling", "kept"] = KeptTokens(ids=torch.tensor([3]), sizes=torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="sample 0 says which vocabulary entries"):
        refuse_other_tokens(td, "tokens", [IDS])
    td[0]["tokens"] = Tokens(full=IDS)
    refuse_other_tokens(td, "tokens", [IDS])


PAD, END = 256, 258


def mask_of(ids: list[int], pad: int | None, end: int = END, **entries: Any) -> list[int]:
    sample = TensorDict(ids=torch.tensor(ids), **entries)
    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=end)
    given = source_of("tokens", input_key="ids", tokenizer=tokenizer if pad is not None else None)
    (one,) = read_sequences([sample], given)
    assert one.ids.tolist() == ids
    return one.mask.int().tolist()


@pytest.mark.parametrize(
    ("ids", "real", "if_it_ends_turns"),
    [
        ([PAD, PAD, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1]),
        ([1, PAD, 2, PAD, PAD], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]),  # the first one behind the tokens is real
        ([PAD, PAD], [0, 0], [0, 0]),
    ],
)
def test_without_a_mask_pads_are_at_the_ends(ids: list[int], real: list[int], if_it_ends_turns: list[int]) -> None:
    assert mask_of(ids, PAD) == real
    assert mask_of(ids, PAD, end=PAD) == if_it_ends_turns
    assert mask_of(ids, None) == [1] * len(ids)
    masks = TensorDict(all_attention_mask=torch.arange(len(ids)) > 0)  # of the rollout: it comes first
    given = {"attention_mask": torch.ones(len(ids) - 1)}
    assert mask_of(ids, PAD, masks=masks, **given) == [0, *[1] * (len(ids) - 1)]
