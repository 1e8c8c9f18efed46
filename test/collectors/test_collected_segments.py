"""Answers that a real engine generated in several parts, by other weights each, through environment and collector."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from support.collecting import Questions, chat
from support.reference import TOLERANCE
from support.versions import SECONDS, Versions
from support.waiting import until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.workflow import Ask
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.modules.backends.engine import Engine

TOKENS = 200


def collector_of(engine: AsyncVLLM, env: Any, tokens: int, *, ignore_eos: bool = True, **kwargs: Any) -> Any:
    params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": ignore_eos}
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
def test_turns_keep_what_earlier_turns_know_of_their_tokens(versions: Versions, engine: AsyncVLLM) -> None:
    """Two turns with a weight change between: the first turn's log-probs, versions and routes stand in the second."""
    collector = collector_of(engine, lambda: chat(1, turns=2), 24, max_staleness=0)
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


@pytest.mark.engine("qwen3_moe")
def test_what_is_cut_before_its_first_token_begins_in_the_new_weights(
    versions: Versions, engine: AsyncVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are with the engine, which stands still, as the swap aborts them; it begins them again by itself."""
    (replica,) = versions.replicas
    sent: list[str] = []
    submit = replica.submit
    monkeypatch.setattr(
        replica, "submit", lambda requests: sent.extend(one.request_id for one in requests) or submit(requests)
    )
    collector = collector_of(engine, chat(2), 8, max_staleness=0)
    replica.call(Engine.pause, SECONDS, "keep", False)
    with ThreadPoolExecutor(1) as trainer:
        batch = trainer.submit(lambda: next(iter(collector)))
        until(lambda: len(sent) == 2)
        new = versions.update(61, "abort")
        replica.call(Engine.resume, SECONDS)
        rows = list(batch.result(120).unbind(0))
    collector.shutdown()
    assert len(sent) == 2
    for row in rows:
        assert (row["policy_versions", "full"][-8:].tolist(), int(row["num_segments"])) == ([new] * 8, 1)
        assert str(row["finish_reason"]) == "length"
        check(versions, row)


STOPS = ["ab", "ca", "bb"]
END = 258  # of a turn, as the byte tokenizer has it


async def stopping(data: TensorDictBase, ask: Ask) -> float:
    """Of two samples one ends with the end of a turn, the other with a pair of letters, each after about 12 tokens."""
    letters = list(b"abcdef")
    if data["query"].endswith("even"):
        await ask(data["query"], allowed_token_ids=[*letters, *b"ghijkl", END])
    else:
        await ask(data["query"], allowed_token_ids=letters, stop=STOPS)
    return 1.0


def ends(row: TensorDictBase) -> str:
    """Check that an answer ends where it must; return whether a cut was within its end, or right before it."""
    ids, made_by = row["tokens", "response"].tolist(), row["policy_versions", "full"].tolist()
    text = bytes(token for token in ids if token != END).decode()
    at_end = made_by[-2:-1] != made_by[-1:] and len(ids) > 1
    assert len(ids) <= 64
    assert END not in ids[:-1]
    if row["query"].endswith("even"):
        assert (ids[-1] == END) == (str(row["finish_reason"]) == "stop")
        return "before an end of turn" if ids[-1] == END and at_end else ""
    assert all(stop not in text[:-1] for stop in STOPS)
    assert (text[-2:] in STOPS) == (str(row["finish_reason"]) == "stop")
    return "within a stop string" if text[-2:] in STOPS and at_end else ""


@pytest.mark.engine("qwen3_moe")
def test_an_answer_ends_where_it_must_wherever_it_was_cut(versions: Versions, engine: AsyncVLLM) -> None:
    """Weights change again and again, until a cut lay within a stop string, and another before the end of a turn."""
    questions = [{"query": [f"{i} {'even' if i % 2 == 0 else 'odd'}" for i in range(64)]}]
    collector = collector_of(
        engine, stopping, 64, ignore_eos=False, dataloader=questions, group_size=8, groups_per_batch=4, max_staleness=2
    )
    over = threading.Event()

    def update() -> None:
        for seed in count(70):
            if over.is_set():
                return
            versions.update(seed, "abort")

    found: dict[str, TensorDictBase] = {}
    with ThreadPoolExecutor(1) as updater:
        updates = updater.submit(update)
        try:
            for batch in islice(collector, 60):
                found |= {words: row for row in batch.unbind(0) if (words := ends(row))}
                if len(found) == 2:
                    break
        finally:
            over.set()
        updates.result(60)
    collector.shutdown()
    assert set(found) == {"within a stop string", "before an end of turn"}
    for row in found.values():
        assert int(row["num_segments"]) >= 2


@pytest.mark.engine("qwen3_moe")
def test_a_collector_that_is_shut_down_leaves_the_engine_idle_and_serving(engine: AsyncVLLM) -> None:
    collector = collector_of(engine, chat(4), TOKENS, group_size=4, groups_per_batch=2)

    def counts(*names: str) -> list[Any]:
        (stats,) = engine.stats()
        return [stats[name] for name in names]

    with ThreadPoolExecutor(1) as trainer:
        batch = trainer.submit(lambda: next(iter(collector), None))
        until(lambda: counts("running")[0] >= 8)
        assert engine.get_cache_usage(0) > 0
        collector.shutdown()
        assert batch.result(60) is None
    until(lambda: counts("running", "waiting", "inflight") == [0, 0, 0])
    until(lambda: engine.get_cache_usage(0) == 0)
    assert len(engine.generate("a", {"max_tokens": 3, "ignore_eos": True}, use_tqdm=False).outputs[0].token_ids) == 3


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
