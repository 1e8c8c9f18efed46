"""Training under R3 on ranks that shard the model, each way that docs/replay.md lists, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDictBase

from support.ranks import run_as_ranks
from support.sharded import CONFIG, SCORES, WAYS, WIDE, Way, by_config, one_process, rollouts, run_way
from support.sources import ROOT
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.testing.tiny_moe import save_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

PIPELINE, TWICE = "pipeline", "two backward passes under TP"
EXACT = 0.0, 1e-6
ROUNDED = 4e-6, 1e-6
BOUNDS = {"FSDP2": EXACT, "FSDP2, CPU offload": EXACT, "FSDP": EXACT, "FSDP2, bf16": (0.0, 1e-2)}
"""Of log-probs, and of gradients; ``ROUNDED`` where products are summed in another order. In bf16, log-probs
are compared with those of a bf16 model, and gradients with the exact ones."""


OLDER = "All-reduce expert parallelism requires `ep_size=tp_size`"
"""How transformers refuses experts that are spread over the ranks of FSDP, before it had this (5.19)."""


def run_ways(folder: Path, td: TensorDictBase, ways: dict[str, Way]) -> dict[str, Any]:
    """What each way gives; nothing for one that this transformers does not have."""
    found = {}
    for name, way in ways.items():
        try:
            found[name] = run_way(folder, td, way)
        except ValueError as error:
            if "EP" not in name or OLDER not in str(error):
                raise
            found[name] = {}
    return found


def run_all(folder: Path, td: TensorDictBase) -> dict[str, Any]:
    with pytest.raises(TypeError) as refused:
        TransformersWrapper(by_config(folder, pp_size=2))
    with pytest.warns(UserWarning, match=r"q_norm\.weight has a gradient already"):
        twice = run_way(folder, td, replace(WAYS["TP"], parts=2))
    return {**run_ways(folder, td, dict(WAYS)), PIPELINE: str(refused.value), TWICE: twice}


@pytest.fixture(scope="module")
def td() -> TensorDictBase:
    return rollouts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("model") / "tiny", **CONFIG)


@pytest.fixture(scope="module")
def answers(folder: Path, td: TensorDictBase) -> list[dict[str, Any]]:
    """What each rank computes, by way: two processes for all."""
    return run_as_ranks(run_all, folder, td)


def check(name: str, way: Way, got: list[dict[str, Any]], td: TensorDictBase) -> None:
    """Scores of all ranks together, and every rank's gradients."""
    exact = one_process(td, way.shares, way.parts)
    rounded = one_process(td, way.shares, way.parts, way.dtype)
    bounds = BOUNDS.get(name, ROUNDED)
    groups = [got[:: len(got) // way.shares], got[len(got) // way.shares - 1 :: len(got) // way.shares]]
    gaps = [np.abs(np.concatenate([one[SCORES] for one in group]) - rounded[SCORES].numpy()).max() for group in groups]
    worst = 0.0
    for one in got:
        assert one.keys() == exact.keys()
        for key in one.keys() - {SCORES}:
            worst = max(worst, np.abs(one[key] - exact[key].numpy()).max())
    print(f"{name}: log-probs {max(gaps):.1e}, gradients {worst:.1e}")
    assert max(gaps) <= bounds[0]
    assert worst <= bounds[1]
    assert max(exact[key].abs().max() for key in exact.keys() - {SCORES}) > 0.1


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_train_as_one_process(name: str, answers: list[Any], td: TensorDictBase) -> None:
    if not answers[0][name]:
        pytest.skip(f"this transformers has no such way: {OLDER}")
    check(name, WAYS[name], [rank[name] for rank in answers], td)


def test_a_pipeline_is_refused_on_each_rank(answers: list[Any]) -> None:
    for rank in answers:
        assert rank[PIPELINE].startswith("Qwen3MoeForCausalLM cannot be scored under pipeline parallelism: ")


def test_transformers_sums_gradients_of_norms_twice_and_one_is_warned(answers: list[Any], td: TensorDictBase) -> None:
    """If this fails for a new transformers, the warning and a note in docs/replay.md can go."""
    exact = one_process(td, 1, 2)
    for rank in answers:
        wrong = {key for key, value in rank[TWICE].items() if np.abs(value - exact[key].numpy()).max() > ROUNDED[0]}
        assert wrong == {key for key in exact if "q_norm" in key or "k_norm" in key}


@pytest.mark.parity
def test_four_ranks_train_as_one_process(folder: Path, td: TensorDictBase) -> None:
    answers = run_as_ranks(run_ways, folder, td, dict(WIDE), world_size=4)
    for name, way in WIDE.items():
        if answers[0][name]:
            check(name, way, [rank[name] for rank in answers], td)


def test_the_page_lists_what_is_tested_here() -> None:
    page = (ROOT / "docs" / "replay.md").read_text()
    table = page.partition("<!-- table of ranks -->")[2].partition("<!-- end of table -->")[0]
    rows = [line.split("|")[1].strip() for line in table.strip().splitlines()[2:]]
    assert rows == [*WAYS, *WIDE]
