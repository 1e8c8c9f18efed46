"""The loss module: what it reads and writes, a batch in parts, a real MoE, and what it refuses; then its functions.

Load, balancing loss and z-loss are compared with naive fp64 code.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from support.gradients import checkpoint_activations
from support.rollouts import PAD, VOCABULARY, BigramActor, dense, ragged, samples, total
from support.routes import random_routes
from torchrl_moe.modules import TransformersWrapper, freeze_routers
from torchrl_moe.objectives import GRPOLoss, GSPOLoss, MoERouterLoss, MoERouterLossOutput
from torchrl_moe.objectives import load_balancing as balance
from torchrl_moe.testing import make_tiny_moe

NAN, INF = float("nan"), float("inf")
SHAPES = [(2, 3), (1, 4), (3, 1)]
LAYERS, EXPERTS, TOP_K = 3, 6, 2


class RouterActor(nn.Module):
    """Routes a token by its id; layer 1 has no router."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCABULARY, LAYERS, EXPERTS, generator=generator, dtype=torch.float64))
        self.calls: list[dict[str, bool]] = []

    def score(self, td: TensorDictBase, router_logits: bool = False, entropy: bool = True) -> tuple[Any, None, Any]:
        self.calls.append({"router_logits": router_logits, "entropy": entropy})
        ids = td.get(("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=PAD)
        logits = self.table[ids]
        dense_layer = torch.tensor([False, True, False])[:, None]
        return torch.zeros(ids.shape), None, logits.masked_fill(dense_layer, 0)


def numbers(out: MoERouterLossOutput) -> dict[str, Any]:
    return {key: value.detach().tolist() for key, value in out.items()}


def by_hand() -> tuple[TensorDictBase, RouterActor]:
    """Every token gives layer 0 scores of 3/8, 1/8 five times; layer 2 is all but even, and expert 0 wins again."""
    actor = RouterActor()
    with torch.no_grad():
        actor.table.zero_()
        actor.table[:, 0, 0] = math.log(3)
        actor.table[:, 2, 0] = 1e-9
    return ragged(samples(SHAPES)), actor


def test_golden_numbers() -> None:
    td, actor = by_hand()
    out = MoERouterLoss(actor, top_k=1, load_balancing_coeff=0.5, z_coeff=0.1)(td)
    assert out.loss_load_balancing.item() == pytest.approx(0.5 * (6 * 3 / 8 + 6 * 1 / 6) / 2)
    assert out.loss_z.item() == pytest.approx(0.1 * (math.log(8) ** 2 + math.log(6) ** 2) / 2)
    expected = torch.tensor([[1.0, 0, 0, 0, 0, 0], [NAN] * 6, [1, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(out.expert_load, expected, equal_nan=True)
    torch.testing.assert_close(out.load_entropy, torch.tensor([0, NAN, 0]), equal_nan=True)
    torch.testing.assert_close(out.max_load, torch.tensor([6, NAN, 6]), equal_nan=True)
    assert out.num_dropped_rows.item() == 0
    assert actor.calls == [{"router_logits": True, "entropy": False}]


def test_it_is_a_loss_module_with_named_outputs() -> None:
    actor = RouterActor()
    actor.in_keys = [("tokens", "full"), ("routed_experts", "full")]
    loss = MoERouterLoss(actor, top_k=TOP_K)
    assert isinstance(loss, LossModule)
    assert loss.in_keys == [*actor.in_keys, ("masks", "all_attention_mask")]
    assert set(loss.state_dict()) == {"actor_network.table"}
    td = ragged(samples(SHAPES))
    out = loss(td)
    assert set(out.keys()) == set(loss.out_keys)
    assert {key for key, value in out.items() if value.requires_grad} == {"loss_load_balancing", "loss_z"}
    total(out).backward()
    assert actor.table.grad.isfinite().all()
    assert not actor.table.grad[:, 1].any()
    assert actor.table.grad[:, 0].abs().max() > 0
    td.rename_key_(("masks", "all_attention_mask"), "mine")
    with pytest.raises(ValueError, match=r"the tensordict has no \('masks', 'all_attention_mask'\)"):
        loss(td)
    loss.set_keys(attention_mask="mine")
    assert "mine" in loss.in_keys
    torch.testing.assert_close(numbers(loss(td)), numbers(out), equal_nan=True)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_pads_change_nothing_and_the_parts_of_a_batch_sum_to_it_gradients_included(per_sequence: bool) -> None:
    actor = RouterActor()
    loss = MoERouterLoss(actor, top_k=TOP_K, per_sequence=per_sequence)
    rollouts = samples([*SHAPES, (4, 2), (1, 1)])
    plain = loss(ragged(rollouts))
    for padded in (dense(rollouts), dense(rollouts, left=2, right=3)):
        torch.testing.assert_close(numbers(loss(padded)), numbers(plain), equal_nan=True)
    whole = total(plain)
    (wanted,) = torch.autograd.grad(whole, actor.table)
    parts = [ragged(rollouts[:2]), ragged(rollouts[2:])]
    keys = set(parts[0].keys(True, True))
    totals = loss.totals(parts)
    assert set(parts[0].keys(True, True)) == keys
    choices = TOP_K * sum(map(sum, [*SHAPES, (4, 2), (1, 1)]))
    assert totals["expert_counts"].sum(-1).tolist() == [choices, 0, choices]
    assert totals["num_router_sequences"].tolist() == [5, 0, 5]
    store(totals, parts)
    got = sum(total(loss(part)) for part in parts)
    torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(got, actor.table)[0], wanted, rtol=1e-6, atol=1e-7)
    # gradients averaged over ranks, as sum_over_ranks does it: the counts of both, divided by two
    first, second = (loss.totals([rank]) for rank in parts)
    store({key: (value + second[key]) / 2 for key, value in first.items()}, parts)
    average = sum(total(loss(rank)) for rank in parts) / 2
    torch.testing.assert_close(average, whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(average, actor.table)[0], wanted, rtol=1e-6, atol=1e-7)


def store(totals: Any, parts: list[TensorDictBase]) -> None:
    for key, value in totals.items():
        for part in parts:
            part[key] = value.expand(len(part), *value.shape)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_layer_of_which_a_part_has_no_row_counts_all_the_same(per_sequence: bool) -> None:
    """Token 3 has no row in layer 0, and is all that the first sample has."""
    actor = RouterActor()
    with torch.no_grad():
        actor.table[3, 0] = NAN
    loss = MoERouterLoss(actor, top_k=TOP_K, per_sequence=per_sequence)
    rollouts = samples([(1, 1), (1, 1), (2, 1)])
    for rollout, tokens in zip(rollouts, ([3, 3], [4, 5], [3, 1, 2]), strict=True):
        rollout["tokens", "full"][:] = torch.tensor(tokens)
    whole, parts = loss(ragged(rollouts)), [ragged([rollout]) for rollout in rollouts]
    assert whole.num_dropped_rows.item() == 3
    store(loss.totals(parts), parts)
    outs = [loss(part) for part in parts]
    torch.testing.assert_close(sum(map(total, outs)), total(whole), rtol=1e-6, atol=1e-8)
    assert [out.num_dropped_rows.item() for out in outs] == [2, 0, 1]


def test_broken_rows_are_dropped_and_counted() -> None:
    actor, rollouts = RouterActor(), samples([(2, 3)])
    rollouts[0]["tokens", "full"][:] = torch.tensor([1, 2, 3, 4, 5])
    actor.table.data[4, 0, 2] = float("inf")
    actor.table.data[5, 2] = NAN
    out = MoERouterLoss(actor, top_k=TOP_K)(ragged(rollouts))
    assert out.num_dropped_rows.item() == 2
    assert total(out).isfinite()
    actor.table.data[:, 2] = NAN  # a layer of NaN alone
    out = MoERouterLoss(actor, top_k=TOP_K)(ragged(samples([(2, 3), (1, 1)])))
    assert total(out).isfinite()
    assert out.max_load.isnan().tolist() == [False, True, True]


def test_the_head_is_not_run_where_the_actor_knows_a_mask() -> None:
    class MaskedActor(RouterActor):
        def score(self, td: TensorDictBase, mask: Tensor | None = None, **asked: bool) -> tuple[Any, None, Any]:  # type: ignore[override]
            assert mask is not None and mask.shape == (3, 5) and not mask.any()
            return super().score(td, **asked)

    actor = MaskedActor()
    MoERouterLoss(actor, top_k=TOP_K)(ragged(samples(SHAPES)))
    assert len(actor.calls) == 1


def test_a_real_moe_of_which_the_first_layer_is_dense() -> None:
    """Against the router's own output, token by token; pads of a batch add nothing."""
    model = make_tiny_moe("qwen3_moe")
    actor = TransformersWrapper(model, replay="none")
    rollouts = samples(SHAPES)
    out = MoERouterLoss(actor, top_k=4, load_balancing_coeff=1.0, z_coeff=1.0)(ragged(rollouts))
    rows: list[Tensor] = []
    with torch.no_grad():
        for rollout in rollouts:
            given = model(rollout["tokens", "full"][None], output_router_logits=True).router_logits
            rows.append(torch.stack(list(given), 1))
    logits = torch.cat(rows)  # [N, 3, E]
    squares = logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(out.loss_z.detach(), squares, rtol=1e-4, atol=1e-4)
    share = torch.zeros_like(logits).scatter(-1, logits.topk(4).indices, 1.0).mean(0) / 4
    torch.testing.assert_close(out.expert_load[1:], share, atol=1e-6, rtol=0)
    assert out.expert_load[0].isnan().all()
    expected = (16 * (share * logits.softmax(-1).mean(0)).sum(-1)).mean()
    torch.testing.assert_close(out.loss_load_balancing.detach(), expected, rtol=1e-4, atol=1e-4)
    total(out).backward()
    for layer in (1, 2, 3):
        assert model.get_submodule(f"model.layers.{layer}.mlp.gate").weight.grad.abs().max() > 0


def real_batch() -> tuple[Any, TensorDictBase]:
    """Four rollouts that follow random experts, in two pairs of unequal lengths."""
    actor, rollouts = TransformersWrapper(make_tiny_moe("qwen3_moe")), []
    for i, one in enumerate(samples([(2, 3), (1, 4), (3, 1), (2, 5)])):
        routes = random_routes(actor.router_replay, 1, len(one["tokens", "full"]), seed=i)[0]
        routes[-1] = -1  # as every engine's
        rollouts.append(one.apply(lambda x: x.float() if x.is_floating_point() else x))
        rollouts[-1]["routed_experts"] = {"full": routes}
    return actor, ragged(rollouts)


def test_two_micro_batches_run_two_forward_passes_of_the_body() -> None:
    """They ran six: those of the loss, as many of the router loss, and as many for its totals."""
    actor, td = real_batch()
    router_loss = MoERouterLoss(actor, top_k=4)
    loss = GRPOLoss(actor, router_loss=router_loss, kl_to_inference_coeff=0.1)
    loss(td)  # the model is tried
    passes: list[int] = []
    hook = actor.model.model.register_forward_hook(lambda *_: passes.append(1))
    parts = td.split(2)
    for key, number in loss.denominators(td).items():
        for part in parts:
            part[key] = torch.full(part.batch_size, number)
    totals = router_loss.totals(parts, routes=("routed_experts", "full"), num_experts=16)
    store(totals, parts)
    outs = [loss(part) for part in parts]
    assert len(passes) == 2
    hook.remove()
    store(totals, [td])
    whole, alone = GRPOLoss(actor, kl_to_inference_coeff=0.1)(td), router_loss(td)
    of = [p for name, p in actor.model.named_parameters() if "gate.weight" in name or "layers.1." in name]
    got, wanted = (torch.autograd.grad(sum(map(total, losses)), of) for losses in (outs, [whole, alone]))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert set(loss.out_keys) == set(outs[0].keys()) == {*whole.keys(), *router_loss.out_keys}
    assert set(loss.state_dict()) == set(GRPOLoss(actor).state_dict())  # the actor is in it once
    for key in ("loss_load_balancing", "loss_z"):
        torch.testing.assert_close(sum(out.get(key) for out in outs), alone.get(key), rtol=1e-5, atol=1e-7)
    other = GSPOLoss(actor, router_loss=router_loss)
    assert set(other.out_keys) == {*GSPOLoss(actor).out_keys, *router_loss.out_keys}
    out = other(td)
    for key in router_loss.out_keys:
        torch.testing.assert_close(out.get(key), alone.get(key), equal_nan=True)
    router_loss.set_keys(attention_mask="attended")
    with pytest.raises(ValueError, match="the tensordict has no 'attended'"):
        other(td)


@pytest.mark.parametrize("frozen", [False, True], ids=["routers train", "layers before them train"])
def test_router_logits_that_checkpointing_cut_from_the_graph_are_refused(frozen: bool) -> None:
    actor, td = real_batch()
    actor.model.train().enable_input_require_grads()
    if frozen:
        freeze_routers(actor.model)
    loss = GRPOLoss(actor, router_loss=MoERouterLoss(actor, top_k=4))
    wanted = total(loss(td))
    checkpoint_activations(actor.model, use_reentrant=True)
    for one in (loss, loss.router_loss):
        with pytest.raises(ValueError, match=r"router logits of layer \d have no gradient.*use_reentrant=False"):
            one(td)
    with torch.no_grad():
        torch.testing.assert_close(total(loss(td)), wanted.detach())
    checkpoint_activations(actor.model, use_reentrant=False)
    of = [p for p in actor.model.parameters() if p.requires_grad]
    torch.testing.assert_close(torch.autograd.grad(total(loss(td)), of), torch.autograd.grad(wanted, of))


def test_totals_of_recorded_choices_are_those_of_the_router_that_made_them() -> None:
    actor, td = real_batch()
    recording = actor.get_new_version(replay="R2")
    with torch.no_grad():
        recording.score(td)
    router_loss, parts = MoERouterLoss(recording, top_k=4), list(td.split(2))
    live = router_loss.totals(parts)
    recorded = router_loss.totals(parts, routes=("train_routed_experts", "full"), num_experts=16)
    for key, value in live.items():
        torch.testing.assert_close(recorded[key], value, rtol=1e-6, atol=1e-6)
    for one in td.unbind(0):
        one["train_routed_experts", "full"][-1] = -1
    without_last = router_loss.totals(parts, routes=("train_routed_experts", "full"), num_experts=16)
    assert without_last["num_router_sequences"].tolist() == [0, 4, 4, 4]
    torch.testing.assert_close(without_last["expert_counts"].sum(-1), live["expert_counts"].sum(-1))
    for wrong in (None, 0, True, 4.0):
        with pytest.raises(ValueError, match=r"go together, got routes='x'|must be an integer of at least 1, or None"):
            router_loss.totals(parts, routes="x", num_experts=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"routes hold expert \d+, allowed are 0..1"):
        router_loss.totals(parts, routes=("train_routed_experts", "full"), num_experts=2)
    td[0]["train_routed_experts", "full"] = td[0]["train_routed_experts", "full"][1:]
    with pytest.raises(ValueError, match=r"of sample 0 must have shape \[5, L, K\], got \[4, 4, 4\]"):
        router_loss.totals([td], routes=("train_routed_experts", "full"), num_experts=16)


def test_router_logits_and_loads_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must have a score method that gives router logits, got Linear"):
        MoERouterLoss(nn.Linear(1, 1), top_k=TOP_K)
    td, actor = ragged(samples(SHAPES)), RouterActor()
    with pytest.raises(ValueError, match="returned None for the router logits"):
        MoERouterLoss(BigramActor(), top_k=TOP_K)(td)
    loss = MoERouterLoss(actor, top_k=TOP_K)
    store(loss.totals([td]), [td])
    counts = td["expert_counts"]
    for wrong in (NAN, -1.0):
        td["expert_counts"] = counts.clamp(max=wrong)
        with pytest.raises(ValueError, match="'expert_counts' holds counts, finite and 0 or more"):
            loss(td)
    del td["num_router_sequences"]
    td["expert_counts"] = torch.ones(3, LAYERS, EXPERTS)
    with pytest.raises(ValueError, match=r"'expert_counts' and 'num_router_sequences' go together.*totals"):
        loss(td)
    td["expert_counts"] = torch.ones(3, EXPERTS)
    with pytest.raises(ValueError, match=r"'expert_counts' must have shape \[3, 3, 6\], got \[3, 6\].*totals"):
        loss(td)
    full = actor.score
    actor.score = lambda td, **kwargs: (None, None, full(td, **kwargs)[2][:, 1:])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"logits of the actor must have shape \[3, 5, L, E\], got \[3, 4, 3, 6\]"):
        loss(td)
    with pytest.raises(ValueError, match="totals"):
        loss.totals([])
    with pytest.raises(ValueError, match=r"batch size \[B\]"):
        loss(td[0])


# -- the functions


balancing: Any = balance.load_balancing_loss


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    """One sequence, one layer."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


def every(logits: Tensor) -> Tensor:
    return torch.ones(logits.shape[:-1], dtype=torch.bool)


def drawn(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.rand(*shape[:2], generator=generator) < 0.7


def test_pads_dense_layers_and_broken_rows_are_no_rows() -> None:
    logits = torch.ones(1, 4, 3, 4)
    logits[:, :, 0] = 0  # a dense layer
    logits[:, 1:, 1] = 0  # another one: what its pads hold says nothing
    logits[0, 1, 2, 2] = INF
    logits[0, 3, 2] = 0  # one token's logits may be 0
    rows = balance.known_rows(logits, torch.tensor([[False, True, True, True]]))
    assert not rows[..., :2].any()
    assert rows[0, :, 2].tolist() == [False, False, True, True]


def test_choices_are_counted_and_measured() -> None:
    logits = torch.tensor([[[[3.0, 1, 2], [9, 8, 7]], [[1, 2, 3], [NAN, NAN, NAN]]]])
    counts = balance.choice_counts(logits, balance.known_rows(logits, torch.ones(1, 2, dtype=torch.bool)), 2)
    assert counts.tolist() == [[[1, 1, 2], [1, 1, 0]]]
    share = balance.load_share(torch.tensor([[1.0, 1, 1, 1], [2, 2, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]]))
    assert share.tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0], [0] * 4]
    torch.testing.assert_close(balance.load_entropy(share), torch.tensor([1, 0.5, 0, NAN]), equal_nan=True)
    torch.testing.assert_close(balance.max_load(share), torch.tensor([1.0, 2, 4, NAN]), equal_nan=True)


LN3 = math.log(3)


def naive(logits: Tensor, mask: Tensor, top_k: int, scoring: str, per_sequence: bool) -> tuple[Tensor, Tensor]:
    """Token by token."""
    experts, losses, squares = logits.shape[-1], [], []
    groups = list(zip(logits, mask, strict=True)) if per_sequence else [(logits.flatten(0, 1), mask.flatten())]
    for layer in range(logits.shape[2]):
        per_group = []
        for group, keep in groups:
            rows = group[keep][:, layer]
            if not len(rows):
                continue
            share = torch.zeros(experts, dtype=rows.dtype)
            for row in rows:
                share[row.topk(top_k).indices] += 1 / (top_k * len(rows))
            score = rows.sigmoid() / rows.sigmoid().sum(-1, keepdim=True) if scoring == "sigmoid" else rows.softmax(-1)
            per_group.append(experts * (share * score.mean(0)).sum())
        losses.append(sum(per_group) / len(per_group))
        squares.append(logits[mask][:, layer].exp().sum(-1).log().square().mean())
    return sum(losses) / len(losses), sum(squares) / len(squares)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_values_and_gradients_are_those_of_naive_code(scoring: Any, per_sequence: bool) -> None:
    logits, mask = drawn(3, 4, 5, 3, 6)
    mask[2] = False  # a sequence without a token
    logits.requires_grad_()
    rows = balance.known_rows(logits, mask)
    ours = (
        balancing(logits, rows, 2, scoring=scoring, per_sequence=per_sequence),
        balance.z_loss(logits, rows),
    )
    for got, wanted in zip(ours, naive(logits, mask, 2, scoring, per_sequence), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7)
        ((one,), (other,)) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (got, wanted))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
        assert one.abs().max() > 1e-3


def test_without_the_whole_batchs_load_parts_are_balanced_one_by_one() -> None:
    logits = torch.cat([logits_of((LN3, 0), (LN3, 0)), logits_of((0, LN3), (0, LN3))])
    parts = [balancing(one, every(one), 1, num_rows=torch.tensor([4])) for one in logits.split(1)]
    assert sum(parts).item() == pytest.approx(1.5)  # 1 for the whole batch


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x, r: balance.known_rows(x, r), "mask must have 2 dimensions, got 3"),
        (lambda x, r: balance.known_rows(x, r[:, :1, 0]), r"router_logits must have shape \[1, 1, L, E\]"),
        (lambda x, r: balance.known_rows(x.long(), r[..., 0]), "router_logits must have a floating point dtype"),
        (lambda x, r: balance.choice_counts(x, r[..., 0], 1), r"rows must have shape \[1, 2, 1\], got \[1, 2\]"),
        (lambda x, r: balance.choice_counts(x[0], r, 1), "router_logits must have 4 dimensions, got 3"),
        (lambda x, r: balancing(x, r, 3), r"top_k must be in 1\.\.2, .* got 3"),
        (lambda x, r: balancing(x, r, 1, scoring="linear"), "scoring must be one of .* got 'linear'"),
        (lambda x, r: balancing(x, r, 1, share=torch.ones(2)), r"share must have shape \[1, 2\], got \[2\]"),
        (
            lambda x, r: balancing(x, r, 1, share=torch.ones(1, 2), per_sequence=True),
            "leave it out with per_sequence=True",
        ),
        (lambda x, r: balance.z_loss(x, r[..., 0]), "rows must have shape"),
        (lambda x, r: balance.z_loss(x, r, torch.tensor(2)), r"num_rows must have shape \[1\], got \[\]"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    logits = logits_of((LN3, 0), (0, 1))
    with pytest.raises(ValueError, match=told):
        call(logits, every(logits))
