"""What is mismatch and what updates: rows and log-ratios by hand, in a function and in a command."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.engines import EngineShelf
from torchrl_moe.cli.main import main
from torchrl_moe.modules import AsyncVLLM, RouterReplay, TransformersWrapper, probe_replay
from torchrl_moe.modules.policies.probe import Causes, Mismatch, ReplayProbe
from torchrl_moe.testing import make_tiny_moe

ROWS, TOKENS = 3, 6
ROUTERS = 3
"""Layer 0 of the tiny model is dense, the other three have routers."""


def rollouts(model: PreTrainedModel) -> TensorDictBase:
    """Answers of an engine that chooses as the model does; the last token was never fed."""
    ids = torch.randint(0, 256, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), RouterReplay.of(model).record() as recording:
        log_probs = model(ids).logits.log_softmax(-1)
    routes = recording.routed_experts
    routes[:, -1] = -1
    sampled = torch.full(ids.shape, float("nan"))
    sampled[:, 2:] = log_probs[:, 1:-1].gather(-1, ids[:, 2:, None])[..., 0]
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": Tokens(full=ids[i]),
                    ("log_probs", "full"): sampled[i],
                    ("routed_experts", "full"): routes[i],
                }
            )
            for i in range(ROWS)
        ]
    )


def with_other_routers(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """A copy whose router of one layer prefers what it liked least."""
    other = make_tiny_moe()
    with torch.no_grad():
        other.get_parameter(f"model.layers.{layer}.mlp.gate.weight").neg_()
    return other


def scores(model: PreTrainedModel, td: TensorDictBase) -> torch.Tensor:
    """log-probs ``[B, T - 2]`` of the tokens that were sampled."""
    ids = torch.stack([row["tokens", "full"] for row in td.unbind(0)])
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)[:, 1:-1].gather(-1, ids[:, 2:, None])[..., 0]


def test_rows_and_answers_are_counted_by_cause() -> None:
    before = make_tiny_moe()
    td = rollouts(before)
    known = ROWS * (TOKENS - 1) * ROUTERS
    # the engine differs in two rows of layer 1; the order of experts is no difference
    for sample, token in ((0, 0), (2, 3)):
        row = td[sample]["routed_experts", "full"][token, 1]
        row[0] = next(e for e in range(16) if e not in row.tolist())
    td[1]["routed_experts", "full"][2, 2] = td[1]["routed_experts", "full"][2, 2].flip(0)
    # and in the log-probs of two answers: by 3 and by 4 in all, so the root mean square over three is 5 / sqrt(3)
    td[0]["log_probs", "full"][2:4] += torch.tensor([1.0, 2.0])
    td[1]["log_probs", "full"][5] -= 4.0
    # the last layer's router is another one now: all of its rows have moved, and no other
    other = with_other_routers(before, 3)
    moved = (scores(other, td) - scores(before, td)).sum(-1).square().mean().sqrt().item()
    probe = probe_replay(TransformersWrapper(other, replay="R3"), td, use_tqdm=False, before=before)
    assert probe.causes is not None
    assert probe.causes.rows_mismatch == pytest.approx(2 / known)
    assert probe.causes.rows_updates == pytest.approx(1 / ROUTERS)
    assert probe.causes.answers_mismatch == pytest.approx(5 / 3**0.5, rel=1e-4)
    assert probe.causes.answers_updates == pytest.approx(moved, rel=1e-3) and moved > 0.1
    assert "by updates: 33 %" in str(probe) and str(probe.causes) in probe._repr_html_()
    # without updates all is mismatch, and without the earlier model nothing is said
    actor = TransformersWrapper(make_tiny_moe(), replay="R3")
    found = probe_replay(actor, td, use_tqdm=False, before=before).causes
    assert found is not None
    assert (found.rows_mismatch, found.rows_updates, found.dominant) == (pytest.approx(2 / known), 0.0, "mismatch")
    assert found.answers_updates < 1e-5
    assert probe_replay(actor, td, use_tqdm=False).causes is None


def test_the_model_of_before_may_be_the_actors_own_and_nothing_is_written() -> None:
    model = make_tiny_moe()
    td = rollouts(model)
    keys = set(td.keys(True, True))
    actor = TransformersWrapper(model, replay="R3")
    found = probe_replay(actor, td, use_tqdm=False, before=model).causes
    assert found is not None and (found.rows_mismatch, found.rows_updates, found.dominant) == (0.0, 0.0, "")
    assert max(found.answers_mismatch, found.answers_updates) < 1e-4
    assert set(td.keys(True, True)) == keys
    assert actor.replay == "R3"


@pytest.mark.parametrize(
    ("rows", "answers", "dominant", "says"),
    [
        ((0.0, 0.0), (0.0, 0.0), "", "replay changes nothing"),
        ((0.0, 0.0), (0.1, 0.5), "", "replay changes nothing"),  # a dense model's updates, say
        ((0.075, 0.004), (1.3, 0.2), "mismatch", "Mismatch dominates: R3 removes"),
        ((0.075, 0.03), (1.3, 1.9), "updates", "Updates dominate: R3 cannot remove those"),
        ((0.0, 0.01), (0.5, 0.5), "", "replay changes nothing"),
        ((0.0, 0.01), (0.4, 0.5), "updates", "Updates dominate"),
        ((0.02, 0.01), (0.5, 0.5), "mismatch", "Mismatch dominates"),
    ],
)
def test_which_one_dominates(rows: tuple[float, float], answers: tuple[float, float], dominant: str, says: str) -> None:
    causes = Causes(*rows, *answers)
    assert causes.dominant == dominant and says in str(causes)


def test_causes_are_printed_with_both_measures() -> None:
    assert str(Causes(0.075, 0.0038, 1.32, 0.246)).startswith(
        "by mismatch: 7.5 % of rows have other experts, log-ratio of an answer 1.3; by updates: 0.38 %, 0.25. "
    )


def test_rollouts_without_a_row_are_refused() -> None:
    model = make_tiny_moe()
    td = rollouts(model)
    for row in td.unbind(0):
        row["routed_experts", "full"].fill_(-1)
    with pytest.raises(ValueError, match="no row of the rollouts has experts"):
        probe_replay(TransformersWrapper(model, replay="R3"), td, use_tqdm=False, before=model)


def test_a_probe_without_the_earlier_model_is_as_it_was() -> None:
    some = Mismatch(0.01, 0.02, 0.5, 1e-4)
    assert str(ReplayProbe(some, some, 0.9, 10)).count("\n") == 5


def test_the_command_compares_a_later_checkpoint(
    second_engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    folder = shelf.folder("qwen3_moe")
    later = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        later.get_parameter("model.layers.3.mlp.gate.weight").neg_()
    later.save_pretrained(tmp_path / "later")
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda *_, **__: contextlib.nullcontext(second_engine))
    command = ["probe", str(folder), "--engine", "transformers", "--dtype", "float32", "--max-new-tokens", "6"]
    main([*command, "--trainer", str(tmp_path / "later"), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    causes = found["causes"]
    assert (causes["rows_mismatch"], causes["dominant"]) == (0.0, "updates")
    assert causes["rows_updates"] == pytest.approx(1 / ROUTERS)
    assert causes["answers_mismatch"] < 1e-4 < causes["answers_updates"]
    assert str(tmp_path / "later") in found["title"]
    main([*command, "--trainer", str(tmp_path / "later")])
    out = capsys.readouterr().out
    assert "by mismatch: 0 % of rows" in out and "by updates: 33 %" in out and "Updates dominate" in out


@pytest.mark.parametrize(
    ("trainer", "said"),
    [("tiny", "--trainer tiny: that model is made on the spot"), ("./none", "there is no folder './none'")],
)
def test_a_trainer_that_cannot_be_loaded_starts_no_engine(
    trainer: str, said: str, shelf: EngineShelf, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")
    assert main(["probe", str(shelf.folder("qwen3_moe")), "--trainer", trainer]) == 2
    assert said in capsys.readouterr().err


def test_a_trainer_of_another_model_starts_no_engine(
    shelf: EngineShelf, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")
    assert main(["probe", str(shelf.folder("qwen3_moe")), "--trainer", str(shelf.folder("mixtral"))]) == 2
    assert "is of another model: its model_type is mixtral, that of MODEL qwen3_moe" in capsys.readouterr().err
