"""Rollouts shown where somebody looks."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
from tensordict import TensorDict, lazy_stack

from support.token_rollouts import TOKENIZER, rollout
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector, RayLLMCollector
from torchrl_moe.render import show_samples
from torchrl_moe.render import tokens as samples
from torchrl_moe.render.tokens import Color
from torchrl_moe.trainers import MoEGRPOTrainer

TD = lazy_stack([rollout("q", "ab", versions=[0, 1]), rollout("q", "c")])


def test_a_terminal_shows_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_samples(TD, n=1, tokenizer=TOKENIZER)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "sample 1: 1 prompt, 1 response tokens",
        "  prompt               q",
        "  response, version 0  c",
    ]


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
    assert text.splitlines()[1] == "sample 0: 1 prompt, 2 response tokens"
    assert capsys.readouterr().out == ""


def test_the_rollouts_are_not_changed() -> None:
    before = TD.clone()
    show_samples(TD, color="experts")
    assert bool((before.exclude(("log_probs", "full")) == TD.exclude(("log_probs", "full"))).all())


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch is empty"):
        show_samples(TensorDict(batch_size=[0]))
    for odd in ("gpt2", ["a"]):
        with pytest.raises(TypeError, match="tokenizer must be"):
            show_samples(TD, tokenizer=odd)
