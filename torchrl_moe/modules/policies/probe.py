"""How far are engine and trainer apart? The same rollouts, scored with the recorded experts and with the live router;
and the tensors that the two hold in different dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from tqdm.auto import tqdm

from torchrl_moe.modules.policies.scoring import RECORDED, read_batch, read_rows, samples_of
from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.render.tables import html_table, number_text, plain_table, share_text

Kinds: TypeAlias = Mapping[str, "tuple[torch.dtype, torch.Size]"]
"""Checkpoint name -> (dtype, shape), as ``get_model_metadata`` returns it of a model and of an engine."""

BAR_SECONDS = 2.0  # delay before a progress bar appears
AT_A_TIME = 4  # sequences of a forward pass that tells mismatch from updates
HEADER = ("|log-prob, trainer - engine|", "live router", "replayed")
FIELDS = {"mean": "mean", "p99": "99th percentile", "maximum": "greatest", "kl": "KL (k3)"}


# Which tensors engine and trainer hold in different dtypes: what is narrower in the engine is rounded by each sync.


ROUTERS = "routers"
PARTS: Mapping[str, tuple[str, ...]] = {
    ROUTERS: ("gate", "router", "e_score_correction_bias", "expert_bias"),
    "experts and MLPs": ("experts", "shared_experts", "shared_expert", "shared_expert_gate", "mlp", "feed_forward"),
    "attention": ("self_attn", "attn", "attention", "linear_attn", "mixer"),
    "embeddings and head": ("embed_tokens", "embeddings", "wte", "lm_head"),
}
"""A kind of tensor -> parts of its names; the first kind that has one, and those named last are what is left."""
OTHERS = "norms and others"


@dataclass(frozen=True, slots=True)
class DtypeGap:
    """Tensors of one kind that an engine holds in another dtype than its trainer; dtypes as torch names them."""

    kind: str
    engine: str
    trainer: str
    names: tuple[str, ...]


def dtype_gaps(engine: Kinds, trainer: Kinds) -> list[DtypeGap]:
    """Return the tensors whose dtypes differ, by kind: routers first, since a rounded router chooses other experts.

    Tensors that one of the two lacks are left out.

    >>> narrow, wide = ({"mlp.gate.weight": (dtype, torch.Size([8]))} for dtype in (torch.bfloat16, torch.float32))
    >>> dtype_gaps(narrow, wide)
    [DtypeGap(kind='routers', engine='bfloat16', trainer='float32', names=('mlp.gate.weight',))]
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in trainer:
        if name in engine and engine[name][0] != trainer[name][0]:
            ours, theirs = (str(kinds[name][0]).removeprefix("torch.") for kinds in (engine, trainer))
            parts = set(name.split("."))
            kind = next((kind for kind, of_kind in PARTS.items() if not parts.isdisjoint(of_kind)), OTHERS)
            found.setdefault((kind, ours, theirs), []).append(name)
    order = [*PARTS, OTHERS]
    in_order = sorted(found.items(), key=lambda item: order.index(item[0][0]))
    return [DtypeGap(*key, tuple(names)) for key, names in in_order]


def is_router(name: str) -> bool:
    """Whether a checkpoint's tensor is a router's, by its name.

    >>> is_router("model.layers.0.block_sparse_moe.gate.weight"), is_router("model.layers.0.mlp.gate_proj.weight")
    (True, False)
    """
    return not set(name.split(".")).isdisjoint(PARTS[ROUTERS])


def gaps_table(gaps: Iterable[DtypeGap]) -> str:
    """Return a line for each kind of tensor; empty if no dtypes differ."""
    rows = [[gap.kind, gap.engine, gap.trainer, f"{len(gap.names)}, such as {gap.names[0]}"] for gap in gaps]
    header = ["dtypes that differ", "engine", "trainer", "tensors"]
    return plain_table("", header, rows, wide=header).lstrip("\n") if rows else ""


def router_advice(gaps: Iterable[DtypeGap]) -> str:
    """Return what to do where the engine's routers are narrower than the trainer's; empty if they are not."""
    for gap in gaps:
        if gap.kind == ROUTERS and getattr(torch, gap.engine).itemsize < getattr(torch, gap.trainer).itemsize:
            return (
                f"Routers are rounded to {gap.engine} on their way to the engine, and then choose other experts than "
                "the trainer's: router_dtype='float32' keeps them in an engine, float32_routers(model) under a "
                "trainer's autocast."
            )
    return ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """|log-prob of the trainer - log-prob of the engine| over response tokens, and the k3 estimate of the KL."""

    mean: float
    p99: float
    maximum: float
    kl: float

    @classmethod
    def of(cls, trained: Tensor, sampled: Tensor) -> Mismatch:
        """Compare two flat tensors of log-probs."""
        gap = trained - sampled
        size = gap.abs()
        return cls(size.mean().item(), size.quantile(0.99).item(), size.max().item(), (gap.expm1() - gap).mean().item())


@dataclass(frozen=True, slots=True)
class Causes:
    """Why a trainer is not its engine: by mismatch, and by updates since the engine generated.

    Mismatch is the engine against the trainer with the weights that generated, on its live router; updates are the
    trainer with those weights against the trainer now. ``rows_*`` are shares of the (token, layer) rows that have other
    experts. ``answers_*`` are root mean squares of the log-ratio of a whole answer, the sum over its tokens: above 1, a
    few answers have most of the weight.

    >>> Causes(rows_mismatch=0.08, rows_updates=0.004, answers_mismatch=1.3, answers_updates=0.25).dominant
    'mismatch'
    """

    rows_mismatch: float
    rows_updates: float
    answers_mismatch: float
    answers_updates: float

    @property
    def dominant(self) -> str:
        """``"mismatch"`` or ``"updates"``, whichever moves answers more; ``""`` if replay has nothing to change."""
        if (self.rows_mismatch or self.rows_updates) and self.answers_updates > self.answers_mismatch:
            return "updates"
        return "mismatch" if self.rows_mismatch else ""

    def __str__(self) -> str:
        says = {
            "": "No row has other experts by mismatch: replay changes nothing.",
            "mismatch": "Mismatch dominates: R3 removes most of it.",
            "updates": "Updates dominate: R3 cannot remove those. Use fresher rollouts first (rollout.max_staleness, "
            "engine.sync_every, optim.lr).",
        }
        return (
            f"by mismatch: {100 * self.rows_mismatch:.2g} % of rows have other experts, log-ratio of an answer "
            f"{self.answers_mismatch:.2g}; by updates: {100 * self.rows_updates:.2g} %, {self.answers_updates:.2g}. "
            + says[self.dominant]
        )


@dataclass(frozen=True, slots=True)
class ReplayProbe:
    """What replay changes on given rollouts; printed, it is a table."""

    replay: Mismatch
    live: Mismatch
    agreement: float
    tokens: int
    causes: Causes | None = None
    """How much is mismatch and how much updates, if the probe was given the earlier model."""

    @property
    def gain(self) -> float:
        """How many times smaller the mean mismatch is with replay."""
        return self.live.mean / max(self.replay.mean, 1e-12)

    @property
    def _title(self) -> str:
        return (
            f"ReplayProbe: mean mismatch {self.gain:.3g} times as small with replay, on {self.tokens:,} tokens; "
            f"the live router agrees with the engine in {share_text(self.agreement)} of rows"
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (name, number_text(getattr(self.live, field)), number_text(getattr(self.replay, field)))
            for field, name in FIELDS.items()
        ]

    def __str__(self) -> str:
        table = plain_table(self._title, HEADER, self._rows(), wide=HEADER[:1])
        return table if self.causes is None else f"{table}\n{self.causes}"

    def _repr_html_(self) -> str:
        title = self._title if self.causes is None else f"{self._title}; {self.causes}"
        return html_table(title, HEADER, self._rows())


@torch.no_grad()
def probe_replay(
    actor: TransformersWrapper, td: TensorDictBase, use_tqdm: bool = True, before: nn.Module | None = None
) -> ReplayProbe:
    """Score rollouts with replay on and off; ``td`` is not changed.

    Args:
        actor: a scoring wrapper with ``replay="R3"``.
        td: rollouts ``[B]`` with ``("log_probs", "full")`` and ``("routed_experts", "full")``. A token counts if its
            log-prob there is finite and it is not padding.
        use_tqdm: whether to show a progress bar, of two passes, on a terminal or in a notebook, if they take long.
        before: the trainer's model as it was when ``td`` was generated, if it was updated since: tells rows that differ
            by mismatch from those that updates moved. Two more passes. It runs the kernels that the actor's model runs,
            from then on.

    Raises:
        ValueError: the actor does not replay the engine's routes, there is no log-prob to compare with, or ``before``
            is another model.
    """
    if actor.replay != "R3":
        raise ValueError(f"probe_replay needs an actor with replay='R3', got {actor.replay!r}")
    batch = read_batch(td, actor.input_key, (actor.masks_key, "all_attention_mask"))
    key = (actor.log_probs_key, "full")
    # prompts have NaN there, and pads may have 0: neither is compared
    sampled = read_rows(td, key, float("nan"), batch.lengths)
    known = batch.scored if sampled is None else batch.scored & sampled.isfinite()
    if sampled is None or not known.any():
        raise ValueError(f"no log-probs of the engine at {key!r} in the rollouts: vLLMWrapper(return_log_probs=True)")
    # scoring writes into its input
    scratch = td.copy()
    silent = None if use_tqdm else True
    with tqdm(total=2, desc="probe", unit="pass", disable=silent, delay=BAR_SECONDS, leave=False) as bar:
        replayed, _, _ = actor.get_new_version(measure_agreement=True).score(scratch, entropy=False)
        bar.update()
        live, _, _ = actor.get_new_version(replay="none").score(td.copy(), entropy=False)
        bar.update()
    sampled, known = sampled.to(replayed.device), known.to(replayed.device)
    causes = None
    if before is not None:
        causes = causes_of(actor, td, live_scores(actor.get_new_version(model=before), td), live_scores(actor, td))
    return ReplayProbe(
        replay=Mismatch.of(replayed[known], sampled[known]),
        live=Mismatch.of(live[known], sampled[known]),
        agreement=scratch.get(("routing", "agreement")).nanmean().item(),
        tokens=int(known.sum()),
        causes=causes,
    )


@dataclass(frozen=True, slots=True)
class LiveScores:
    """What a model says of rollouts on its own routers, sample by sample, on the CPU.

    ``log_probs`` are ``[T]`` of each, and ``experts`` ``[T, L, K]``.
    """

    log_probs: Sequence[Tensor]
    experts: Sequence[Tensor]


@torch.no_grad()
def live_scores(actor: TransformersWrapper, td: TensorDictBase) -> LiveScores:
    """Score rollouts on the live routers of an actor's model, a few at a time; ``td`` is not changed."""
    recording = actor.get_new_version(replay="R2", rerecord=True, measure_agreement=False)
    log_probs: list[Tensor] = []
    experts: list[Tensor] = []
    for part in td.split(AT_A_TIME):
        scratch = part.copy()
        found, _, _ = recording.score(scratch, entropy=False)
        rows = [row.cpu() for row in samples_of(scratch, (RECORDED, "full")) or () if row is not None]
        experts += rows
        log_probs += read_batch(part, actor.input_key, (actor.masks_key, "all_attention_mask")).split(found.cpu())
    return LiveScores(log_probs, experts)


def causes_of(actor: TransformersWrapper, td: TensorDictBase, before: LiveScores, now: LiveScores) -> Causes:
    """Tell mismatch from updates, on rollouts whose trainer was updated since.

    Args:
        actor: names the keys of the rollouts.
        td: rollouts with ``("log_probs", "full")`` and ``("routed_experts", "full")``.
        before: what the model said of them as it was when they were generated.
        now: what it says today.

    Raises:
        ValueError: experts or log-probs are missing, those of the engine have another shape than the model's, or no row
            or no log-prob is known.
    """
    routes_key, log_probs_key = (actor.routed_experts_key, "full"), (actor.log_probs_key, "full")
    engine = samples_of(td, routes_key)
    if engine is None or any(row is None for row in engine):
        raise ValueError(f"no experts of the engine at {routes_key!r} in every sample")
    batch = read_batch(td, actor.input_key, (actor.masks_key, "all_attention_mask"))
    sampled = read_rows(td, log_probs_key, float("nan"), batch.lengths)
    if sampled is None:
        raise ValueError(f"no log-probs of the engine at {log_probs_key!r} in every sample")
    counts = (batch.scored & sampled.isfinite()).cpu()
    if not counts.any():
        raise ValueError(f"no log-prob of the engine at {log_probs_key!r} is finite: there is nothing to compare")
    rows = mismatch = updates = 0
    of_answers: list[tuple[float, float]] = []
    of_engine = zip(engine, batch.split(sampled.cpu()), batch.split(counts), strict=True)
    for i, (theirs, own, counted) in enumerate(of_engine):
        assert theirs is not None
        for said, model in ((before, "model of before"), (now, "model")):
            if theirs.shape != said.experts[i].shape:
                raise ValueError(
                    f"{routes_key!r} of sample {i} has the shape {list(theirs.shape)}, and the {model} chooses experts "
                    f"of the shape {list(said.experts[i].shape)}: [tokens, layers, experts of a row]"
                )
        known = theirs[..., 0].cpu() >= 0
        chosen = [one.cpu().long()[known].sort(-1).values for one in (theirs, before.experts[i], now.experts[i])]
        rows += int(known.sum())
        mismatch += int((chosen[0] != chosen[1]).any(-1).sum())
        updates += int((chosen[1] != chosen[2]).any(-1).sum())
        of_answers.append(
            (
                float((before.log_probs[i] - own)[counted].double().sum()),
                float((now.log_probs[i] - before.log_probs[i])[counted].double().sum()),
            )
        )
    if not rows:
        raise ValueError("no row of the rollouts has experts: there is nothing to compare")
    squares = torch.tensor(of_answers, dtype=torch.float64).square().mean(0).sqrt()
    return Causes(mismatch / rows, updates / rows, *squares.tolist())
