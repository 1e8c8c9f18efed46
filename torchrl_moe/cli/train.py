"""``torchrl-moe train``: the trainer, from one of the packaged configurations or the user's own file."""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import os
from dataclasses import replace
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_moe.cli.command import FINE, BadUse, Command, Output, listing
from torchrl_moe.cli.services import check_installed

if TYPE_CHECKING:
    from torchrl_moe.trainers.config import GRPOConfig

DEFAULT = "tiny_cpu"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default=DEFAULT, metavar="NAME", help=f"see --list, or a file (default: {DEFAULT})")
    parser.add_argument("--list", action="store_true", help="list the packaged configurations")
    parser.add_argument("--cfg", action="store_true", help="print every setting and what it is, and do not train")
    parser.add_argument("--export", metavar="RUN", help="write RUN/model, of a run's newest checkpoint or a given one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as optim.lr=1e-5")


def configurations() -> dict[str, str]:
    """Return the packaged configurations: name -> the first sentence of the comment that each begins with."""
    found = {}
    for item in files("torchrl_moe.trainers").joinpath("configs").iterdir():
        if item.name.endswith(".yaml"):
            lines = takewhile(lambda line: line.startswith("#"), item.read_text(encoding="utf-8").splitlines())
            comment = " ".join(line.lstrip("# ").strip() for line in lines)
            sentence = comment.partition(". ")[0].partition(": torchrun")[0]
            found[item.name.removesuffix(".yaml")] = sentence.rstrip(".:") + "."
    return dict(sorted(found.items()))


def _run(options: argparse.Namespace, output: Output) -> int:
    if options.list:
        listed = configurations()
        output.show(listing(listed), listed)
        return FINE
    if options.export:
        folder = export(Path(options.export))
        output.show(f"the model is in {folder}", {"folder": str(folder)})
        return FINE
    for setting in options.overrides:
        if "=" not in setting and not setting.startswith("~"):  # ~key takes a key of a file out
            raise BadUse(f"{setting!r} is not a setting: write key=value; --config names a configuration")
    from torchrl_moe.trainers.compose import load_config

    config = load_config(options.config, options.overrides)
    if options.cfg:
        from torchrl_moe.trainers.config import as_dict, as_yaml

        output.show(as_yaml(config, explained=True).rstrip(), as_dict(config))
    elif config.plan:  # what the run needs; nothing is started
        from torchrl_moe.trainers.plan import Console, RunPlan

        plan = RunPlan.of(config)
        if output.is_json:
            output.show("", plan.to_dict())
            return FINE
        console = Console(highlight=False)
        console.print(plan.table())
        for note in plan.notes:
            console.print(f"- {note}")
    else:
        if config.engine.connect is None:
            check_installed(config.engine.kind, "engine.kind=transformers")
        run(config)
        if output.is_json and os.environ.get("RANK", "0") == "0":  # of torchrun's ranks, the first has the records
            output.show("", {"folder": config.out, "last_step": _last_row(Path(config.out) / "metrics.csv")})
    return FINE


def export(folder: Path) -> Path:
    """Write the model of a checkpoint, in the layout of the hub; start no engine."""
    from torchrl_moe.trainers.checkpoints import SHARDS, TrainedState
    from torchrl_moe.trainers.compose import saved_config
    from torchrl_moe.trainers.config import ConfigError
    from torchrl_moe.trainers.policy_model import starting_model
    from torchrl_moe.trainers.ranks import Placement, Ranks

    # a run's folder, or one of its checkpoints
    checkpoint = folder if folder.name.startswith("step-") else max(folder.glob("checkpoints/step-*"), default=None)
    of_run = folder.parent.parent if checkpoint == folder else folder
    if checkpoint is None or not (of_run / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no folder of a run with checkpoints, nor one of its checkpoints")
    # resume=True: a function that made the model is not called again, its saved model is read
    config = replace(saved_config(of_run / "config.yaml"), out=str(of_run), resume=True)
    policy_model = starting_model(None, None, config, Placement())
    try:
        TrainedState(policy_model.model).load(checkpoint / SHARDS, Ranks())
    except (OSError, ValueError) as error:
        raise ConfigError.of(str(checkpoint), error) from error
    return policy_model.save(of_run / "model")


def run(config: GRPOConfig) -> None:
    """Train, export the model, draw the figure, and print a summary; with several ranks, rank 0 draws and prints."""
    import torch
    from tensordict import set_list_to_stack

    from torchrl_moe.modules.backends.engine_kind import threads_on_a_cpu
    from torchrl_moe.trainers.grpo_trainer import MoEGRPOTrainer
    from torchrl_moe.trainers.plan import Console

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # threads that train on a CPU, unless the user says how many, which torch has read by now
    if not torch.cuda.is_available() and not os.environ.get("OMP_NUM_THREADS"):
        # engines are idle while a synchronous run trains, and in an asynchronous one never; ranks share the cores
        if config.parity == "exact":  # as many as a replica has, or sums are rounded in another order
            torch.set_num_threads(threads_on_a_cpu(config.engine.num_replicas))
        elif config.rollout.max_staleness > 0 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            torch.set_num_threads(1)
    with set_list_to_stack(True), MoEGRPOTrainer(config=config) as trainer:
        trainer.train()
        # all ranks take part in writing the model
        trainer.save_pretrained()
        if not trainer.ranks.is_first:
            return
        folder, console = trainer.record.folder, Console(highlight=False)
        trainer.plot().savefig(folder / "run.png")
        if trainer.record.rows:
            console.print(trainer.summary())
        console.print(f"metrics, events, samples, figure and the trained model are in {folder}")


def _last_row(file: Path) -> dict[str, object]:
    """Return the last step of a run's record, numbers as numbers."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    row: dict[str, object] = {}
    for key, text in rows[-1].items() if rows else ():
        row[key] = text or None
        with contextlib.suppress(ValueError):
            row[key] = float(text)
    return row


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
        ("torchrl-moe train engine.kind=transformers steps=3 out=runs/three", "without vLLM, three steps"),
        (
            "torchrun --nproc-per-node 2 -m torchrl_moe.cli train --config tiny_ranks",
            "two ranks; options of torchrun go before -m",
        ),
    ],
    add_arguments=_add_arguments,
    run=_run,
    after_interrupt="resume=true continues from the last checkpoint",
    keeps_logs=True,
)
