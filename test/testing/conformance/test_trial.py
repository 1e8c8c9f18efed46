"""What is asked of an engine, and that it gets its own weights back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.conformance import shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from torchrl_moe.testing.conformance import Answer, NotOffered, Sampling, check
from torchrl_moe.testing.conformance.reference import Reference
from torchrl_moe.testing.conformance.report import DoesNotHold
from torchrl_moe.testing.conformance.trial import Trial


def trial_of(engine: Any) -> Trial:
    return Trial(engine, Reference(shared_moe()), None, QUICK)


@pytest.fixture
def trial() -> Trial:
    return trial_of(ConformingEngine(shared_moe()))


def test_prompts_are_the_same_again_and_hold_no_special_ids(trial: Trial) -> None:
    assert trial.prompt(50) == trial.prompt(50)
    assert trial.prompt(50) != trial.prompt(50, seed=1)
    config = shared_moe().config
    special = {config.bos_token_id, config.eos_token_id, config.pad_token_id}
    assert not special & set(trial.prompt(2000))
    assert len(set(trial.prompt(2000))) > 200


def test_a_small_vocabulary_is_kept_to() -> None:
    alone = Trial(ConformingEngine(shared_moe()), None, None, QUICK)
    assert max(alone.prompt(500)) < QUICK.vocabulary


def test_answers_stand_beside_their_prompts(trial: Trial) -> None:
    found = trial.ask([[1, 2], [3]], Sampling(max_tokens=2, n=2))
    assert [one.prompt for one in found] == [(1, 2), (1, 2), (3,), (3,)]
    assert [len(one.tokens) for one in found] == [2] * 4


class Short(ConformingEngine):
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        return super().generate(prompts[:1], sampling)


def test_too_few_answers_do_not_hold() -> None:
    with pytest.raises(DoesNotHold, match=r"generate gave \[1\] answers to 2 prompts, wanted 1 to each"):
        trial_of(Short(shared_moe())).ask([[1], [2]], Sampling(max_tokens=1))


def test_questions_are_asked_once(trial: Trial) -> None:
    assert trial.plain is trial.plain
    assert [len(one.prompt) for one in trial.plain] == list(QUICK.prompts)
    asked: list[Trial] = []

    def make(of: Trial) -> int:
        asked.append(of)
        raise NotOffered("no")

    for _ in range(2):
        with pytest.raises(NotOffered, match="no"):
            trial.once(make)
    assert asked == [trial]


def test_weights_are_switched_to_and_fro(trial: Trial) -> None:
    own = trial.judge.reference
    engine = trial.adapter
    assert isinstance(engine, ConformingEngine)
    assert trial.judge_now.reference is own
    other = trial.switch_weights()
    assert trial.serving is other is trial.judge_now.reference
    assert trial.judge.reference is own
    name = "model.embed_tokens.weight"
    assert torch.equal(engine.model.state_dict()[name], other.model.state_dict()[name])
    assert trial.version() == 1
    trial.close()
    assert trial.serving is own
    assert torch.equal(engine.model.state_dict()[name], shared_moe().state_dict()[name])
    assert trial.version() == 2
    trial.close()  # nothing to bring back
    assert trial.version() == 2


class NoWeights:
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        return []


def test_what_takes_no_weights_is_not_asked() -> None:
    trial = trial_of(NoWeights())
    assert trial.version() is None
    with pytest.raises(NotOffered, match=r"the adapter has no update_weights\(model\)"):
        trial.switch_weights()
    trial.close()


class Silent(ConformingEngine):
    """Answers without a token, and says no more than that they are over."""

    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        nothing = Answer(token_ids=[], log_probs=[], versions=[], finish_reason="stop")
        return [[nothing] * sampling.n for _ in prompts]


def test_answers_without_a_token_prove_nothing() -> None:
    with pytest.raises(DoesNotHold, match="1 of 2 answers have no token"):
        trial_of(Partly(shared_moe())).ask([[1], [2]], Sampling(max_tokens=1))
    assert trial_of(Silent(shared_moe())).ask([[1]], Sampling(max_tokens=1), ["cut"])  # by an abort, perhaps
    names = ["log_probs[plain]", "versions", "update"]
    report = check(Silent(shared_moe()), shared_moe(), only=names, settings=QUICK)
    assert {one.verdict for one in report.results} == {"does not hold"}, report


class Partly(Silent):
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        return [*super().generate(prompts[:1], sampling), *ConformingEngine.generate(self, prompts[1:], sampling)]
