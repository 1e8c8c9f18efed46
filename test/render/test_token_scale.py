"""Which label, and which color, a token has."""

from __future__ import annotations

from typing import Any

import pytest

from support.token_rollouts import sample, token
from torchrl_moe.render.curves import HUES, OTHERS
from torchrl_moe.render.tokens import make_scale


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
    ("kept", "label"),
    [
        (None, None), (1, "1 word"), (2, "2 to 4 words"), (4, "2 to 4 words"), (5, "5 to 16 words"),
        (16, "5 to 16 words"), (17, "17 to 64 words"), (64, "17 to 64 words"), (65, "more words"),
        (-1, "all but some"), (0, "all words"),
    ],
)  # fmt: skip
def test_kept_words(kept: int | None, label: str | None) -> None:
    scale = make_scale([sample(token(kept=kept))], "kept")
    assert scale.label(token(kept=kept)) == label
    assert list(scale.fills) == ([] if label is None else [label])


@pytest.mark.parametrize(
    ("log_prob", "label"),
    [
        (0.0, "p ≥ 0.9"), (0.001, "p ≥ 0.9"), (-0.11, "p 0.5 to 0.9"), (-0.7, "p 0.1 to 0.5"),
        (-2.4, "p 0.01 to 0.1"), (-5.0, "p < 0.01"), (None, None),
    ],
)  # fmt: skip
def test_probabilities(log_prob: float | None, label: str | None) -> None:
    assert make_scale([sample(token(log_prob=log_prob))], "log_probs").label(token(log_prob=log_prob)) == label


def test_the_rarer_the_stronger() -> None:
    likely, unlikely = token(log_prob=-0.01), token(log_prob=-9.0)
    fills = make_scale([sample(likely, unlikely)], "log_probs").fills
    assert fills["p ≥ 0.9"].alpha == 0 and fills["p < 0.01"].alpha == 0.5
    fills = make_scale([sample(token(kept=1), token(kept=0))], "kept").fills
    assert fills["all words"].alpha == 0 and fills["1 word"].alpha == 0.5


def test_another_color_is_refused() -> None:
    with pytest.raises(ValueError, match="color must be one of 'versions', 'experts', 'kept', 'log_probs', got 'red'"):
        make_scale([], "red")  # type: ignore[arg-type]
