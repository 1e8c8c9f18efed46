"""Answers that a real engine generated in several parts, by other weights each, through environment and collector."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace

import pytest

from support.collecting import Questions, chat
from support.reference import TOLERANCE
from support.versions import Versions
from support.waiting import until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.modules.backends.engine import Engine


@pytest.mark.engine("qwen3_moe")
def test_every_part_of_an_answer_is_exactly_its_versions(versions: Versions, engine: AsyncVLLM) -> None:
    """Weights change three times under running answers, which are aborted and continue; 0 route mismatches."""
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 200, "temperature": 1.0, "ignore_eos": True})
    collector = AsyncLLMCollector(chat(2), policy=policy, dataloader=Questions(), group_size=2, max_staleness=1)
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
        assert (len(row["tokens", "response"]), str(row["finish_reason"])) == (200, "length")
        assert int(row["policy_version"]) == int(row["policy_versions", "full"][-200:].min())
        assert (row["routed_experts", "full"][-1] == -1).all()
        # it is what each token's version makes of all that stands before it
        prompt = row["tokens", "prompt"].numpy()
        output = SimpleNamespace(
            token_ids=row["tokens", "response"].numpy(),
            logprobs=row["log_probs", "full"][-200:].numpy(),
            policy_versions=row["policy_versions", "full"][-200:].numpy(),
            routed_experts=row["routed_experts", "full"][:-1].numpy(),
            kept=None,
        )
        versions.check(SimpleNamespace(prompt_token_ids=prompt), output)  # type: ignore[arg-type]
    assert max(int(row["num_segments"]) for row in rows) >= 3
