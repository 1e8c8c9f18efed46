"""How far the policy gradient is off, exactly: every answer is scored, so expectations are sums and nothing is sampled.

All ``8 ** 3`` answers of three tokens over eight words; a noisy copy of the trainer is the engine, whose distribution
over them is mu. An estimator is ``sum over y of mu(y) A(y) w(y) grad log pi(y)``, with the trainer's pi under the live
router, under the engine's experts (R3) or under those that the trainer itself chose before the updates (R2), and w the
importance ratio, or cut as a correction cuts it. It is compared with two targets, each the exact gradient of a reward:

- ``engine``: of the engine as it is deployed now, with the new weights and its noise;
- ``trainer``: of the trainer's own float32 model.

``error`` is ``|g - g*| / |g*|``, ``cosine`` between them. ``masks=no``: the scorer divides by all
words, not by the eight.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens

from benchmarks.evidence.lengths import NOISES, differing, made
from torchrl_moe.data import KeptTokens
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.objectives import Thresholds
from torchrl_moe.testing import Noise, NoisyModel, without_kept_tokens

KEYS = ("family", "layers", "experts", "top_k", "noise", "masks", "seed", "ages")
WORDS, LENGTH, PROMPT, AT_A_TIME = 8, 3, (5, 77, 33, 130), 256
AGES: Mapping[str, Sequence[tuple[float, int]]] = {
    "fresh": [(0.0, 0)],
    "stale": [(0.0, 0), (1e-6, 1), (1e-6, 8), (1e-5, 8)],
}
"""Learning rate and updates between the answers and the gradient."""
FLIPS: Mapping[str, Noise] = {
    f"{how} flips {rate:g}": Noise(flips=rate, nearest=how == "nearest")
    for how in ("nearest", "random")
    for rate in (0.01, 0.03, 0.1, 0.3)
} | {"router noise 0.1": Noise(router_std=0.1)}
PAIRS: Mapping[str, Noise] = {"bfloat16 and nearest flips 0.03": Noise(dtype=torch.bfloat16, flips=0.03)}
ALL_NOISES = {**NOISES, **FLIPS, **PAIRS}
ARMS = {"live": None, "R3": "routed_experts", "R2": "own_experts"}


class Answers:
    """All answers to one prompt, and a reward that depends on the words."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = (torch.randperm(200, generator=generator)[:WORDS] + 20).sort().values
        index = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))
        self.ids = torch.cat([torch.tensor(PROMPT).expand(len(index), -1), self.words[index]], 1)
        self.reward = (index.sum(1) % 3 == 0).double() + 0.5 * (index[:, 0] == index[:, -1]).double()
        sizes = torch.tensor([0] * len(PROMPT) + [WORDS] * LENGTH, dtype=torch.int32)
        kept = KeptTokens(ids=self.words.repeat(LENGTH).int(), sizes=sizes)
        self.batch: TensorDictBase = lazy_stack(
            [
                TensorDict(
                    tokens=Tokens(full=row, prompt=row[: len(PROMPT)], response=row[len(PROMPT) :]),
                    sampling=TensorDict(temperature=torch.tensor(1.0), kept=kept.clone()),
                )
                for row in self.ids
            ]
        )

    def log_probs(self, actor: TransformersWrapper, batch: TensorDictBase) -> Iterator[tuple[slice, Tensor]]:
        """Yield ``log p(y)``, a part of the answers at a time, so that a backward pass can follow each."""
        for start, part in zip(range(0, len(batch), AT_A_TIME), batch.split(AT_A_TIME), strict=True):
            scores = actor.score(part.copy(), entropy=False)[0]
            yield slice(start, start + len(part)), scores[:, len(PROMPT) :].double().sum(1)

    @torch.no_grad()
    def values(self, actor: TransformersWrapper, batch: TensorDictBase) -> Tensor:
        """``log p(y)`` of all answers, float64."""
        return torch.cat([value for _, value in self.log_probs(actor, batch)])

    def gradient(self, actor: TransformersWrapper, batch: TensorDictBase, weights: Tensor) -> Tensor:
        """``sum over y of weights(y) grad log p(y)``, one vector in float64."""
        actor.model.requires_grad_(True).zero_grad()
        for part, value in self.log_probs(actor, batch):
            (weights[part] * value).sum().backward()
        return torch.cat([p.grad.double().flatten() for p in actor.model.parameters() if p.grad is not None])

    @torch.no_grad()
    def record(self, model: Any, key: str) -> None:
        """Write the experts that a model chooses; equal prefixes get equal ones, as in an engine."""
        rows = []
        for rank, part in enumerate([others[:1]] if quick else [others, more], 1):
        for seed in seeds:
            for other in part:
                yield rank, {**main, **other, "seed": seed, "ages": "fresh"}
