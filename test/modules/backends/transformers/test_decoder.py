"""The batch decoder against the model by itself: one sequence at a time, without a cache, without pads."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.plain import TOLERANCE, answers, check_output, chosen, loaded, log_probs, save, sets, step
from torchrl_moe._compat_transformers import cache_argument
from torchrl_moe.modules.backends.replica import KeptIds, Scoring
from torchrl_moe.modules.backends.transformers.decoder import BatchDecoder, Sampler
from torchrl_moe.modules.backends.transformers.loading import Loaded, _decoder
from torchrl_moe.testing.tiny_moe import make_tiny_moe

GREEDY = {"temperature": 0.0}


def test_answers_that_join_and_leave_at_any_time_are_those_of_the_model_alone(plain: Loaded) -> None:
    one, two, three, four = (answers(plain, range(65, 65 + count), GREEDY)[0] for count in (3, 9, 1, 5))
    step(plain, one, two, times=2)
    step(plain, three, four, times=3)
    plain.decoder.leave([two])  # the longest: columns that only it had go, too
    assert plain.decoder.columns == max(len(answer.ids) - 1 for answer in (one, three, four))
    step(plain, times=3)
    assert [len(answer.tokens) for answer in (one, two, three, four)] == [8, 5, 6, 6]
    for answer in (one, two, three, four):
        check_output(plain, answer.prompt_ids, answer.output(True))
        assert (log_probs(plain.decoder.model, answer).argmax(-1) == torch.tensor(answer.tokens)).all()
    plain.decoder.leave([one, three, four])
    assert plain.decoder.answers == []
    assert plain.decoder.columns == 0


def test_nothing_that_transformers_calls_deprecated_is_used(plain_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*deprecated.*", FutureWarning)
        engine = loaded(plain_folder)
        (answer,) = answers(engine, [70, 71, 72], GREEDY)
        step(engine, answer, times=2)
        engine.decoder.score(answer.ids, Scoring())


def test_sampled_answers_have_the_log_probs_of_their_temperature(plain: Loaded) -> None:
    some = [answers(plain, [70, 71 + i], {"temperature": 0.7})[0] for i in range(4)]
    step(plain, *some, times=6)
    for answer in some:
        check_output(plain, answer.prompt_ids, answer.output(True), 0.7)
    assert len({tuple(answer.tokens) for answer in some}) == 4


@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 0.5, "top_k": 20, "top_p": 0.9}]
)
def test_log_probs_are_over_the_words_that_are_named(plain: Loaded, params: dict[str, Any]) -> None:
    (answer,) = answers(plain, [70, 71, 72], params)
    step(plain, answer, times=8)
    output = answer.output(True)
    assert output.kept is not None
    assert output.logprobs is not None
    rows = log_probs(plain.decoder.model, answer, params.get("temperature", 1.0))
    start = 0
    for position, (token, size) in enumerate(zip(answer.tokens, output.kept.sizes.tolist(), strict=True)):
        ids = output.kept.ids[start : start + abs(size)].tolist()
        start += abs(size)
        words = ids if size > 0 else [word for word in range(rows.shape[1]) if word not in ids]
        assert token in words
        expected = rows[position, token] - rows[position, words].logsumexp(0)
        assert output.logprobs[position] == pytest.approx(expected.item(), abs=TOLERANCE)


def test_answers_to_one_prompt_are_read_once_and_differ(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    forward = plain.decoder._forward
    monkeypatch.setattr(
        plain.decoder, "_forward", lambda ids, *rest: seen.append(tuple(ids.shape)) or forward(ids, *rest)
    )
    group = answers(plain, [70, 71, 72], {"n": 4, "temperature": 2.0})
    (other,) = answers(plain, [70, 71])
    step(plain, *group, other, times=3)
    assert seen == [(2, 3), (5, 1), (5, 1)]
    assert [answer.index for answer in group] == [0, 1, 2, 3]
    assert len({tuple(answer.tokens) for answer in group}) > 1
    for answer in group:
        check_output(plain, answer.prompt_ids, answer.output(True), 2.0)


def test_the_same_seed_gives_the_same_answer_in_any_batch(plain: Loaded) -> None:
    params = {"seed": 5, "n": 2}
    first = answers(plain, [70, 71, 72], params)
    step(plain, *first, times=6)
    plain.decoder.empty()
    second, others = answers(plain, [70, 71, 72], params), answers(plain, range(60, 80), {"n": 3})
    step(plain, *others, times=2)
    step(plain, *second, times=6)
    assert [answer.tokens for answer in first] == [answer.tokens for answer in second]
    assert first[0].tokens != first[1].tokens
    (other,) = answers(plain, [70, 71, 72], {"seed": 6})
    step(plain, other, times=6)
    assert other.tokens != first[0].tokens


def test_each_token_has_the_version_of_its_step(plain: Loaded) -> None:
    (answer,) = answers(plain, [70])
    step(plain, answer, times=2, version=3)
    step(plain, times=1, version=4)
    assert answer.output(True).policy_versions.tolist() == [3, 3, 4]


# -- forced routes ----------------------------------------------------------------------------------------------------


def other_rows(plain: Loaded, ids: list[int]) -> Any:
    """Routes that the model would not choose."""
    with torch.no_grad(), plain.decoder.replay.record() as recording:  # type: ignore[union-attr]
        plain.decoder.model(torch.tensor([ids]))
    rows = (recording.routed_experts[0].numpy() + 1) % 16
    rows[:, 0] = -1
    return rows.astype(np.int8)


def test_recorded_experts_are_followed_and_other_rows_are_live(plain: Loaded) -> None:
    ids = [70, 71, 72, 73]
    rows = other_rows(plain, ids)
    rows[1] = -1
    (forced,) = answers(plain, ids, GREEDY, routed_experts=rows[:3])
    (free,) = answers(plain, ids, GREEDY)
    (longer,) = answers(plain, [80, *range(65, 72)], GREEDY)
    step(plain, forced, free, longer, times=4)
    used = forced.output(True).routed_experts
    assert used is not None
    assert (sets(used[[0, 2], 1:]) == sets(rows[[0, 2], 1:])).all()
    whole = np.full((1, len(forced.ids), 4, 4), -1, np.int16)
    whole[0, :3] = rows[:3]
    with torch.no_grad(), plain.decoder.replay.replay(torch.from_numpy(whole)):  # type: ignore[union-attr]
        logits = plain.decoder.model(torch.tensor([forced.ids])).logits[0]
    expected = chosen(logits.log_softmax(-1)[len(ids) - 1 : -1], forced)
    assert forced.output(True).logprobs == pytest.approx(expected, abs=TOLERANCE)
    check_output(plain, free.prompt_ids, free.output(True))
    check_output(plain, longer.prompt_ids, longer.output(True))


def test_what_is_read_again_follows_its_own_experts_or_not(plain: Loaded) -> None:
    """With rows that the model would not choose the two ways differ."""
    ids = [70, 71, 72, 73]
    rows = other_rows(plain, ids)
    some = [answers(plain, ids, GREEDY, routed_experts=rows, on_resume=how)[0] for how in ("forced", "live")]
    step(plain, *some, times=3)
    for answer in some:
        answer.followed = None  # not the user's any more: its own
    step(plain, *plain.decoder.empty(), times=3)
    forced, live = (answer.output(True) for answer in some)
    assert (forced.resume, live.resume) == ("forced", "live")
    assert forced.routed_experts is not None
    assert live.routed_experts is not None
    assert (forced.routed_experts[:6] == live.routed_experts[:6]).all()  # the rows delivered first win
    whole = np.full((1, len(some[0].ids), 4, 4), -1, np.int16)
    whole[0, :4] = rows
    with torch.no_grad(), plain.decoder.replay.replay(torch.from_numpy(whole)):  # type: ignore[union-attr]
        logits = plain.decoder.model(torch.tensor([some[0].ids])).logits[0]
    expected = chosen(logits.log_softmax(-1)[len(ids) - 1 : -1], some[0])
    assert forced.logprobs == pytest.approx(expected, abs=TOLERANCE)
    tail = chosen(log_probs(plain.decoder.model, some[1]), some[1])[3:]
    assert live.logprobs is not None
    assert live.logprobs[3:] == pytest.approx(tail, abs=TOLERANCE)


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [256, 3])
def test_scores_are_the_models_log_probs_however_they_are_cut(
    plain: Loaded, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr("torchrl_moe.modules.backends.transformers.decoder.SCORED_TOKENS", part)
    ids = list(range(70, 82))
    rows = other_rows(plain, ids)[:5]
    kept = KeptIds(np.array([75, 1, 2, 9], np.int32), np.array([0] * 5 + [3, -1] + [0] * 5, np.int32))
    with torch.no_grad():
        free = plain.decoder.model(torch.tensor([ids])).logits[0]
        whole = torch.from_numpy(np.concatenate([rows, np.full((7, 4, 4), -1, np.int8)])[None])
        with plain.decoder.replay.replay(whole):  # type: ignore[union-attr]
            forced = plain.decoder.model(torch.tensor([ids])).logits[0]
    masked = free.clone() / 0.5
    masked[4, [word for word in range(len(masked[4])) if word not in (75, 1, 2)]] = -math.inf
    masked[5, 9] = -math.inf
    for logits, scores in (
        (free, plain.decoder.score(ids, Scoring())),
        (forced, plain.decoder.score(ids, Scoring(), rows)),
        (masked, plain.decoder.score(ids, Scoring(temperature=0.5, kept=kept))),
    ):
        expected = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
        assert math.isnan(scores[0])
        assert scores[1:] == pytest.approx(expected, abs=TOLERANCE)
    assert np.isnan(plain.decoder.score([70], Scoring())).all()


# -- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "config"),
    [("mixtral", {"sliding_window": 4}), ("deepseek_v3", {}), ("olmoe", {}), ("qwen3", {})],
)
def test_other_families_are_decoded_alike(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    engine = loaded(save(tmp_path, family, **config))
    some = [answers(engine, range(65, 65 + count), GREEDY)[0] for count in (3, 9)]
    step(engine, *some, times=6)  # past the window
    for answer in some:
        expected = chosen(log_probs(engine.decoder.model, answer), answer)
        assert answer.output(True).logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_in_bfloat16_routes_and_log_probs_fit_each_other(plain_folder: Path) -> None:
    """A pass that replays the routes comes as near as rounding lets it."""
    engine = loaded(plain_folder, dtype="bfloat16")
    some = [answers(engine, range(65, 65 + count), GREEDY)[0] for count in (3, 9)]
    step(engine, *some, times=8)
    for answer in some:
        output = answer.output(True)
        assert output.routed_experts is not None
        rows = torch.from_numpy(np.concatenate([output.routed_experts, np.zeros((1, 4, 4))]).astype(np.int16))[None]
        rows[:, :, 0], rows[:, -1] = -1, -1
        with torch.no_grad(), engine.decoder.replay.replay(rows):  # type: ignore[union-attr]
            logits = engine.decoder.model(torch.tensor([answer.ids])).logits[0].float()
        expected = chosen(logits.log_softmax(-1)[len(answer.prompt_ids) - 1 : -1], answer)
        assert output.logprobs == pytest.approx(expected, abs=0.15)


class Blind(torch.nn.Module):
    """A model whose pads are seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.device, self.config = model, model.device, model.config

    def forward(self, input_ids: Any, attention_mask: Any, past_key_values: Any, use_cache: bool) -> Any:
        name = cache_argument(inspect.signature(self.model.forward).parameters)
        return self.model(input_ids=input_ids, use_cache=use_cache, **{name: past_key_values})


def test_a_model_that_sees_pads_is_refused() -> None:
    model: Any = Blind(make_tiny_moe("qwen3"))
    with pytest.raises(ValueError, match=r"cannot serve Blind: in a padded batch its logits are off by \d"):
        BatchDecoder(model, None, Sampler(torch.device("cpu"), 0))


def test_a_model_that_keeps_more_than_keys_and_values_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=32, hidden_size=16, num_hidden_layers=1, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="cannot serve MambaForCausalLM"):  # some releases fail in the forward pass
        _decoder(model, None, Sampler(torch.device("cpu"), 0))
