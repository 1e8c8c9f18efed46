"""What collectors' tests collect from: numbered questions, an environment of one turn or more, a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import ChatHistory

from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

TOKENIZER = ByteTokenizer()


class Questions:
    """``q0``, ``q1``, ...: an epoch of ``count``, in batches."""

    def __init__(self, count: int = 1 << 20, batch_size: int = 4) -> None:
        self.count, self.batch_size = count, batch_size

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        for start in range(0, self.count, self.batch_size):
            yield {"query": [f"q{i}" for i in range(start, min(start + self.batch_size, self.count))]}


class Reward(Transform):
    """Rewards by a function of the query, once for each sample."""

    def __init__(self, function: Callable[[str], float]) -> None:
        super().__init__()
        self.function = function

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        values = [self.function(query) for query in tensordict.get("query").tolist()]
        next_tensordict.set("reward", torch.tensor(values).reshape(-1, 1, 1))
        return next_tensordict


class NextQuestion(Transform):
    """Adds a user's message after each answer."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        more, prompts = History(role="user", content="and then?"), next_tensordict["history"].prompt.unbind(0)
        asked = [prompt.append(more, inplace=False, dim=-1) for prompt in prompts]
        next_tensordict["history"] = ChatHistory(prompt=lazy_stack(asked))
        return next_tensordict


def chat(batch_size: int, turns: int = 1, reward: Callable[[str], float] | None = None) -> EnvBase:
    """An environment of so many samples and turns."""
    env = ChatEnv(batch_size=(batch_size,), tokenizer=TOKENIZER)
    if turns > 1:
        env = env.append_transform(NextQuestion())
    if reward is not None:
        env = env.append_transform(Reward(reward))
    return env.append_transform(StepCounter(max_steps=turns))


def policy_of(engine: FakeAsyncVLLM, max_new_tokens: int = 6, **kwargs: Any) -> vLLMWrapper:
    return vLLMWrapper(engine, generate_kwargs={"max_new_tokens": max_new_tokens}, **kwargs)


def new_weights(engine: FakeAsyncVLLM, version: int) -> None:
    """Have every replica hold a version."""
    for replica in engine.replicas:
        replica.version = version
        engine.replica_table.set_version(replica.index, version)


def queries(batch: TensorDictBase) -> list[str]:
    return [row["query"] for row in batch.unbind(0)]


def plain(row: TensorDictBase) -> dict[Any, Any]:
    """Every leaf of a row as plain Python; NaN as text, for it equals nothing."""
    items = row.items(include_nested=True, leaves_only=True)
    return {key: repr(value.tolist() if isinstance(value, torch.Tensor) else value) for key, value in items}


@contextmanager
def collectors_over(engine: Any) -> Iterator[Callable[..., AsyncLLMCollector]]:
    """A function that makes collectors of groups of 2 over questions, of this engine unless it is given a policy."""
    with ExitStack() as stack:

        def make(env: Any = None, **kwargs: Any) -> AsyncLLMCollector:
            if "policy" not in kwargs:
                kwargs["policy"] = policy_of(engine() if callable(engine) else engine)
            kwargs = {"dataloader": Questions(), "group_size": 2, **kwargs}
            collector = AsyncLLMCollector(chat(kwargs["group_size"]) if env is None else env, **kwargs)
            stack.callback(collector.shutdown)
            return collector

        yield make
