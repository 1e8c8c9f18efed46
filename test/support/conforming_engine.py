"""An engine over a tiny transformers MoE, a token at a time, that is right in all that conformance looks at.

Samples by numpy, so that the checks' own distributions are compared with something else.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from torchrl_moe._compat_transformers import cache_argument
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.conformance import Answer, Sampling, Settings

BLOCK = 16  # tokens
CHUNK = 64
QUICK = Settings(answer=6, long_prompt=100, long_answer=24, prompts=(1, 7, 18))
"""Enough tokens for every check, and few enough for every fault."""


def small_moe() -> PreTrainedModel:
    """A dense layer and two with routers."""
    return make_tiny_moe("qwen3_moe", num_hidden_layers=3, hidden_size=32, num_experts=8, num_experts_per_tok=2)


def distribution(
    logits: NDArray[np.float64], seen: Sequence[int], answer: Sequence[int], how: Sampling
) -> NDArray[np.float64]:
    """The log-probs ``[V]`` that the next token is drawn from."""
    values = logits.copy()
    for token in set(seen):
        values[token] *= how.repetition_penalty if values[token] <= 0 else 1 / how.repetition_penalty
    for token in set(answer):
        values[token] -= how.frequency_penalty * list(answer).count(token) + how.presence_penalty
    probs = normal(values / how.temperature)
    order = np.argsort(-probs, kind="stable")
    if how.top_k:
        probs[order[how.top_k :]] = 0
        probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= how.top_p]] = 0
    probs[probs < how.min_p * probs.max()] = 0
    with np.errstate(divide="ignore"):
        return np.log(probs / probs.sum())


def normal(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@dataclass
class Running:
    """An answer that is being made."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    untruncated: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    cache: Any = field(default_factory=DynamicCache)
    read: int = 0
    rereads: int = 0


class ConformingEngine:
    """Keeps each promise of ``torchrl_moe.testing.conformance.adapter``; ``native`` are log-probs before truncation.

    It copies the model. A token takes ``token_seconds``, so that something can happen meanwhile. If ``is_live``, it
    routes for itself when it reads an answer's first part again; ``raw_log_probs`` are the model's own.
    """

    name = "conforming"

    def __init__(
        self, model: PreTrainedModel, *, token_seconds: float = 0.0, is_live: bool = False, raw_log_probs: bool = False
    ) -> None:
        self.model = copy.deepcopy(model)
        self.cache_argument = cache_argument(inspect.signature(model.forward).parameters)
        self.replay = RouterReplay(self.model)
        self.token_seconds, self.is_live, self.raw_log_probs = token_seconds, is_live, raw_log_probs
        self.version, self.retractions, self.is_paused = 0, 0, False
        self.prompts: list[list[int]] = []
        self.aborted: set[str] = set()
        self.running: list[str] = []
        self.random = np.random.default_rng(0)
        self.changed = threading.Condition()
        self.no_update = threading.Event()  # else an update waits, and the answers wait for it
        self.no_update.set()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        names = request_ids or [""] * len(prompts)
        return [
            [self.answer(Running(list(prompt)), sampling, name) for _ in range(sampling.n)]
            for prompt, name in zip(prompts, names, strict=True)
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        with self.changed:
            self.aborted.update(request_ids)
            self.changed.notify_all()

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        made = {"tokens": answer.token_ids, "log_probs": answer.log_probs, "versions": answer.versions}
        made["rows"] = answer.routed_experts
        had = Running(list(prompt), **{name: list(values) for name, values in made.items()})
        return self.answer(had, sampling, "")

    def update_weights(self, model: PreTrainedModel) -> None:
        self.no_update.clear()
        with self.changed:
            self.model.load_state_dict(model.state_dict())
            self.version += 1
            self.prompts.clear()
        self.no_update.set()

    def weights_version(self) -> int:
        return self.version

    def pause(self, mode: str) -> None:
        with self.changed:
            self.is_paused = True
            self.retractions += mode == "retract"

    def go_on(self) -> None:
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()

    def rows_of(self, ids: Sequence[int]) -> NDArray[np.int8]:
        """What the weights of now route a sequence to, ``[T, L, K]``."""
        with self.changed, torch.no_grad(), self.replay.record() as recording:
            self.model(torch.tensor([list(ids)]))
        return recording.routed_experts[0].numpy().astype(np.int8)

    def answer(self, running: Running, sampling: Sampling, name: str) -> Answer:
        with self.changed:
            cached = self.cached(running.prompt)
            self.prompts.append(running.prompt)
            running.rereads = self.retractions
            self.running.append(name)
        while len(running.tokens) < sampling.max_tokens:
            self.no_update.wait()
            with self.changed:
                self.changed.wait_for(lambda: not self.is_paused or name in self.aborted)
                if name in self.aborted:
                    break
                if running.rereads != self.retractions:
                    running.rereads = self.retractions
                    running.cache, running.read = DynamicCache(), 0  # and nothing that was delivered is lost
                self.step(running, sampling)
            time.sleep(self.token_seconds)
        self.running.remove(name)
        finished = len(running.tokens) == sampling.max_tokens
        return Answer(
            token_ids=np.array(running.tokens, np.int64),
            log_probs=np.array(running.log_probs, np.float32),
            routed_experts=np.array(running.rows, np.int8) if running.rows else None,
            versions=np.array(running.versions, np.int32),
            finish_reason="length" if finished else "abort",
            num_cached_tokens=cached,
            native=running.untruncated,
        )

    def step(self, running: Running, sampling: Sampling) -> None:
        ids = [*running.prompt, *running.tokens]
        logits = self.read(running, ids)
        own = distribution(logits, ids, running.tokens, sampling)
        token = int(self.random.choice(len(own), p=np.exp(own)))
        given = np.log(normal(logits)) if self.raw_log_probs else own
        whole = distribution(logits, ids, running.tokens, replace(sampling, top_k=0, top_p=1.0, min_p=0.0))
        running.untruncated.append(float(whole[token]))
        running.tokens.append(token)
        running.log_probs.append(float(given[token]))
        running.versions.append(self.version)

    @torch.no_grad()
    def read(self, running: Running, ids: list[int]) -> NDArray[np.float64]:
        """Read what the cache lacks, in chunks: what was routed before by the rows that were delivered."""
        logits: Any = None
        while running.read < len(ids):
            known = 0 if self.is_live else len(running.rows)
            end = min(running.read + CHUNK, len(ids), known if known > running.read else len(ids))
            chunk, cache = torch.tensor([ids[running.read : end]]), {self.cache_argument: running.cache}
            if known > running.read:
                rows = torch.from_numpy(np.array(running.rows[running.read : end], np.int16))
                with self.replay.replay(rows[None]):
                    logits = self.model(chunk, **cache).logits
            else:
                with self.replay.record() as recording:
                    logits = self.model(chunk, **cache).logits
                made = recording.routed_experts[0].numpy().astype(np.int8)
                running.rows += list(made[max(0, len(running.rows) - running.read) :])
            running.read = end
        return logits[0, -1].double().numpy()

    def cached(self, prompt: list[int]) -> int:
        """How many tokens of a prompt came before, in whole blocks, the last token left out."""
        pairs = [enumerate(zip_longest(prompt, other)) for other in self.prompts]
        longest = max((next((i for i, (a, b) in two if a != b), len(prompt)) for two in pairs), default=0)
        return min(longest, len(prompt) - 1) // BLOCK * BLOCK
