"""How far the policy gradient is off, exactly: every answer is scored, so expectations are sums and nothing is sampled.

All ``8 ** 3`` answers of three tokens over eight words; a noisy copy of the trainer is the engine, whose distribution
over them is mu. An estimator is ``sum over y of mu(y) A(y) w(y) grad log pi(y)``, with the trainer's pi under the live
router, under the engine's experts (R3) or under those that the trainer itself chose before the updates (R2), and w the
importance ratio, or cut as a correction cuts it. It is compared with two targets, each the exact gradient of a reward:

- ``engine``: of the engine as it is deployed now, with the new weights and its noise;
- ``trainer``: of the trainer's own float32 model.

``error`` is ``|g - g*| / |g*|``, ``cosine`` between them. ``masks=no``: the scorer divides by all
words, not by the eight. Flips and router noise change which experts the engine uses, not its weights of them: so it is
one policy, and not another for each pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    def squares(self, actor: TransformersWrapper, batch: TensorDictBase) -> Tensor:
        """``|grad log p(y)|^2`` of all answers, float64."""
        actor.model.requires_grad_(True)
        found = []
        for one in batch.split(1):
            actor.model.zero_grad()
            actor.score(one.copy(), entropy=False)[0][:, len(PROMPT) :].double().sum().backward()
            found.append(sum(p.grad.double().square().sum() for p in actor.model.parameters() if p.grad is not None))
        return torch.stack(found)

    @torch.no_grad()
    def record(self, model: Any, key: str) -> None:
        """Write the experts that a model chooses; equal prefixes get equal ones, as in an engine."""
        rows = []
        for part in self.ids.split(AT_A_TIME):
            with RouterReplay.of(model).record() as recording:
                model(part)
            rows.append(recording.routed_experts)
        routes = torch.cat(rows)
        for t in range(routes.shape[1]):  # flips are drawn for each row: those of a prefix's first answer hold for all
            _, index = torch.unique(self.ids[:, : t + 1], dim=0, return_inverse=True)
            first = torch.full((int(index.max()) + 1,), len(index)).scatter_reduce(
                0, index, torch.arange(len(index)), "amin"
            )
            routes[:, t] = routes[first[index], t]
        routes[:, -1] = -1  # the last token is never fed
        for row, one in zip(self.batch.unbind(0), routes, strict=True):
            row.set((key, "full"), one.clone())


@dataclass(frozen=True)
class Age:
    """What is known of a batch so many updates after it was sampled; ``log_mu``: of all answers, to the engine."""

    lr: float
    updates: int
    log_mu: Tensor
    advantage: Tensor
    told: TensorDictBase
    arms: Mapping[str, TransformersWrapper]
    targets: Mapping[str, Tensor]
    shares: Mapping[str, float]

    def key(self, arm: str, weight: str, target: str) -> dict[str, object]:
        """The columns that say which estimator a row is of."""
        return {"lr": self.lr, "updates": self.updates, "arm": arm, "weight": weight, "target": target}


def measured(**setting: Any) -> Iterator[dict[str, object]]:
    """Yield a row for each age, arm, weight and target."""
    answers = Answers(setting["seed"])
    for age in _ages(answers, **setting):
        mu = age.log_mu.exp()
        for arm, actor in age.arms.items():
            log_pi = answers.values(actor, age.told)
            ratio = (log_pi - age.log_mu).exp()
            ess = float((mu * ratio).sum() ** 2 / (mu * ratio.square()).sum())
            for name, weight in _weights(ratio, age.advantage).items():
                if bool((weight == ratio).all()) and name != "ratio":
                    continue  # nothing is cut
                found = answers.gradient(actor, age.told, mu * weight * age.advantage)
                for target, true in age.targets.items():
                    yield {
                        **age.key(arm, name, target),
                        "error": f"{_off(found, true):.5g}",
                        "cosine": f"{float(torch.cosine_similarity(found, true, 0)):.6g}",
                        "ess": f"{ess:.6g}",
                        "kl": f"{float((mu * (age.log_mu - log_pi)).sum()):.4g}",
                        **{key: f"{value:.5g}" for key, value in age.shares.items()},
                    }


def variances(**setting: Any) -> Iterator[dict[str, object]]:
    """Yield bias and standard deviation of one answer's term apart, for each age, arm and weight; both exact.

    ``std`` is ``sqrt(E |w A grad log pi|^2 - |E|^2) / |g*|``; of ``answers`` sampled ones the mean's deviation is the
    bias. ``mixture`` is ``(1 - m) none + m seq_tis``, what AIS (2605.13907) draws its gradients from, with the m that
    has the least bias: no rule for m can do better.
    """
    answers = Answers(setting["seed"])
    for age in _ages(answers, **setting):
        mu = age.log_mu.exp()
        for arm, actor in age.arms.items():
            squares = answers.squares(actor, age.told)
            ratio = (answers.values(actor, age.told) - age.log_mu).exp()
            weights = _weights(ratio, age.advantage)
            found = {name: answers.gradient(actor, age.told, mu * w * age.advantage) for name, w in weights.items()}
            for target, true in age.targets.items():
                step = found["seq_tis"] - found["none"]
                share = min(1.0, max(0.0, float((true - found["none"]) @ step / (step @ step))))
                mixed = {"mixture": (1 - share) * weights["none"] + share * weights["seq_tis"]}
                sums = {**found, "mixture": found["none"] + share * step}
                for name, weight in {**weights, **mixed}.items():
                    variance = (mu * (weight * age.advantage).square() * squares).sum() - sums[name].square().sum()
                    std, bias = float(variance.sqrt() / true.norm()), _off(sums[name], true)
                    yield {
                        **age.key(arm, name, target),
                        "bias": f"{bias:.5g}",
                        "std": f"{std:.5g}",
                        "answers": f"{(std / bias) ** 2 if bias else math.inf:.4g}",
                        "share": f"{share:.4g}" if name == "mixture" else "",
                    }


def _ages(
    answers: Answers, family: str, layers: int, experts: int, top_k: int, noise: str, masks: str, seed: int, ages: str
) -> Iterator[Age]:
    """Update the trainer, and yield what there is to estimate then."""
    trainer = made(family, layers, experts, top_k, seed)
    start = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    rollouts = NoisyModel(trainer, ALL_NOISES[noise])
    with rollouts.running() as model:
        answers.record(model, "routed_experts")
    answers.record(trainer, "own_experts")
    by = {name: _actor(trainer, key) for name, key in ARMS.items()}
    log_mu = answers.values(_actor(rollouts.model, "routed_experts"), answers.batch)
    mu = log_mu.exp()
    for lr, updates in AGES[ages]:
        trainer.load_state_dict(start)
        _ascend(answers, trainer, lr, updates)
        # the engine as it is now: the new weights, and its noise
        now, deployed = Answers(seed), NoisyModel(trainer, ALL_NOISES[noise])
        with deployed.running() as model:
            now.record(model, "routed_experts")
        now.record(trainer, "own_experts")
        yield Age(
            lr,
            updates,
            log_mu,
            advantage=answers.reward - (mu * answers.reward).sum(),
            told=answers.batch if masks == "yes" else without_kept_tokens(answers.batch),
            # fresh, R2 is the live router's choice of a moment ago
            arms={arm: actor for arm, actor in by.items() if arm != "R2" or updates},
            targets={
                "engine": _true_gradient(now, _actor(deployed.model, "routed_experts")),
                "trainer": _true_gradient(answers, by["live"]),
            },
            shares={
                "rows_mismatch": _share(answers, "routed_experts", answers, "own_experts"),
                "rows_moved": _share(answers, "own_experts", now, "own_experts"),
                "engine_rows_moved": _share(answers, "routed_experts", now, "routed_experts"),
            },
        )


def _off(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def _weights(ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """The weight of each answer: none, the ratio, and the ratio as corrections cut it."""
    limit = Thresholds().seq_tis
    return {
        "none": torch.ones_like(ratio),
        "ratio": ratio,
        "clip": ratio * ~(((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))),
        "seq_tis": ratio.clamp(max=limit),
        "seq_mis": ratio * (ratio <= limit),
    }


def _actor(model: Any, key: str | None) -> TransformersWrapper:
    if key is None:
        return TransformersWrapper(model, replay="none")
    return TransformersWrapper(model, replay="R3", routed_experts_key=key)


def _true_gradient(answers: Answers, actor: TransformersWrapper) -> Tensor:
    """The gradient of a policy's own expected reward."""
    p = answers.values(actor, answers.batch).exp()
    return answers.gradient(actor, answers.batch, p * (answers.reward - (p * answers.reward).sum()))


def _ascend(answers: Answers, trainer: Any, lr: float, updates: int) -> None:
    """Make Adam steps up the exact gradient of the trainer's reward."""
    optimizer = torch.optim.Adam(trainer.parameters(), lr=lr)
    live = _actor(trainer, None)
    for _ in range(updates):
        trainer.zero_grad()
        for part, value in answers.log_probs(live, answers.batch):
            (-(value.exp() * answers.reward[part]).sum()).backward()
        optimizer.step()


def _share(answers: Answers, first: str, others: Answers, second: str) -> float:
    """Share of (token, layer) rows of words whose sets of experts differ; all answers have the prompt's rows alike."""
    pairs = [
        TensorDict(
            first={"full": one[first, "full"][len(PROMPT) :]}, second={"full": two[second, "full"][len(PROMPT) :]}
        )
        for one, two in zip(answers.batch.unbind(0), others.batch.unbind(0), strict=True)
    ]
    return differing(lazy_stack(pairs), "first", "second")


def settings(quick: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """What is measured, with a rank: the most important first."""
    main = {"family": "qwen3_moe", "layers": 8, "experts": 32, "top_k": 4, "noise": "bfloat16", "masks": "yes"}
    seeds = range(1 if quick else 5)
    for seed in seeds if quick else range(20):
        yield 0, {**main, "seed": seed, "ages": "stale"}
    others: list[dict[str, Any]] = [
        {"masks": "no"}, {"noise": "bfloat16, float32 routers"}, {"noise": "int8 and bfloat16"},
        *({"noise": noise} for noise in FLIPS), {"layers": 16}, {"family": "mixtral", "experts": 8, "top_k": 2},
        {"family": "olmoe"}, {"family": "deepseek_v3"},
    ]  # fmt: skip
    more: list[dict[str, Any]] = [
        {"layers": 2}, {"layers": 4}, {"experts": 8, "top_k": 2}, {"experts": 64, "top_k": 8},
        {"experts": 64, "top_k": 1}, {"noise": "int8"}, {"noise": "float8"}, {"noise": "float8 and bfloat16"},
        *({"noise": noise} for noise in PAIRS),
    ]  # fmt: skip
    for rank, part in enumerate([others[:1]] if quick else [others, more], 1):
        for seed in seeds:
            for other in part:
                yield rank, {**main, **other, "seed": seed, "ages": "fresh"}


def of_variances(quick: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """What bias and variance are measured of."""
    for seed in range(1 if quick else 5):
        for noise in ("bfloat16", "int8 and bfloat16", "float8 and bfloat16"):
            main = {"family": "qwen3_moe", "layers": 8, "experts": 32, "top_k": 4, "noise": noise, "masks": "yes"}
            yield 1, {**main, "seed": seed, "ages": "stale" if noise == "bfloat16" and not quick else "fresh"}
