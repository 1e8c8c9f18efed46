"""probe_replay: rollouts whose engine follows known, random experts. Replay explains them, the live router cannot."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.engines import EngineShelf
from support.html_table import TableReader
from support.routes import random_routes
from torchrl_moe.cli.main import main
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules import AsyncVLLM, RouterReplay, TransformersWrapper, probe_replay
from torchrl_moe.modules.policies.probe import (
    Causes,
    Mismatch,
    ReplayProbe,
    causes_of,
    dtype_gaps,
    gaps_table,
    live_scores,
    router_advice,
)
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


def rollout(
    engine: RouterReplay, prompt: int, live: bool, seed: int | None = None, temperature: float = TEMPERATURE
) -> TensorDict:
    total = prompt + ANSWER
    ids = torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(prompt if seed is None else seed))
    routes = random_routes(engine, 1, total, seed=prompt)
    if live:
        with torch.no_grad(), engine.record() as recording:
            engine.model(ids[None])
        routes = recording.routed_experts.long()
    routes[:, -1] = -1
    with torch.no_grad(), engine.replay(routes):
        logits = engine.model(ids[None]).logits[0] / temperature
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
def test_replay_explains_the_mismatch(
    actor: TransformersWrapper, engine: RouterReplay, layout: Any, packed: bool
) -> None:
    probe = probe_replay(actor.get_new_version(pad_model_input=not packed), layout(rollouts(engine)))
    assert probe.tokens == len(PROMPTS) * ANSWER  # neither prompts nor pads
    assert probe.replay.maximum < 1e-5
    assert probe.replay.kl == pytest.approx(0, abs=1e-6)
    assert 0.1 < probe.live.mean < probe.live.p99 <= probe.live.maximum
    assert probe.live.kl > 0
    assert probe.gain > 1e3
    assert probe.agreement < 0.05


def test_an_engine_that_routes_as_the_trainer_needs_no_replay(actor: TransformersWrapper, engine: RouterReplay) -> None:
    probe = probe_replay(actor, rollouts(engine, live=True))
    assert probe.agreement == 1.0
    assert max(probe.live.maximum, probe.replay.maximum) < 1e-5


def test_quantiles_kl_and_gain_by_hand() -> None:
    gaps = torch.arange(101) / 100  # 0, 0.01 ... 1
    got = Mismatch.of(-2.0 + gaps * torch.tensor([1.0, -1.0]).repeat(51)[:101], torch.full((101,), -2.0))
    assert (got.mean, got.p99, got.maximum) == pytest.approx((0.5, 0.99, 1.0), abs=1e-6)
    # two tokens, one twice as likely to the trainer: (2 - 1 - ln 2) / 2
    got = Mismatch.of(torch.tensor([0.5, 0.3]).log(), torch.tensor([0.25, 0.3]).log())
    assert got.kl == pytest.approx((1 - 0.6931472) / 2, abs=1e-6)
    live, none = Mismatch(0.5, 1.0, 1.0, 0.1), Mismatch(0.0, 0.0, 0.0, 0.0)
    assert ReplayProbe(Mismatch(0.1, 0.0, 0.0, 0.0), live, 0.9, 10).gain == pytest.approx(5.0)
    assert ReplayProbe(none, live, 0.9, 10).gain > 1e9  # and no division by zero
    assert ReplayProbe(none, none, 1.0, 10).gain == 0.0


def test_rollouts_without_log_probs_or_routes_are_refused(actor: TransformersWrapper, engine: RouterReplay) -> None:
    td, silent = rollouts(engine), rollouts(engine)
    for one in silent.unbind(0):
        one["log_probs", "full"].fill_(float("nan"))
    short = rollouts(engine)
    short[0]["log_probs", "full"] = short[0]["log_probs", "full"][1:]
    unsaid = r"no log-probs of the engine at \('log_probs', 'full'\).*return_log_probs=True"
    for scorer, given, message in (
        (actor.get_new_version(replay="none"), td, "needs an actor with replay='R3', got 'none'"),
        (actor.get_new_version(replay="R2"), td, "needs an actor with replay='R3', got 'R2'"),
        (actor, td.exclude("log_probs"), unsaid),
        (actor, silent, unsaid),
        (actor, td.exclude("routed_experts"), "return_routed_experts=True"),
        (actor, td[0], r"batch size \[B\]"),
        (actor, short, "of sample 0 has 6 rows, its tokens are 7"),
    ):
        with pytest.raises((ValueError, ReplayError), match=message):
            probe_replay(scorer, given)


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


def kinds(dtype: torch.dtype, **others: torch.dtype) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Of a layer, with other dtypes of some parts, which their names contain."""
    names = ["lm_head.weight", "layers.1.mlp.gate.weight"]
    names += [f"layers.0.{name}" for name in ("norm.weight", "self_attn.q_proj.weight", "mlp.gate.weight")]
    names += [f"layers.0.mlp.{name}" for name in ("gate.e_score_correction_bias", "experts.0.gate_proj.weight")]
    found = {}
    for name in names:
        found[name] = next((other for part, other in others.items() if part in name), dtype), torch.Size([2])
    return found


def test_dtypes_that_differ_are_grouped_with_routers_first() -> None:
    engine = kinds(torch.bfloat16, correction=torch.float32)
    gaps = dtype_gaps(engine, {**kinds(torch.float32), "only.the.trainer": (torch.float32, torch.Size([1]))})
    assert {(gap.engine, gap.trainer) for gap in gaps} == {("bfloat16", "float32")}
    assert [(gap.kind, set(gap.names)) for gap in gaps] == [
        ("routers", {"layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"}),
        ("experts and MLPs", {"layers.0.mlp.experts.0.gate_proj.weight"}),
        ("attention", {"layers.0.self_attn.q_proj.weight"}),
        ("embeddings and head", {"lm_head.weight"}),
        ("norms and others", {"layers.0.norm.weight"}),
    ]
    first, second, *_ = gaps_table(gaps).splitlines()
    assert first.split() == ["dtypes", "that", "differ", "engine", "trainer", "tensors"]
    assert second.split("  ")[0] == "routers" and "2, such as layers." in second
    assert router_advice(gaps).startswith("Routers are rounded to bfloat16 on their way to the engine")
    # equal dtypes say nothing, and wider routers in the engine need no advice
    assert dtype_gaps(kinds(torch.bfloat16), kinds(torch.bfloat16)) == []
    assert gaps_table([]) == router_advice([]) == ""
    wider = dtype_gaps(kinds(torch.bfloat16, gate=torch.float32), kinds(torch.bfloat16))
    assert [gap.kind for gap in wider] == ["routers", "experts and MLPs"] and router_advice(wider) == ""


# -- what is mismatch and what updates: rows and log-ratios by hand ---------------------------------------------------

ANSWERS, TOKENS = 3, 6
ROUTERS = 3
"""Layer 0 of the tiny model is dense, the other three have routers."""


def same_lengths(model: PreTrainedModel) -> TensorDictBase:
    """Answers of an engine that chooses as the model does; the last token was never fed."""
    handle = RouterReplay.of(model)
    return lazy_stack([rollout(handle, TOKENS - ANSWER, True, seed, temperature=1.0) for seed in range(ANSWERS)])


def scores(model: PreTrainedModel, td: TensorDictBase) -> torch.Tensor:
    """log-probs ``[B, T - 2]`` of the tokens that were sampled."""
    ids = torch.stack([row["tokens", "full"] for row in td.unbind(0)])
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)[:, 1:-1].gather(-1, ids[:, 2:, None])[..., 0]


def test_rows_and_answers_are_counted_by_cause() -> None:
    before = make_tiny_moe()
    td = same_lengths(before)
    known = ANSWERS * (TOKENS - 1) * ROUTERS
    # the engine differs in two rows of layer 1; the order of experts is no difference
    for sample, token in ((0, 0), (2, 3)):
        row = td[sample]["routed_experts", "full"][token, 1]
        row[0] = next(e for e in range(16) if e not in row.tolist())
    td[1]["routed_experts", "full"][2, 2] = td[1]["routed_experts", "full"][2, 2].flip(0)
    # and in the log-probs of two answers: by 3 and by 4 in all, so the root mean square over three is 5 / sqrt(3)
    td[0]["log_probs", "full"][2:4] += torch.tensor([1.0, 2.0])
    td[1]["log_probs", "full"][5] -= 4.0
    # the last layer's router is another one now: all of its rows have moved, and no other
    other = make_tiny_moe()
    with torch.no_grad():
        other.get_parameter("model.layers.3.mlp.gate.weight").neg_()
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
    td, actor = same_lengths(model), TransformersWrapper(model, replay="R3")
    with torch.no_grad():
        actor.score(td)
    keys = set(td.keys(True, True))
    found = probe_replay(actor, td, use_tqdm=False, before=model).causes
    assert found is not None and (found.rows_mismatch, found.rows_updates, found.dominant) == (0.0, 0.0, "")
    assert max(found.answers_mismatch, found.answers_updates) < 1e-4
    assert set(td.keys(True, True)) == keys and td["routing", "agreement"].isnan().all()  # as it was
    assert actor.replay == "R3" and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("rows", "answers", "dominant", "says"),
    [
        ((0.0, 0.0), (0.1, 0.5), "", "replay changes nothing"),  # a dense model's updates, say
        ((0.075, 0.004), (1.3, 0.2), "mismatch", "Mismatch dominates: R3 removes"),
        ((0.075, 0.03), (1.3, 1.9), "updates", "Updates dominate: R3 cannot remove those"),
        ((0.0, 0.01), (0.5, 0.5), "", "replay changes nothing"),
        ((0.02, 0.01), (0.5, 0.5), "mismatch", "Mismatch dominates"),
    ],
)
def test_which_one_dominates(rows: tuple[float, float], answers: tuple[float, float], dominant: str, says: str) -> None:
    causes = Causes(*rows, *answers)
    assert causes.dominant == dominant and says in str(causes)
    assert str(Causes(0.075, 0.0038, 1.32, 0.246)).startswith(
        "by mismatch: 7.5 % of rows have other experts, log-ratio of an answer 1.3; by updates: 0.38 %, 0.25. "
    )


def test_rollouts_that_say_nothing_are_refused() -> None:
    model = make_tiny_moe()
    actor, td = TransformersWrapper(model, replay="R3"), same_lengths(model)
    scores, unrouted, short, unsampled = live_scores(actor, td), td.clone(), list(td.clone().unbind(0)), td.clone()
    for row in unrouted.unbind(0):
        row["routed_experts", "full"].fill_(-1)
    short[1]["routed_experts", "full"] = short[1]["routed_experts", "full"][:-1]
    for given, before, message in (
        (unrouted, model, "no row of the rollouts has experts"),
        (lazy_stack(short), model, "of sample 1 has 5 rows, its tokens are 6"),
        (td, make_tiny_moe(num_hidden_layers=3), r"sample 0 has the shape \[6, 4, 4\], and .* before .*\[6, 3, 4\]"),
    ):
        with pytest.raises((ValueError, ReplayError), match=message):
            probe_replay(actor, given, use_tqdm=False, before=before)
    for row in unsampled.unbind(0):
        row["log_probs", "full"].fill_(float("nan"))
    with pytest.raises(ValueError, match=r"no log-prob of the engine at .* is finite"):
        causes_of(actor, unsampled, scores, scores)  # else its answers would agree


def test_answers_are_scored_a_few_at_a_time_and_each_at_its_own_length() -> None:
    """Nine answers of three lengths: log-probs and experts are those of each by itself."""
    model = make_tiny_moe()
    td = lazy_stack([row.clone() for _ in range(3) for row in same_lengths(model).unbind(0)])
    for i, row in enumerate(td.unbind(0)):
        for key in (("tokens", "full"), ("masks", "all_attention_mask"), ("routed_experts", "full")):
            row[key] = row[key][: 4 + i % 3]
    rows: list[int] = []

    def count(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        rows.append(len(kwargs["input_ids"]))

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


@pytest.mark.parametrize("command", ["probe", "bisect"])
@pytest.mark.parametrize(
    ("trainer", "config", "said"),
    [
        ("tiny", None, "--trainer tiny: that model is made on the spot"),
        ("./none", None, "there is no folder './none'"),
        ("mixtral", {}, "is of another model: its model_type is mixtral, that of MODEL qwen3_moe"),
        ("qwen3_moe", {"num_experts": 8}, "is of another model: it has 8 experts, MODEL has 16"),
        ("qwen3_moe", {"num_experts_per_tok": 3}, "its num_experts_per_tok is 3, that of MODEL 4"),
    ],
)
def test_a_trainer_that_cannot_be_loaded_or_is_another_model_starts_no_engine(
    command: str,
    trainer: str,
    config: dict[str, Any] | None,
    said: str,
    shelf: EngineShelf,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")
    if config is not None:
        make_tiny_moe(trainer, **config).save_pretrained(tmp_path)
        trainer = str(tmp_path)
    assert main([command, str(shelf.folder("qwen3_moe")), "--trainer", trainer]) == 2
    assert said in capsys.readouterr().err
