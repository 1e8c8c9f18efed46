"""The fake engine's answers: the same in one part or in several. What they are like is in ``test_fake_engine.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.completions import cut
from support.routes import rows_of
from torchrl_moe.errors import RouteShapeError, RouteValueError
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.testing.fake_engine import LAYOUT
from torchrl_moe.testing.fake_model import FakeModel, tokens_to_come

PROMPT = np.array([104, 105], np.int64)
OLD, NEW = FakeModel(3, 0, LAYOUT), FakeModel(3, 1, LAYOUT)


def ask(resume: Completion | None = None, **params: Any) -> Request:
    params = {"max_tokens": 6, "logprobs": 0, "n": 2, **params}
    return Request(request_id="r", sampling_params=params, prompt="hi", resume=resume)


def complete(request: Request, model: FakeModel = OLD, tokens: int = 6) -> Any:
    outputs = [model.answer(request, PROMPT, index, tokens) for index in range(2)]
    return Completion(request_id="r", prompt="hi", prompt_token_ids=PROMPT, num_cached_tokens=0, outputs=outputs)


@pytest.mark.parametrize("tokens", [(2, 4), (0, 5), (1, None)])
def test_an_answer_in_two_parts_is_the_same_and_its_first_rows_win(tokens: Any) -> None:
    full = complete(ask())
    partial = cut(full, *tokens)
    marked = [
        replace(output, routed_experts=None if output.routed_experts is None else 0 * output.routed_experts + 99)
        for output in partial.outputs
    ]
    done = complete(ask(replace(partial, outputs=marked)))
    for got, output, had in zip(done.outputs, full.outputs, marked, strict=True):
        count = len(had.token_ids)
        assert got.token_ids.tolist() == output.token_ids.tolist()
        assert (got.text, got.finish_reason) == (output.text, "length")
        assert got.logprobs.tolist() == output.logprobs.tolist()
        known = len(PROMPT) + count - 1 if count else 0
        assert (got.routed_experts[:known] == 99).all()
        assert np.array_equal(got.routed_experts[known:], output.routed_experts[known:])


def test_each_part_keeps_the_version_that_made_it_and_may_be_cut_again() -> None:
    partial = cut(complete(ask()), 2, None)
    first, second = complete(ask(partial), NEW).outputs
    assert first.policy_versions.tolist() == [0, 0, 1, 1, 1, 1]
    assert second is partial.outputs[1]
    first, second = complete(ask(cut(complete(ask()), 2, 5)), tokens=1).outputs
    assert [(len(one.token_ids), one.finish_reason) for one in (first, second)] == [(3, "abort"), (6, "length")]


def test_the_shortest_answer_has_most_tokens_to_come() -> None:
    full = complete(ask())
    assert tokens_to_come(ask()) == 6
    assert tokens_to_come(ask(max_tokens=None)) == 16
    assert tokens_to_come(ask(cut(full, 2, 5))) == 4
    assert tokens_to_come(ask(cut(full, None, 5))) == 1
    with pytest.raises(ValueError, match="an answer to resume has 5 tokens already: max_tokens=5 must be larger"):
        tokens_to_come(ask(cut(full, 2, 5), max_tokens=5))


def follow(rows: Any, model: FakeModel = OLD, **fields: Any) -> Request:
    asked = replace(ask(), prompt=None, prompt_token_ids=PROMPT.astype(np.int32), routed_experts=rows, **fields)
    return model.checked(asked)


def test_one_layer_may_be_followed_and_another_not() -> None:
    rows = rows_of(6)
    rows[:, 2] = -1
    (output, _) = complete(follow(rows)).outputs
    (own, _) = complete(ask()).outputs
    assert output.routed_experts[0].tolist() == [[0, 0], [6, 7], own.routed_experts[0, 2].tolist(), [6, 7]]
    # no token yet: an answer's rows begin with that of the prompt's last token, which was not computed
    (output, _) = complete(follow(rows_of(6, 5)), tokens=0).outputs
    assert output.routed_experts[:, 1].tolist() == [[6, 7]]
    assert complete(follow(rows_of(6), return_routed_experts=False)).outputs[0].routed_experts is None
    whole = complete(follow(rows_of(6, 5)))
    for got, expected in zip(complete(ask(cut(whole, 2, 3))).outputs, whole.outputs, strict=True):
        assert np.array_equal(got.routed_experts, expected.routed_experts)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (rows_of(1, 2, 3), RouteShapeError, "at most a row per prompt token, 2, got 3"),
        (rows_of(7), RouteValueError, "token 0, layer 1 holds expert 8"),
        (rows_of(6).astype(np.uint8), RouteValueError, "signed integer"),
        (rows_of(6)[:, :, :1], RouteShapeError, r"got \[1, 4, 1\]"),
    ],
)
def test_bad_rows_are_refused_as_a_real_engine_refuses_them(rows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        follow(rows)


def test_a_model_that_cannot_follow_refuses_what_asks_for_it() -> None:
    unable = replace(OLD, forced_routing_unavailable_reason="it speculates")
    for fields in ({"rows": rows_of(6)}, {"rows": None, "on_resume": "forced"}):
        with pytest.raises(ValueError, match="cannot follow recorded experts: it speculates"):
            follow(model=unable, **fields)
    with pytest.raises(ValueError, match="cannot follow recorded experts"):
        follow(rows_of(6), replace(OLD, layout=None))
    assert follow(None, unable, on_resume="live").on_resume == "live"


@pytest.mark.parametrize(
    ("model", "fields", "how"),
    [
        (NEW, {}, "forced"),
        (NEW, {"on_resume": "live"}, "live"),
        (replace(NEW, forced_routing_unavailable_reason="it speculates"), {}, "live"),
    ],
)
def test_an_answer_in_parts_says_how_the_later_ones_read_the_earlier(model: FakeModel, fields: Any, how: str) -> None:
    full = complete(ask())
    assert [output.resume for output in full.outputs] == ["none", "none"]
    first, second = complete(replace(ask(cut(full, 2, None)), **fields), model).outputs
    assert (first.resume, second.resume) == (how, "none")
    assert complete(replace(ask(cut(full, 0, None)), **fields), model).outputs[0].resume == "none"  # begins again
    part = complete(replace(ask(cut(full, 2, 2)), **fields), model, tokens=1)
    again = complete(replace(ask(part), on_resume="forced"))  # one part that was read live is enough
    assert [output.resume for output in again.outputs] == [how, how]


def scripted(prompt: str) -> str | None:
    return {"hi": "héy", "<|im_start|>user": "chat"}.get(prompt)


def test_a_script_says_what_is_answered_and_ends_the_turn() -> None:
    """Bytes of ``héy``, and 258, the end of a turn."""
    model = FakeModel(3, 0, LAYOUT, scripted)
    output: Any = model.answer(ask(), PROMPT, 0, 6)
    assert output.token_ids.tolist() == [104, 195, 169, 121, 258]
    assert (output.text, output.finish_reason) == ("héy", "stop")
    assert (len(output.logprobs), len(output.routed_experts)) == (5, len(PROMPT) + 4)
    short = FakeModel(3, 0, LAYOUT, scripted).answer(ask(max_tokens=4), PROMPT, 0, 9)  # too long for it
    assert (len(short.token_ids), short.finish_reason) == (4, "length")
    chat = np.array([257, *b"user"], np.int64)
    assert model.answer(ask(), chat, 0, 6).text == "chat"
    other = model.answer(ask(), np.array([105], np.int64), 0, 6)
    assert other.token_ids.tolist() == OLD.answer(ask(), np.array([105], np.int64), 0, 6).token_ids.tolist()


@pytest.mark.parametrize("had", [0, 2, 4])
def test_a_scripted_answer_may_be_cut_and_continues(had: int) -> None:
    """After the second token the text ends within a letter."""
    full = complete(ask(), FakeModel(3, 0, LAYOUT, scripted))
    partial = complete(ask(), FakeModel(3, 0, LAYOUT, scripted), tokens=had)
    assert [(len(output.token_ids), output.finish_reason) for output in partial.outputs] == [(had, "abort")] * 2
    done = complete(ask(partial), FakeModel(3, 1, LAYOUT, scripted))
    for got, output in zip(done.outputs, full.outputs, strict=True):
        assert got.token_ids.tolist() == output.token_ids.tolist()
        assert got.policy_versions.tolist() == [0] * had + [1] * (5 - had)
        assert (got.text, got.finish_reason) == ("héy", "stop")
