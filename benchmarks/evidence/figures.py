"""The figures of ``docs/why_replay.md`` and of the real model, from the measured rows; one without rows is left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.table import KEYS, Table

DOCS = Path("docs/figures")
COLORS = {"live": "tab:orange", "R3": "tab:blue", "R2": "tab:green"}
RUN_ARMS = {
    "live": ("live", "tab:orange"),
    "R3": ("R3", "tab:blue"),
    "live, tis": ("live, decoupled, tis", "tab:purple"),
}
PANELS = [
    ("sums", "none", 0, "no noise"),
    ("sums", "nearest flips 1", 0, "a near miss in every row"),
    ("sums", "none", 64, "rollouts 64 updates old"),
    ("countdown", "none", 0, "no noise"),
    ("countdown", "nearest flips 1", 0, "a near miss in every row"),
    ("countdown", "none", 16, "rollouts 16 updates old"),
]
"""Of runs: task, noise, updates that the copy is behind, title."""
OTHER_UPDATES = {"passes": "same answers", "LoRA": "LoRA"}
SIZE, DPI = (7.2, 3.4), 90


def draw(data: Path, folder: Path) -> None:
    """Draw all figures of which there are rows."""
    folder.mkdir(parents=True, exist_ok=True)
    of_lengths = _lengths(data)
    of_gradients = Table(data / "gradients.csv", KEYS["gradients"])
    of_run_rows = Table(data / "runs.csv", KEYS["runs"])
    of_real = Table(data / "real.csv", KEYS["real"])
    if of_lengths.rows:
        by_length(of_lengths, folder / "evidence_length.png")
        by_setting(of_lengths, folder / "evidence_settings.png")
    if of_gradients.rows:
        by_target(of_gradients, folder / "evidence_gradient.png")
    if of_run_rows.rows:
        by_run(of_run_rows, folder / "evidence_runs.png")
        print(of_runs(of_run_rows))
    if of_real.rows:
        by_task(of_real, folder / "real_model.png")


def write_medians(data: Path, file: Path) -> None:
    """Write the medians of sample sizes, gradients, and their bias and variance: what the pages say in words."""
    gradients, variances = (Table(data / f"{name}.csv", KEYS[name]).rows for name in ("gradients", "variances"))
    tables = [
        medians(_longest_of_seeds(_lengths(data).rows), KEYS["lengths"][:5], "tokens", ("ess", "kl", "clipped")),
        medians(gradients, KEYS["gradients"][:6], "weight", ("error", "cosine")),
        medians(variances, KEYS["variances"][:6], "weight", ("bias", "std", "answers")),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    print(f"medians of all settings: {file}")


def _lengths(data: Path) -> Table:
    """The rows of sample sizes, whose settings are told apart."""
    table = Table(data / "lengths.csv", KEYS["lengths"])
    # an arm of its own; its other rows are those of the same seeds, once more
    table.rows = [row for row in table.rows if row["ages"] != "with weights"]
    for row in table.rows:
        if row["ages"] in OTHER_UPDATES:  # not of the same setting as updates with other answers
            row["noise"] = f"{row['noise']}, {OTHER_UPDATES[row['ages']]}"
    return table


def middle(values: Iterable[float]) -> tuple[float, float, float]:
    """The median of finite values, and the quartiles around it."""
    found = sorted(value for value in values if math.isfinite(value))
    if len(found) < 2:
        return (found * 3)[0], (found * 3)[1], (found * 3)[2]
    low, median, high = statistics.quantiles(found, n=4, method="inclusive")
    return median, low, high


def medians(rows: Sequence[Mapping[str, str]], setting: Sequence[str], within: str, figures: Sequence[str]) -> str:
    """Medians over seeds, in Markdown: a line for each setting, age, arm, ``within`` and target."""
    columns = (*setting, "lr", "updates", "arm", within, *(["target"] if rows and "target" in rows[0] else []))
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns), []).append(row)
    lines = [
        "| " + " | ".join((*columns, "seeds", *figures)) + " |",
        "| --- " * (len(columns) + 1 + len(figures)) + "|",
    ]
    for key, of_key in found.items():
        shown = [f"{middle(float(row[name]) for row in of_key)[0]:.3g}" for name in figures]
        lines.append("| " + " | ".join((*key, str(len({row["seed"] for row in of_key})), *shown)) + " |")
    return "\n".join(lines)


def _figure(columns: int, lines: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, ``[columns]`` or, of several lines, ``[lines, columns]``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], SIZE[1] if lines == 1 else 2.8 * lines), layout="constrained", dpi=DPI)
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for one in axes.flat:
        one.grid(alpha=0.3)
    return figure, axes[0] if lines == 1 else axes


def by_length(table: Table, file: Path) -> None:
    """Effective sample size against length: fresh, and after updates of an ordinary size."""
    main = {"family": "qwen3_moe", "layers": 8, "experts": 32, "top_k": 4, "noise": "bfloat16"}
    panels: list[tuple[str, dict[str, Any]]] = [
        ("fresh rollouts", {"updates": 0}),
        ("8 updates old, lr 1e-6", {"lr": 1e-6, "updates": 8}),
    ]
    figure, axes = _figure(len(panels))
    for one, (title, where) in zip(axes, panels, strict=True):
        rows = _longest_of_seeds(table.select(**main, **where))
        for arm, color in COLORS.items():
            points = _by((int(r["tokens"]), float(r["ess"])) for r in rows if r["arm"] == arm)
            if arm == "R2" and where["updates"] == 0:
                continue  # it is the live router's own choice then
            _line(one, points, arm, color)
        one.set(xscale="log", ylim=(0, 1.03), xlabel="tokens of an answer", title=title)
        one.set_xticks([8, 32, 128, 512, 1024], ["8", "32", "128", "512", "1024"])
    axes[0].set_ylabel("share of samples that count")
    axes[-1].legend(loc="lower left")
    figure.savefig(file)


def by_setting(table: Table, file: Path) -> None:
    """Effective sample size of answers of 256 tokens: by age, family, size and noise; median and quartiles of seeds."""
    main = dict(zip(KEYS["lengths"][:5], ("qwen3_moe", "8", "32", "4", "bfloat16"), strict=True))
    rows = _longest_of_seeds([row for row in table.rows if row["tokens"] == "256"])
    found: dict[str, dict[str, list[float]]] = {}
    ages: dict[str, tuple[float, ...]] = {}
    for row in rows:
        own = [row[name] for name, value in main.items() if row[name] != value and name not in ("experts", "top_k")]
        own = [name.removeprefix("bfloat16, ") if row["ages"] in OTHER_UPDATES else name for name in own]
        if (row["experts"], row["top_k"]) != ("32", "4"):
            own.append(f"{row['experts']} experts, top {row['top_k']}")
        if row["layers"] != "8":
            own[own.index(row["layers"])] = f"{row['layers']} layers"
        if row["updates"] != "0":
            own.append(
                f"{row['updates']} update{'s' * (row['updates'] != '1')} of {float(row['lr']):.0e}".replace("e-0", "e-")
            )
            ages[own[-1]] = (float(row["lr"]) * int(row["updates"]), int(row["updates"]))
        found.setdefault(", ".join(own) or "fresh", {}).setdefault(row["arm"], []).append(float(row["ess"]))
    # fresh, then older and older, then other models and engines by name
    order = sorted(found, key=lambda name: (name != "fresh", ages.get(name, (math.inf,)), name))
    figure, axes = _figure(1)
    for place, name in enumerate(reversed(order)):
        for arm in ("live", "R3"):
            median, low, high = middle(found[name][arm])
            axes[0].plot([low, high], [place, place], color=COLORS[arm], alpha=0.4, linewidth=4)
            axes[0].plot(median, place, "o", color=COLORS[arm], label=arm if not place else None)
    axes[0].set_yticks(range(len(order)), [f"{name} ({len(found[name]['R3'])})" for name in reversed(order)])
    axes[0].set(xlim=(0, 1.03), xlabel="share of answers of 256 tokens that count (seeds)")
    figure.legend(loc="outside upper center", ncols=2)
    figure.set_size_inches(SIZE[0], 1.2 + 0.3 * len(order))
    figure.savefig(file)


def by_target(table: Table, file: Path) -> None:
    """Error of the expected gradient, to the engine's own and to the trainer's, fresh and after updates."""
    main = {"family": "qwen3_moe", "layers": 8, "experts": 32, "top_k": 4, "noise": "bfloat16", "masks": "yes"}
    ages = [(0.0, 0, "fresh"), (1e-6, 1, "1, 1e-6"), (1e-6, 8, "8, 1e-6"), (1e-5, 8, "8, 1e-5")]
    figure, axes = _figure(2)
    for one, target in zip(axes, ("engine", "trainer"), strict=True):
        for place, arm in enumerate(COLORS):
            heights = []
            for lr, updates, _ in ages:  # fresh, R2 is the live router's own choice of a moment ago
                whose = "live" if arm == "R2" and not updates else arm
                rows = table.select(**main, lr=lr, updates=updates, target=target, arm=whose, weight="ratio")
                heights.append(middle(float(row["error"]) for row in rows) if rows else (math.nan,) * 3)
            x = [index + 0.25 * (place - 1) for index in range(len(ages))]
            spread = [[max(0.0, m - lo) for m, lo, _ in heights], [max(0.0, hi - m) for m, _, hi in heights]]
            one.bar(x, [m for m, _, _ in heights], 0.25, yerr=spread, color=COLORS[arm], label=arm, capsize=2)
        one.set_xticks(range(len(ages)), [name for _, _, name in ages])
        one.set(title=f"to the {target}'s own gradient", xlabel="updates and learning rate")
    axes[0].set_ylabel("error of the expected gradient")
    axes[0].legend()
    figure.savefig(file)


def by_run(table: Table, file: Path) -> None:
    """Reward over steps, median and quartiles over seeds: exact rollouts, the worst routes, old weights."""
    panels = [panel for panel in PANELS if table.select(task=panel[0], noise=panel[1], stale=panel[2])]
    if not panels:
        return
    figure, axes = _figure(3, 2)
    for one, (task, noise, stale, title) in zip(axes.flat, panels, strict=False):
        for arm, (label, color) in RUN_ARMS.items():
            rows = table.select(task=task, noise=noise, stale=stale, arm=arm)
            if len({row["seed"] for row in rows}) < 3:
                continue  # begun, and not a curve yet
            _line(one, _by((int(r["step"]), float(r["reward"])) for r in rows), label, color)
        one.set(title=f"{task}: {title}", xlabel="step", ylim=(0, 1.03))
        one.title.set_fontsize("small")
    for row in axes:
        row[0].set_ylabel("reward")
    for one in axes.flat[len(panels) :]:
        one.set_visible(False)
    drawn = {label: line for one in axes.flat for line, label in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn, loc="outside upper center", ncols=3)
    figure.savefig(file)


def of_runs(table: Table) -> str:
    """A row of Markdown for each task, noise, age and arm: medians over seeds, and how far seeds are from live.

    Two runs of a seed are compared over the steps that both have.
    """
    found: dict[tuple[str, ...], dict[str, dict[int, Mapping[str, str]]]] = {}
    for row in table.rows:
        key = tuple(row[name] for name in ("task", "noise", "stale", "lr", "steps", "arm"))
        found.setdefault(key, {}).setdefault(row["seed"], {})[int(row["step"])] = row

    def gap(one: Mapping[int, Mapping[str, str]], other: Mapping[int, Mapping[str, str]]) -> float:
        return statistics.fmean(
            float(one[step]["reward"]) - float(other[step]["reward"]) for step in one.keys() & other
        )

    titles = (
        "task | engine | updates old | arm | seeds | last 20 steps | all steps, arm - live (seeds) | KL | collapsed"
    )
    lines = [f"| {titles} |", f"| {' | '.join(['---'] * 9)} |"]
    for key, seeds in sorted(found.items()):
        task, noise, stale, *_, arm = key
        live = found.get((*key[:-1], "live"), {})
        gaps = [gap(rows, live[seed]) for seed, rows in seeds.items() if seed in live]
        last = [rows[max(rows)] for rows in seeds.values()]
        cells = [
            f"{statistics.median(float(row['reward']) for row in last):.3f}",
            f"{min(gaps):.3f} to {max(gaps):.3f} ({len(gaps)})" if gaps and arm != "live" else "",
            f"{statistics.median(max(float(row['kl']) for row in rows.values()) for rows in seeds.values()):.1g}",
            str(sum(row["collapsed"] != "-1" for row in last)),
        ]
        lines.append(f"| {' | '.join([task, noise, stale, arm, str(len(seeds)), *cells])} |")
    return "\n".join(lines)


def by_task(table: Table, file: Path) -> None:
    """Reward of the real model over steps: of each step, and of held-out questions, greedy; all seeds."""
    titles = {"even": "reward: even numbers", "sums": "reward: sums"}
    found = dict.fromkeys((row["task"], row["supervised"]) for row in table.rows)
    panels = [(task, supervised) for task, supervised in found if task in titles]
    figure, axes = _figure(len(panels))
    for one, (task, supervised) in zip(axes, panels, strict=True):
        rows = table.select(task=task, supervised=supervised)
        for name, label, color in (
            ("reward", "a step's answers, sampled", "tab:blue"),
            ("held_out_reward", "held out, greedy", "tab:orange"),
        ):
            points = _by((int(row["step"]), float(row[name])) for row in rows if row[name])
            _line(one, points, label, color)
        seeds = len({row["seed"] for row in rows})
        one.set(title=f"{titles[task]} (seeds: {seeds})", xlabel="step", ylim=(0, 1.03))
    axes[0].set_ylabel("reward")
    axes[0].legend(loc="lower right")
    figure.savefig(file)


def _longest_of_seeds(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the longest answers of each setting and seed: shorter ones of the same seed are their beginning."""

    def setting(row: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in (*KEYS["lengths"][:6], "lr", "updates"))

    longest: dict[tuple[str, ...], int] = {}
    for row in rows:
        longest[setting(row)] = max(longest.get(setting(row), 0), int(row["longest"]))
    return [row for row in rows if int(row["longest"]) == longest[setting(row)]]


def _by(pairs: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for x, y in pairs:
        found.setdefault(x, []).append(y)
    return dict(sorted(found.items()))


def _line(axes: Any, points: Mapping[int, Sequence[float]], label: str, color: str) -> None:
    """A median with its quartiles."""
    if not points:
        return
    spread = [middle(values) for values in points.values()]
    axes.plot([*points], [m for m, _, _ in spread], color=color, label=label, marker="o", markersize=3)
    axes.fill_between([*points], [lo for _, lo, _ in spread], [hi for _, _, hi in spread], color=color, alpha=0.15)
