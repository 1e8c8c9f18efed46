"""The part of TransformersWrapper that scores: each score is that of a plain forward of one sequence, by its experts.

Rollouts come from a fake engine, whose routes are random: no router would choose them, so a row that is not replayed,
or replayed one off, shows in the numbers.
"""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from support.families import build
from support.flash import flash_attention
from support.gradients import assert_same, gradients
from support.routes import experts_seen, random_routes
from support.scored_rollouts import LAYOUT, LAYOUTS, at, dense, fake_rollouts
from torchrl_moe.data import KeptTokens, RoutedExperts
from torchrl_moe.errors import ReplayError, UnsupportedRouterError
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.modules.policies.scoring import read_rows
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

MOE = LAYOUT.moe_layers
FULL, ROUTES, RECORDED = ("tokens", "full"), ("routed_experts", "full"), ("train_routed_experts", "full")
MASK = ("masks", "all_attention_mask")


@pytest.fixture(scope="module")
def rollouts() -> LazyStackedTensorDict:
    return fake_rollouts()


@pytest.fixture
def td(rollouts: LazyStackedTensorDict) -> TensorDictBase:
    return rollouts.clone()


@pytest.fixture(scope="module")
def actor() -> TransformersWrapper:
    return TransformersWrapper(make_tiny_moe(), tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def twin() -> RouterReplay:
    """Another model of the same weights."""
    return RouterReplay(make_tiny_moe())


VOCABULARY = 259
KEPT = ("sampling", "kept")
TEMPERATURES = (0.5, 2.0, 1.0)


def truncated(td: TensorDictBase, words: tuple[bool, ...] = (True, True, True)) -> TensorDictBase:
    """As if tokens of some answers had been drawn from 3 words, or from all but 40, by turns; each at a temperature."""
    for i, (one, temperature) in enumerate(zip(td.unbind(0), TEMPERATURES, strict=True)):
        one["sampling", "temperature"] = torch.tensor(temperature)
        if not words[i]:
            continue
        answered = one["masks", "all_assistant_mask"]
        ids, sizes = [], torch.zeros(len(answered), dtype=torch.int32)
        for t in answered.nonzero()[:, 0].tolist():
            others = [word for word in range(VOCABULARY) if word != int(one[FULL][t])]
            ids += others[:40] if t % 2 else [int(one[FULL][t]), others[100], others[-1]]
            sizes[t] = -40 if t % 2 else 3
        one[KEPT] = KeptTokens(ids=torch.tensor(ids, dtype=torch.int32), sizes=sizes)
        one[KEPT].validate(vocabulary=VOCABULARY, tokens=one[FULL])
    return td


def sampled_reference(twin: RouterReplay, one: TensorDictBase, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies ``[T - 1]``, of a softmax over each token's words."""
    routes = one.get(ROUTES, None)
    with torch.no_grad(), nullcontext() if routes is None else twin.replay(routes[None]):
        logits = twin.model(one[FULL][None]).logits[0, :-1] / temperature
    scores = []
    for t, row in enumerate(logits, start=1):
        kept = one.get(KEPT, None)
        words = torch.arange(VOCABULARY) if kept is None else kept.ids_of(t, vocabulary=VOCABULARY)
        dist = torch.distributions.Categorical(logits=row[words])
        scores.append((dist.log_prob((words == one[FULL][t]).nonzero()[0, 0]), dist.entropy()))
    log_probs, entropies = zip(*scores, strict=True)
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pads", [True, False, None])
@pytest.mark.parametrize("case", ["R3, each its own", "R3, dense logits", "R3, one", "none, one"])
def test_scores_are_those_of_each_sequence_alone_in_the_distribution_that_it_was_drawn_from(
    actor: TransformersWrapper, twin: RouterReplay, td: TensorDictBase, layout: str, pads: bool | None, case: str
) -> None:
    replay, _, sampling = case.partition(", ")
    rollouts = at(0.7, td) if sampling == "one" else truncated(td, (True, False, True))
    batch = LAYOUTS[layout](rollouts)
    scorer = actor.get_new_version(replay=replay, pad_model_input=pads)
    scorer.scoring_model.check()
    assert scorer.scoring_model.splits
    if sampling == "dense logits":
        scorer.scoring_model = copy.copy(scorer.scoring_model)
        scorer.scoring_model.splits = False
    log_probs, entropy, router_logits = scorer.score(batch)
    dist, ids = scorer.get_dist(batch), read_rows(batch, FULL, 0)  # of logits [B, T, V]
    found = (log_probs, entropy, dist.log_prob(ids), dist.entropy())
    assert router_logits is None
    assert log_probs.dtype == entropy.dtype == torch.float32
    masks = read_rows(batch, MASK, False)
    assert log_probs.shape == entropy.shape == masks.shape
    assert layout == "dense" or masks[:, -1].all()  # padded on the left
    for i, (one, mask) in enumerate(zip(rollouts.unbind(0), masks, strict=True)):
        temperature = 0.7 if sampling == "one" else TEMPERATURES[i]
        wanted = sampled_reference(twin, one if replay == "R3" else one.exclude("routed_experts"), temperature)
        of_scores = 1e-5 if sampling == "one" else 2e-5
        of_dist = 2e-5
        bounds = (of_scores, of_scores, of_dist, of_dist)
        for got, alone, atol in zip(found, wanted * 2, bounds, strict=True):
            torch.testing.assert_close(got[i][mask][1:], alone, atol=atol, rtol=0)
        for got in (log_probs[i], entropy[i]):
            assert not got[~mask].any() and got[mask][0] == 0  # pads and the first token
    loss = log_probs.sum() + entropy.sum()
    grads = torch.autograd.grad(loss, [p for p in scorer.model.parameters() if p.requires_grad], allow_unused=True)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ask", ["score", "get_dist", "forward"])
def test_silent_answers_are_warned_of_once(
    actor: TransformersWrapper, td: TensorDictBase, layout: str, ask: str
) -> None:
    batch = LAYOUTS[layout](td)
    unsaid = batch.exclude("sampling")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet, scorer = actor.get_new_version(temperature=1.0), actor.get_new_version(inplace=False)
        for one, given in ((scorer, batch), (quiet, unsaid), (scorer, unsaid.exclude("log_probs"))):
            getattr(one, ask)(given.copy())
        assert not caught
        for _ in range(2):
            getattr(scorer, ask)(unsaid.copy())
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__ or ask != "score"  # the line that asks
    text = r"^sample 0 has an engine's log-probs, but no 'sampling' .* at temperature 1, over the whole vocabulary\."
    assert re.match(text, str(warning.message))


def test_a_temperature_must_be_what_each_sample_says(actor: TransformersWrapper, td: TensorDictBase) -> None:
    wanted = actor.score(at(1.0, td.clone()))[0]
    assert torch.equal(actor.score(td.exclude("sampling", "policy_versions"))[0], wanted)
    hot = actor.get_new_version(temperature=2.0)
    torch.testing.assert_close(hot.score(td.exclude("sampling"))[0], actor.score(at(2.0, td))[0])
    assert torch.equal(hot.score(td)[0], actor.score(td)[0])
    td[1]["sampling", "temperature"] = torch.tensor(0.9)
    for ask in (hot.score, hot.get_dist, hot):
        with pytest.raises(ValueError, match=r"^sample 1 was sampled at temperature 0\.9, and is to be scored at 2:"):
            ask(td)


def test_words_may_have_become_a_plain_tensordict(actor: TransformersWrapper, td: TensorDictBase) -> None:
    wanted = actor.score(truncated(td))[0]
    for one in td.unbind(0):
        one[KEPT] = one[KEPT].to_tensordict()
    assert torch.equal(actor.score(td)[0], wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_have_been_drawn_is_named(actor: TransformersWrapper, td: TensorDictBase, layout: str) -> None:
    greedy, cut, outside = td.clone(), truncated(td.clone()), truncated(td.clone())
    greedy[2]["sampling", "temperature"] = torch.tensor(0.0)
    for ask in (actor.score, actor.get_dist):
        with pytest.raises(ValueError, match=r"^sample 2 was sampled at temperature 0: it is greedy"):
            ask(LAYOUTS[layout](greedy))
    outside[0][FULL][-1] = (outside[0][FULL][-1] + 7) % 250
    outside[0][KEPT].sizes[-1] = outside[0][KEPT].sizes[-1].abs()  # whichever it was: the words that are named
    for scorer in (actor, actor.get_new_version(pad_model_input=64)):
        with pytest.raises(ValueError, match="is not among the ids that kept gives this row"):
            scorer.score(LAYOUTS[layout](outside))
    cut[0][KEPT] = cut[0][KEPT].truncate(3)
    if layout == "ragged":  # others could not be padded
        with pytest.raises(ValueError, match=r"^\('sampling', 'kept'\) of sample 0 is for 3 tokens, and there are \d+"):
            actor.score(cut)


def test_a_scaled_loss_has_its_gradients_from_dense_logits_too(td: TensorDictBase) -> None:
    """As float16 scales it; those of excluded words were NaN."""
    found = []
    for width in (None, 64):
        actor = TransformersWrapper(make_tiny_moe(), tokenizer=ByteTokenizer(), pad_model_input=width)
        log_probs, entropy, _ = actor.score(truncated(td.clone()))
        (2**16 * (log_probs + entropy).sum()).backward()
        found.append({name: grad / 2**16 for name, grad in gradients(actor.model).items()})
    assert_same(*found, atol=1e-5)


def test_the_reference_scores_over_the_same_words(actor: TransformersWrapper, td: TensorDictBase) -> None:
    batch = truncated(td)
    scores = actor.score(batch)[0].detach()
    torch.testing.assert_close(actor.reference(replay=True).score(batch)[0], scores)
    log_probs, entropy, _ = actor.score(batch.exclude("masks"), entropy=False)  # without a mask pads are looked for
    assert entropy is None and torch.equal(log_probs, scores)
    with pytest.raises(ValueError, match="this one is trained"):
        actor.reference(model=actor.model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pads", [True, False, None])
def test_only_tokens_of_the_mask_are_scored(
    actor: TransformersWrapper, td: TensorDictBase, layout: str, pads: bool | None
) -> None:
    scorer, batch = actor.get_new_version(pad_model_input=pads), LAYOUTS[layout](td)
    asked = read_rows(batch, ("masks", "all_assistant_mask"), False)
    asked[0] = False  # no token of this sample is read
    asked[1] = True  # every one of this sample, its first token and its pads too
    counted: list[int] = []
    hook = scorer.model.lm_head.register_forward_hook(lambda _, __, scores: counted.append(len(scores)))
    log_probs, entropy, logits = scorer.score(batch, router_logits=True, mask=asked)
    hook.remove()
    whole, spread, all_logits = scorer.score(batch, router_logits=True)
    scored = scorer._batch(batch).scored
    assert counted == [int((asked & scored).sum())] and 0 < counted[0] < int(scored.sum())
    torch.testing.assert_close(log_probs, torch.where(asked & scored, whole, 0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, torch.where(asked & scored, spread, 0), atol=1e-6, rtol=1e-6)
    assert torch.equal(logits, all_logits)
    nothing, _, _ = scorer.score(batch, mask=torch.zeros_like(asked))
    assert not nothing.any()
    (log_probs.sum() + nothing.sum()).backward()
    with pytest.raises(ValueError, match=r"mask must have shape \[3, \d+\], got \[3, 2\]"):
        scorer.score(batch, mask=asked[:, :2])


def test_ragged_batches_are_packed_where_that_is_smaller(actor: TransformersWrapper, td: TensorDictBase) -> None:
    longest, same = max(len(one[FULL]) for one in td.unbind(0)), lazy_stack([td[1], td[1].clone()])
    leaky = TransformersWrapper(build("jamba"), replay="none")
    for scorer, batch, rows in ((actor, td, 2), (actor, same, 2), (leaky, td, 3)):
        assert scorer._layout(scorer._batch(batch)).shape == (rows, longest)


@pytest.fixture
def uneven() -> TensorDictBase:
    """Sequences of 300, 20 and 20 tokens."""
    ids = torch.randint(3, 250, (340,), generator=torch.Generator().manual_seed(0)).split([300, 20, 20])
    return lazy_stack([TensorDict({"tokens": {"full": one}}) for one in ids])


def test_flash_attention_has_one_row_for_all(uneven: TensorDictBase) -> None:
    """Of 340 tokens, in its kernel for sequences of several lengths. As three rows they were 900, in the other one."""
    model = make_tiny_moe(num_hidden_layers=2)
    actor = TransformersWrapper(model, replay="none")
    wanted = actor.score(uneven)[0]
    slots: list[int] = []

    def count(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        slots.append(inputs["input_ids"].numel())

    model.model.register_forward_pre_hook(count, with_kwargs=True)
    for packed in (None, False):
        with flash_attention(model) as calls:
            scorer = TransformersWrapper(model, replay="none", pad_model_input=packed)
            scorer.score(uneven)  # the model is tried
            calls.clear()
            slots.clear()
            got = scorer.score(uneven)[0]
        assert slots == [340]
        assert calls == [[0, 300, 320, 340]] * 2
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pads", [True, None])
def test_right_pads_need_no_mask(uneven: TensorDictBase, pads: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA's is [B, 1, W, W]: 2.1 GB for 8 sequences of 16k. Rows of one sequence need none, and keep every score."""
    actor = TransformersWrapper(make_tiny_moe(num_hidden_layers=2), replay="none", pad_model_input=pads)
    batch = uneven if pads else uneven[1:]
    alone = [actor.score(batch[i : i + 1])[0][0] for i in range(len(batch))]
    masks: list[Any] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def kept(*args: Any, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        masks.append(None if attn_mask is None else list(attn_mask.shape))
        return attention(*args, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kept)
    together = actor.score(batch)[0]
    assert masks == [None] * 2
    for row, one in zip(together, alone, strict=True):
        torch.testing.assert_close(row[len(row) - len(one) :], one, atol=1e-6, rtol=0)
    actor.get_dist(batch)
    assert masks == [None] * 4


@pytest.mark.parametrize("family", ["minimax", "deepseek_v4", "qwen3_next"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_family_sees_pads(family: str, side: str) -> None:
    """Linear attention, and attention over blocks of tokens, do see those on the left of a model's input."""
    actor = TransformersWrapper(build(family))
    alone, padded = [], []
    for n in (14, 6, 5):
        ids, route = torch.arange(n) % 57 + 3, random_routes(actor.router_replay, 1, n, seed=n)[0]
        one = TensorDict({FULL: ids, ROUTES: route})
        alone.append(actor.score(lazy_stack([one]))[0][0, 1:].detach())
        at = slice(14 - n, 14) if side == "left" else slice(0, n)
        one = TensorDict({FULL: torch.zeros(14).long(), MASK: torch.zeros(14).bool()})
        one[ROUTES] = torch.full((14, *route.shape[1:]), -1)
        one[FULL][at], one[MASK][at], one[ROUTES][at] = ids, True, route
        padded.append(one)
    batch = torch.stack(padded)
    scores = actor.score(batch)[0].detach()
    for got, mask, wanted in zip(scores, batch[MASK], alone, strict=True):
        torch.testing.assert_close(got[mask][1:], wanted, atol=1e-5, rtol=0)


def test_one_row_is_refused_where_sequences_would_see_each_other() -> None:
    actor = TransformersWrapper(build("jamba"), replay="none", pad_model_input=False)
    for ask in (actor.score, actor.get_dist):
        with pytest.raises(ValueError, match=r"pad_model_input=False: sequences .* in Jamba"):
            ask(lazy_stack([TensorDict({FULL: torch.tensor([3, 4, 5])})]))


@pytest.mark.parametrize("packed", [None, True, False])
def test_sequences_of_one_token_and_of_none(packed: bool | None) -> None:
    actor = TransformersWrapper(make_tiny_moe(num_hidden_layers=2), replay="R2", pad_model_input=packed)
    for rows in (1, 0):
        td = lazy_stack([TensorDict({FULL: torch.tensor([7]), MASK: torch.tensor([bool(rows)])}) for _ in range(2)])
        with torch.no_grad():
            assert actor.score(td)[0].tolist() == [[0.0], [0.0]]
        assert [int((row[:, 1] >= 0).all(-1).sum()) for row in td.get(RECORDED, as_list=True)] == [rows, rows]
        assert actor.score(td)[0].tolist() == [[0.0], [0.0]]


def test_training_without_the_recorded_experts_is_said_once(td: TensorDictBase) -> None:
    td["advantage"] = torch.ones(3, 1, 1)
    live = TransformersWrapper(make_tiny_moe(), replay="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            live.score(td)  # as a reference, or to compare
        live.score(td.exclude("routed_experts"))
        live.reference().score(td)
    with pytest.warns(
        UserWarning, match="the batch has the experts that an engine recorded, and replay='none'"
    ) as told:
        live.score(td)
        GRPOLoss(live)(td)
    assert [one.filename for one in told] == [__file__]
    with pytest.warns(UserWarning, match=r"replay='R3' to follow them, or record none, vLLMWrapper\(return_routed"):
        GRPOLoss(TransformersWrapper(make_tiny_moe(), replay="none"))(td)


def test_what_has_no_router_logits_and_what_hides_its_model_is_refused() -> None:
    td = lazy_stack([TensorDict({"tokens": {"full": torch.tensor([3, 4, 5])}})])
    for model, message in (
        (build("gemma4"), "probabilities"),
        (make_tiny_moe("qwen3"), "Qwen3ForCausalLM returns no router logits"),
    ):
        with pytest.raises(UnsupportedRouterError, match=message):
            TransformersWrapper(model, replay="none").score(td, router_logits=True)
    with pytest.raises(TypeError, match="DataParallel hides its model"):
        TransformersWrapper(torch.nn.DataParallel(make_tiny_moe(num_hidden_layers=2)))


def test_a_token_behind_a_gap_does_not_count_as_certain(actor: TransformersWrapper, td: TensorDictBase) -> None:
    td[1]["masks", "all_attention_mask"][len(td[1]["tokens", "prompt"])] = False
    td["advantage"] = torch.ones(3, 1, 1)
    for ask in (actor.score, actor.get_dist, GRPOLoss(actor)):
        with pytest.raises(ValueError, match=r"'all_attention_mask'\) of sample 1 has a gap before token \d+ \(1 gaps"):
            ask(td)


def test_packed_equals_padded_with_gradients() -> None:
    padded = TransformersWrapper(make_tiny_moe("deepseek_v3"))
    routes = [random_routes(padded.router_replay, 1, length, seed=length)[0] for length in (3, 9, 5)]
    batch = lazy_stack([TensorDict({FULL: torch.arange(len(row)) * 7 % 250, ROUTES: row}) for row in routes])
    results = []
    for scorer in (padded, padded.get_new_version(pad_model_input=False)):
        log_probs, entropy, _ = scorer.score(batch)
        (log_probs.sum() + entropy.sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), gradients(scorer.model)))
    (*scores, grads), (*others, other_grads) = results
    torch.testing.assert_close(others, scores, atol=1e-6, rtol=1e-6)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert_same(other_grads, grads, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_r2_records_then_replays(actor: TransformersWrapper, td: TensorDictBase, layout: str, packed: bool) -> None:
    scorer = actor.get_new_version(replay="R2", pad_model_input=not packed)
    batch = LAYOUTS[layout](td).exclude("routed_experts")  # the engine's are not asked for
    with torch.no_grad(), experts_seen(scorer.model) as seen:
        before = scorer.score(batch)[0]
    recorded = batch.get(RECORDED, as_list=True)
    assert [len(row) for row in recorded] == [len(row) for row in batch.get(FULL, as_list=True)]
    recorded, mask = torch.cat(list(recorded)), torch.cat(list(batch.get(MASK, as_list=True)))
    rows, laid_out = recorded[mask], scorer._layout(scorer._batch(batch))
    assert (recorded[~mask] == -1).all()
    assert (rows[:, 0] == -1).all() and (rows[:, 1:] >= 0).all()  # the dense layer; the last token too
    for layer in MOE:
        assert torch.equal(rows[:, layer].long(), seen[layer][0][laid_out.index[laid_out.mask]])
    assert isinstance(batch["train_routed_experts"][0], RoutedExperts)
    assert rows.dtype == torch.int8  # as an engine's of so few experts
    after = scorer.score(batch)[0]
    assert after.requires_grad
    assert torch.equal(after, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r2_records_once_unless_asked_to_do_it_again(td: TensorDictBase, layout: str) -> None:
    """Old log-probs after an update are those of the recorded experts, whose record stays."""
    scorer, batch = TransformersWrapper(make_tiny_moe(), replay="R2"), LAYOUTS[layout](td)
    with torch.no_grad():
        scorer.score(batch)
        first = [row.clone() for row in batch.get(RECORDED, as_list=True)]
        for layer in MOE:
            scorer.model.model.layers[layer].mlp.gate.weight.copy_(torch.randn(16, 64))
        again = scorer.score(batch)[0]
        assert all(map(torch.equal, batch.get(RECORDED, as_list=True), first))
    laid_out = scorer._layout(scorer._batch(batch))
    with experts_seen(scorer.model) as seen:
        assert torch.equal(scorer.score(batch)[0], again)
    kept = torch.cat(first)[batch["masks", "all_attention_mask"].flatten() if layout == "dense" else slice(None)]
    for layer in MOE:
        assert torch.equal(seen[layer][0][laid_out.index[laid_out.mask]], kept[:, layer].long())
    with torch.no_grad():
        scorer.get_new_version(rerecord=True).score(batch)
    assert not all(map(torch.equal, batch.get(RECORDED, as_list=True), first))


def test_r2_does_not_guess_where_some_samples_were_recorded(td: TensorDictBase, actor: TransformersWrapper) -> None:
    scorer = TransformersWrapper(make_tiny_moe(), replay="R2")
    with torch.no_grad():
        scorer.score(td[:1])
        with pytest.raises(ReplayError, match=r"samples \[1, 2\] have no 'train_routed_experts'"):
            scorer.score(td)
        scorer.get_new_version(rerecord=True).score(td)
        scorer.score(td)
    with pytest.raises(ReplayError, match=r"'train_routed_experts'.*score the batch once under torch.no_grad\(\)"):
        actor.get_new_version(replay="R2").score(td.exclude("train_routed_experts"))


def test_agreement_and_fallback_by_hand(actor: TransformersWrapper, twin: RouterReplay, td: TensorDictBase) -> None:
    """The live routes, but for 4 rows of the last layer; 2 rows are unset."""
    for one in td.unbind(0):
        with torch.no_grad(), twin.record() as native:
            twin.model(one[FULL][None])
        one["routed_experts"] = RoutedExperts(full=native.routed_experts[0].flip(-1))  # sets have no order
    rows = td[1][ROUTES]
    taken = rows[:4, 3].tolist()
    rows[:4, 3, 0] = torch.tensor([next(e for e in range(16) if e not in row) for row in taken], dtype=rows.dtype)
    td[0][ROUTES][-1] = -1
    td[2][ROUTES][0, 1] = -1  # in one layer
    total = sum(len(one[FULL]) for one in td.unbind(0))
    with torch.no_grad():
        actor.get_new_version(measure_agreement=True).score(td)
    agreement = td["routing", "agreement"]
    assert agreement.shape == (3, 4)
    assert agreement[:, 0].isnan().all()
    assert agreement[:, 1:3].eq(1.0).all()
    torch.testing.assert_close(agreement[:, 3], torch.full((3,), 1 - 4 / (total - 1)))
    assert td["routing", "fallback"].tolist() == [1, 0, 1]


def test_agreement_is_nan_unless_measured(actor: TransformersWrapper, td: TensorDictBase) -> None:
    for batch in (td, dense(td)):  # pads are not counted
        actor.score(batch)
        assert batch["routing", "agreement"].isnan().all()
        assert batch["routing", "fallback"].tolist() == [1, 1, 1]  # engines do not forward the last token
    bare = td.exclude("routing")
    before = set(bare.keys(True, True))
    actor.get_new_version(replay="none").score(bare)  # without replay nothing is said
    assert set(bare.keys(True, True)) == before


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("replay", ["R3", "none", "bare"])
def test_router_logits_stand_at_their_layer_and_token(
    actor: TransformersWrapper, twin: RouterReplay, td: TensorDictBase, replay: Any, packed: bool
) -> None:
    if replay == "bare":  # no handle on the model that would know its routers
        scorer = TransformersWrapper(make_tiny_moe(), replay="none", pad_model_input=not packed)
    else:
        scorer = actor.get_new_version(replay=replay, pad_model_input=not packed, measure_agreement=True)
    _, _, logits = scorer.score(td, router_logits=True)
    mask = scorer._batch(td).mask
    assert logits.shape == (*mask.shape, 4, 16) and logits.requires_grad
    assert not logits[:, :, 0].any()  # the dense layer
    assert not logits[~mask].any()  # pads
    for i, one in enumerate(td.unbind(0)):
        with torch.no_grad():
            seen = (None, *twin.model(one[FULL][None], output_router_logits=True).router_logits)
        for layer in MOE if replay != "R3" else MOE[:1]:  # replay changes what later layers see
            torch.testing.assert_close(logits[i, mask[i], layer], seen[layer].view(-1, 16), atol=1e-4, rtol=1e-4)
