"""Answers that a real engine generated in several parts, by other weights each, through environment and collector."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDictBase

from support.collecting import Questions, chat
from support.reference import TOLERANCE
from support.versions import Versions
from support.waiting import until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.modules.backends.engine import Engine

TOKENS = 200


def collector_of(engine: AsyncVLLM, env: Any, tokens: int, **kwargs: Any) -> Any:
    params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    policy = vLLMWrapper(engine, generate_kwargs=params)
    return AsyncLLMCollector(env, policy=policy, **{"dataloader": Questions(), "group_size": 2, **kwargs})


def check(versions: Versions, row: TensorDictBase) -> None:
    """A row of the collector's is what each token's version makes of all that stands before it."""
    prompt = len(row["tokens", "prompt"])
    output = SimpleNamespace(
        token_ids=row["tokens", "response"].numpy(),
        logprobs=row["log_probs", "full"][prompt:].numpy(),
        policy_versions=row["policy_versions", "full"][prompt:].numpy(),
        routed_experts=row["routed_experts", "full"][:-1].numpy(),
        kept=None,
    )
    assert (row["routed_experts", "full"][-1] == -1).all()
    versions.check(SimpleNamespace(prompt_token_ids=row["tokens", "prompt"].numpy()), output)  # type: ignore[arg-type]


@pytest.mark.engine("qwen3_moe")
def test_every_part_of_an_answer_is_exactly_its_versions(versions: Versions, engine: AsyncVLLM) -> None:
    """Weights change three times under running answers, which are aborted and continue; 0 route mismatches."""
    collector = collector_of(engine, chat(2), TOKENS, max_staleness=1)
    first = versions.now

    def longest() -> int:
        """Tokens that the longest of the running answers has."""
        running = [answer for replica in versions.replicas for answer in replica.call(Engine.snapshot, 60)]
        return max((len(output.token_ids) for answer in running for output in answer.outputs), default=0)

    with ThreadPoolExecutor(1) as trainer:
        batches = trainer.submit(lambda: list(islice(collector, 2)))
        for seed, tokens in ((51, 25), (52, 80), (53, 130)):
            until(lambda: longest() >= tokens)  # noqa: B023  it is over before the next round
            versions.update(seed, "abort")
        rows = [row for batch in batches.result(120) for row in batch.unbind(0)]
    collector.shutdown()
    assert len(rows) == 4
    assert all(versions.changed(first + i, first + i + 1) > 100 * TOLERANCE for i in range(3))
    for row in rows:
        assert (len(row["tokens", "response"]), str(row["finish_reason"])) == (TOKENS, "length")
        assert int(row["policy_version"]) == int(row["policy_versions", "full"][-TOKENS:].min())
        check(versions, row)
    assert max(int(row["num_segments"]) for row in rows) >= 3


@pytest.mark.engine("qwen3_moe")
def test_groups_of_one_prompt_that_share_its_cache_have_the_right_rows(versions: Versions, engine: AsyncVLLM) -> None:
    """Three groups of one prompt, two requests at a time: the later ones find its blocks in the prefix cache."""
    collector = collector_of(
        engine,
        chat(2),
        12,
        dataloader=[{"query": ["Which numbers are prime, and why? " * 9]}],
        groups_per_batch=3,
        max_staleness=0,
        max_in_flight=2,
    )
    (batch,) = islice(collector, 1)
    collector.shutdown()
    assert len(set(batch.get("group_id").tolist())) == 3
    assert max(batch.get("num_cached_tokens").tolist()) >= 128
    assert len({tuple(row["tokens", "response"].tolist()) for row in batch.unbind(0)}) == 6
    for row in batch.unbind(0):
        assert (row["routed_experts", "full"][:-1, 1:] != -1).all()
        check(versions, row)
