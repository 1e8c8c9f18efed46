"""``torchrl-moe train``: the trainer, from one of the packaged configurations or the user's own file."""

from __future__ import annotations

import argparse
import csv
import os
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_moe.cli.command import FINE, BadUse, Command, Output, listing
from torchrl_moe.cli.services import check_installed

if TYPE_CHECKING:
    from torchrl_moe.trainers.config import GRPOConfig

__all__ = ["COMMAND", "configurations"]

DEFAULT = "tiny_cpu"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default=DEFAULT, metavar="NAME", help=f"see --list, or a file (default: {DEFAULT})")
    parser.add_argument("--list", action="store_true", help="list the packaged configurations")
    parser.add_argument("--cfg", action="store_true", help="print the configuration, and do not train")
    parser.add_argument("--export", metavar="RUN", help="write RUN/model, of a run's newest checkpoint or a given one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as optim.lr=1e-5")


def configurations() -> dict[str, str]:
    """Return the packaged configurations: name -> the first sentence of the comment that each begins with."""
    folder = files("torchrl_moe.trainers").joinpath("configs")
    found = {}
    for item in folder.iterdir():
        if item.name.endswith(".yaml"):
            found[item.name.removesuffix(".yaml")] = _about(item.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def _about(text: str) -> str:
    # the comment that the file begins with, up to the end of its first sentence
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return (
        " ".join(line.lstrip("# ").strip() for line in comment)
        .partition(". ")[0]
        .partition(": torchrun")[0]
        .rstrip(".:")
        + "."
    )


def _run(options: argparse.Namespace, output: Output) -> int:
    if options.list:
        listed = configurations()
        output.show(listing(listed), listed)
        return FINE
    if options.export:
        from torchrl_moe.trainers.script import export

        folder = export(Path(options.export))
        output.show(f"the model is in {folder}", {"folder": str(folder)})
        return FINE
    for setting in options.overrides:
        if "=" not in setting:
            raise BadUse(f"{setting!r} is not a setting: write key=value; --config names a configuration")
    from torchrl_moe.trainers.compose import load_config

    config = load_config(options.config, options.overrides)
    if options.cfg:
        from torchrl_moe.trainers.config import as_dict, as_yaml

        output.show(as_yaml(config).rstrip(), as_dict(config))
    elif config.plan:
        _plan(config, output)
    else:
        _train(config, output)
    return FINE


def _plan(config: GRPOConfig, output: Output) -> None:
    from torchrl_moe.trainers.script import show_plan

    if not output.is_json:
        show_plan(config)
        return
    from torchrl_moe.trainers.plan import RunPlan

    output.show("", RunPlan.of(config).to_dict())


def _train(config: GRPOConfig, output: Output) -> None:
    if config.engine.connect is None:
        check_installed(config.engine.kind, "engine.kind=transformers")
    from torchrl_moe.trainers.script import run

    run(config)
    if output.is_json and os.environ.get("RANK", "0") == "0":  # of torchrun's ranks, the first has the records
        output.show("", {"folder": config.out, "last_step": _last_row(Path(config.out) / "metrics.csv")})


def _last_row(file: Path) -> dict[str, object]:
    """Return the last step of a run's record, numbers as numbers."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {key: _number(value) for key, value in rows[-1].items()} if rows else {}


def _number(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text or None


COMMAND = Command(
    name="train",
    help="train with GRPO, from a packaged configuration or your own",
    description="Trains a Mixture-of-Experts model with GRPO: rollouts by vLLM, updates on the recorded experts. "
    "resume=true continues after a kill; plan=true prints what a run would need, and starts nothing.",
    examples=[
        ("torchrl-moe train", "a tiny model on a CPU, in a minute or two"),
        ("torchrl-moe train --list", "the packaged configurations"),
        ("torchrl-moe train --config olmoe_1b_7b plan=true", "the memory and network that it needs"),
        ("torchrl-moe train --config my.yaml optim.lr=1e-5", "your own configuration, with one change"),
        ("torchrl-moe train --export runs/grpo", "the model of a run's newest checkpoint, in runs/grpo/model"),
        ("torchrl-moe train engine.kind=transformers steps=3", "without vLLM, three steps"),
        ("torchrun -m torchrl_moe.cli train --config tiny_ranks", "several ranks; options of torchrun go before -m"),
    ],
    add_arguments=_add_arguments,
    run=_run,
    after_interrupt="resume=true continues from the last checkpoint",
    keeps_logs=True,
)
