"""CPU time per answer of ``AsyncLLMCollector``, against TorchRL's ``LLMCollector`` and by number of answers in flight.

Both collect the same groups of one turn, with one reward and one policy, from one fake engine whose answers are ready,
so the path from prompt to row is measured. CPU seconds are of the whole process; the contenders alternate.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv

from benchmarks.report import Row, finish, median_range
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.modules.backends.replica import Completion, Request, Tell
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

GROUP, GROUPS, TOKENS, ROUNDS, BATCHES = 8, 8, 256, 9, 4
IN_FLIGHT = (64, 512, 4096)
BAR, FLAT = 4.5, 1.5
TOKENIZER = ByteTokenizer()


class Questions:
    """Without end."""

    batch_size = 8

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        count = 0
        while True:
            yield {"query": [f"How much is {count + i:06d} + {count + i:06d}?" for i in range(self.batch_size)]}
            count += self.batch_size


class Length(Transform):
    """A reward that costs next to nothing."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        texts = tensordict.get(("text", "response"))
        texts = texts if isinstance(texts, list) else texts.tolist()
        lengths = torch.tensor([float(len(text)) for text in texts])
        next_tensordict.set("reward", lengths.reshape(*next_tensordict.batch_size, 1, 1))
        return next_tensordict


def environment(count: int) -> EnvBase:
    """Batches of a fixed number of samples, in groups."""
    env = DatasetChatEnv.from_dataloader(Questions(), repeats=GROUP, batch_size=(count,), tokenizer=TOKENIZER)
    return env.append_transform(Length()).append_transform(StepCounter(max_steps=1))


def ready_answers() -> FakeAsyncVLLM:
    """An engine that has its one answer, with routes, ready before the first request."""
    layout = RoutingLayout(num_layers=48, moe_layers=tuple(range(48)), top_k=8, num_experts=128)  # Qwen3-30B-A3B
    engine = FakeAsyncVLLM(max_concurrent_requests=None, layout=layout)
    made: list[Completion] = []
    first = engine.replicas[0].submit

    def submit(requests: Sequence[Request], tell: Tell | None = None) -> list[Future[Completion]]:
        futures = []
        for request in requests:
            if not made:
                made.append(first([request], tell)[0].result())
            ids = request.prompt_token_ids
            assert ids is not None
            assert len(ids) == len(made[0].prompt_token_ids)  # its routes have a row for each
            completion = replace(made[0], request_id=request.request_id, prompt_token_ids=ids.astype(np.int64))
            future: Future[Completion] = Future()
            future.set_result(completion)
            futures.append(future)
        return futures

    engine.replicas[0].submit = submit  # type: ignore[method-assign]
    return engine


def cost(batches: Iterator[Any], answers: int, count: int = BATCHES) -> float:
    """Return the milliseconds of CPU per answer, over ``batches`` batches of ``size`` answers."""
    gc.collect()
    began = time.process_time()
    got = sum(batch.numel() for batch in islice(batches, count))
    assert got == count * answers
    return (time.process_time() - began) / got * 1e3


def against_torchrl(policy: vLLMWrapper) -> list[Row]:
    """Alternating rounds, after a warm-up round."""
    answers = GROUP * GROUPS
    collectors: dict[str, Any] = {
        "ours": AsyncLLMCollector(environment(answers), policy=policy, dialog_turns_per_batch=answers, max_staleness=1),
        "TorchRL": LLMCollector(
            environment(answers), policy=policy, dialog_turns_per_batch=answers, yield_completed_trajectories=True
        ),
    }
    runs = {name: iter(collector) for name, collector in collectors.items()}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):
        for name, batches in runs.items():
            milliseconds = cost(batches, answers)
            if round_:
                spent[name].append(milliseconds)
    for collector in collectors.values():
        collector.shutdown()
    ratios = [theirs / ours for theirs, ours in zip(spent["TorchRL"], spent["ours"], strict=True)]
    ours = statistics.median(spent["ours"])
    return [
        Row(claim="TorchRL's LLMCollector, CPU per answer, ms", value=median_range(spent["TorchRL"], 2)),
        Row(
            claim="AsyncLLMCollector, CPU per answer, ms",
            value=median_range(spent["ours"], 2),
            target=f"<= {BAR}",
            met=ours <= BAR,
        ),
        Row(claim="TorchRL / ours", value=median_range(ratios, 2), target=">= 2", met=statistics.median(ratios) >= 2),
    ]


def over_what_is_in_flight(policy: vLLMWrapper) -> list[Row]:
    """One size after another; batches are half of the answers in flight, and each delivered answer starts another."""
    spent: dict[int, list[float]] = {}
    for count in IN_FLIGHT:
        size = count // 2
        collector = AsyncLLMCollector(environment(size), policy=policy, dialog_turns_per_batch=size, max_staleness=1)
        batches = iter(collector)
        cost(batches, size, 2)  # fills the pipeline
        spent[count] = [cost(batches, size, max(IN_FLIGHT[-1] // count, 1)) for _ in range(3)]
        collector.shutdown()
    medians = [statistics.median(values) for values in spent.values()]
    growth = medians[-1] / medians[0]
    rows = [
        Row(claim=f"{count} answers in flight, CPU per answer, ms", value=median_range(values, 2))
        for count, values in spent.items()
    ]
    claim = f"CPU per answer, {IN_FLIGHT[-1]} in flight / {IN_FLIGHT[0]}"
    return [*rows, Row(claim=claim, value=f"{growth:.2f}", target=f"<= {FLAT}", met=growth <= FLAT)]


def bytes_per_token(policy: vLLMWrapper) -> Row:
    """Compare the bytes of a row's tensors with those of id, log-prob, routes and version."""
    collector = AsyncLLMCollector(environment(GROUP), policy=policy)
    (batch,) = islice(collector, 1)
    collector.shutdown()
    row = batch[0]
    tokens = len(row["tokens", "full"])
    held = sum(
        value.numel() * value.element_size()
        for value in row.values(include_nested=True, leaves_only=True)
        if isinstance(value, torch.Tensor)
    )
    routes = row["routed_experts", "full"]
    least = 8 + 4 + routes[0].numel() * routes.element_size() + 4
    value = held / tokens / least
    return Row(
        claim=f"bytes per token of a row / {least}: id, log-prob, version, routes of 48 layers, top-8",
        value=f"{value:.2f}",
        target="<= 1.2",
        met=value <= 1.2,
    )


def main() -> None:
    """Measure all."""
    measures: list[Callable[[vLLMWrapper], Row | list[Row]]] = [
        against_torchrl,
        over_what_is_in_flight,
        bytes_per_token,
    ]
    rows: list[Row] = []
    with ready_answers() as engine:
        policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": TOKENS})
        for measure in measures:
            found = measure(policy)
            rows += found if isinstance(found, list) else [found]
    finish("collector_overhead", rows)


if __name__ == "__main__":
    main()
