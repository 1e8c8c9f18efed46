"""``torchrl-moe probe``: is R3 helping? Real rollouts of a model, scored with the recorded experts and without."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_moe.cli.command import FINE, PROBLEM, BadUse, Command, Output, note
from torchrl_moe.cli.models import MODEL_HELP, load, moe_and_trainer
from torchrl_moe.cli.services import ENGINES, add_engine_arguments, check_engine, engine_arguments, started

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from transformers import PreTrainedModel

    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.modules.policies.probe import LiveScores
    from torchrl_moe.objectives import MismatchMetrics

PROMPTS = (
    "What is 17 * 23? Think step by step.",
    "Write a Python function that reverses a linked list.",
    "Explain in two sentences why the sky is blue.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
    "Translate into French: the engine and the trainer disagree.",
    "List three prime numbers between 50 and 80.",
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies?",
    "Summarise the plot of Hamlet in one sentence.",
)
AT_A_TIME = 4
"""Sequences that are scored in one forward pass."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt per line, or JSON lines with a key 'prompt' (default: eight built-in prompts)",
    )
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="which engine generates (default: vllm)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="length of an answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="for sampling (default: 1)")
    parser.add_argument(
        "--trainer-dtype", choices=("bfloat16", "float32"), help="dtype of the trainer (default: the engine's)"
    )
    parser.add_argument(
        "--trainer",
        metavar="MODEL",
        help="a model with the weights of the trainer after more updates, such as a run's model/: tells mismatch from "
        "updates (default: MODEL)",
    )
    add_engine_arguments(parser, "bfloat16")


def read_prompts(file: str) -> list[str]:
    """Return the prompts of a file: a text a line, or JSON lines with a key ``prompt``. Empty lines are left out.

    A file is JSON lines if its name ends in ``.jsonl``, or if its first line is an object with that key.
    """
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadUse(f"--prompts {file} cannot be read: {error}") from error
    lines = [line for line in lines if line]
    if not lines:
        raise BadUse(f"--prompts {file}: there is no prompt in it: write one per line")
    if not file.endswith(".jsonl"):
        try:
            first = json.loads(lines[0])
        except ValueError:
            return lines
        if not isinstance(first, dict) or "prompt" not in first:
            return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadUse(f"--prompts {file}, line {number}: it must be an object with a key 'prompt'") from error
        if not isinstance(prompts[-1], str) or not prompts[-1]:
            raise BadUse(f"--prompts {file}, line {number}: the prompt must be text")
    return prompts


def _run(options: argparse.Namespace, output: Output) -> int:
    prompts = list(PROMPTS) if options.prompts is None else read_prompts(options.prompts)
    if options.max_new_tokens < 1:
        raise BadUse(f"--max-new-tokens {options.max_new_tokens}: at least 1")
    if not options.temperature > 0:
        raise BadUse(f"--temperature {options.temperature:g}: greedy answers say nothing; it must be above 0")
    check_engine(options.engine, options.engine_args)
    arguments = engine_arguments(options.engine_args)
    with moe_and_trainer(options.model, arguments, options.trainer) as (folder, config):
        # the engine ends before the model is loaded: both may not fit
        with started(folder, config, options.engine, options.dtype, options.engine_args) as engine:
            rollouts = _roll_out(engine, prompts, options)
            held = engine.get_model_metadata()
        trainer_dtype = options.trainer_dtype or options.dtype
        note(f"scoring {len(prompts)} answers by transformers, with replay and without ...")
        # the model of before has gone when the trainer is loaded: both may not fit
        before = None
        if options.trainer is not None:
            before = _live(load(folder, trainer_dtype), rollouts, options.temperature)
        model = load(options.trainer or folder, trainer_dtype)
        replayed, live = _score(model, rollouts, options.temperature)
    from torchrl_moe.cli.probe_result import ProbeResult
    from torchrl_moe.modules import TransformersWrapper
    from torchrl_moe.modules.policies.probe import causes_of, dtype_gaps
    from torchrl_moe.weight_update import get_model_metadata

    causes = None
    if before is not None:
        now = _live(model, rollouts, options.temperature)
        causes = causes_of(TransformersWrapper(model, replay="R3"), rollouts, before, now)
    title = f"{options.model}: {options.engine} in {options.dtype}, scored by transformers in {trainer_dtype}"
    if options.trainer is not None:
        title += f" with the weights of {options.trainer}"
    result = ProbeResult.of(title, replayed, live, dtype_gaps(held, get_model_metadata(model)), causes)
    output.show(result.text(), result.to_dict())
    return PROBLEM if result.problems else FINE


def _roll_out(engine: AsyncVLLM, prompts: Sequence[str], options: argparse.Namespace) -> TensorDictBase:
    """Answer prompts; a chat where the tokenizer has a template for it."""
    from tensordict import TensorDict, set_list_to_stack

    from torchrl_moe.modules import Text, vLLMWrapper

    if engine.routing_layout is None:
        raise BadUse("the engine records no routes: leave enable_return_routed_experts out of --engine-arg")
    tokenizer = engine.get_tokenizer()
    if not all(tokenizer(prompt)["input_ids"] for prompt in prompts):
        raise BadUse(
            f"the tokenizer of {options.model} makes no tokens from a prompt: is it in the model's folder? "
            "tokenizer.save_pretrained(path) writes it there"
        )
    is_chat = bool(getattr(tokenizer, "chat_template", None))
    if is_chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    note(f"generating answers to {len(prompts)} prompts ...")
    with set_list_to_stack(True):
        policy = vLLMWrapper(
            engine,
            input_mode="text",
            tokenizer_kwargs={"add_special_tokens": not is_chat},  # a template writes its own
            generate_kwargs={"max_new_tokens": options.max_new_tokens, "temperature": options.temperature},
            inplace=False,
        )
        return policy(TensorDict(text=Text(prompt=list(prompts)), batch_size=[len(prompts)]))


def _score(
    model: PreTrainedModel, rollouts: TensorDictBase, temperature: float
) -> tuple[MismatchMetrics, MismatchMetrics]:
    """Return the mismatch with replay, and without."""
    import torch

    from torchrl_moe.modules import TransformersWrapper
    from torchrl_moe.objectives import MismatchMetrics

    replaying = TransformersWrapper(model, replay="R3", temperature=temperature, measure_agreement=True)
    native = replaying.get_new_version(replay="none", measure_agreement=False)
    replayed, live = (MismatchMetrics(masking_strategy="generic", thresholds=None) for _ in range(2))
    with torch.no_grad():
        for part in rollouts.split(AT_A_TIME):
            # the same answers twice: on the recorded experts, and on the model's own router
            for metrics, actor in ((replayed, replaying), (live, native)):
                scored = part.copy()
                log_probs, _, _ = actor.score(scored, entropy=False)
                metrics.update(scored, log_probs)
    return replayed, live


def _live(model: PreTrainedModel, rollouts: TensorDictBase, temperature: float) -> LiveScores:
    from torchrl_moe.modules import TransformersWrapper
    from torchrl_moe.modules.policies.probe import live_scores

    return live_scores(TransformersWrapper(model, replay="R3", temperature=temperature), rollouts)


COMMAND = Command(
    name="probe",
    help="is R3 helping? a few rollouts, scored with the recorded experts and without",
    description="Generates answers with an engine, scores them with transformers, once with the engine's experts and "
    "once with the live router, and says how much of the mismatch replay removes.",
    examples=[
        ("torchrl-moe probe tiny", "a tiny model, in half a minute"),
        ("torchrl-moe probe path/to/moe --prompts mine.txt", "your model, your prompts"),
        ("torchrl-moe probe tiny --dtype float32", "float32 proves that routes are mapped right"),
        ("torchrl-moe probe tiny --engine transformers", "without vLLM"),
        ("torchrl-moe probe path/to/moe --trainer run/model", "is it mismatch, or what updates moved?"),
    ],
    add_arguments=_add_arguments,
    run=_run,
)
