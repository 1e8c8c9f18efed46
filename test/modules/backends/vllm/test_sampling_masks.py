"""Which words vLLM's masks name, and in how few ids; the masks of a real engine are in test_truncated_sampling.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.modules.backends.replica import KeptIds
from torchrl_moe.modules.backends.vllm.sampling import can_report, lift_top_k_rule, report_kept, shortest

WORDS = 9


def masks(*rows: list[int], rows_per_request: int = 1) -> Any:
    """vLLM's tensors of these kept ids; lists longer than two are in the bit mask only, as long ones are."""
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    kept = np.zeros((len(rows), WORDS), bool)
    ids = np.zeros((len(rows), 2), np.int32)
    for row, words in enumerate(rows):
        kept[row, words] = True
        ids[row, : len(words[:2])] = words[:2]
    packed = np.packbits(kept, axis=1, bitorder="little")
    counts = torch.from_numpy(kept.sum(1).astype(np.int32))
    return SamplingMaskTensors(torch.from_numpy(ids), torch.from_numpy(packed), counts, WORDS, rows_per_request)


class Runner:
    """A model runner of vLLM's shape whose sampler has sampled."""

    def __init__(self, *rows: list[int], rows_per_request: int = 1) -> None:
        self.max_num_reqs = 8
        self.rows, self.rows_per_request = rows, rows_per_request
        self.sampler = SimpleNamespace(add_request=lambda slot, params: None, return_sampling_mask=True)

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        on = self.sampler.return_sampling_mask
        found = masks(*self.rows, rows_per_request=self.rows_per_request) if on else None
        return SimpleNamespace(sampling_mask_tensors=found), "num_sampled", "num_rejected"


def said(runner: Runner, *params: dict[str, Any], num_sampled: list[int] | None = None) -> Any:
    """The masks of a step of requests with these parameters, request by request; None if there are none."""
    from vllm import SamplingParams

    report_kept(runner)
    report_kept(runner)  # once is enough
    for slot, fields in enumerate(params):
        runner.sampler.add_request(slot, SamplingParams(**{"logprobs": 0, **fields}))
    output, *rest = runner.sample(None, SimpleNamespace(idx_mapping_np=np.arange(len(params))), None)
    assert rest == ["num_sampled", "num_rejected"]
    if output.sampling_mask_tensors is None:
        return None
    counts = num_sampled or [1] * len(params)
    lists = output.sampling_mask_tensors.to_cpu_nonblocking().tolists(np.array(counts))
    return [lists.slice_request(i, count).to_nested_list() for i, count in enumerate(counts)]


ALL = list(range(WORDS))


def test_masks_of_a_step() -> None:
    """Few words are named, many by those that were left out, all not at all; nor is what nobody wants."""
    runner = Runner([5, 7], [0, 1, 2, 3, 4, 5, 6, 8], ALL, [2, 3, 4], [1])
    cuts: dict[str, Any] = {"top_p": 0.9}
    assert said(runner, cuts, {"bad_words": ["x"]}, {"min_p": 0.1}, {}, {**cuts, "logprobs": None}) == [
        [[5, 7]],
        [[~7]],
        [[]],
        [[]],
        [[]],
    ]


@pytest.mark.parametrize("params", [{}, {"top_k": 0}, {"temperature": 0.3}, {"top_p": 0.5, "logprobs": None}])
def test_a_step_in_which_nothing_can_be_left_out_computes_none(params: dict[str, Any]) -> None:
    assert said(Runner(ALL), params) is None


def test_several_tokens_of_a_request_are_one_list_each() -> None:
    """As under speculative decoding."""
    runner = Runner([5, 7], [1, 2, 3, 4, 5, 6, 7, 8], [3], [0], rows_per_request=2)
    assert said(runner, {"top_k": 2}, {"top_k": 2}, num_sampled=[2, 1]) == [[[5, 7], [~0]], [[3]]]


def test_masks_become_the_words_of_an_answer() -> None:
    lists = [[5, 7], [], [~3], [0]]
    kept = KeptIds.of_masks(lists, 4)
    assert kept is not None
    dense = dense_mask(torch.from_numpy(kept.ids), torch.from_numpy(kept.sizes), WORDS).int()
    expected = [[1 if word in (5, 7) else 0 for word in ALL], [1] * WORDS, [1] * 3 + [0] + [1] * 5, [1] + [0] * 8]
    assert dense.tolist() == expected


@pytest.mark.parametrize("count", range(WORDS + 1))
def test_no_list_is_longer_than_half_the_vocabulary(count: int) -> None:
    kept = np.random.default_rng(count).permutation(WORDS)[:count].astype(np.int32)
    kept.sort()
    found = shortest(kept, WORDS)
    assert len(found) == min(count, WORDS - count)
    words = set(ALL) - {int(~word) for word in found} if 2 * count > WORDS else {int(word) for word in found}
    assert words == set(kept.tolist())


@pytest.mark.parametrize(
    ("fields", "reports"),
    [({}, True), ({"logprobs_mode": "raw_logprobs"}, False), ({"logits_processors": ["mine"]}, False)],
)
def test_engines_whose_masks_say_all_report_them(fields: dict[str, Any], reports: bool) -> None:
    args = SimpleNamespace(**{"logprobs_mode": "processed_logprobs", "logits_processors": None, **fields})
    assert can_report(args) is reports


def test_the_frontend_asks_for_no_top_k() -> None:
    engine = SimpleNamespace(model_config=SimpleNamespace(return_sampling_mask=True))
    assert lift_top_k_rule(engine) is True
    assert lift_top_k_rule(engine) is False
