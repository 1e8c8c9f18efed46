"""Scores of a batch against forward passes one by one, and no forward pass that nobody asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from support.rollouts import byte_row
from support.routes import random_routes
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.modules.policies.scoring_model import ScoringModel
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.trainers.learner import RolloutScores

SHAPES = [(3, 4), (2, 7), (5, 1), (1, 3)]
"""Tokens of prompt and answer."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the forward passes."""
    seen: list[tuple[int, ...]] = []
    forward = ScoringModel.__call__

    def counted(self: ScoringModel, inputs: Any, *rest: Any) -> Any:
        seen.append(tuple(inputs["input_ids"].shape))
        return forward(self, inputs, *rest)

    monkeypatch.setattr(ScoringModel, "__call__", counted)
    return seen


def actor_of(replay: Any = "R3") -> TransformersWrapper:
    return TransformersWrapper(make_tiny_moe("qwen3_moe", num_hidden_layers=2), replay=replay, pad_model_input=True)


def batch_of(actor: TransformersWrapper, shift: float = 0.1) -> TensorDictBase:
    """Rollouts with experts of their own, and log-probs of an engine that is off by up to ``shift``."""
    rows = []
    for place, (prompt, answer) in enumerate(SHAPES):
        total = prompt + answer
        row = byte_row(prompt, answer, place)
        row["policy_versions"] = {"full": torch.where(row["masks"]["all_assistant_mask"], 2, -1).int()}
        row["advantage"] = torch.ones(1, 1)
        if actor.router_replay is not None:
            routes = random_routes(actor.router_replay, 1, total, seed=place)[0].to(torch.int8)
            routes[-1] = -1
            row["routed_experts"] = {"full": routes}
        rows.append(TensorDict(row))
    noise = torch.Generator().manual_seed(9)
    for row, log_probs in zip(rows, by_hand(actor, rows), strict=True):
        prompt = len(row["tokens", "prompt"])
        sampled = log_probs + shift * (2 * torch.rand(log_probs.shape, generator=noise) - 1)
        sampled[:prompt] = math.nan
        row["log_probs"] = TensorDict({"full": sampled})
    return lazy_stack(rows)


@torch.no_grad()
def by_hand(actor: TransformersWrapper, rows: list[TensorDictBase], live: bool = False) -> list[Tensor]:
    """Log-probs of each row's tokens, by a forward pass of its own; 0 of the first."""
    found = []
    for row in rows:
        ids = row["tokens", "full"][None]
        context: Any = nullcontext()
        if actor.replay == "R3" and not live:
            assert actor.router_replay is not None
            context = actor.router_replay.replay(row["routed_experts", "full"][None].long())
        with context:
            logits = actor.model(ids).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        found.append(torch.cat([torch.zeros(1), log_probs]))
    return found


def scores_of(actor: TransformersWrapper, reference: Any = None, max_tokens: int | None = None, **loss: Any) -> Any:
    loss_module = GRPOLoss(actor, entropy_bonus=False, **loss)
    return RolloutScores(actor, loss_module, reference, max_tokens=max_tokens, precision=nullcontext)


def gaps(actor: TransformersWrapper, batch: TensorDictBase, live: bool = False) -> Tensor:
    rows = list(batch.unbind(0))
    parts = [row["log_probs", "full"] for row in rows]
    found = torch.cat([own - sampled for own, sampled in zip(by_hand(actor, rows, live), parts, strict=True)])
    return found[found.isfinite()]


@pytest.mark.parametrize("replay", ["R3", "R2", "none"])
def test_the_mismatch_is_that_of_forward_passes_one_by_one(replay: str) -> None:
    actor = actor_of(replay)
    batch = batch_of(actor)
    gap = gaps(actor, batch)
    found = scores_of(actor)(batch, 2, True)
    assert len(gap) == sum(answer for _, answer in SHAPES)
    assert found["mismatch_kl"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), abs=1e-6)
    assert found["dlogp_mean"] == pytest.approx(float(gap.abs().mean()), abs=1e-5)
    assert found["dlogp_max"] == pytest.approx(float(gap.abs().max()), abs=1e-5)
    assert found["extreme_fraction"] == 0.0
    if replay == "R3":
        unaided = gaps(actor, batch, live=True)
        assert found["dlogp_live"] == pytest.approx(float(unaided.abs().mean()), abs=1e-5)
        assert found["dlogp_live"] > found["dlogp_mean"]
    else:
        assert "dlogp_live" not in found


def test_a_mismatch_that_lasts_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    actor = actor_of()
    scores, near, far = scores_of(actor), batch_of(actor), batch_of(actor, shift=4.0)

    def warnings_after(batch: TensorDictBase) -> int:
        scores(batch, 2, True)
        return sum("far apart" in record.message for record in caplog.records)

    assert [warnings_after(batch) for batch in (near, far, far, far, near, far)] == [0, 1, 1, 1, 1, 2]


def test_the_entropy_is_the_mean_over_sampled_tokens() -> None:
    actor = actor_of("none")
    batch = batch_of(actor)
    with torch.no_grad():
        entropies = []
        for row in batch.unbind(0):
            log_probs = actor.model(row["tokens", "full"][None]).logits[0].log_softmax(-1)
            spread = -(log_probs.exp() * log_probs).sum(-1)  # of the next token
            entropies.append(spread[len(row["tokens", "prompt"]) - 1 : -1])
    assert scores_of(actor)(batch, 2, True)["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-5)


def test_agreement_is_the_share_of_rows_that_the_live_router_chooses_too() -> None:
    actor = actor_of()
    batch = batch_of(actor)
    assert actor.router_replay is not None
    own = []
    for row in batch.unbind(0):
        with actor.router_replay.record() as recording, torch.no_grad():
            actor.model(row["tokens", "full"][None])
        own.append(recording.routed_experts[0].to(torch.int8))
    every = scores_of(actor)
    assert every(batch, 2, True)["agreement"] < 0.5  # experts were drawn
    for row, routes in zip(batch.unbind(0), own, strict=True):
        row["routed_experts", "full"] = routes
    found = every(batch, 2, True)
    assert found["agreement"] == 1.0
    assert found["dlogp_live"] == pytest.approx(found["dlogp_mean"], abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 14, 18])
@pytest.mark.parametrize("replay", ["R3", "R2", "none"])
def test_parts_change_nothing(replay: str, max_tokens: int) -> None:
    def run(limit: int | None) -> tuple[dict[str, float], TensorDictBase]:
        actor = actor_of(replay)
        batch = batch_of(actor)
        reference = actor.reference().get_new_version(log_probs_key="ref_log_probs")
        loss = {"proximal_policy": "recomputed", "kl_to_ref_coeff": 0.1}
        return scores_of(actor, reference, limit, **loss)(batch, 2, True), batch

    whole, batch = run(None)
    found, in_parts = run(max_tokens)
    assert found.keys() == whole.keys()
    for name, value in found.items():
        assert value == pytest.approx(whole[name], abs=2e-6), name
    keys = [("prox", "full"), ("ref_log_probs", "full")]
    keys += [("train_routed_experts", "full")] if replay == "R2" else []
    for row, other in zip(batch.unbind(0), in_parts.unbind(0), strict=True):
        for key in keys:
            torch.testing.assert_close(other[key], row[key], atol=2e-6, rtol=0)


def test_proximal_log_probs_are_those_of_the_policy_and_the_loss_reads_them() -> None:
    actor = actor_of()
    scores = scores_of(actor, proximal_policy="recomputed")
    batch = batch_of(actor)
    assert scores(batch, 2, False) == {}
    for row, expected in zip(batch.unbind(0), by_hand(actor, list(batch.unbind(0))), strict=True):
        torch.testing.assert_close(row["prox", "full"], expected, atol=1e-5, rtol=0)
    out = scores.loss(batch)
    assert float(out.kl_approx) != 0.0  # to the engine
    assert float(out.loss_objective) == pytest.approx(-1.0, abs=1e-5)  # ratio 1 to itself, advantage 1


def test_the_loss_reads_the_reference_that_is_written() -> None:
    actor = actor_of()
    reference = actor.reference(make_tiny_moe("qwen3_moe", num_hidden_layers=2, seed=5))
    scores = scores_of(actor, reference.get_new_version(log_probs_key="ref_log_probs"), kl_to_ref_coeff=1.0)
    batch = batch_of(actor)
    scores(batch, 2, False)
    rows = list(batch.unbind(0))
    known = torch.cat([torch.arange(len(row["tokens", "full"])) >= len(row["tokens", "prompt"]) for row in rows])
    gap = (torch.cat(by_hand(reference, rows)) - torch.cat(by_hand(actor, rows)))[known].clamp(max=20)
    k3 = (gap.exp() - 1 - gap).clamp(-10, 10).mean()
    assert float(scores.loss(batch).loss_kl_to_ref) == pytest.approx(float(k3), rel=1e-4)


def test_experts_are_recorded_once(calls: list[Any]) -> None:
    actor = actor_of("R2")
    batch = batch_of(actor)
    for row in batch.unbind(0):
        assert "train_routed_experts" not in row.keys()  # noqa: SIM118
    scores_of(actor)(batch, 2, False)
    calls_to_score = len(calls)
    assert calls_to_score == 1
    assert actor.router_replay is not None
    for row in batch.unbind(0):
        with actor.router_replay.record() as recording, torch.no_grad():
            actor.model(row["tokens", "full"][None])
        mine, expected = row["train_routed_experts", "full"], recording.routed_experts[0]
        assert torch.equal(mine.sort(-1).values.long(), expected.sort(-1).values.long())
    kept = [row["train_routed_experts", "full"].clone() for row in batch.unbind(0)]
    with torch.no_grad():
        for weight in actor.model.parameters():
            weight.mul_(0.7)
    actor.score(batch)  # with a gradient: it replays
    for row, routes in zip(batch.unbind(0), kept, strict=True):
        assert torch.equal(row["train_routed_experts", "full"], routes)


def test_nothing_is_computed_where_nothing_asks(calls: list[Any]) -> None:
    actor = actor_of()
    batch = batch_of(actor)
    calls.clear()
    before = [sorted(map(str, row.keys(True))) for row in batch.unbind(0)]
    assert scores_of(actor)(batch, 2, False) == {}
    assert calls == []
    assert [sorted(map(str, row.keys(True))) for row in batch.unbind(0)] == before


@pytest.mark.parametrize(
    ("replay", "due", "loss", "passes"),
    [
        ("R3", True, {}, 2),  # with replay and without
        ("none", True, {}, 1),
        ("R2", True, {}, 1),
        ("R2", False, {}, 1),
        ("R3", False, {"proximal_policy": "recomputed"}, 1),
        ("none", False, {"proximal_policy": "recomputed"}, 1),
        ("R3", False, {"proximal_policy": "interpolated"}, 0),
    ],
)
def test_forward_passes(calls: list[Any], replay: str, due: bool, loss: dict[str, Any], passes: int) -> None:
    actor = actor_of(replay)
    batch = batch_of(actor)
    calls.clear()
    scores_of(actor, **loss)(batch, 2, due)
    assert calls == [(4, 9)] * passes


def test_no_gradient_is_kept(calls: list[Any]) -> None:
    del calls
    actor = actor_of()
    batch = batch_of(actor)
    scores_of(actor, proximal_policy="recomputed")(batch, 2, True)
    assert not any(row["prox", "full"].requires_grad for row in batch.unbind(0))
    assert all(weight.grad is None for weight in actor.model.parameters())


@pytest.fixture(autouse=True)
def one_thread_each(one_thread: None) -> Iterator[None]:
    yield
