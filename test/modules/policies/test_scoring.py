"""What a scoring pass reads: tokens, masks and routes, sample by sample, in every layout; and its distributions.

A sample whose routes are wrong stops the batch or runs live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from support.routes import experts_seen, random_routes
from torchrl_moe.errors import ReplayError, RouteShapeError, RouteValueError, RoutingError
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.modules.policies.scoring import ScoringBatch, read_batch, read_routes
from torchrl_moe.modules.policies.scoring_wrapper import ScoringWrapper
from torchrl_moe.objectives.batch import TokenReader
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

TOKENS, ROUTES = ("tokens", "full"), ("routed_experts", "full")
MASK, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
LENGTHS, TAIL = (3, 9, 5), (4, 4)
U = -1


def ids(length: int) -> Tensor:
    return torch.arange(length) * 7 % 250


@pytest.fixture(scope="module")
def actor() -> TransformersWrapper:
    return TransformersWrapper(make_tiny_moe())


def routes_for(actor: TransformersWrapper) -> list[Tensor]:
    return [random_routes(actor.router_replay, 1, length, seed=length)[0] for length in LENGTHS]


def ragged(routes: list[Any]) -> TensorDictBase:
    rows = [TensorDict({TOKENS: ids(length)}) for length in LENGTHS]
    for row, given in zip(rows, routes, strict=True):
        if given is not None:
            row[ROUTES] = given
    return lazy_stack(rows)


def padded(routes: list[Tensor], width: int, left: Callable[[int], int]) -> TensorDictBase:
    """Dense rows of ``width``, of which the sample of length n begins at ``left(n)``; pads hold nonsense."""
    rows = []
    for length, given in zip(LENGTHS, routes, strict=True):
        at = slice(left(length), left(length) + length)
        row = {
            TOKENS: torch.full((width,), 9),
            MASK: torch.zeros(width, dtype=torch.bool),
            ROUTES: torch.zeros(width, *given.shape[1:], dtype=given.dtype),
        }
        row[TOKENS][at], row[MASK][at], row[ROUTES][at] = ids(length), True, given
        rows.append(TensorDict(row))
    return torch.stack(rows)


def jagged(routes: list[Tensor]) -> TensorDictBase:
    def nested(rows: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    return TensorDict({TOKENS: nested([ids(length) for length in LENGTHS]), ROUTES: nested(routes)}, batch_size=[3])


LAYOUTS: dict[str, Callable[[list[Tensor]], TensorDictBase]] = {
    "ragged": ragged,
    "left": lambda routes: padded(routes, 9, lambda length: 9 - length),
    "right": lambda routes: padded(routes, 9, lambda length: 0),
    "both": lambda routes: padded(routes, 11, lambda length: 1),
    "jagged": jagged,
}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_log_probs_are_the_same_in_every_layout(family: str) -> None:
    actor, alone = TransformersWrapper(make_tiny_moe(family)), []
    routes = routes_for(actor)
    routes[1][4:6] = U  # two rows on the live router
    routes[1][7, 2] = U  # and one in a single layer
    for i, length in enumerate(LENGTHS):
        with torch.no_grad(), actor.router_replay.replay(routes[i][None]):
            logits = actor.model(ids(length)[None]).logits[0]
        alone.append(logits[:-1].log_softmax(-1).gather(1, ids(length)[1:, None])[:, 0])
    for scorer in (actor, actor.get_new_version(pad_model_input=False)):  # packed
        for name, layout in LAYOUTS.items():
            td = layout(routes)
            with torch.no_grad():
                log_probs, _, _ = scorer.score(td, entropy=False)
            got = log_probs[read_batch(td, TOKENS, MASK).scored]
            torch.testing.assert_close(got, torch.cat(alone), atol=1e-6, rtol=1e-6, msg=name)
            assert td["routing", "fallback"].tolist() == [0, 3, 0]


@pytest.mark.parametrize("ends_turns", [False, True], ids=["pads only pad", "they end turns too"])
def test_pads_without_a_mask_are_found_in_every_layout(ends_turns: bool) -> None:
    tokenizer = ByteTokenizer()
    if ends_turns:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    tokens = torch.tensor([[pad, pad, 7, 8, 9], [3, 4, 5, pad, pad], [9, 8, 7, 6, 5], [pad, 1, 2, pad, pad]])
    mask = tokens != pad
    mask[[1, 3], 3] = ends_turns
    scorer = TransformersWrapper(make_tiny_moe(), tokenizer=tokenizer, replay="none")
    batch = TensorDict({TOKENS: tokens}, batch_size=[4])
    with torch.no_grad():
        wanted = scorer.score(TensorDict({TOKENS: tokens, MASK: mask}, batch_size=[4]), entropy=False)[0]
        for width in (None, 8):
            one = scorer.get_new_version(pad_model_input=width)
            for td in (batch, lazy_stack(list(batch.unbind(0)))):
                torch.testing.assert_close(one.score(td, entropy=False)[0], wanted, atol=1e-6, rtol=1e-6)
        square = scorer(batch.view(2, 2))
    got = torch.stack([square[i][k]["log_probs", "full"] for i in range(2) for k in range(2)])
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_samples_of_two_dtypes_keep_their_ids() -> None:
    routes = [torch.full((length, *TAIL), 1, dtype=torch.int8) for length in LENGTHS]
    routes[1] = torch.full((9, *TAIL), 300, dtype=torch.int16)
    td = ragged(routes)
    got = read_routes(td, ROUTES, read_batch(td, TOKENS, MASK), TAIL, "raise")
    assert got.dtype == torch.int16
    assert got[:, :, 0, 0].tolist() == [[U] * 6 + [1] * 3, [300] * 9, [U] * 4 + [1] * 5]


def spoiled(rows: Tensor, place: tuple[int, int, int], value: int) -> Tensor:
    rows = rows.clone()
    rows[place] = value
    return rows


BAD: dict[str, tuple[Callable[[Tensor], Any], type[RoutingError], str]] = {
    "missing": (lambda rows: None, ReplayError, r"needs \('routed_experts', 'full'\) in every sample"),
    "short": (lambda rows: rows[1:], ReplayError, "of sample 1 has 8 rows, its tokens are 9"),
    "long": (lambda rows: torch.cat([rows, rows[-1:]]), ReplayError, "of sample 1 has 10 rows, its tokens are 9"),
    "layers": (lambda rows: rows[:, 1:], RouteShapeError, r"of sample 1 must have shape \[T, 4, 4\], got \[9, 3, 4\]"),
    "float": (lambda rows: rows.float(), RouteValueError, "of sample 1 must have a signed integer dtype"),
    "unsigned": (lambda rows: rows.clamp(min=0).byte(), RouteValueError, "of sample 1 must have a signed integer"),
    "range": (lambda rows: spoiled(rows, (7, 2, 0), 16), RouteValueError, "sample 1, token 7, layer 2 holds expert 16"),
    "dense": (lambda rows: spoiled(rows, (7, 0), 3), RouteValueError, "sample 1, token 7, layer 0 .* has no router"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_one_bad_sample_is_named_or_runs_live(actor: TransformersWrapper, what: str, packed: bool) -> None:
    spoil, error, message = BAD[what]
    routes: list[Any] = routes_for(actor)
    native = [torch.full_like(given, U) if i == 1 else given for i, given in enumerate(routes)]
    routes[1] = spoil(routes[1])
    scorer = actor.get_new_version(pad_model_input=not packed)
    with pytest.raises(error, match=message):
        scorer.score(ragged(routes))
    tolerant = scorer.get_new_version(on_bad_routes="live")
    td, wanted_td = ragged(routes), ragged(native)
    with torch.no_grad():
        got = tolerant.score(td, entropy=False)[0]
        assert tolerant.router_replay.refused == (1,)
        wanted = scorer.score(wanted_td, entropy=False)[0]
    assert torch.equal(got, wanted)
    assert td["routing", "fallback"].tolist() == wanted_td["routing", "fallback"].tolist() == [0, 9, 0]


def test_a_bad_sample_of_a_dense_batch_runs_live_without_its_pads(actor: TransformersWrapper) -> None:
    td = LAYOUTS["both"](routes_for(actor))
    td[2][ROUTES][3] = 1  # token 2: one pad comes before
    with pytest.raises(RouteValueError, match="sample 2, token 2, layer 0 holds"):
        actor.score(td)
    tolerant = actor.get_new_version(on_bad_routes="live")
    tolerant.score(td)
    assert td["routing", "fallback"].tolist() == [0, 0, 5]
    assert (tolerant.router_replay.refused, tolerant.router_replay.report()[1]["refused"]) == ((2,), 5)
    with pytest.raises(ReplayError, match="start the engine with route capture"):  # not one has routes
        tolerant.score(ragged([None, None, None]))


def test_a_reference_is_native_and_frozen_unless_told_to_replay(actor: TransformersWrapper) -> None:
    td = ragged(routes_for(actor))
    reference, replaying, native = actor.reference(), actor.reference(replay=True), actor.get_new_version(replay="none")
    assert reference.router_replay is None
    assert reference.out_keys == ["masks", "tokens", "log_probs"]
    for one in (reference, replaying):
        assert one.model is not actor.model
        assert not one.model.training
        assert not any(p.requires_grad for p in one.model.parameters())
    with pytest.raises(ValueError, match="which has replay='none'"):
        native.reference(replay=True)
    live, replayed = native.score(td)[0].detach(), actor.score(td)[0].detach()
    assert torch.equal(reference.score(td)[0], live)
    assert torch.equal(replaying.score(td)[0], replayed)
    assert (replayed - live).abs().max() > 0.1
    assert all(p.requires_grad for p in actor.model.parameters())


def test_under_r2_a_reference_follows_what_the_actor_recorded_and_records_nothing() -> None:
    trained, other = TransformersWrapper(make_tiny_moe(), replay="R2"), make_tiny_moe(seed=1)
    td, key = ragged([None, None, None]), ("train_routed_experts", "full")
    reference = trained.reference(other, replay=True)
    with torch.no_grad():
        trained.score(td)
        before = [row.clone() for row in td.get(key, as_list=True)]
        with experts_seen(other) as seen:
            reference.get_new_version(pad_model_input=True).score(td)
    assert reference.model is other
    assert all(map(torch.equal, td.get(key, as_list=True), before))
    assert torch.equal(seen[1][0].view(3, 9, 4)[1], before[1][:, 1].long())
    log_probs = trained.score(td)[0]
    reference.score(td)  # in one process, between forward and backward
    log_probs.sum().backward()


# -- tokens and masks


def one(ids: list[int], mask: list[int] | None = None) -> TensorDict:
    td = TensorDict({"tokens": {"full": torch.tensor(ids)}})
    if mask is not None:
        td["masks"] = {"all_attention_mask": torch.tensor(mask).bool()}
    return td


def test_what_is_missing_of_another_length_or_no_integer_is_named() -> None:
    with pytest.raises(KeyError, match=r"in every sample; the first one has .*full") as error:
        read_batch(lazy_stack([one([5, 6], [1, 1])]), ("tokens", "ids"), MASK)
    assert error.value.args[0].startswith("no ('tokens', 'ids') in every sample")
    with pytest.raises(KeyError, match=r"in every sample; the first one has .*all_attention_mask"):
        read_batch(lazy_stack([one([5], [1]), one([5])]), MASK, TOKENS)
    td = lazy_stack([one([5, 6, 7], [1, 1]), one([7, 8, 9, 10], [1, 1, 1, 1])])
    with pytest.raises(ValueError, match=r"'all_attention_mask'\) of sample 0 has 2 rows, its tokens are 3"):
        read_batch(td, TOKENS, MASK)
    td = lazy_stack([one([5, 6])])
    td[TOKENS] = td[TOKENS].float()
    with pytest.raises(ValueError, match=r"\('tokens', 'full'\) of sample 0"):
        read_batch(td, TOKENS, MASK)


# -- dense distributions, of a wrapper without a model: which tokens they are of --------------------------------------

WORDS = 5


class Wrapper(ScoringWrapper):
    """Its logits are ever the same."""

    tokens_key, masks_key = "tokens", "masks"

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        return read_batch(td, TOKENS, MASK)

    def _token_logits(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        return torch.randn(*batch.ids.shape, WORDS, generator=torch.Generator().manual_seed(0))


def sample(prompt: int, response: int) -> TensorDict:
    """The second token of a prompt is an earlier turn of the assistant."""
    ids = torch.arange(prompt + response) % WORDS
    assistant = torch.arange(len(ids)) >= prompt
    assistant[1] = True
    masks = {"all_attention_mask": torch.ones(len(ids), dtype=torch.bool), "all_assistant_mask": assistant}
    return TensorDict({"tokens": {"full": ids, "prompt": ids[:prompt]}, "masks": masks})


@pytest.fixture
def td() -> TensorDictBase:
    return lazy_stack([sample(3, 2), sample(2, 1), sample(4, 4)])


def test_the_prompt_mask_is_that_of_our_loss(td: TensorDictBase) -> None:
    actor, reader = Wrapper(), TokenReader(td, TOKENS)
    scored, counts = actor._batch(td).scored, {"sft": 7, "rlhf": 7 + 3, "generic": 13}
    for strategy, count in counts.items():
        mask = getattr(actor, f"_get_{strategy}_dist")(td).mask
        assert torch.equal(mask, reader.mask(strategy, ("tokens", "prompt"), MASK, ASSISTANT) & scored)
        assert mask.sum() == count
    rlhf = actor._get_rlhf_dist(td).mask
    del td["tokens", "prompt"]
    assert torch.equal(actor._get_dist_with_prompt_mask(td).mask, rlhf)


def test_masks_may_have_other_keys(td: TensorDictBase) -> None:
    actor = Wrapper()
    for one in td.unbind(0):
        one["mine"] = torch.arange(len(one[TOKENS])) >= len(one[TOKENS]) - 2
    dist = actor.get_dist(td, mask_key="mine")
    assert dist.mask.sum() == 6
    for other in (
        actor._get_dist_with_assistant_mask(td, "mine"),
        actor._get_dist_with_attention_mask(td, "mine"),
        actor._get_dist_with_custom_mask(td, dist.mask),
        actor._get_dist_with_prompt_mask(td.exclude(("tokens", "prompt")), assistant_mask_key="mine"),
    ):
        assert torch.equal(other.mask, dist.mask)
    both = actor._get_dist_with_prompt_mask(td, attention_mask_key="mine").mask
    assert torch.equal(both, dist.mask & actor._get_sft_dist(td).mask)
    with pytest.raises(KeyError, match=r"yours.* in every sample"):
        actor.get_dist(td, mask_key="yours")
    with pytest.raises(ValueError, match=r"mask has shape \[2, 3\], the padded tokens have"):
        actor._get_dist_with_custom_mask(td, torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding_side": "right"}, "padded on the left .* got padding_side='right'"),
        ({"logits_key": "scores"}, "logits_key='scores'"),
        ({"tensordict_out": TensorDict()}, "writes nothing: leave tensordict_out"),
        ({"as_nested_tensor": True}, "returns dense distributions"),
        ({"as_padded_tensor": False}, "returns dense distributions"),
        ({"padding_value": -1.0}, "got padding_value=-1.0"),
        ({"layout": torch.jagged}, "layout=torch.jagged"),
    ],
)
def test_what_a_distribution_cannot_be_is_refused(td: TensorDictBase, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wrapper().get_dist(td, **arguments)
