"""``torchrl-moe bisect``: at which layer and operation do an engine and its trainer part?"""

from __future__ import annotations

import argparse

from torchrl_moe.cli.command import FINE, PROBLEM, BadUse, Command, Output, note
from torchrl_moe.cli.models import MODEL_HELP, load, moe_and_trainer
from torchrl_moe.cli.probe import PROMPTS
from torchrl_moe.cli.services import DTYPES, add_engine_arguments, check_engine, engine_arguments, started

MOST_TOKENS = 256
"""Beyond these a prompt is cut: the outputs of all layers are copied."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPTS[0], help=f"default: {PROMPTS[0]!r}")
    parser.add_argument(
        "--trainer", metavar="MODEL", help="weights of the trainer, such as a run's model/ (default: those of MODEL)"
    )
    parser.add_argument("--trainer-dtype", choices=DTYPES, help="dtype of the trainer (default: the engine's)")
    add_engine_arguments(parser, "float32")


def _run(options: argparse.Namespace, output: Output) -> int:
    check_engine("vllm", options.engine_args)
    arguments = engine_arguments(options.engine_args)
    with moe_and_trainer(options.model, arguments, options.trainer) as (folder, config):
        from torchrl_moe.modules.policies.bisect import EngineTrace

        # the engine ends before the trainer's model is loaded: both may not fit
        with started(folder, config, "vllm", options.dtype, options.engine_args) as engine:
            tokens = engine.get_tokenizer()(options.prompt)["input_ids"][:MOST_TOKENS]
            if len(tokens) < 2:
                raise BadUse(f"--prompt {options.prompt!r} makes {len(tokens)} token(s): two at least")
            trace = EngineTrace.of(engine, tokens)
        note(f"running {len(tokens)} tokens through transformers ...")
        found = trace.against(load(options.trainer or folder, options.trainer_dtype or options.dtype))
    output.show(str(found), found.to_dict())
    return FINE if found.first is None else PROBLEM


COMMAND = Command(
    name="bisect",
    help="at which layer and operation do engine and trainer part?",
    description="Runs a prompt through vLLM and through transformers, which follows the engine's experts, and compares "
    "what leaves each operation: norms, attention, router logits, the choice of experts, experts, head.",
    examples=[
        ("torchrl-moe bisect tiny", "a tiny model: equal to rounding"),
        ("torchrl-moe bisect path/to/moe --dtype bfloat16", "how the rounding of bfloat16 grows over the layers"),
        ("torchrl-moe bisect path/to/moe --trainer run/model", "the served weights against those of a run"),
    ],
    add_arguments=_add_arguments,
    run=_run,
)
