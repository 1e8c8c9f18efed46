"""Numbers of kept tokens, by hand, and their figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.render.routes import kept_counts, kept_figure, kept_label, kept_rows


def test_counts_by_hand() -> None:
    sizes = torch.tensor([[0, 3, -2], [0, 0, 1]], dtype=torch.int32)
    sampled = torch.tensor([[False, True, True], [False, True, True]])
    np.testing.assert_array_equal(kept_counts(sizes, sampled, 10), [3, 8, 10, 1])


def test_every_count_lies_in_a_bin() -> None:
    for vocabulary in (1, 2, 3, 4, 5, 255, 256, 257):
        counts = np.arange(1, vocabulary + 1)
        (axes,) = kept_figure({"each once": counts}, vocabulary).axes
        values, edges = axes.patches[0].get_data()[:2]
        assert values.sum() == pytest.approx(1)
        assert np.histogram(counts, edges)[0].sum() == vocabulary and (np.diff(edges) > 0).all()


def test_labels_say_tokens_and_median() -> None:
    (axes,) = kept_figure({"top_p": [1, 2, 9], "none": []}, 16, "a title").axes
    labels = [part.get_label() for part in (*axes.patches, *axes.get_lines())]
    assert labels == ["top_p, 3 tokens, median 2", "none, 0 tokens", "the vocabulary, 16"]
    assert axes.get_title() == "a title" and axes.get_xscale() == "log"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: kept_counts(np.array([1, 2]), np.array([True]), 9), "must have the same shape"),
        (lambda: kept_counts(np.array([-12]), np.array([True]), 9), "from 12 token ids, and there are 9"),
        (lambda: kept_figure({"a": [0]}, 9), r"a: counts must be in 1\.\.9, got 0\.\.0"),
        (lambda: kept_figure({"a": [10]}, 9), r"a: counts must be in 1\.\.9, got 10\.\.10"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


def test_rows_of_a_table_by_hand() -> None:
    assert kept_rows(torch.tensor([[0, 0, 3], [1, -2, 4]])) == [
        ("1 word", "1"),
        ("2 to 4 words", "2"),
        ("all but some", "1"),
        ("all words", "2"),
    ]
    assert kept_rows([]) == []
    few, more = "5 to 16 words", "17 to 64 words"
    assert [kept_label(size) for size in (16, 17, 64, 65)] == [few, more, more, "more words"]
