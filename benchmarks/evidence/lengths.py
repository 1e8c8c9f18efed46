"""How many of the sampled answers an update keeps, by their length: the effective sample size of sequence weights.

A noisy copy of the trainer samples answers; then each token is scored by the copy (mu) and by the trainer (pi), all
tokens of an answer at once, so that no term is an estimate. ``w = prod of pi / mu``; of n answers ``(sum of w)^2 / (n *
sum of w^2)`` is what counts. Arms: the trainer's live router; R3, on the copy's experts; R2, on those that the trainer
itself chose before the updates; "R3, weights", on the copy's experts and the weights that it gave them, as constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens

from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives import Thresholds
from torchrl_moe.objectives import functional as F
from torchrl_moe.ops import k3
from torchrl_moe.testing import Noise, NoisyModel, make_tiny_moe

LENGTHS = (8, 32, 64, 128, 256, 512, 1024)
PROMPT, AT_A_TIME, ANSWERS = 8, 8, 32
SIZES: Mapping[str, tuple[str, str]] = {
    "qwen3_moe": ("num_experts", "num_experts_per_tok"),
    "olmoe": ("num_experts", "num_experts_per_tok"),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok"),
}
AGES: Mapping[str, Sequence[tuple[float, int]]] = {
    "fresh": [(0.0, 0)],
    "stale": [(0.0, 0), (1e-6, 8), (1e-5, 8)],
    "older": [(1e-6, 1), (1e-5, 1), (1e-4, 8)],
    "with weights": [(0.0, 0), (1e-5, 8)],
    "passes": [(1e-6, 8), (1e-5, 8)],
    "LoRA": [(1e-4, 8), (1e-3, 8)],
}
"""Learning rate and updates between sampling and scoring; "passes": over the very answers that are scored; "LoRA": of
adapters of the attention, which are merged then."""
UPDATED_WITH = 8
"""Answers of an update, none of which is scored; Adam moves a weight by about its learning rate, whatever they are."""
NOISES: Mapping[str, Noise] = {
    "bfloat16": Noise(dtype=torch.bfloat16),
    "bfloat16, float32 routers": Noise(dtype=torch.bfloat16, float32_routers=True),
    "int8": Noise(weights="int8"),
    "float8": Noise(weights="float8"),
    "int8 and bfloat16": Noise(weights="int8", dtype=torch.bfloat16),
    "float8 and bfloat16": Noise(weights="float8", dtype=torch.bfloat16),
    "int8 weights and activations": Noise(weights="int8", activations="int8", dtype=torch.bfloat16),
    "float8 weights and activations": Noise(weights="float8", activations="float8", dtype=torch.bfloat16),
}


def made(family: str, layers: int, experts: int, top_k: int, seed: int) -> Any:
    """A tiny model in float32 whose routers are decisive."""
    names: dict[str, Any] = dict(zip(SIZES[family], (experts, top_k), strict=True))
    return make_tiny_moe(family, seed=seed, num_hidden_layers=layers, **names)


def measured(
    family: str, layers: int, experts: int, top_k: int, noise: str, seed: int, longest: int, ages: str
) -> Iterator[dict[str, object]]:
    """Yield a row for each age of the answers, arm and length."""
    trainer = made(family, layers, experts, top_k, seed)
    start = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    rollouts = NoisyModel(trainer, NOISES[noise])
    batch = sampled(rollouts, longest, seed)
    others, batch = batch[:UPDATED_WITH], batch[UPDATED_WITH:]
    # who chose what: the engine, the trainer with the weights of that time, and with those of now
    recording = TransformersWrapper(trainer, replay="R2", rerecord=True)
    r3 = recording.get_new_version(replay="R3")
    r2 = recording.get_new_version(replay="R3", routed_experts_key="own_experts")
    with rollouts.running(), _combine_weights(rollouts.model) as given:
        mu = scored(TransformersWrapper(rollouts.model, replay="R2"), batch, "routed_experts")
    scored(recording, batch, "own_experts")
    for lr, updates in AGES[ages]:
        trainer.load_state_dict(start)
        with _adapters(trainer) if ages == "LoRA" else nullcontext():
            update(
                trainer, recording.get_new_version(replay="none"), batch if ages == "passes" else others, lr, updates
            )
        live = scored(recording, batch, "now_experts")
        gaps = {"live": live - mu, "R3": scored(r3, batch) - mu}
        if ages == "with weights":
            waiting = iter(given)
            with _combine_weights(trainer, waiting):
                gaps["R3, weights"] = scored(r3, batch) - mu
            assert next(waiting, None) is None
        gaps["R2"] = scored(r2, batch) - mu if updates else gaps["live"]  # its own choice of a moment ago
        shares = {
            "rows_mismatch": f"{differing(batch, 'routed_experts', 'own_experts'):.5g}",
            "rows_moved": f"{differing(batch, 'own_experts', 'now_experts'):.5g}",
        }
        for arm, gap in gaps.items():
            for length in (one for one in LENGTHS if one <= longest):
                yield {"lr": lr, "updates": updates, "tokens": length, "arm": arm, **figures(gap[:, :length]), **shares}


def sampled(rollouts: NoisyModel, longest: int, seed: int) -> TensorDictBase:
    """Answers of the copy, at temperature 1 over the whole vocabulary; all of one length."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(20, 220, (UPDATED_WITH + ANSWERS, PROMPT), generator=generator)
    arguments = {"max_new_tokens": longest, "min_new_tokens": longest, "temperature": 1.0}
    torch.manual_seed(seed)
    with rollouts.running() as model, torch.no_grad():
        model.generation_config.eos_token_id = None  # an answer goes on to its full length
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, top_p=1.0, pad_token_id=0,
            **arguments,
        )  # fmt: skip
    return lazy_stack([TensorDict(tokens=Tokens(full=row, prompt=row[:PROMPT], response=row[PROMPT:])) for row in ids])


@torch.no_grad()
def scored(actor: TransformersWrapper, batch: TensorDictBase, key: str | None = None) -> Tensor:
    """Log-probs of the answers, float64 ``[B, T]``; ``key``: where the experts that were used are written."""
    found = []
    for part in batch.split(AT_A_TIME):
        one = part.copy()
        found.append(actor.score(one, entropy=False)[0][:, PROMPT:].double())
        for row, written in zip(part.unbind(0), one.unbind(0), strict=True):
            if key is not None:
                row.set((key, "full"), written["train_routed_experts", "full"])
    return torch.cat(found)


@contextmanager
def _combine_weights(model: Any, given: Iterator[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Keep the weights ``[N, K]`` of each call of experts in order, or put those that were given in their place."""
    kept: list[Tensor] = []

    def hook(_: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden, index, weights = args
        if len(hidden) < AT_A_TIME * PROMPT:  # a wrapper proves its replay on a few tokens first
            return None
        if given is None:
            kept.append(weights.float())
            return None
        return hidden, index, next(given)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                stack.callback(module.register_forward_pre_hook(hook).remove)
        yield kept


def update(trainer: Any, actor: TransformersWrapper, batch: TensorDictBase, lr: float, updates: int) -> None:
    """Make Adam steps of a policy gradient with random advantages: the size of a real update, in no direction."""
    optimizer = torch.optim.Adam([one for one in trainer.parameters() if one.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        optimizer.zero_grad()
        advantage = torch.randn(len(batch), generator=generator)
        for part, weight in zip(batch.split(AT_A_TIME), advantage.split(AT_A_TIME), strict=True):
            log_probs = actor.score(part.copy(), entropy=False)[0][:, PROMPT:].sum(-1)
            ((weight * log_probs).sum() / len(batch)).backward()
        optimizer.step()


@contextmanager
def _adapters(trainer: Any) -> Iterator[None]:
    """Train low-rank adapters alone, and merge them at the end."""
    torch.manual_seed(0)
    adapted = get_peft_model(trainer, LoraConfig(r=8, lora_alpha=16, target_modules=r".*self_attn\..*_proj"))
    yield
    adapted.merge_and_unload()
    trainer.requires_grad_(True)


def differing(batch: TensorDictBase, first: str, second: str) -> float:
    """Share of (token, layer) rows whose sets of experts differ."""
    one, other = (torch.stack([row[key, "full"] for row in batch.unbind(0)]).sort(-1).values for key in (first, second))
    routed = (one >= 0).all(-1)
    return float((one != other).any(-1)[routed].float().mean())


def figures(gap: Tensor) -> dict[str, object]:
    """Figures of the log-ratios ``[B, T]`` of answers."""
    total, mask, limits = gap.sum(-1), torch.ones_like(gap, dtype=torch.bool), Thresholds()
    weight = F.sequence_weight(gap, mask)[:, :1]
    values: dict[str, Any] = {
        "ess": ess(total),
        "ess_seq_tis": ess(weight[:, 0].clamp(max=limits.seq_tis).log()),
        "kept_seq_mis": F.weight_within(weight, 0.0, limits.seq_mis).double().mean(),
        "kept_geo": F.geometric_mean_within(gap, mask, *limits.geo)[:, 0].double().mean(),
        "clipped": (gap.exp() - 1).abs().gt(0.2).double().mean(),
        "std": total.std(),
        "kl": k3(torch.zeros_like(gap), gap).mean(),
    }
    return {name: f"{float(value):.5g}" for name, value in values.items()}


def ess(log_weight: Tensor) -> float:
    """The effective sample size, as a share of the samples: 1 if all weigh the same, 1 / n if one has all."""
    share = (2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)).exp() / len(log_weight)
    return min(1.0, float(share)) if math.isfinite(float(share)) else math.nan
