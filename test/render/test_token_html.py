"""Tokens as HTML, read back: nothing runs, titles say all, and size is bounded."""

from __future__ import annotations

from html.parser import HTMLParser

from support.token_rollouts import TOKENIZER, rollout, sample, token
from torchrl_moe.render.tokens import MOST_TOKENS, describe, make_scale, read_samples, samples_html

NASTY = "<script>alert('1')</script>\" onmouseover=\"x"


class Reader(HTMLParser):
    """Spans with a title, and all text; refuses other tags than those of a display, and attributes that run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "span", "b", "br"}
        assert {name for name, _ in attrs} <= {"style", "title"}
        given = dict(attrs)
        self.styles.append(given.get("style") or "")
        if "title" in given:
            self.titles.append(given["title"] or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_in_a_rollout_runs() -> None:
    samples = read_samples(rollout("<|im_start|>" + NASTY, NASTY), 1, 999, tokenizer=TOKENIZER)
    whole = sample(token(NASTY))
    for shown in (samples, [whole]):
        html = samples_html(shown, make_scale(shown))
        assert "<script" not in html
        assert NASTY in Reader(html).text


def test_a_title_says_all_that_is_known() -> None:
    known = token(position=7, id=300, text="x", log_prob=-0.25, version=3, kept=20, experts={0: (1, 2), 4: (3, 5)})
    lines = ["token 7, id 300: x", "log-prob -0.25", "version 3", "sampled from 20 words"]
    routes = ["layer 0: experts 1, 2", "layer 4: experts 3, 5"]
    assert describe(known).split("\n") == lines + routes
    assert describe(known, layer=4).split("\n") == [*lines, routes[1]]
    assert describe(token(kept=0)).split("\n")[1:] == ["sampled from all words"]
    assert describe(token(kept=-2)).split("\n")[1:] == ["sampled from all but 2"]
    assert Reader(samples_html([sample(known)], make_scale([sample(known)]))).titles == [describe(known)]


def test_a_title_names_a_few_layers() -> None:
    deep = token(experts={layer: (0,) for layer in range(48)})
    assert describe(deep).split("\n")[-1] == "and 40 more layers"
    assert describe(deep, layer=40).split("\n")[1:] == ["layer 40: experts 0"]


def test_the_legend_counts_and_parts_are_named() -> None:
    shown = [sample(token("q", part="prompt"), token(version=1), token(version=1), 5, token("o", part="observation"))]
    text = Reader(samples_html(shown, make_scale(shown))).text
    assert "version 1 (2)" in text
    for words in ("[prompt] q", "[response] aa", "… 5 more tokens …", "[observation] o", "special token"):
        assert words in text
    assert "not known" in Reader(samples_html([], make_scale([]))).text


def test_colors_let_the_pages_own_text_be_seen() -> None:
    shown = [sample(token(version=1, special=True))]
    for style in Reader(samples_html(shown, make_scale(shown))).styles:
        for rule in filter(None, style.split(";")):
            name, value = rule.split(":")
            assert name != "color" or value == "inherit"
            assert name != "background" or value == "transparent" or value.startswith("rgba(")


def test_long_rollouts_of_deep_models_stay_small() -> None:
    deep = token(log_prob=-0.123456, version=123, kept=20, experts={at: tuple(range(100, 108)) for at in range(96)})
    shown = [sample(*[deep] * MOST_TOKENS)] * 4
    assert len(samples_html(shown, make_scale(shown))) < 1_000_000
