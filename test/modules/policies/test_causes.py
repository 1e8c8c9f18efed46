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
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules import AsyncVLLM, RouterReplay, TransformersWrapper, probe_replay
from torchrl_moe.modules.policies.probe import Causes, causes_of, live_scores
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
    rows = zip(ids, sampled, routes, strict=True)
    keys = ("log_probs", "full"), ("routed_experts", "full")
    return lazy_stack([TensorDict({"tokens": Tokens(full=row), keys[0]: own, keys[1]: r}) for row, own, r in rows])


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


def test_rollouts_that_say_nothing_are_refused() -> None:
    model, other = make_tiny_moe(), make_tiny_moe(num_hidden_layers=3)
    actor, td = TransformersWrapper(model, replay="R3"), rollouts(model)
    scores, unrouted, short, unsampled = live_scores(actor, td), td.clone(), list(td.clone().unbind(0)), td.clone()
    for row in unrouted.unbind(0):
        row["routed_experts", "full"].fill_(-1)
    with pytest.raises(ValueError, match="no row of the rollouts has experts"):
        probe_replay(actor, unrouted, use_tqdm=False, before=model)
    short[1]["routed_experts", "full"] = short[1]["routed_experts", "full"][:-1]
    with pytest.raises(ReplayError, match="of sample 1 has 5 rows, its tokens are 6"):
        probe_replay(actor, lazy_stack(short), use_tqdm=False, before=model)
    with pytest.raises(ValueError, match=r"of sample 0 has the shape \[6, 4, 4\], and .* before .*\[6, 3, 4\]"):
        probe_replay(actor, td, use_tqdm=False, before=other)
    for row in unsampled.unbind(0):
        row["log_probs", "full"].fill_(float("nan"))
    with pytest.raises(ValueError, match=r"no log-prob of the engine at .* is finite"):
        causes_of(actor, unsampled, scores, scores)  # else its answers would agree


def test_answers_are_scored_a_few_at_a_time_and_each_at_its_own_length() -> None:
    """Nine answers of three lengths: log-probs and experts are those of each by itself."""
    model = make_tiny_moe()
    td = lazy_stack([row.clone() for _ in range(3) for row in rollouts(model).unbind(0)])
    for i, row in enumerate(td.unbind(0)):
        for key in (("tokens", "full"), ("log_probs", "full"), ("routed_experts", "full")):
            row[key] = row[key][: 4 + i % 3]
    rows: list[int] = []
    count = lambda _, __, kwargs: rows.append(len(kwargs["input_ids"]))  # noqa: E731
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    actor = TransformersWrapper(model, replay="R3", pad_model_input=True)
    found = live_scores(actor, td)
    hook.remove()
    assert max(rows) == 4
    for i, (row, log_probs, experts) in enumerate(zip(td.unbind(0), found.log_probs, found.experts, strict=True)):
        assert log_probs.shape == (4 + i % 3,) and experts.shape == (4 + i % 3, 4, 4)
        with torch.no_grad():
            logits = model(row["tokens", "full"][None]).logits[0].log_softmax(-1)
        mine = logits[:-1].gather(-1, row["tokens", "full"][1:, None])[:, 0]
        assert torch.allclose(log_probs[1:], mine, atol=1e-5)


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
    # at another temperature the same weights are the same: each side divides by it
    main([*command, "--trainer", str(folder), "--temperature", "0.5", "--json"])
    cold = json.loads(capsys.readouterr().out)["causes"]
    assert max(cold["answers_mismatch"], cold["answers_updates"]) < 1e-4
    main([*command, "--trainer", str(tmp_path / "later")])
    out = capsys.readouterr().out
    assert "by mismatch: 0 % of rows" in out and "by updates: 33 %" in out and "Updates dominate" in out


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "eight": ("qwen3_moe", {"num_experts": 8}),
    "three": ("qwen3_moe", {"num_experts_per_tok": 3}),
}
"""Models that are not those of the engine: a folder's name, the family, and its config."""


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("tiny", "--trainer tiny: that model is made on the spot"),
        ("./none", "there is no folder './none'"),
        ("mixtral", "is of another model: its model_type is mixtral, that of MODEL qwen3_moe"),
        ("eight", "is of another model: it has 8 experts, MODEL has 16"),
        ("three", "its num_experts_per_tok is 3, that of MODEL 4"),
    ],
)
def test_a_trainer_that_cannot_be_loaded_or_is_another_model_starts_no_engine(
    trainer: str, said: str, shelf: EngineShelf, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")
    if trainer in OTHERS:
        family, config = OTHERS[trainer]
        make_tiny_moe(family, **config).save_pretrained(tmp_path / trainer)
        trainer = str(tmp_path / trainer)
    assert main(["probe", str(shelf.folder("qwen3_moe")), "--trainer", trainer]) == 2
    assert said in capsys.readouterr().err
