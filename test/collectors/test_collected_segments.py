"""Answers that a real engine generated in several parts, by other weights each, through environment and collector."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDictBase

from support.collecting import Questions, chat
from support.engines import EngineShelf
from support.reference import TOLERANCE
from support.versions import Versions
from support.waiting import until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper

TOKENS = 420


@pytest.fixture
def versions(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> Iterator[Versions]:
    made = Versions(engine, shelf, "qwen3_moe", tmp_path, "memmap")
    yield made
    made.close()


def check(versions: Versions, row: TensorDictBase) -> None:
    """A row of the collector's is what each token's version makes of all that stands before it."""
    prompt = len(row["tokens", "prompt"])
    output = SimpleNamespace(
        token_ids=row["tokens", "response"].numpy(),
        logprobs=row["log_probs", "full"][prompt:].numpy(),
        policy_versions=row["policy_versions", "full"][prompt:].numpy(),
        routed_experts=row["routed_experts", "full"][:-1].numpy(),
    )
    assert (row["routed_experts", "full"][-1] == -1).all()
    versions.check(SimpleNamespace(prompt_token_ids=row["tokens", "prompt"].numpy()), output)  # type: ignore[arg-type]


@pytest.mark.engine("qwen3_moe")
def test_every_part_of_an_answer_is_exactly_its_versions(versions: Versions, engine: AsyncVLLM) -> None:
    """Weights change three times under running answers, which are aborted and go on; 0 route mismatches."""
    kwargs = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    collector = AsyncLLMCollector(
        chat(2),
        policy=vLLMWrapper(engine, generate_kwargs=kwargs),
        dataloader=Questions(),
        group_size=2,
        groups_per_batch=2,
        max_staleness=1,
    )
    first = versions.now

    def longest() -> int:
        """Tokens that the longest of the running answers has."""
        running = [answer for replica in versions.replicas for answer in replica.snapshot(60)]
        return max((len(output.token_ids) for answer in running for output in answer.outputs), default=0)

    with ThreadPoolExecutor(1) as trainer:
        batches = trainer.submit(lambda: list(islice(collector, 2)))
        for seed, tokens in ((51, 40), (52, 120), (53, 200)):
            until(lambda: longest() >= tokens)  # noqa: B023  it is over before the next round
            versions.update(seed, "abort")
        rows = [row for batch in batches.result(120) for row in batch.unbind(0)]
    collector.shutdown()
    assert len(rows) == 8
    assert all(versions.changed(first + i, first + i + 1) > 100 * TOLERANCE for i in range(3))
    for row in rows:
        assert len(row["tokens", "response"]) == TOKENS
        assert str(row["finish_reason"]) == "length"
        assert int(row["policy_version"]) == int(row["policy_versions", "full"][-TOKENS:].min())
        check(versions, row)
    assert max(int(row["num_segments"]) for row in rows) >= 3


@pytest.mark.engine("qwen3_moe")
def test_turns_keep_what_earlier_turns_know_of_their_tokens(versions: Versions, engine: AsyncVLLM) -> None:
    """Two turns with a weight change between: the first turn's log-probs, versions and routes stand in the second."""
    kwargs = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.0}
    collector = AsyncLLMCollector(
        lambda: chat(1, turns=2),
        policy=vLLMWrapper(engine, generate_kwargs=kwargs),
        dataloader=Questions(),
        group_size=2,
        max_staleness=0,
    )
    (batch,) = islice(collector, 1)
    collector.shutdown()
    for one, other in (batch[:2].unbind(0), batch[2:].unbind(0)):
        had = len(one["tokens", "full"])
        assert torch.equal(other["tokens", "full"][:had], one["tokens", "full"])
        known = one["log_probs", "full"].isfinite()
        assert torch.equal(other["log_probs", "full"][:had][known], one["log_probs", "full"][known])
        assert torch.equal(other["routed_experts", "full"][: had - 1], one["routed_experts", "full"][:-1])
        # the last token of a turn has its route from the next turn's prefill
        assert (other["routed_experts", "full"][had - 1] != -1).any()
        check(versions, one)
