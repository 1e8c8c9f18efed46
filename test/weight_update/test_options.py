"""Groups of choices: what follows from them; and the canary, whose song is the model's own log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update.options import SwapOptions, canary_of


@pytest.mark.parametrize(
    ("choices", "replicas", "hold", "serve"),
    [
        ({}, 1, 1, 0),
        ({}, 2, 1, 1),
        ({}, 4, 3, 3),
        ({"rolling": 3}, 4, 3, 1),
        ({"rolling": 9}, 4, 3, 0),
        ({"min_serving": 4}, 4, 4, 3),  # one may always be away
        ({"min_serving": 2, "rolling": 4}, 4, 2, 2),
        ({"min_serving": 0}, 4, 0, 0),
        ({}, 10, 9, 9),
        ({}, 64, 57, 58),  # nine tenths hold it, a tenth is away
        ({}, 1024, 921, 922),
        ({"rolling": 0.5, "min_serving": 0.25}, 8, 2, 2),
        ({"rolling": 0.5}, 8, 7, 4),
        ({"rolling": 0.01}, 8, 7, 7),  # one at least
        ({"min_serving": 1.0}, 8, 8, 7),
        ({"min_serving": 0.7}, 10, 7, 7),  # not 6, as floor(0.7 * 10) would be if 0.7 were a little less
    ],
)
def test_how_many_must_hold_a_version_and_how_many_must_serve_meanwhile(
    choices: dict[str, Any], replicas: int, hold: int, serve: int
) -> None:
    options = SwapOptions(**choices)
    assert (options.must_hold(replicas), options.must_serve(replicas)) == (hold, serve)


def test_log_probs_are_those_of_the_prompts_own_tokens() -> None:
    model = make_tiny_moe("mixtral")
    canary = canary_of(model)
    ids = canary["token_ids"]
    assert (len(ids), len(set(ids))) == (16, 16)
    assert all(type(value) is float for value in canary["log_probs"])
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = [table[position, ids[position + 1]].item() for position in range(15)]
    assert canary["log_probs"] == pytest.approx(wanted, abs=1e-6)


def test_the_model_is_evaluated_and_left_as_it_was() -> None:
    model = make_tiny_moe("mixtral").train()
    model.model.layers[0].eval()
    dropout = torch.nn.Dropout(0.5)
    model.lm_head = torch.nn.Sequential(dropout, model.lm_head)
    assert canary_of(model)["log_probs"] == canary_of(model)["log_probs"]
    assert model.training
    assert dropout.training
    assert not model.model.layers[0].training


@pytest.mark.parametrize(
    ("trainer", "engine", "tolerance"),
    [
        (torch.float32, None, 1e-3),
        (torch.float32, torch.float32, 1e-3),
        (torch.float32, torch.bfloat16, 1.0),
        (torch.bfloat16, torch.float32, 1.0),
    ],
)
def test_the_coarser_dtype_sets_the_tolerance(
    trainer: torch.dtype, engine: torch.dtype | None, tolerance: float
) -> None:
    assert canary_of(make_tiny_moe(dtype=trainer), engine)["tolerance"] == tolerance
