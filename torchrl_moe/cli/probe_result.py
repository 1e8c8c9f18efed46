"""What ``torchrl-moe probe`` found: figures with replay and without, agreement of each layer, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from torchrl_moe.modules.policies.probe import Causes, DtypeGap, gaps_table, router_advice
from torchrl_moe.objectives.mismatch import CollapseThresholds, MismatchMetrics
from torchrl_moe.render.tables import plain_table

LAYER = "routing/agreement/layer_"
ROUNDING = 1e-5
"""A mean difference of log-probs below this is rounding in float32: the two compute the same function."""
WORTH_IT = 0.1
"""Share of the mismatch from which on replay counts as helping; a few hundred tokens do not show less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The mismatch of sampled tokens: ``|log-prob of the trainer - log-prob of the engine|``, and estimates of the KL.

    ``k1`` and ``k3`` both estimate KL(engine || trainer); ``k3`` is never negative.
    """

    mean: float
    median: float
    p99: float
    maximum: float
    k1: float
    k3: float
    extreme_fraction: float
    ess: float

    @classmethod
    def of(cls, metrics: MismatchMetrics) -> Figures:
        """Read collected metrics, of one token at least."""
        found = {name.removeprefix("mismatch/"): value for name, value in metrics.compute().items()}
        return cls(
            mean=found["dlogp_mean"],
            median=float(np.median(abs(metrics.log_ratios))),
            p99=found["dlogp_p99"],
            maximum=found["dlogp_max"],
            k1=found["k1"],
            k3=found["k3"],
            extreme_fraction=found["extreme_fraction"],
            ess=found["ess"],
        )


ROWS = {
    "mean": "mean |log-prob, trainer - engine|",
    "median": "median",
    "p99": "99th percentile",
    "maximum": "maximum",
    "k1": "KL, k1",
    "k3": "KL, k3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The mismatch with replay and without, and how far the live router agrees with the engine."""

    title: str
    tokens: int
    live: Figures
    replayed: Figures
    agreement: Mapping[int, float]
    dtypes: Sequence[DtypeGap] = ()
    causes: Causes | None = None

    @classmethod
    def of(
        cls,
        title: str,
        replayed: MismatchMetrics,
        live: MismatchMetrics,
        dtypes: Sequence[DtypeGap] = (),
        causes: Causes | None = None,
    ) -> ProbeResult:
        """Read the metrics that were collected with replay and without.

        ``dtypes``: tensors whose dtypes differ. ``causes``: mismatch or updates, if the trainer has newer weights
        than the engine.
        """
        found = replayed.compute()
        if not found.get("mismatch/tokens"):
            raise ValueError("the answers have no tokens to compare: give other prompts, or --max-new-tokens")
        layers = {int(name.removeprefix(LAYER)): share for name, share in found.items() if name.startswith(LAYER)}
        return cls(
            title=title,
            tokens=int(found["mismatch/tokens"]),
            live=Figures.of(live),
            replayed=Figures.of(replayed),
            agreement=layers,
            dtypes=dtypes,
            causes=causes,
        )

    @property
    def removed(self) -> float:
        """Share of the mean mismatch that replay removes; negative if it adds some, 0 if there is none."""
        return 1 - self.replayed.mean / self.live.mean if self.live.mean > 0 else 0.0

    @property
    def mean_agreement(self) -> float:
        """Share of rows in which the live router chooses the engine's experts, over layers; NaN without any."""
        return float(np.mean(list(self.agreement.values()))) if self.agreement else float("nan")

    @property
    def problems(self) -> list[str]:
        """What is wrong, with the mend: what replay leaves over is more than rounding explains."""
        limits, left = CollapseThresholds(), self.replayed
        found = []
        if limits.k3 is not None and left.k3 > limits.k3:
            found.append(f"KL (k3) {left.k3:.1e}, at most {limits.k3:g}")
        if limits.extreme_fraction is not None and left.extreme_fraction > limits.extreme_fraction:
            found.append(f"{left.extreme_fraction:.0%} of ratios beyond 2, at most {limits.extreme_fraction:.0%}")
        if limits.ess is not None and left.ess < limits.ess:
            found.append(f"effective sample size {left.ess:.2f}, at least {limits.ess:g}")
        return found

    @property
    def verdict(self) -> str:
        """Whether replay helps here, in a sentence or two."""
        # worst first: what cannot be trained on, what needs no replay, then what replay does
        change = f"mean |Δ log-prob| {self.live.mean:.1e} -> {self.replayed.mean:.1e}"
        differ = f"the live router chooses other experts in {1 - self.mean_agreement:.1%} of rows"
        if self.problems:
            return (
                f"Even with replay, engine and trainer are far apart ({'; '.join(self.problems)}): do not train "
                "on this. torchrl-moe conformance says which part of the engine is wrong."
            )
        if self.live.mean < ROUNDING and self.replayed.mean < ROUNDING:
            return f"Nothing to remove: engine and trainer compute the same function to rounding ({change})."
        if self.removed >= WORTH_IT:
            return f"R3 helps: it removes {self.removed:.0%} of the mismatch ({change}); {differ}."
        if self.removed > -WORTH_IT:
            return f"R3 makes little difference here ({change}); {differ}. What is left comes from other rounding."
        return f"R3 does not help here: the mismatch grows by {-self.removed:.0%} ({change}); {differ}."

    def text(self) -> str:
        """The tables, and the verdict."""
        live, replayed = asdict(self.live), asdict(self.replayed)
        rows = [[words, f"{live[name]:.1e}", f"{replayed[name]:.1e}"] for name, words in ROWS.items()]
        title = f"{self.title}; {self.tokens} tokens"
        figures = plain_table(title, ["", "live router", "replayed"], rows, wide=[""])
        layers = [[f"{layer}", f"{share:.2%}", _bar(share)] for layer, share in sorted(self.agreement.items())]
        header = ["layer", "rows that agree", "rows that do not"]
        agreement = plain_table("live router against the engine", header, layers, wide=header[2:])
        causes = "" if self.causes is None else str(self.causes)
        parts = [figures, agreement, gaps_table(self.dtypes), router_advice(self.dtypes), causes, self.verdict]
        return "\n\n".join(part for part in parts if part)

    def to_dict(self) -> dict[str, object]:
        """Plain data, for ``--json``."""
        return {
            "title": self.title,
            "tokens": self.tokens,
            "live": asdict(self.live),
            "replayed": asdict(self.replayed),
            "agreement": {"mean": self.mean_agreement, "layers": dict(sorted(self.agreement.items()))},
            "dtypes": [asdict(gap) for gap in self.dtypes],
            "causes": None if self.causes is None else {**asdict(self.causes), "dominant": self.causes.dominant},
            "removed": self.removed,
            "problems": self.problems,
            "verdict": self.verdict,
        }


def _bar(share: float) -> str:
    """Return a bar of the share that disagrees: a character for each percent, 40 at most."""
    return "#" * min(40, round(100 * (1 - share)))
