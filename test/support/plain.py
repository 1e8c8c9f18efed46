"""Plain transformers as an engine, without a process: a tiny model that is loaded, and answers that grow by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.processes import ids_request
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.decoder import Loaded, load
from torchrl_moe.modules.backends.transformers.transformers_arguments import EngineArguments
from torchrl_moe.modules.backends.transformers.transformers_process import EngineProcess
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe

TOLERANCE = 1e-5
"""Of log-probs in float32."""


def save(folder: Path, family: str = "qwen3_moe", **config: Any) -> Path:
    """Save a tiny model with its tokenizer."""
    make_tiny_moe(family, **config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path, **arguments: Any) -> Loaded:
    """Load it as an engine process does."""
    return load(EngineArguments(model=str(folder), **{"dtype": "float32", "max_model_len": 128, **arguments}))


def answers(engine: Loaded, ids: Sequence[int], params: Any = None, **fields: Any) -> list[Answer]:
    """The answers to a prompt, which have no token yet."""
    params = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, **(params or {})}
    return engine.read(ids_request("r", ids, sampling_params=params, **fields)).answers


def step(engine: Loaded, *joining: Answer, times: int = 1, version: int = 0) -> None:
    """Take steps; what is given joins at the first."""
    for time in range(times):
        engine.decoder.step(joining if time == 0 else (), version)


@torch.no_grad()
def log_probs(model: Any, answer: Answer, temperature: float = 1.0) -> Tensor:
    """What the model by itself says of all words at each token of an answer, ``[G, V]``: one sequence, no cache."""
    logits = model(torch.tensor([answer.ids])).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(answer.prompt_ids) - 1 : -1]


def chosen(rows: Tensor, answer: Answer) -> Any:
    """The log-probs of an answer's own tokens."""
    return rows.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0].numpy()


@torch.no_grad()
def check_output(engine: Loaded, prompt_ids: Sequence[int], output: CompletionOutput, temperature: float = 1.0) -> None:
    """An answer's log-probs are those of the model by itself, and its routes what the model's routers choose."""
    ids = [*prompt_ids, *output.token_ids.tolist()]
    assert engine.decoder.replay is not None
    with engine.decoder.replay.record() as recording:
        logits = engine.decoder.model(torch.tensor([ids])).logits[0].float() / temperature
    rows = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]
    expected = rows.gather(-1, torch.from_numpy(output.token_ids)[:, None])[:, 0].numpy()
    assert output.logprobs is not None
    assert np.abs(output.logprobs - expected).max() <= TOLERANCE
    assert output.routed_experts is not None
    assert output.routed_experts.shape == (len(ids) - 1, 4, 4)
    own = recording.routed_experts[0, :-1].numpy()
    assert (sets(output.routed_experts[:, 1:]) == sets(own[:, 1:])).all()
    assert (output.routed_experts[:, 0] == 0).all()  # a dense layer


class Bench:
    """Requests over a model, and what became of them."""

    def __init__(self, engine: Loaded) -> None:
        self.sent: dict[str, Completion] = {}
        self.refused: dict[str, BaseException] = {}
        self.order: list[str] = []
        self.requests = EngineProcess(engine, None, None)  # type: ignore[arg-type]
        self.requests.deliver = self._take  # type: ignore[method-assign]

    def _take(self, completion: Completion) -> None:
        self.order.append(completion.request_id)
        self.sent[completion.request_id] = completion

    def start(self, name: str, ids: Sequence[int] = (65, 66), **fields: Any) -> None:
        params = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, **fields.pop("params", {})}
        try:
            self.requests.start(ids_request(name, ids, sampling_params=params, **fields))
        except ValueError as error:
            self.refused[name] = error

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60.0):
            while not condition():
                await asyncio.sleep(0.001)

    async def tokens(self, name: str, count: int) -> None:
        """Wait until a request has so many tokens."""

        async def enough() -> bool:
            found = [one for one in await self.requests._snapshot() if one.request_id == name]
            return not found or len(found[0].outputs[0].token_ids) >= count

        async with asyncio.timeout(60.0):
            while not await enough():
                await asyncio.sleep(0)


def serve(engine: Loaded, script: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Run a script beside the loop of requests."""

    async def main() -> Bench:
        bench = Bench(engine)
        working = asyncio.create_task(bench.requests._run())
        try:
            await script(bench)
        finally:
            working.cancel()
            engine.decoder.empty()
            bench.requests.close()
        return bench

    return asyncio.run(main())


def sets(rows: Any) -> Any:
    """Routes as sets: each row in order."""
    return np.sort(np.asarray(rows), -1)
