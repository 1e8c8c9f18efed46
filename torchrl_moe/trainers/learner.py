"""``Learner``: the half of a run that trains: loss, optimizer, learning rate, scores."""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_moe import objectives
from torchrl_moe.errors import DivergedError
from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.modules.policies.unstack import has_adapters
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.replay.discovery import EXPERT_COUNTS
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.launch import EngineName
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.mismatch import CollapseThresholds, MismatchMetrics
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, OptimConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Placement, Ranks

LOG = logging.getLogger(__name__)


# The norm of a gradient, and clipping it, with weights on one device or sharded over ranks.
def by_mesh(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return weights grouped by device mesh and placements: a foreach operation needs them to agree in both."""
    groups: dict[object, list[Tensor]] = {}
    for weight in weights:
        key = getattr(weight, "device_mesh", None), getattr(weight, "placements", None)
        groups.setdefault(key, []).append(weight)
    return list(groups.values())


def total_norm(groups: Iterable[Sequence[Tensor]], ranks: Ranks) -> float:
    """Return the 2-norm over groups of tensors, each of one mesh, of all ranks; NaN if that of any is not finite."""
    squares = 0.0
    for group in groups:
        norm = nn.utils.get_total_norm(group)
        squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    # ranks may differ by rounding, and all must scale alike: the largest counts
    norms = ranks.gather(math.sqrt(squares) if math.isfinite(squares) else math.nan)
    return max(norms) if all(map(math.isfinite, norms)) else math.nan


def clip_gradients(weights: Iterable[Tensor], limit: float | None, ranks: Ranks) -> float:
    """Clip the gradient to a maximum norm; return the norm before clipping."""
    groups = by_mesh(weight for weight in weights if weight.grad is not None)
    total = total_norm([[weight.grad for weight in group if weight.grad is not None] for group in groups], ranks)
    if limit is not None and math.isfinite(total):
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, limit, torch.tensor(total))
    return total


# Splitting a batch by tokens, so that each part fits into memory.
def in_rows(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch, ``[B]``, whose parts share its rows: what is written to one of them is in the other.

    Parts of a dense TensorDict would be copies. A lazy stack is such a batch already, and keeps its rows.
    """
    return lazy_stack(list(batch.unbind(0)))


def micro_batches(lengths: Sequence[int], max_tokens: int | None, at_least: int = 0) -> list[list[int]]:
    """Return the samples of each part: padded to its longest sample, a part has at most ``max_tokens`` tokens.

    Samples of similar length are grouped, longest first, to keep padding low. A sample that is longer than
    ``max_tokens`` is a part of its own.

    >>> micro_batches([5, 9, 4, 8], max_tokens=18)
    [[1, 3], [0, 2]]
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    parts: list[list[int]] = []
    if max_tokens is None and lengths:
        parts.append(list(range(len(lengths))))
    elif max_tokens is not None:
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable: ties keep their order
            if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= max_tokens:
                parts[-1].append(index)
            else:
                parts.append([index])
    # more parts than memory needs, where another rank has more: halve the part with most samples
    while len(parts) < at_least:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]), default=0)
        samples = parts[largest] if parts else []
        if len(samples) < 2:
            return parts + [[]] * (at_least - len(parts))
        half = len(samples) // 2
        parts[largest : largest + 1] = [samples[:half], samples[half:]]
    return parts


def micro_batches_of_ranks(lengths: Sequence[int], max_tokens: int | None, ranks: Ranks) -> list[list[int]]:
    """Return the samples of each part, as many parts on each rank: forward passes of a shared model are collectives.

    All ranks must call. A rank with too few samples gets empty parts, for which it runs a sample and discards the
    result.
    """
    own = micro_batches(lengths, max_tokens)
    return micro_batches(lengths, max_tokens, max(ranks.gather(len(own))))


def minibatches(batch: TensorDictBase, count: int, ranks: Ranks | None = None) -> Iterator[TensorDictBase]:
    """Yield a batch in ``count`` parts, one for each optimizer step, in an order drawn by torch's global generator.

    With several ranks, each splits its own share. Ranks that see the same samples split them in the same way.
    """
    if count == 1:
        yield batch
        return
    ranks = ranks or Ranks()
    # rank 0's seed for all: ranks of a tensor-parallel group must step on the same samples
    seed = ranks.from_first(int(torch.randint(1 << 62, ())), "minibatches")
    drawn = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    for part in drawn.tensor_split(min(ranks.gather(min(count, len(batch))))):  # as many steps on each rank
        yield batch[part.tolist()]


def lengths_of(batch: TensorDictBase) -> list[int]:
    """Return the number of tokens of each sample, its prompt included."""
    return [len(sample.get(("tokens", "full"))) for sample in batch.unbind(0)]


class TokenStepper:
    """One optimizer step on a minibatch, in micro-batches of bounded token count.

    The loss of every part is divided by the tokens of the whole minibatch, so the gradients of the parts add up to its
    gradient, to rounding. The same holds if each rank has a share of it. Samples without an advantage are skipped if
    the loss gives them no gradient. A step whose gradient is not finite is skipped, logged, and counted.
    """

    def __init__(
        self,
        loss: GRPOLoss,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        *,
        max_tokens: int | None,
        max_grad_norm: float | None,
        precision: Callable[[], AbstractContextManager[object]],
        placement: Placement | None = None,
        max_bad_steps: int = 10,
    ) -> None:
        self._placement = placement or Placement()
        self.ranks = self._placement.ranks
        self.loss, self.optimizer, self.schedule = loss, optimizer, schedule
        self.max_tokens, self.max_grad_norm, self.precision = max_tokens, max_grad_norm, precision
        self.count, self.skipped, self.max_bad_steps, self._bad = 0, 0, max_bad_steps, 0
        self._metrics: list[dict[str, float]] = []

    def step(self, batch: TensorDictBase) -> TensorDictBase:
        """Make one step; return the loss terms, summed over parts, and the means of metrics over their tokens."""
        lr, self.count = self.lr, self.count + 1
        self.ranks.meet("a step")
        metrics = self.accumulate(batch)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        norm = clip_gradients(weights, self.max_grad_norm, self.ranks)
        if math.isfinite(norm):
            self._bad = 0
            self.optimizer.step()
            self.schedule.step()
            # weights that are not finite would go to the engine, and into a checkpoint
            if not math.isfinite(total_norm(by_mesh(weight.detach() for weight in weights), self.ranks)):
                raise DivergedError(
                    "the weights are not finite after this step: resume from the last checkpoint with a lower optim.lr"
                )
        else:
            self.skipped, self._bad = self.skipped + 1, self._bad + 1
            LOG.warning("a gradient of norm %s: the step is skipped, %d so far", norm, self.skipped)
            if self._bad >= self.max_bad_steps:
                raise DivergedError(
                    f"optim.max_bad_steps={self.max_bad_steps} gradients in a row are not finite: the rewards, the "
                    "coefficients of the loss or the weights are, resume from the last checkpoint with others"
                )
        self.optimizer.zero_grad(set_to_none=True)
        metrics |= {"grad_norm": torch.tensor(norm), "lr": torch.tensor(lr)}
        self._metrics.append({name: float(value) for name, value in metrics.items()})
        return TensorDict(metrics, batch_size=[])

    def take_metrics(self) -> dict[str, float]:
        """Return the means over all steps since the last call; ``loss`` is the sum of all terms."""
        taken, self._metrics = self._metrics, []
        # a term that some steps lack makes its mean NaN: better than a mean of fewer steps
        names = dict.fromkeys(name for metrics in taken for name in metrics)
        means = {name: statistics.mean(metrics.get(name, math.nan) for metrics in taken) for name in names}
        total = sum(value for name, value in means.items() if name.startswith("loss_"))
        return {**means, "loss": total, "ess": means["ESS"], "skipped_steps": float(self.skipped)} if means else {}

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def accumulate(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Accumulate a minibatch's gradient; return its metrics over all ranks, each ``[]``."""
        batch = in_rows(batch)  # a hook may have made it dense
        loss, router_loss = self.loss, self.loss.router_loss
        # leave out samples without an advantage, unless a term has a gradient whatever the advantage is
        takes_all = loss.entropy_bonus or loss.kl_to_ref_coeff or loss.kl_to_inference_coeff or router_loss is not None
        rows = batch.unbind(0)
        kept = [i for i, row in enumerate(rows) if takes_all or bool(row.get(loss.tensor_keys.advantage).any())]
        kept = kept or [0]  # metrics of one
        # pack the others into micro-batches
        lengths = lengths_of(batch)
        split = micro_batches_of_ranks([lengths[i] for i in kept], self.max_tokens, self.ranks)
        parts = [batch[[kept[i] for i in samples]] for samples in split if samples]
        shortest = batch[[min(kept, key=lambda i: lengths[i])]]
        idle = [shortest] * (len(split) - len(parts))  # extra passes, because other ranks have more parts
        # each part is divided by the whole minibatch's tokens, so that the gradients add up; a router loss needs totals
        # over all parts before the first of them is computed
        numbers: dict[NestedKey, Any] = dict(loss.denominators(batch))
        if router_loss is not None and (len(parts) > 1 or self.ranks.size > 1):
            with self.precision():
                numbers.update(router_loss.totals(parts))
                if idle:
                    router_loss.totals(idle)
        elif router_loss is not None:  # its rows may have those of a minibatch of an earlier epoch
            keys = router_loss.tensor_keys
            batch.exclude(keys.expert_counts, keys.num_router_sequences, inplace=True)
        for key, number in self.ranks.sum(numbers).items():
            value = torch.as_tensor(number)
            batch.set(key, value.expand(*batch.batch_size, *value.shape))
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
        tokens = 0.0
        for place, part in enumerate([*parts, *idle]):
            with self.precision():
                out = loss(part)
            total = sum(value for name, value in out.items() if name.startswith("loss_"))
            assert isinstance(total, Tensor)
            # collectives of a shared model: as many passes as the rank with most, of which these count for nothing
            if place >= len(parts):
                (total * 0.0).backward()
                continue
            total.backward()
            count = float(sum(len(row.get(("tokens", "response"))) for row in part.unbind(0)))
            tokens += count
            for name, value in out.items():
                if value.ndim == 0:
                    sums[name] = sums[name] + value.detach().float().cpu() * (1.0 if _adds_up(name) else count)
        # of all ranks; their losses are averaged, as their gradients are: see Ranks.sum
        every = self._placement.gather((dict(sums), tokens))
        all_tokens = max(sum(count for _, count in every), 1.0)
        found = {}
        for name in sums:
            divisor = len(every) if name.startswith("loss_") else 1.0 if _adds_up(name) else all_tokens
            found[name] = sum((one[name] for one, _ in every), torch.zeros(())) / divisor
        return found

    def state_dict(self) -> dict[str, object]:
        """Return the schedule's state, and the numbers of steps; the optimizer is a separate component."""
        return {"schedule": self.schedule.state_dict(), "skipped": self.skipped, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the numbers of steps."""
        self.schedule.load_state_dict(state_dict["schedule"])
        self.skipped = state_dict["skipped"]
        self.count = state_dict.get("count", 0)  # not in the checkpoints of older versions


def _adds_up(name: str) -> bool:
    """Whether a metric is summed over parts; the others are averaged."""
    return name.startswith(("loss_", "num_"))


# A batch's mismatch, proximal and reference log-probs, before the first update.
PROX_KEY, REFERENCE_KEY = "prox", "ref_log_probs"
MISMATCH_COLUMNS = {
    "mismatch_kl": "mismatch/k3",
    "dlogp_mean": "mismatch/dlogp_mean",
    "dlogp_max": "mismatch/dlogp_max",
    "extreme_fraction": "mismatch/extreme_fraction",
    "agreement": "routing/agreement",
}
"""Column of a run's record -> metric of :class:`~torchrl_moe.objectives.MismatchMetrics`."""


class RolloutScores:
    """Scores rollouts by the current policy, and by the reference.

    Under R2 this is the forward pass that records the experts. If nothing needs the policy's scores, and no mismatch is
    due, there is no forward pass. With several ranks each scores its own share; metrics are of all ranks.
    """

    def __init__(
        self,
        actor: TransformersWrapper,
        loss: GRPOLoss,
        reference: Callable[[TensorDictBase], TensorDictBase] | None,
        *,
        max_tokens: int | None,
        precision: Callable[[], AbstractContextManager[object]],
        placement: Placement | None = None,
    ) -> None:
        self._placement = placement or Placement()
        self.actor, self.loss, self.reference = actor, loss, reference
        self.max_tokens, self.precision = max_tokens, precision
        self.writes_prox = loss.proximal_policy == "recomputed"
        # one for the whole run: it remembers that it has warned
        self._watch = _metrics(CollapseThresholds() if self._placement.ranks.is_first else None)
        # under R2 a second forward pass would record again: it gets a copy of the batch
        self.scorer = actor.get_new_version(measure_agreement=actor.replay == "R3")
        self.live = actor.get_new_version(replay="none") if actor.replay == "R3" else None
        if self.writes_prox:
            loss.set_keys(prox_log_prob=(PROX_KEY, "full"))
        if reference is not None:
            loss.set_keys(ref_log_probs=(REFERENCE_KEY, "full"))

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase, version: int, with_mismatch: bool) -> dict[str, float]:
        """Score a batch, in place; return the mismatch between trainer and engine, if requested."""
        metrics, live = _metrics(), _metrics()
        entropy = tokens = 0.0
        scores = with_mismatch or self.writes_prox or self.actor.replay == "R2"
        for part, counts in self._parts(batch) if scores else ():
            # the policy, on recorded experts; R2 records them here
            with self.precision():
                log_probs, spread, _ = self.scorer.score(part, entropy=with_mismatch)
            if self.writes_prox:  # each sample gets its row, without the padding on the left
                for sample, row in zip(part.unbind(0), log_probs, strict=True):
                    sample.set((PROX_KEY, "full"), row[len(row) - len(sample.get(("tokens", "full"))) :].cpu())
            if not with_mismatch:
                continue
            # and once more on its own router, to see what replay removes
            unaided = None
            if self.live is not None:
                with self.precision():
                    unaided = self.live.score(part.copy(), entropy=False)[0]
            if not counts:
                continue
            assert spread is not None
            metrics.update(part, log_probs, version=version)
            key = ("log_probs", "full")
            sampled = part.get(key, as_padded_tensor=True, padding_side="left", padding_value=torch.nan)
            known = sampled.isfinite().to(log_probs.device)
            entropy, tokens = entropy + float(spread[known].sum()), tokens + float(known.sum())
            if unaided is not None:
                live.update(part, unaided)
        if self.reference is not None:  # last: it follows the experts that R2 has recorded by now
            for part, _ in self._parts(batch):
                with self.precision():
                    self.reference(part)
        if not with_mismatch:
            return {}
        # of all ranks; the watch keeps what it warned of, and takes this batch's numbers
        every = self._placement.gather((metrics, live, entropy, tokens))
        self._watch.reset()
        live = _metrics()
        for of_rank, live_of_rank, _, _ in every:
            self._watch.merge(of_rank)
            live.merge(live_of_rank)
        found, without = self._watch.compute(), live.compute()
        columns = {name: found[key] for name, key in MISMATCH_COLUMNS.items() if key in found}
        if "mismatch/dlogp_mean" in without:
            columns["dlogp_live"] = without["mismatch/dlogp_mean"]
        columns["entropy"] = sum(one[2] for one in every) / max(sum(one[3] for one in every), 1.0)
        return columns

    def _parts(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, bool]]:
        """Yield micro-batches, and whether they count: copies that do not give all ranks as many passes."""
        lengths = lengths_of(batch)
        for part in micro_batches_of_ranks(lengths, self.max_tokens, self._placement.ranks):
            shortest = min(range(len(lengths)), key=lambda i: lengths[i])
            yield (batch[part], True) if part else (batch[[shortest]].clone(), False)


def _metrics(thresholds: CollapseThresholds | None = None) -> MismatchMetrics:
    # no percentile is needed; a row of several turns has tokens between them that nothing sampled
    return MismatchMetrics(sample_size=1, thresholds=thresholds, masking_strategy="rlhf")


# The loss, the advantages and the reference that a configuration names.
TOP_K = ("num_experts_per_tok", "moe_topk")
Reference = Callable[[TensorDictBase], TensorDictBase]
TRAINED: WeakSet[nn.Module] = WeakSet()
"""Models that an optimizer of this process has stepped."""


def build_loss(actor: TransformersWrapper, config: GRPOConfig) -> GRPOLoss:
    """Return the loss of a run."""
    # the loss itself scores the reference by switching the adapter off
    own = {"reference": "adapter"} if _reference_kind(config, actor.model) == "adapter" else {}
    top_k, experts = config.loss.router.get("top_k"), _of_model(actor, EXPERT_COUNTS)
    if top_k is not None and experts is not None and top_k > experts:
        raise ConfigError(f"loss.router.top_k={top_k} is more than the {experts} experts of the model")
    return config.loss.build(actor, _of_model(actor, TOP_K), **own)


def _of_model(actor: TransformersWrapper, names: Sequence[str]) -> int | None:
    """Return the first number of a model's configuration that it has, by any of these names."""
    text_config: Any = actor.model.config.get_text_config()  # type: ignore[union-attr, operator]
    found = (getattr(text_config, name, None) for name in names)
    return next((number for number in found if isinstance(number, int) and number), None)


def _reference_kind(config: GRPOConfig, model: nn.Module) -> str:
    """Return which kind of reference to use; ``""``: the loss reads none."""
    where, adapted, arguments = config.loss.reference, has_adapters(model), config.loss.arguments
    if where == "adapter" and not adapted:
        raise ConfigError("loss.reference=adapter needs an adapter to switch off: set model.lora.rank")
    if not arguments.get("kl_to_ref_coeff") and arguments.get("kl_mask_threshold") is None:
        return ""
    return ("adapter" if adapted else "model") if where == "auto" else where


def build_reference(
    actor: TransformersWrapper, policy_model: PolicyModel, config: GRPOConfig, placement: Placement | None = None
) -> tuple[Reference | None, Callable[[], None]]:
    """Return what writes the reference's log-probs, if the loss reads any, and a function that shuts it down."""
    where = _reference_kind(config, policy_model.model)
    shared = placement is not None and placement.is_shared  # a sharded model cannot be copied: it is loaded again
    if where in ("", "adapter"):  # the loss scores an adapter's itself
        return None, lambda: None
    if where == "model":
        if config.resume and actor.model in TRAINED:
            raise ConfigError(
                "resume=true with a model that this process has trained: the KL reference would be of its trained "
                "weights. Load the model again, or set model.source to load it from"
            )
        follows = config.loss.replay != "none"  # as a switched-off adapter does: both score the same routes
        second = PolicyModel.load(policy_model.source, None, config.model, placement).model if shared else None
        return actor.reference(second, replay=follows).get_new_version(log_probs_key=REFERENCE_KEY), lambda: None
    if shared:
        raise ConfigError("loss.reference=engine is for one rank: set loss.reference=model, which ranks share")
    if policy_model.source is None:
        raise ConfigError("loss.reference=engine needs a model that is in a folder or on the hub: set model.source")
    kind: EngineName = "vllm" if config.engine.kind == "vllm" else "transformers"
    engine = AsyncVLLM.from_pretrained(policy_model.source, engine=kind, **config.engine.arguments)
    scorer = vLLMWrapper(
        engine,
        tokenizer=policy_model.tokenizer,
        input_mode="tokens",
        generate=False,
        replay="R3" if config.loss.replay == "R3" else "none",  # without R3 the rollouts carry no experts to follow
        log_probs_key=REFERENCE_KEY,
    )
    return scorer, engine.shutdown


def advantages(name: str, batch: TensorDictBase, samples: int) -> TensorDictBase:
    """Return a batch of so many samples with ``"advantage"``, one number for each row."""
    kinds: dict[str, Callable[[], objectives.GroupAdvantage]] = {
        "grpo": objectives.GRPOAdvantage,
        "rloo": objectives.RLOOAdvantage,
        "dr_grpo": objectives.DrGRPOAdvantage,
        "reinforce_plus_plus": lambda: objectives.ReinforcePlusPlusAdvantage(samples),
    }
    found: TensorDictBase = kinds[name]().inv(batch)
    return found


GAP = 0.1  # nats; rounding in float32 is below 1e-4


class Learner:
    """Loss, optimizer, schedule and scores of a run, made of its configuration."""

    def __init__(
        self,
        actor: TransformersWrapper,
        policy_model: PolicyModel,
        config: GRPOConfig,
        placement: Placement | None = None,
    ) -> None:
        optim, placement = config.optim, placement or Placement()
        self.actor, self.loss = actor, build_loss(actor, config)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(policy_model.trained.values())],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
        )
        self.optimizer.register_step_post_hook(lambda *_: TRAINED.add(actor.model))
        # optimizer steps of the whole run, which the schedule is spread over
        total = config.steps * optim.epochs * optim.minibatches
        self.stepper = TokenStepper(
            self.loss,
            self.optimizer,
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate(optim, total)),
            max_tokens=optim.max_tokens,
            max_grad_norm=optim.max_grad_norm,
            precision=policy_model.precision,
            placement=placement,
            max_bad_steps=optim.max_bad_steps,
        )
        # last, because it may start an engine
        reference, self._end_reference = build_reference(actor, policy_model, config, placement)
        self.scores = RolloutScores(
            actor,
            self.loss,
            reference,
            max_tokens=optim.max_tokens,
            precision=policy_model.precision,
            placement=placement,
        )

    @torch.no_grad()
    def first_gap(self, batch: TensorDictBase, limit: float = GAP) -> str:
        """Describe the first sampled token of a batch whose log-prob here is off the engine's by more than a limit.

        With ``limit=0`` any bit counts; ``""``: there is no such token.
        """
        for number, row in enumerate(batch.unbind(0)):
            sampled = row.get(("log_probs", "full"))
            scored = self.actor.score(lazy_stack([row]), entropy=False)[0][0].to(sampled.device)
            # a prompt's are NaN, which is not far; a NaN here is
            far = (sampled.isfinite() & ~((scored - sampled).abs() <= limit)).nonzero()
            if len(far):
                place = int(far[0])
                token = int(row.get(("tokens", "full"))[place])
                digits = ".4f" if limit else ".9g"
                return (
                    f"id {token} at place {place} of row {number}, log-prob {scored[place]:{digits}} here and "
                    f"{sampled[place]:{digits}} in the engine"
                )
        return ""

    def apply(self, optim: OptimConfig) -> None:
        """Apply the optimizer settings of the configuration; loading a checkpoint has restored the older ones."""
        schedule = self.stepper.schedule
        schedule.base_lrs = [optim.lr] * len(schedule.base_lrs)
        for group in self.optimizer.param_groups:
            group["betas"], group["weight_decay"] = (optim.betas[0], optim.betas[1]), optim.weight_decay
            group["initial_lr"] = optim.lr
            group["lr"] = optim.lr * schedule.lr_lambdas[0](schedule.last_epoch)

    def shutdown(self) -> None:
        """Shut down the reference's engine, if it has one."""
        self._end_reference()


def learning_rate(optim: OptimConfig, total: int) -> Callable[[int], float]:
    """Return the learning rate factor as a function of the optimizer step, counted from 0.

    >>> share = learning_rate(OptimConfig(schedule="linear", warmup_steps=2), total=6)
    >>> [round(share(step), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def share(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        done = min((step - optim.warmup_steps) / max(total - optim.warmup_steps, 1), 1.0)
        return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]

    return share
