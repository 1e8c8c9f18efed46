"""probe_replay: rollouts whose engine follows known, random experts. Replay explains them, the live router cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from support.html_table import TableReader
from support.routes import random_routes
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules import RouterReplay, TransformersWrapper, probe_replay
from torchrl_moe.modules.policies.probe import DtypeGap, Mismatch, ReplayProbe, dtype_gaps, gaps_table, router_advice
from torchrl_moe.modules.policies.rollout import RolloutKeys, pad_answers
from torchrl_moe.testing import make_tiny_moe

PROMPTS, ANSWER, TEMPERATURE = (3, 7, 5), 4, 0.7


@pytest.fixture(scope="module")
def actor() -> TransformersWrapper:
    return TransformersWrapper(make_tiny_moe(), temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def engine() -> RouterReplay:
    """What stands in for the engine: the same weights, told which experts to use."""
    return RouterReplay(make_tiny_moe())


def rollout(engine: RouterReplay, prompt: int, live: bool) -> TensorDict:
    total = prompt + ANSWER
    ids = torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(prompt))
    routes = random_routes(engine, 1, total, seed=prompt)
    if live:
        with torch.no_grad(), engine.record() as recording:
            engine.model(ids[None])
        routes = recording.routed_experts.long()
    routes[:, -1] = -1
    with torch.no_grad(), engine.replay(routes):
        logits = engine.model(ids[None]).logits[0] / TEMPERATURE
    log_probs = torch.full((total,), float("nan"))
    log_probs[prompt:] = logits.log_softmax(-1)[torch.arange(prompt - 1, total - 1), ids[prompt:]]
    return TensorDict(
        {
            "tokens": {"full": ids, "prompt": ids[:prompt], "response": ids[prompt:]},
            "masks": {"all_attention_mask": torch.ones(total, dtype=torch.bool)},
            "log_probs": {"full": log_probs},
            "routed_experts": {"full": routes[0]},
        }
    )


def rollouts(engine: RouterReplay, live: bool = False) -> TensorDictBase:
    return lazy_stack([rollout(engine, prompt, live) for prompt in PROMPTS])


def padded(td: TensorDictBase) -> TensorDictBase:
    """Dense, pads on the left; the log-prob of a pad is 0, as TorchRL writes it."""
    return pad_answers(list(td.unbind(0)), 0, RolloutKeys(), [len(td)])


@pytest.mark.parametrize("layout", [lambda td: td, padded])
@pytest.mark.parametrize("packed", [False, True])
def test_replay_explains_what_the_live_router_cannot(
    actor: TransformersWrapper, engine: RouterReplay, layout: Any, packed: bool
) -> None:
    td = layout(rollouts(engine))
    probe = probe_replay(actor.get_new_version(pad_model_input=not packed), td)
    assert probe.tokens == len(PROMPTS) * ANSWER  # neither prompts nor pads
    assert probe.replay.maximum < 1e-5
    assert probe.replay.kl == pytest.approx(0, abs=1e-6)
    assert probe.live.mean > 0.1
    assert 0 < probe.live.mean < probe.live.p99 <= probe.live.maximum
    assert probe.live.kl > 0
    assert probe.gain > 1e3
    assert probe.agreement < 0.05


def test_an_engine_that_routes_as_the_trainer_needs_no_replay(actor: TransformersWrapper, engine: RouterReplay) -> None:
    probe = probe_replay(actor, rollouts(engine, live=True))
    assert probe.agreement == 1.0
    assert max(probe.live.maximum, probe.replay.maximum) < 1e-5


def test_the_input_stays_as_it_was(actor: TransformersWrapper, engine: RouterReplay) -> None:
    td = rollouts(engine)
    with torch.no_grad():
        actor.score(td)
    before, keys = td["routing", "agreement"].clone(), set(td.keys(True, True))
    probe_replay(actor, td)
    assert set(td.keys(True, True)) == keys
    assert before.isnan().all()
    assert td["routing", "agreement"].isnan().all()
    assert all(parameter.grad is None for parameter in actor.model.parameters())


def test_quantiles_and_kl_by_hand() -> None:
    gaps = torch.arange(101) / 100  # 0, 0.01 ... 1
    got = Mismatch.of(-2.0 + gaps * torch.tensor([1.0, -1.0]).repeat(51)[:101], torch.full((101,), -2.0))
    assert got.mean == pytest.approx(0.5, abs=1e-6)
    assert got.p99 == pytest.approx(0.99, abs=1e-6)
    assert got.maximum == pytest.approx(1.0, abs=1e-6)
    # two tokens, one twice as likely to the trainer: (2 - 1 - ln 2) / 2
    got = Mismatch.of(torch.tensor([0.5, 0.3]).log(), torch.tensor([0.25, 0.3]).log())
    assert got.kl == pytest.approx((1 - 0.6931472) / 2, abs=1e-6)


def test_the_gain_is_a_ratio_of_means() -> None:
    live, none = Mismatch(0.5, 1.0, 1.0, 0.1), Mismatch(0.0, 0.0, 0.0, 0.0)
    assert ReplayProbe(Mismatch(0.1, 0.0, 0.0, 0.0), live, 0.9, 10).gain == pytest.approx(5.0)
    assert ReplayProbe(none, live, 0.9, 10).gain > 1e9  # and no division by zero
    assert ReplayProbe(none, none, 1.0, 10).gain == 0.0


def test_rollouts_without_log_probs_or_routes_are_refused(actor: TransformersWrapper, engine: RouterReplay) -> None:
    td = rollouts(engine)
    message = r"no log-probs of the engine at \('log_probs', 'full'\).*return_log_probs=True"
    for replay in ("none", "R2"):
        with pytest.raises(ValueError, match=f"needs an actor with replay='R3', got '{replay}'"):
            probe_replay(actor.get_new_version(replay=replay), td)
    with pytest.raises(ValueError, match=message):
        probe_replay(actor, td.exclude("log_probs"))
    with pytest.raises(ReplayError, match="return_routed_experts=True"):
        probe_replay(actor, td.exclude("routed_experts"))
    with pytest.raises(ValueError, match=r"batch size \[B\]"):
        probe_replay(actor, td[0])
    td[0]["log_probs", "full"] = td[0]["log_probs", "full"][1:]
    with pytest.raises(ValueError, match="of sample 0 has 6 rows, its tokens are 7"):
        probe_replay(actor, td)
    for one in td.unbind(0):
        one["log_probs", "full"] = torch.full((len(one["tokens", "full"]),), float("nan"))
    with pytest.raises(ValueError, match=message):
        probe_replay(actor, td)


def test_a_probe_is_printed_and_shown_as_a_table() -> None:
    probe = ReplayProbe(Mismatch(0.01, 0.02, 0.5, 1e-4), Mismatch(0.04, 0.05, 0.6, 2e-3), agreement=0.905, tokens=1200)
    title, header, *rows = str(probe).splitlines()
    assert title == (
        "ReplayProbe: mean mismatch 4 times as small with replay, on 1,200 tokens; "
        "the live router agrees with the engine in 90.5% of rows"
    )
    assert header.split()[-3:] == ["live", "router", "replayed"]
    shown = [["0.04", "0.01"], ["0.05", "0.02"], ["0.6", "0.5"], ["0.002", "0.0001"]]
    assert [row.split()[-2:] for row in rows] == shown
    read = TableReader(probe._repr_html_())
    assert read.rows["tbody"][0] == ["mean", "0.04", "0.01"] and read.other == [title]


# -- dtypes that differ -----------------------------------------------------------------------------------------------


def kinds(dtype: torch.dtype, **others: torch.dtype) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Of a layer, with other dtypes of some parts, which their names contain."""
    names = (
        "lm_head.weight", "layers.0.norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate.weight",
        "layers.1.mlp.gate.weight", "layers.0.mlp.gate.e_score_correction_bias",
        "layers.0.mlp.experts.0.gate_proj.weight",
    )  # fmt: skip
    return {
        name: (next((other for part, other in others.items() if part in name), dtype), torch.Size([2]))
        for name in names
    }


def test_dtypes_that_differ_are_grouped_with_routers_first() -> None:
    engine = kinds(torch.bfloat16, correction=torch.float32)
    gaps = dtype_gaps(engine, {**kinds(torch.float32), "only.the.trainer": (torch.float32, torch.Size([1]))})
    assert gaps == [
        DtypeGap("routers", "bfloat16", "float32", ("layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight")),
        DtypeGap("experts and MLPs", "bfloat16", "float32", ("layers.0.mlp.experts.0.gate_proj.weight",)),
        DtypeGap("attention", "bfloat16", "float32", ("layers.0.self_attn.q_proj.weight",)),
        DtypeGap("embeddings and head", "bfloat16", "float32", ("lm_head.weight",)),
        DtypeGap("norms and others", "bfloat16", "float32", ("layers.0.norm.weight",)),
    ]
    first, second, *_ = gaps_table(gaps).splitlines()
    assert first.split() == ["dtypes", "that", "differ", "engine", "trainer", "tensors"]
    assert second.split("  ")[0] == "routers" and second.endswith("2, such as layers.0.mlp.gate.weight")
    assert router_advice(gaps).startswith("Routers are rounded to bfloat16 on their way to the engine")


def test_equal_dtypes_say_nothing_and_wider_routers_in_the_engine_need_no_advice() -> None:
    assert dtype_gaps(kinds(torch.bfloat16), kinds(torch.bfloat16)) == []
    assert gaps_table([]) == router_advice([]) == ""
    wider = dtype_gaps(kinds(torch.bfloat16, gate=torch.float32), kinds(torch.bfloat16))
    assert [gap.kind for gap in wider] == ["routers", "experts and MLPs"] and router_advice(wider) == ""
