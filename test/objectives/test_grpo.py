"""The loss against numbers by hand, against TorchRL where TorchRL is right, and in its trainer."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import distributed
from torchrl.envs.llm.transforms import RetrieveKL
from torchrl.objectives import LossModule

from support.ranks import run_as_ranks
from support.rollouts import (
    BigramActor,
    GivenActor,
    by_hand,
    numbers,
    ragged,
    sample,
    samples,
    total,
)
from torchrl_moe.objectives import (
    DAPO,
    CISPOLoss,
    CISPOLossOutput,
    DAPOLossOutput,
    DPPOLoss,
    GRPOLoss,
    GRPOLossOutput,
    GSPOLoss,
    LLMLossOutput,
    MoERouterLoss,
    SAPOLoss,
    Thresholds,
    sum_over_ranks,
)
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

LN2, LN15 = math.log(2), math.log(1.5)
SHAPES = [(2, 3), (1, 4), (3, 1)]
LOG_PROBS = ("log_probs", "full")
REF = ("next", "ref_log_probs", "full")
EVERYTHING: dict[str, Any] = {"clip_epsilon": (0.2, 0.28), "kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2}


WEIGHED: dict[str, Any] = {"kl_to_ref_coeff": 0.3, "kl_off_policy": True}
RECOMPUTED: dict[str, Any] = {"proximal_policy": "recomputed"}
WIDE = Thresholds(mis=1.5, geo=(0.4, 1.3), icepop=(0.6, 1.4))


# -- by hand ----------------------------------------------------------------------------------------------------------


TO_REF = (0 + (0.5 - 1 + LN2) + (0.25 - 1 + 2 * LN2)) / 3
K3 = [2 / 3 - 1 + LN15, 0, 2 - 1 - LN2]
"""To the sampling policy, by token."""
WHOLE = (-2.56 - 2 + 0.8) / 3
ALL_OF_IT = {
    "loss_objective": WHOLE,
    "clip_fraction": 2 / 3,
    "kl_approx": -(LN15 - LN2) / 3,
    "ESS": 3**2 / (3 * (1.5**2 + 1 + 0.5**2)),
    "num_dropped_tokens": 0,
    **{"entropy": 2, "loss_entropy": -0.02, "kl_to_ref": TO_REF, "loss_kl_to_ref": 0.3 * TO_REF},
    **{"kl_to_inference": sum(K3) / 3, "loss_kl_to_inference": 0.2 * sum(K3) / 3},
}
SAYING = {**RECOMPUTED, "correction": "mis", "kl_to_inference_coeff": 0.5, "thresholds": Thresholds(mis=1.5)}
SAID = {
    **{"masked_fraction": 1 / 3, "mean_weight": (0 + 1 + 0.5) / 3, "kl_to_inference": sum(K3) / 3, "entropy": 2},
    # every loss term leaves the token out, and no other metric does
    **{"loss_kl_to_inference": 0.5 * sum(K3[1:]) / 3, "loss_entropy": -0.01 * (2 + 3) / 3},
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (EVERYTHING, ALL_OF_IT),
        ({"clip_epsilon": 0.2}, (-2.4 - 2 + 0.8) / 3),
        ({"clip_epsilon": (0.6, 0.6)}, {"loss_objective": (-3 - 2 + 0.5) / 3, "clip_fraction": 0}),
        ({"kl_mask_threshold": 0.5}, (-2.56 - 2) / 3),  # (log 4)^2 / 2 = 0.96; a masked token still counts
        ({"kl_mask_threshold": 0.2}, -2.56 / 3),
        # π/prox is 0.75, 1 and 1; prox/μ is 2, 1 and 0.5
        (RECOMPUTED, (-1.5 - 2 + 1) / 3),
        ({**RECOMPUTED, "correction": ["tis"], "thresholds": Thresholds(tis=1.5)}, (-2.25 - 2 + 0.5) / 3),
        ({**RECOMPUTED, "correction": ["mis", "geo"], "thresholds": WIDE}, (0 + 0 + 0.5) / 3),
        ({**RECOMPUTED, "correction": ["tis", "snis"]}, (-3 - 2 + 0.5) / 3 / (3.5 / 3)),
        (SAYING, SAID),
        # coupled: π/μ is 1.5, 1 and 0.5
        ({"correction": "icepop", "thresholds": WIDE}, (0 - 2 + 0) / 3),
        ({"correction": "staleness_mask", "thresholds": Thresholds(staleness_mask=1)}, (0 - 2 + 0) / 3),
        ({"correction": "staleness_weight"}, (-1.28 - 2 + 0.2) / 3),
        # A-3PO: r is 1.5^(1/2), 1 and 0.5^(1/4); the weight is 1.5^(1/2), 1 and 0.5^(3/4)
        ({"proximal_policy": "interpolated"}, (-2 * 1.5**0.5 - 2 + 0.5**0.25) / 3),
        ({"proximal_policy": "interpolated", "correction": "tis"}, (-3 - 2 + 0.5) / 3),
        # log π/ref is 0, log 2 and log 4
        ({"kl_to_ref_coeff": 0.3, "kl_estimator": "k2"}, {"kl_to_ref": (LN2**2 / 2 + 2 * LN2**2) / 3}),
        ({**WEIGHED, "kl_estimator": "k2"}, {"loss_kl_to_ref": 0.3 * (LN2**2 / 2 + LN2**2) / 3}),
        (WEIGHED, {"kl_to_ref": ((0.5 - 1 + LN2) + 0.5 * (0.25 - 1 + 2 * LN2)) / 3}),
    ],
)
def test_golden_numbers(arguments: dict[str, Any], expected: Any) -> None:
    td, actor = by_hand()
    loss = GRPOLoss(actor, **{"clip_epsilon": (0.2, 0.28), **arguments})
    found = numbers(loss(td))
    expected = expected if isinstance(expected, dict) else {"loss_objective": expected}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert set(found) == set(loss.out_keys)
    assert found["ESS"] == pytest.approx(ALL_OF_IT["ESS"])  # of π/μ, whatever is corrected


def test_what_is_said_of_a_batch() -> None:
    """Of its tokens that nobody knows, of which some do not count, and of a ratio that is far out."""
    td, actor = by_hand()
    loss = GRPOLoss(actor, **EVERYTHING)
    for i, keep in enumerate(([False, True, False], [False, True])):
        td[i]["mine"] = torch.tensor(keep)
    loss.loss_mask_key = "mine"
    assert loss(td).loss_objective.item() == pytest.approx((-2.56 + 0.8) / 2)
    loss.loss_mask_key = None
    td[1][REF] = torch.tensor([float("nan")] * 2)  # it only leaves the KL
    out = loss(td)
    assert out.kl_to_ref.item() == pytest.approx((0 + (0.5 - 1 + LN2)) / 2)
    assert out.loss_objective.item() == pytest.approx(WHOLE)
    actor.log_probs.data[1, 2] += math.log(8)  # ratio 4, advantage -1
    assert GRPOLoss(actor)(td).loss_objective.item() == pytest.approx((-2.4 - 2 + 4) / 3)
    assert GRPOLoss(actor, dual_clip=3.0)(td).loss_objective.item() == pytest.approx((-2.4 - 2 + 3) / 3)
    td[1]["advantage"] = torch.tensor([[float("nan")]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'advantage' must be finite where a token counts, got nan in sample 1"):
        GRPOLoss(actor)(td)


@pytest.mark.parametrize("arguments", [{"aggregation": "none"}, {"reduction": "none"}])
def test_no_aggregation(arguments: dict[str, Any]) -> None:
    td, actor = by_hand()
    out = GRPOLoss(actor, **EVERYTHING, **arguments)(td)
    assert out.loss_objective.flatten().tolist() == pytest.approx([0, -2.56, -2, 0, 0, 0.8])
    assert total(out).shape == (2, 3, 1)
    assert out.kl_to_ref.shape == ()


# -- a batch in parts -------------------------------------------------------------------------------------------------


def test_denominators() -> None:
    td, actor = ragged([*samples(SHAPES), sample(2, 0)]), BigramActor()
    assert GRPOLoss(actor).denominators(td) == {"num_valid_tokens": 8, "num_sequences": 4}
    assert GRPOLoss(actor, aggregation="sequence_mean").denominators(td)["num_sequences"] == 3
    loss = GRPOLoss(actor)
    loss.set_keys(num_valid_tokens=("n", "tokens"))
    assert loss.denominators(td) == {("n", "tokens"): 8, "num_sequences": 4}
    # normalised weights need one more, and all of them
    loss = GRPOLoss(actor, correction=["tis", "snis"], proximal_policy="recomputed")
    rho = [(row["prox_log_prob"] - row[LOG_PROBS]).exp().clamp(max=2).nansum() for row in td.unbind(0)]
    expected = {"num_valid_tokens": 8, "num_sequences": 4, "sum_weights": float(sum(rho))}
    assert loss.denominators(td) == pytest.approx(expected)
    td["num_valid_tokens"] = torch.full(td.batch_size, 8.0)
    with pytest.raises(ValueError, match="'snis' needs 'num_valid_tokens' and 'sum_weights' of the whole batch"):
        loss(td)
    for key in ("num_valid_tokens", "num_sequences"):
        for number, told in ((0.0, "is 0, but 8 tokens of"), (torch.inf, "must be a tensor of one finite number")):
            td[key] = torch.full(td.batch_size, number)
            with pytest.raises(ValueError, match=f"'{key}' {told}"):  # it would leave a sum
                GRPOLoss(actor)(td)
        del td[key]


def run_rank() -> Any:
    """Sums of both ranks: numbers and tensors, for gradients that are averaged and that are not."""
    rank = distributed.get_rank()
    sums = sum_over_ranks({"flat": torch.arange(3) + rank, "square": torch.ones(2, 2)})
    assert sums["flat"].tolist() == [0.5, 1.5, 2.5]
    assert sums["square"].tolist() == [[1, 1], [1, 1]]
    assert sum_over_ranks({"a": 1.0 + rank}) == {"a": 1.5}
    return sum_over_ranks({"a": 1.0 + rank, ("b", "c"): 0.5}, gradients_are_averaged=False)


def test_two_ranks_are_one_and_without_ranks_it_says_so() -> None:
    assert run_as_ranks(run_rank) == [{"a": 3.0, ("b", "c"): 1.0}] * 2
    with pytest.raises(ValueError, match=r"sum_over_ranks needs a process group.*init_process_group first"):
        sum_over_ranks({"num_valid_tokens": 3.0})


# -- which tokens count -----------------------------------------------------------------------------------------------


def test_unknown_sample_log_probs_drop_their_tokens() -> None:
    rollouts = samples(SHAPES)
    cut = [rollout.clone() for rollout in rollouts]
    for rollout, short in zip(rollouts[:2], cut, strict=False):
        rollout[LOG_PROBS][-1] = float("nan")
        for key, value in list(short.items(True, True)):  # the same without the last token
            if len(value.shape) == 1 and key != ("tokens", "prompt"):
                short[key] = value[:-1]
    for strategy, dropped in (("sft", 2), ("rlhf", 2), ("generic", 0)):  # generic names prompts, which nobody sampled
        loss = GRPOLoss(BigramActor(), masking_strategy=strategy, **EVERYTHING)
        expected = {**numbers(loss(ragged(cut))), "num_dropped_tokens": dropped}
        assert numbers(loss(ragged(rollouts))) == pytest.approx(expected)


@pytest.mark.parametrize("of", ["log_probs", "entropy"])
def test_what_the_actor_gives_that_is_not_finite_is_dropped_and_counted(of: str) -> None:
    td, actor = by_hand()
    getattr(actor, of).data[0, 2] = float("nan")
    actor.log_probs.data[0, 0] = float("nan")  # of the prompt: not counted
    out = GRPOLoss(actor, clip_epsilon=(0.2, 0.28))(td)
    assert out.num_dropped_tokens.item() == 1
    assert out.entropy.item() == pytest.approx((1 + 3) / 2)
    assert out.loss_entropy.item() == pytest.approx(-0.01 * (1 + 3) / 3)
    if of == "log_probs":
        assert out.loss_objective.item() == pytest.approx((-2.56 + 0.8) / 3)  # it still counts in the denominator
        assert out.kl_approx.item() == pytest.approx(-(LN15 - LN2) / 2)  # and not in a metric
    else:
        assert out.loss_objective.item() == pytest.approx((-2.56 - 2 + 0.8) / 3)  # its log-prob is known
    total(out).backward()
    assert actor.log_probs.grad.isfinite().all()


@pytest.mark.parametrize("arguments", [{"kl_mask_threshold": 0.5}, {"correction": "icepop", "thresholds": WIDE}])
def test_kept_is_what_corrections_leave(arguments: dict[str, Any]) -> None:
    td, actor = by_hand()
    first = "kl_mask_threshold" in arguments
    kept = GRPOLoss(actor, **arguments).kept(td, actor.log_probs)
    assert kept.tolist() == [[False, first, True], [False, False, False]]
    with pytest.raises(ValueError, match=r"log_probs and tokens must have the same shape"):
        GRPOLoss(actor).kept(td, actor.log_probs[:, 1:])


def test_a_batch_without_valid_tokens_is_a_loss_of_zero() -> None:
    actor = BigramActor()
    out = GRPOLoss(actor, **EVERYTHING)(ragged([sample(2, 0), sample(3, 0)]))
    assert set(numbers(out).values()) == {0}
    total(out).backward()
    td = ragged([sample(2, 0)])  # which has denominators too
    loss = GRPOLoss(actor, aggregation="sequence_mean")
    for key, number in loss.denominators(td).items():
        td[key] = torch.full(td.batch_size, number)
    assert total(loss(td)).item() == 0


# -- a TorchRL loss module --------------------------------------------------------------------------------------------


def test_terms_that_are_off_are_absent() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False, kl_to_ref_coeff=0.0, masking_strategy="rlhf")
    out = loss(ragged(samples(SHAPES)).exclude(REF, ("tokens", "prompt")))
    assert set(out.keys()) == {"loss_objective", "clip_fraction", "kl_approx", "ESS", "num_dropped_tokens"}
    assert set(out.keys()) == set(loss.out_keys)
    assert out.loss_kl_to_ref is None
    assert ("masks", "all_assistant_mask") in loss.in_keys
    assert REF not in loss.in_keys
    assert loss.actor_network.calls[-1]["entropy"] is False
    measured = GRPOLoss(BigramActor(), kl_to_inference_coeff=0.0)(ragged(samples(SHAPES)))
    assert measured.kl_to_inference.item() > 0
    assert measured.loss_kl_to_inference.item() == 0


@pytest.mark.parametrize(("term", "key"), [("kl_to_ref", REF), ("kl_to_inference", LOG_PROBS)])
def test_one_far_token_does_not_drown_the_batch(term: str, key: Any) -> None:
    """π gives it e^-25 where the other policy gives it e^-5.1: as it is, k3 is 4.4e8, and so is its gradient."""
    td, actor = by_hand()
    td[1][key][1] = -5.1
    actor.log_probs.data[1, 2] = -25.0
    bounded, free = (GRPOLoss(actor, **{f"{term}_coeff": 1.0}, **how)(td) for how in ({}, {"kl_clamp": None}))
    assert bounded.get(term).item() < 10
    (one, other) = (torch.autograd.grad(out.get(f"loss_{term}"), actor.log_probs)[0] for out in (bounded, free))
    assert one[1, 2] == 0
    assert other[1, 2].item() == pytest.approx(-(math.exp(19.9) - 1) / 3)
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("paper", "output"),
    [
        *((paper, GRPOLossOutput) for paper in (GSPOLoss, DPPOLoss, SAPOLoss)),
        *((DAPO, DAPOLossOutput), (CISPOLoss, CISPOLossOutput)),
    ],
)
def test_losses_of_papers_have_no_entropy_bonus_and_outputs_named_as_in_torchrl(
    paper: type[GRPOLoss], output: type[LLMLossOutput]
) -> None:
    """TorchRL's DAPO and CISPOLoss add one by default, as its GRPOLoss does, whose default stays."""
    td, actor = by_hand()
    out = paper(actor)(td)
    kinds = (GRPOLossOutput, DAPOLossOutput, CISPOLossOutput)
    assert [kind for kind in kinds if isinstance(out, kind)] == [output] and isinstance(out, LLMLossOutput)
    assert total(out).item() == out.loss_objective.item()
    assert out.loss_entropy is None
    wanted = paper(actor, entropy_bonus=True, aggregation="token_mean")(td)
    assert wanted.loss_entropy.item() == pytest.approx(-0.01 * (1 + 2 + 3) / 3)
    assert GRPOLoss(actor)(td).loss_entropy.item() == wanted.loss_entropy.item()


def test_arguments_and_attributes_of_torchrl() -> None:
    """Some arguments change nothing; attributes may be assigned: what is read of a batch follows them."""
    td, actor = by_hand()
    same = {"gamma": None, "clip_value": False, "samples_mc_entropy": 8, "aggregation": None, "reduction": "mean"}
    assert numbers(GRPOLoss(actor, **same)(td)) == numbers(GRPOLoss(actor)(td))
    assert GRPOLoss(actor, **same).samples_mc_entropy == 8
    loss = GRPOLoss(actor, entropy_bonus=False, clip_epsilon=(0.2, 0.28))
    assert {"clip_epsilon_low", "clip_epsilon_high", "actor_network.log_probs"} == set(loss.state_dict())
    loss.clip_epsilon_high = 0.2  # it can be scheduled
    assert loss(td).loss_objective.item() == pytest.approx((-2.4 - 2 + 0.8) / 3, rel=1e-6)
    loss.kl_to_ref_coeff = 0.3
    assert loss(td).kl_to_ref.item() == pytest.approx(TO_REF)
    # a trust region around the policy that sampled: (log 1.5)^2 / 2 = 0.08 and (log 0.5)^2 / 2 = 0.24
    loss.kl_to_ref_coeff, loss.kl_mask_threshold = None, 0.1
    loss.set_keys(ref_log_probs=LOG_PROBS)
    assert loss(td.exclude(REF)).loss_objective.item() == pytest.approx((-2.4 - 2) / 3)
    loss.kl_mask_threshold, loss.masking_strategy = None, "rlhf"
    td[0]["masks", "all_assistant_mask"][-1] = False
    assert loss(td).loss_objective.item() == pytest.approx((-2.4 + 0.8) / 2)
    loss.masking_strategy = "all"
    with pytest.raises(ValueError, match=r"masking_strategy must be one of .*, got 'all'"):
        loss(td)


def test_set_keys() -> None:
    td = ragged(samples(SHAPES))
    loss = GRPOLoss(BigramActor(), **EVERYTHING)
    expected = numbers(loss(td))
    renamed = {"advantage": "a", "sample_log_prob": ("b", "c"), "ref_log_probs": "d", "prompt": "e"}
    for name, key in renamed.items():
        td.rename_key_(getattr(loss.tensor_keys, name), key)
    with pytest.raises(ValueError, match=r"the tensordict has no \('tokens', 'prompt'\)"):
        loss(td)
    loss.set_keys(**renamed)
    assert numbers(loss(td)) == expected
    assert set(renamed.values()) <= set(loss.in_keys)
    with pytest.raises(ValueError, match="value is not an accepted tensordict key"):
        loss.set_keys(value="v")


def test_the_input_is_left_as_it_was() -> None:
    td, again = ragged(samples(SHAPES)), ragged(samples(SHAPES))
    GRPOLoss(BigramActor(), **EVERYTHING)(td)
    for one, other in zip(td, again, strict=True):
        found, wanted = (dict(row.items(True, True)) for row in (one, other))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_low_precision_log_probs_are_computed_with_in_float32() -> None:
    td, actor = by_hand()
    low = lazy_stack([one.apply(lambda x: x.float() if x.is_floating_point() else x) for one in td])
    out = GRPOLoss(GivenActor(actor.log_probs.detach().bfloat16(), actor.entropy), entropy_bonus=False)(low)
    assert out.loss_objective.dtype == torch.float32


def test_it_is_a_loss_module_whose_outputs_are_named_by_its_class() -> None:
    actor = BigramActor()
    actor.in_keys = [("tokens", "full"), ("routed_experts", "full")]
    loss = GRPOLoss(actor, **EVERYTHING)
    assert isinstance(loss, LossModule)
    out = loss(ragged(samples(SHAPES)))
    own = [LOG_PROBS, "advantage", ("masks", "all_attention_mask"), ("tokens", "prompt"), REF]
    assert loss.in_keys == [*actor.in_keys, *own]
    assert {key for key, value in out.items() if value.requires_grad} == {k for k in loss.out_keys if "loss_" in k}
    assert loss.get_stateful_net("actor_network") is actor
    whole = GRPOLoss(actor, **EVERYTHING, router_loss=MoERouterLoss(actor, top_k=1), correction="geo")
    assert {field.name for field in fields(GRPOLossOutput)} == set(whole.out_keys)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"kl_to_ref_coeff": 0.1}, REF),
        ({"kl_mask_threshold": 0.1}, REF),
        ({}, LOG_PROBS),
        ({}, "advantage"),
        ({}, ("tokens", "full")),
        ({}, ("tokens", "prompt")),
        ({}, ("masks", "all_attention_mask")),
        ({"masking_strategy": "generic"}, ("masks", "all_attention_mask")),
        ({"masking_strategy": "rlhf"}, ("masks", "all_assistant_mask")),
        ({"proximal_policy": "recomputed"}, "prox_log_prob"),
        ({"proximal_policy": "interpolated"}, ("policy_versions", "full")),
        ({"correction": "staleness_mask"}, "current_version"),
    ],
)
def test_missing_keys_are_named_before_the_actor_runs(arguments: dict[str, Any], key: Any) -> None:
    actor = BigramActor()
    td = ragged(samples(SHAPES))
    del td[key]
    with pytest.raises(ValueError, match=rf"the tensordict has no {re.escape(repr(key))}"):
        GRPOLoss(actor, **arguments)(td)
    assert actor.calls == []


def test_missing_log_probs_are_the_error_that_torchrl_raises() -> None:
    td = ragged(samples(SHAPES))
    with pytest.raises(KeyError, match=r"^Couldn't find the log-probs"):
        GRPOLoss(BigramActor())(td.exclude(LOG_PROBS))
    told = r"^Couldn't find the ref log-probs .* set_keys\(ref_log_probs=\('log_probs', 'full'\)\)\.$"
    with pytest.raises(KeyError, match=told):
        GRPOLoss(BigramActor(), kl_mask_threshold=0.1)(td.exclude(REF))


def test_torchrls_kl_in_the_reward() -> None:
    """The call of the docs: it runs with our wrapper, and its reference is found by the loss."""
    from torchrl_moe.modules import TransformersWrapper

    actor = TransformersWrapper(make_tiny_moe(), tokenizer=ByteTokenizer(), replay="none")
    reference = actor.reference(make_tiny_moe(seed=1)).get_new_version(log_probs_key="ref_log_probs")
    rollouts = [one.apply(lambda x: x.float() if x.is_floating_point() else x) for one in samples([(2, 3), (1, 2)])]
    for rollout in rollouts:
        rollout["next"] = {"reward": torch.zeros(len(rollout["tokens", "full"]), 1)}
    with torch.no_grad():
        td = RetrieveKL(actor, reference, assistant_only=False, add_to_reward=True, coeff=0.1)(ragged(rollouts))
    for row in td.unbind(0):
        gap = row["next", "log_probs", "full"] - row[REF]
        torch.testing.assert_close(row["next", "reward"][:, 0], -0.1 * gap)  # at prompt positions too
        assert row["next", "reward"][1:].abs().min() > 0
    assert GRPOLoss(actor, kl_to_ref_coeff=0.1)(td).kl_to_ref.item() > 0


# -- against TorchRL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GRPOLoss", "DAPO", "CISPOLoss"])
def test_torchrls_wrapper_over_a_chat(name: str) -> None:
    """A padded batch with TorchRL's classes, an advantage per token, and a mask that was never computed."""
    from tensordict import MetaData
    from torchrl.data import History
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives import llm as theirs
    from torchrl.testing import MockTransformerModel

    from torchrl_moe import objectives as ours
    from torchrl_moe.modules import ChatHistory, Masks
    from torchrl_moe.testing import ByteTokenizer

    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    prompt = History(role=["user"], content=["What is 2 + 2?"], batch_size=[1])
    answer = History(role=["assistant"], content=["4."], batch_size=[1])
    chat = ChatHistory(prompt=prompt, response=answer, full=prompt.extend(answer, inplace=False)).expand((1,))
    tokens = chat.to_tokens(tokenizer)
    length = tokens.get("full", as_padded_tensor=True, padding_side="left", padding_value=0).shape[-1]
    masks = Masks(all_attention_mask=torch.ones(1, length, dtype=torch.bool), padded=MetaData(True))
    td = TensorDict(
        {
            "history": chat,
            "tokens": tokens,
            "masks": masks,
            "advantage": torch.randn(1, length, 1),
            "log_probs": torch.randn_like(tokens, dtype=torch.float32) - 5,
        },
        batch_size=[1],
    )
    model = MockTransformerModel(len(tokenizer))
    actor = TransformersWrapper(model, tokenizer=tokenizer, generate=False, pad_output=True, input_mode="history")
    same: dict[str, Any] = {"clip_epsilon": (0.2, 0.28), "entropy_bonus": True}
    found, expected = (getattr(room, name)(actor, **same)(td.copy()) for room in (ours, theirs))
    for key in ["loss_entropy", "ESS"] + ["loss_objective"] * (name != "CISPOLoss"):  # whose weight has a gradient
        torch.testing.assert_close(found.get(key), expected.get(key).squeeze(), atol=1e-5, rtol=1e-5)
