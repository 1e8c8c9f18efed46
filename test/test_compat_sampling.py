"""Words that sampling kept, by vLLM's own sampler under a runner of ours; and which engines hand them on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrl_moe import _compat_sampling
from torchrl_moe._compat_routing import SCHEDULERS
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.modules.backends.kept_ids import KeptIds, name_kept

WORDS = 6
LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0, -2.0], [1.0, 1.0, 0.0, 2.5, 0.5, -9.0]])


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """As in an engine's process on a CPU: g++ would work 16 s on the drawing of words, which is none of ours."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_importing_imports_no_vllm() -> None:
    code = "import sys, torchrl_moe._compat_sampling; print('vllm' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# -- engines ----------------------------------------------------------------------------------------------------------


def config_of(**fields: Any) -> SimpleNamespace:
    model = {"logprobs_mode": "processed_logprobs", "logits_processors": None}
    scheduling = SimpleNamespace(scheduler_cls=fields.pop("scheduler_cls", f"{SCHEDULERS}.MoEScheduler"))
    return SimpleNamespace(scheduler_config=scheduling, model_config=SimpleNamespace(**{**model, **fields}))


@pytest.mark.parametrize(
    ("fields", "carries"),
    [
        ({}, True),
        ({"scheduler_cls": f"{SCHEDULERS}.AsyncMoEScheduler"}, True),
        ({"scheduler_cls": None}, False),
        ({"scheduler_cls": "mine.Scheduler"}, False),
        ({"logprobs_mode": "raw_logprobs"}, False),
        ({"logits_processors": ["mine"]}, False),
    ],
)
def test_engines_whose_masks_say_all_hand_them_on(fields: dict[str, Any], carries: bool) -> None:
    assert _compat_sampling.carries_masks(config_of(**fields)) is carries


def test_masks_of_an_answer_stay_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.output_processor import RequestState

    seen: list[Any] = []

    def theirs(self: Any, text: str, *, finished: bool) -> Any:
        seen.append((text, finished, list(self.sampling_mask_chunks)))
        return SimpleNamespace(sampling_mask=None)

    monkeypatch.setattr(RequestState, "_new_completion_output", theirs)
    _compat_sampling.keep_masks_as_arrays()
    ours = RequestState._new_completion_output
    _compat_sampling.keep_masks_as_arrays()
    assert RequestState._new_completion_output is ours
    steps = [SimpleNamespace(token_ids=np.array([0, 3], np.int32)), SimpleNamespace(token_ids=np.array([], np.int32))]
    state = SimpleNamespace(sampling_mask_chunks=steps)
    output = ours(state, "text", finished=True)
    assert seen == [("text", True, [])]
    assert [mask is step.token_ids for mask, step in zip(output.sampling_mask, steps, strict=True)] == [True, True]
    assert state.sampling_mask_chunks is steps


# -- workers ----------------------------------------------------------------------------------------------------------


class Runner:
    """A model runner of two requests, with 0 and 4 tokens, and vLLM's own sampler."""

    def __init__(self, is_late: bool = False) -> None:
        from vllm.v1.sample.sampler import Sampler

        self.sampler = Sampler("processed_logprobs")
        self.requests = {name: SimpleNamespace(output_token_ids=[0] * n) for name, n in (("a", 0), ("b", 4))}
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.is_late = is_late
        self.metadata: Any = None
        self.logits = LOGITS

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; the grammar's output is a mask."""
        logits = self.logits if grammar_output is None else self.logits.masked_fill(~grammar_output, -float("inf"))
        sampled = self.sampler(logits.clone(), self.metadata)
        output = SimpleNamespace(sampling_masks=None, tokens=sampled.sampled_token_ids[:, 0].tolist())
        return SimpleNamespace(_model_runner_output=output) if self.is_late else output


def metadata(**fields: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    given: dict[str, Any] = {
        "temperature": torch.ones(2),
        "all_greedy": False,
        "all_random": True,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        **{name: torch.zeros(2) for name in ("frequency_penalties", "presence_penalties")},
        "repetition_penalties": torch.ones(2),
        "output_token_ids": [[], [0] * 4],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**{**given, **fields})


def sampled(given: Any, grammar: Tensor | None = None, is_late: bool = False) -> tuple[Any, Any]:
    """What a step says of words, and its tokens."""
    runner = Runner(is_late)
    runner.metadata = given
    _compat_sampling.fill_masks(runner, name_kept)
    output = runner.sample_tokens(grammar)
    output = output._model_runner_output if is_late else output
    return output.sampling_masks, output.tokens


def masks_of(said: Any) -> list[list[int]]:
    """Of both requests, whose tokens are at 0 and at 4."""
    rows = []
    for i, at in enumerate((0, 4)):
        kept = KeptIds.of_steps([said.slice_request(i, 1).token_ids], at + 1)
        if kept is None:
            rows.append([1] * WORDS)
            continue
        assert not kept.sizes[:at].any()
        rows.append(dense_mask(torch.from_numpy(kept.ids), torch.from_numpy(kept.sizes), WORDS)[at].int().tolist())
    return rows


def min_p(value: float) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor

    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    processor.min_p_cpu[:] = value
    processor.min_p_count = 2 if value else 0
    processor.min_p = processor.min_p_device[:2].unsqueeze(1)
    return LogitsProcessors([processor])


ALLOWED = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
"""vLLM's mask says which words are not allowed."""


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": torch.tensor([2, 6])}, [[0, 1, 0, 1, 0, 0], [1] * 6]),
        # of 3, 2, 1, 0, -1, -2 the first two have 0.86 of the probability; of the other row four of five have 0.91
        ({"top_p": torch.tensor([0.8, 0.9])}, [[0, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0]]),
        ({"logitsprocs": lambda: min_p(0.1)}, [[0, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0]]),
        ({"allowed_token_ids_mask": ALLOWED}, [[1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]),
        ({"bad_words_token_ids": {1: [[3]]}}, [[1] * 6, [1, 1, 1, 0, 1, 1]]),
    ],
)
def test_the_words_that_vllms_sampler_kept(fields: dict[str, Any], expected: list[list[int]], is_late: bool) -> None:
    given = {name: value() if callable(value) else value for name, value in fields.items()}
    said, tokens = sampled(metadata(**given), is_late=is_late)
    assert masks_of(said) == expected
    assert [row[token] for row, token in zip(expected, tokens, strict=True)] == [1, 1]


def test_the_words_of_a_grammar() -> None:
    allowed = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 1]]).bool()
    assert masks_of(sampled(metadata(), allowed)[0]) == allowed.int().tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logitsprocs": lambda: min_p(0.0)},
        {"top_k": torch.tensor([2, 6]), "max_num_logprobs": None},  # nobody wants log-probs
        {"top_k": torch.tensor([6, 6])},
    ],
)
def test_where_no_word_is_left_out_or_wanted_nothing_is_sent(fields: dict[str, Any]) -> None:
    given = {name: value() if callable(value) else value for name, value in fields.items()}
    assert sampled(metadata(**given))[0] is None


def test_nothing_is_looked_at_where_no_word_can_be_left_out() -> None:
    runner = Runner()
    runner.metadata = metadata()
    _compat_sampling.fill_masks(runner, lambda log_probs, positions: pytest.fail("looked at"))
    assert runner.sample_tokens(None).sampling_masks is None


def test_words_of_one_step_are_not_those_of_the_next() -> None:
    runner = Runner()
    runner.metadata = metadata(top_k=torch.tensor([2, 6]))
    _compat_sampling.fill_masks(runner, name_kept)
    assert runner.sample_tokens(None).sampling_masks is not None
    runner.metadata = metadata()
    assert runner.sample_tokens(None).sampling_masks is None


def test_an_unknown_processor_may_leave_words_out() -> None:
    class Mine:
        def is_argmax_invariant(self) -> bool:
            return True

        def apply(self, logits: Tensor) -> Tensor:
            return logits.index_fill(1, torch.tensor([2]), -float("inf"))

    from vllm.v1.sample.logits_processor import LogitsProcessors

    mine: Any = Mine()
    said, _ = sampled(metadata(logitsprocs=LogitsProcessors([mine])))
    assert masks_of(said) == [[1, 1, 0, 1, 1, 1]] * 2


def test_a_runner_can_be_left_as_it_was() -> None:
    runner = Runner()
    runner.metadata = metadata(top_k=torch.tensor([2, 6]))
    _compat_sampling.fill_masks(runner, name_kept)
    _compat_sampling.leave_masks(runner)
    assert runner.sample_tokens(None).sampling_masks is None
