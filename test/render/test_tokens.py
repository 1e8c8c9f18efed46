"""Rollouts token by token: texts, what is read, what colors mean, and how they are shown."""

from __future__ import annotations

import inspect
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from support.token_rollouts import TOKENIZER, rollout, sample, token
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector, RayLLMCollector
from torchrl_moe.render import show_samples
from torchrl_moe.render import tokens as samples
from torchrl_moe.render.curves import HUES, OTHERS
from torchrl_moe.render.tokens import (
    Color,
    TokenSample,
    TokenTexts,
    describe,
    make_scale,
    print_samples,
    read_samples,
    rows_of,
    samples_html,
    samples_text,
)
from torchrl_moe.trainers import MoEGRPOTrainer


# -- the text of a token ----------------------------------------------------------------------------------------------
class Strict:
    """It raises at an id that it does not know, and has no name for it."""

    all_special_ids = ()

    def decode(self, ids: list[int], **_: Any) -> str:
        raise KeyError(ids[0])

    convert_ids_to_tokens = decode


def test_texts_of_tokens() -> None:
    texts = TokenTexts(TOKENIZER)
    assert texts.of([*b"a b", 10, 9, 13, 27, 258]) == ["a", " ", "b", "↵\n", "→\t", "␍", "\\x1b", "<|im_end|>"]
    assert texts.is_special(258) and not texts.is_special(97)
    # a character of several tokens stands at the first, half of one has the tokenizer's name
    assert texts.of(list("é€𝄞x".encode())) == ["é", "·", "€", "·", "·", "𝄞", "·", "·", "·", "x"]
    assert texts.of([0xC3, 97]) == [TOKENIZER.convert_ids_to_tokens(0xC3), "a"]
    assert texts.of([100_000]) == ["⟨100000⟩"] and TokenTexts(Strict()).of([7]) == ["⟨7⟩"]


# -- token sample -----------------------------------------------------------------------------------------------------
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
    row = rollout("ab", "c").exclude("routed_experts", "sampling", "masks")
    for key in (("tokens", "full"), ("tokens", "prompt"), ("log_probs", "full"), ("policy_versions", "full")):
        row[key] = torch.cat([row[key][:1], row[key][:1], row[key]])
    row["masks", "all_attention_mask"] = torch.tensor([False, False, True, True, True])
    for known in (row, row.exclude("policy_versions")):
        (sample,) = read(known)
        shown = [(token.text, token.part, token.log_prob) for token in sample.shown]
        assert shown == [("a", "prompt", None), ("b", "prompt", None), ("c", "response", -0.5)]


@pytest.mark.parametrize(
    "left_out",
    [
        [],
        ["policy_versions"],
        ["policy_versions", ("masks", "all_assistant_mask")],
        ["policy_versions", ("masks", "all_assistant_mask"), ("tokens", "prompt")],  # log-probs are left
    ],
)
def test_what_was_sampled_is_known_by_any_entry(left_out: list[Any]) -> None:
    (sample,) = read(rollout("ab", "cd").exclude(*left_out))
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
        ("abcdefgh", "ij", 4, "6ghij"),
        ("abcdefgh", "ijklmnop", 8, "6ghijk2nop"),
        ("a", "bcdefghij", 5, "abc5ij"),
        ("ab", "cd", 1, "2c1"),
    ],
)
def test_a_long_rollout_is_cut(prompt: str, answer: str, most: int, expected: str) -> None:
    """A number stands for so many tokens that are not shown."""
    (sample,) = read(rollout(prompt, answer), most=most)
    assert "".join(str(one) if isinstance(one, int) else one.text for one in sample.tokens) == expected
    assert all(one.part == ("prompt" if one.text in prompt else "response") for one in sample.shown)


def test_the_policy_names_keys_and_has_the_tokenizer() -> None:
    row = rollout("a", "b")
    row["words"] = row.pop("tokens")
    policy = SimpleNamespace(tokens_key="words", masks_key=None, tokenizer=TOKENIZER)
    (sample,) = read_samples(row, 1, 9, policy=policy)
    assert [token.text for token in sample.shown] == ["a", "b"]
    known = sample.shown[1].experts
    row["routes"] = row.pop("routed_experts")
    (sample,) = read_samples(row, 1, 9, policy=policy)
    assert not sample.shown[1].experts
    policy.routed_experts_key = "routes"
    (sample,) = read_samples(row, 1, 9, policy=policy)
    assert sample.shown[1].experts == known
    with pytest.raises(ValueError, match=r"no tokens at \('tokens', 'full'\)"):
        read(row)


def test_a_reward_is_summed_and_an_entry_of_another_length_refused() -> None:
    row = rollout("a", "bc")
    row["next", "reward"] = torch.tensor([[0.5], [1.0]], dtype=torch.bfloat16)
    assert read(row)[0].title.endswith("reward 1.5")
    row["policy_versions", "full"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"\('policy_versions', 'full'\) has 2 rows, and there are 3 tokens"):
        read(row)


# -- token scale ------------------------------------------------------------------------------------------------------
def test_versions_keep_their_colors_from_batch_to_batch() -> None:
    one = make_scale([sample(token(version=3), token(version=4))])
    two = make_scale([sample(token(version=4), token(version=5), token())])
    assert list(one.fills) == ["version 3", "version 4"]
    assert one.fills["version 4"] == two.fills["version 4"] == HUES[4]
    assert two.label(token()) is None and two.fill(token()) is None
    far = make_scale([sample(token(version=0), token(version=7))])
    assert far.fills["version 0"] != far.fills["version 7"]


def test_of_many_versions_the_newest_are_named() -> None:
    scale = make_scale([sample(*(token(version=at) for at in range(9)))])
    assert list(scale.fills) == ["older", *(f"version {at}" for at in range(2, 9))]
    assert scale.label(token(version=1)) == "older" and scale.fill(token(version=1)) == OTHERS
    assert len(set(scale.fills.values())) == 8


def test_experts_are_those_of_the_first_layer_with_routes_or_of_the_one_named() -> None:
    tokens = [token(experts={2: (5, 1), 3: (0, 1)}), token(experts={2: (1, 5)}), token()]
    scale = make_scale([sample(*tokens)], "experts")
    assert scale.title == "expert that stands first in layer 2"
    assert [scale.label(t) for t in tokens] == ["expert 5", "expert 1", None]
    assert list(scale.fills) == ["expert 1", "expert 5"]
    assert make_scale([sample(*tokens)], "experts", 3).label(tokens[0]) == "expert 0"
    with pytest.raises(ValueError, match="layer 1 has no routes in these samples: take one of 2, 3"):
        make_scale([sample(*tokens)], "experts", 1)
    assert make_scale([sample(token())], "experts").fills == {}


def test_of_many_experts_the_commonest_are_named() -> None:
    def scale_of(count: int) -> Any:
        return make_scale([sample(*(token(experts={0: (at,)}) for at in [*range(count), *range(2, count)]))], "experts")

    assert list(scale_of(8).fills) == [f"expert {at}" for at in range(8)]
    assert list(scale_of(9).fills) == [*(f"expert {at}" for at in range(2, 9)), "another expert"]
    assert len(set(scale_of(9).fills.values())) == len(set(scale_of(8).fills.values())) == 8


@pytest.mark.parametrize(
    ("color", "known", "label"),
    [
        ("kept", {}, None),
        *(("kept", {"kept": at}, label) for at, label in (
            (0, "all"), (-1, "all but some"), (1, "1 entry"), (2, "2 to 4 entries"), (4, "2 to 4 entries"),
            (5, "5 to 16 entries"), (16, "5 to 16 entries"), (17, "17 to 64 entries"), (64, "17 to 64 entries"),
            (65, "more"),
        )),
        *(("log_probs", {"log_prob": at}, label) for at, label in (
            (0.0, "p ≥ 0.9"), (0.001, "p ≥ 0.9"), (-0.11, "p 0.5 to 0.9"), (-0.7, "p 0.1 to 0.5"),
            (-2.4, "p 0.01 to 0.1"), (-5.0, "p < 0.01"), (None, None),
        )),
    ],
)  # fmt: skip
def test_numbers_kept_and_probabilities(color: Any, known: dict[str, Any], label: str | None) -> None:
    scale = make_scale([sample(token(**known))], color)
    assert scale.label(token(**known)) == label and list(scale.fills) == ([] if label is None else [label])


# -- token runs -------------------------------------------------------------------------------------------------------
SHOWN = [
    sample(
        token("[red]q", part="prompt"), token("a", version=0), token("↵\n", version=0), token("b", version=1), 3,
        token("o", part="observation"),
    )
]  # fmt: skip
TEXT = """\
version of the weights that sampled a token: version 0, version 1
sample 0: 6 response tokens
  prompt               [red]q
  response, version 0  a↵
  response, version 1  b
  …                    3 more tokens
  observation          o
"""


def test_each_run_of_one_label_is_a_line_in_a_file_and_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_samples(SHOWN, make_scale(SHOWN))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_samples(SHOWN, make_scale(SHOWN))
    assert capsys.readouterr().out == TEXT * 2
    assert samples_text([], make_scale([])) == "version of the weights that sampled a token: not known"


def test_a_terminal_gets_colors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    print_samples(SHOWN, make_scale(SHOWN))
    shown = capsys.readouterr().out
    assert "\x1b[" in shown and "[red]q" in shown
    black_on_blue = "\x1b[30;48;2;179;221;245m"  # sky blue, on white
    assert f"{black_on_blue}a\x1b[0m" in shown and "more tokens" in shown


# -- token html -------------------------------------------------------------------------------------------------------
NASTY = "<script>alert('1')</script>\" onmouseover=\"x"


class Reader(HTMLParser):
    """Titles, and all text; refuses other tags than those of a display, and attributes that run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.titles: list[str | None] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "span", "b", "br"}
        assert {name for name, _ in attrs} <= {"style", "title"}
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_in_a_rollout_runs() -> None:
    for shown in (read(rollout("<|im_start|>" + NASTY, NASTY), most=999), [sample(token(NASTY))]):
        html = samples_html(shown, make_scale(shown))
        assert "<script" not in html and NASTY in Reader(html).text


def test_a_title_says_all_that_is_known() -> None:
    known = token(position=7, id=300, text="x", log_prob=-0.25, version=3, kept=20, experts={0: (1, 2), 4: (3, 5)})
    lines = ["token 7, id 300: x", "log-prob -0.25", "version 3", "sampled from 20 vocabulary entries"]
    routes = ["layer 0: experts 1, 2", "layer 4: experts 3, 5"]
    assert describe(known).split("\n") == lines + routes
    assert describe(known, layer=4).split("\n") == [*lines, routes[1]]
    assert describe(token(kept=0)).split("\n")[1:] == ["sampled from all vocabulary entries"]
    assert describe(token(kept=-2)).split("\n")[1:] == ["sampled from all but 2 vocabulary entries"]
    assert Reader(samples_html([sample(known)], make_scale([sample(known)]))).titles == [describe(known)]


def test_the_legend_counts_and_parts_are_named() -> None:
    shown = [sample(token("q", part="prompt"), token(version=1), token(version=1), 5, token("o", part="observation"))]
    text = Reader(samples_html(shown, make_scale(shown))).text
    assert "version 1 (2)" in text
    for words in ("[prompt] q", "[response] aa", "… 5 more tokens …", "[observation] o", "special token"):
        assert words in text
    assert "not known" in Reader(samples_html([], make_scale([]))).text


# -- both -------------------------------------------------------------------------------------------------------------
TD = lazy_stack([rollout("q", "ab", versions=[0, 1]), rollout("q", "c")])


def test_a_terminal_shows_text(capsys: pytest.CaptureFixture[str]) -> None:
    before = TD.clone()
    show_samples(TD, n=1, tokenizer=TOKENIZER)
    assert bool((before.exclude(("log_probs", "full")) == TD.exclude(("log_probs", "full"))).all())
    assert capsys.readouterr().out.splitlines()[1] == "sample 1: 1 prompt, 1 response tokens"


def test_the_former_name_of_an_argument_is_taken_until_the_next_release(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(DeprecationWarning, match="colour= is now color="):
        show_samples(TD, colour="kept", tokenizer=TOKENIZER)  # type: ignore[call-arg]
    show_samples(TD, color="kept", tokenizer=TOKENIZER)
    shown = capsys.readouterr().out
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
    with pytest.raises(TypeError, match="give one of them"), pytest.warns(DeprecationWarning):
        show_samples(TD, color="kept", colour="kept")  # type: ignore[call-arg]
    for shows in (AsyncLLMCollector, LLMCollector, RayLLMCollector, MoEGRPOTrainer):
        assert "color" in inspect.signature(shows.show_samples).parameters
        with pytest.warns(DeprecationWarning), pytest.raises(AttributeError):  # it is looked at before anything else
            shows.show_samples(object(), colour="kept")  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize("color", get_args(Color))
def test_a_notebook_shows_html(
    color: Color, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(samples, "in_notebook", lambda: True)
    monkeypatch.setattr(samples, "show_html", lambda html, text: shown.append((html, text)))
    show_samples(TD, color=color, layer=2, tokenizer=TOKENIZER)
    ((html, text),) = shown
    assert html.startswith("<div") and "sample 0" in html and "sample 1" in html
    assert "layer 2: experts" in html and "layer 1" not in html
    assert text.splitlines()[1] == "sample 0: 1 prompt, 2 response tokens" and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("batch", "arguments", "told"),
    [
        (TD, {"n": 0}, "n must be an integer of at least 1, got 0"),
        (TD, {"tokens": 1.5}, "tokens must be an integer of at least 1, got 1.5"),
        (TD, {"color": "red"}, "color must be one of 'versions', 'experts', 'kept', 'log_probs', got 'red'"),
        (TD, {"tokenizer": "gpt2"}, "tokenizer must be"),
        (TensorDict(batch_size=[0]), {}, "the batch is empty"),
    ],
)
def test_what_cannot_be_shown_is_refused(batch: Any, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError if "tokenizer" in arguments else ValueError, match=told):
        show_samples(batch, **arguments)
