"""A training run from the command line: bad input is one clear line and exit code 2."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tensordict import set_list_to_stack

from torchrl_moe.errors import RankError, UnsupportedRouterError
from torchrl_moe.trainers.checkpoints import SHARDS, TrainedState
from torchrl_moe.trainers.compose import CONFIGS, load_config, saved_config
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, as_yaml
from torchrl_moe.trainers.grpo_trainer import MoEGRPOTrainer
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.plan import Console, RunPlan
from torchrl_moe.trainers.policy_model import starting_model
from torchrl_moe.trainers.ranks import Ranks

__all__ = ["export", "main", "run", "show_plan"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as configured on the command line."""
    parser = argparse.ArgumentParser(
        description="Train a Mixture-of-Experts model with GRPO: rollouts by vLLM, updates on the recorded experts.",
        epilog=f"Every key and its default: {CONFIGS.parent / 'config.py'}. resume=true continues after a kill; "
        "plan=true prints what a run would need.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(sorted(item.stem for item in CONFIGS.glob("*.yaml")))
    parser.add_argument("--config", default="tiny_cpu", help=f"{names}, or a file (default: tiny_cpu)")
    parser.add_argument("--cfg", action="store_true", help="print the configuration, and do not train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as optim.lr=1e-5")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        if options.cfg:
            print(as_yaml(config))
            return 0
        if config.plan:
            show_plan(config)
            return 0
        run(config)
    except (ConfigError, UnsupportedRouterError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; resume=true continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def show_plan(config: GRPOConfig) -> None:
    """Print the resources that a run needs, and start nothing."""
    plan = RunPlan.of(config)
    console = Console(highlight=False)
    console.print(plan.table())
    for note in plan.notes:
        console.print(f"- {note}")


def export(folder: Path) -> Path:
    """Write the model of a checkpoint, in the layout of the hub; start no engine."""
    # a run's folder, or one of its checkpoints
    checkpoint = folder if folder.name.startswith("step-") else max(folder.glob("checkpoints/step-*"), default=None)
    run = folder.parent.parent if checkpoint == folder else folder
    if checkpoint is None or not (run / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no folder of a run with checkpoints, nor one of its checkpoints")
    # resume=True: a function that made the model is not called again, its saved model is read
    config = replace(saved_config(run / "config.yaml"), out=str(run), resume=True)
    policy_model = starting_model(None, None, config, Placement())
    try:
        TrainedState(policy_model.model).load(checkpoint / SHARDS, Ranks())
    except (OSError, ValueError) as error:
        raise ConfigError.of(str(checkpoint), error) from error
    return policy_model.save(run / "model")


def run(config: GRPOConfig) -> None:
    """Train, export the model, draw the figure, and print a summary; with several ranks, rank 0 draws and prints."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the engine computes at the same time
    console = Console(highlight=False)
    with set_list_to_stack(True), MoEGRPOTrainer(config=config) as trainer:
        trainer.train()
        # all ranks take part in writing the model
        trainer.save_pretrained()
        if not trainer.ranks.is_first:
            return
        trainer.plot().savefig(trainer.record.folder / "run.png")
        if trainer.record.rows:
            console.print(trainer.summary())
        console.print(f"metrics, events, samples, figure and the trained model are in {trainer.record.folder}")
