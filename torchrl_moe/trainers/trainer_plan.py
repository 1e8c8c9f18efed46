"""The trainer's part of a plan: what each rank holds, and what it gets from the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchrl_moe.trainers.config import GRPOConfig
from torchrl_moe.trainers.model_sizes import ModelSizes, activation_bytes
from torchrl_moe.trainers.plan_row import FLOAT32, HOST, TRAINER, PlanRow, ranks_of_host, shards, share_of

__all__ = ["compute_dtype", "longest", "of_trainer", "over"]

EXCHANGED = 4
"""Rows of hidden states that an exchange holds per token and expert, besides the experts' input: rows sent,
rows received back, the same rows reordered, and weighted (transformers 5.23, ``AllToAllEP``)."""


def compute_dtype(config: GRPOConfig) -> torch.dtype:
    """Return the dtype of the trainer's forward passes on a GPU."""
    return torch.float32 if config.model.dtype == "float32" else torch.bfloat16


def over(config: GRPOConfig) -> str:
    """Return the text by which a plan says how weights are split."""
    return f" / {shards(config)} ranks" if shards(config) > 1 else ""


def longest(config: GRPOConfig, hf_config: Any) -> int:
    """Return the token count of the longest sequence that the engine accepts."""
    text = hf_config.get_text_config()
    return int(config.engine.arguments.get("max_model_len") or text.max_position_embeddings)


def of_trainer(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what each rank of the trainer holds."""
    ranks, dtype = config.hardware.trainer_gpus, compute_dtype(config)
    yield from _states(config, sizes)
    if ranks > 1:
        yield from _gathered(config, sizes)
    if _has_reference_model(config, sizes):
        copy = share_of(sizes.parameters, shards(config), dtype.itemsize)
        yield PlanRow(TRAINER, "reference model", copy, f"a second model{over(config)}")
    sequences, tokens = _micro_batch(config, hf_config)
    used = activation_bytes(hf_config, config.model, sequences, tokens, dtype, sharded=ranks > 1)
    shape = f"{sequences} sequences of {tokens:,} tokens"
    checkpointed = ", layers computed again" if config.model.activation_checkpointing else ""
    yield PlanRow(TRAINER, "a micro-batch", used, f"forward and backward of {shape}{checkpointed}", at_once=False)
    if config.placement.expert_parallel > 1:
        yield from _exchanged(config, sizes, sequences * tokens)
    if not config.placement.cpu_offload:
        step = share_of(sizes.trained, shards(config), FLOAT32)
        yield PlanRow(TRAINER, "an optimizer step", step, "a number beside each trained one", at_once=False)


def _states(config: GRPOConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield weights, gradients and moments: of each rank, or, if they are offloaded, of all ranks of a host."""
    split, width = shards(config), compute_dtype(config).itemsize
    frozen = sizes.parameters - sizes.trained
    part, times, how = TRAINER, 1, over(config)
    if config.placement.cpu_offload:
        part, times = HOST, ranks_of_host(config)
        how += f" x {times} of this host (placement.cpu_offload)"
    weights = share_of(sizes.trained, split, FLOAT32) + share_of(frozen, split, width)
    what = f"{sizes.trained:,} x 4 B" + (f" + {frozen:,} x {width} B" if frozen else "")
    yield PlanRow(part, "weights", times * weights, f"{what}{how}")
    gradients = times * share_of(sizes.trained, split, FLOAT32)
    yield PlanRow(part, "gradients", gradients, f"{sizes.trained:,} x 4 B{how}")
    yield PlanRow(part, "AdamW's moments", 2 * gradients, f"{sizes.trained:,} x 8 B{how}")


def _gathered(config: GRPOConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what a rank briefly holds unsharded: two layers, what is in no layer, and a weight being written."""
    own, width = config.placement, compute_dtype(config).itemsize

    def of_rank(numbers: int, experts: int) -> int:
        return -(-(numbers - experts) // own.tensor_parallel) + -(-experts // own.expert_parallel)

    layer = of_rank(sizes.layer, min(sizes.layer, sizes.experts // sizes.layers))
    if own.reshard_after_forward:
        numbers = 2 * layer + of_rank(sizes.outside, 0)
        how = f"2 layers of {layer:,}, and what is in none, x {width} B"
    else:
        numbers, how = of_rank(sizes.parameters, sizes.experts), f"all layers x {width} B (placement)"
    if own.expert_parallel > 1:
        how += f"; experts / {own.expert_parallel}"
    yield PlanRow(TRAINER, "gathered layers", numbers * width, how)
    if sizes.trained == sizes.parameters:
        yield PlanRow(TRAINER, "gradients that are being reduced", layer * FLOAT32, "1 layer x 4 B")
    part, times = (HOST, ranks_of_host(config)) if own.cpu_offload else (TRAINER, 1)
    count = f" x {times} ranks" if own.cpu_offload else ""
    yield PlanRow(
        part,
        "a weight that is gathered to be written",
        times * sizes.largest * FLOAT32,
        f"{sizes.largest:,} x 4 B{count}, when the model is saved; less in a weight update",
        at_once=False,
    )


def _exchanged(config: GRPOConfig, sizes: ModelSizes, tokens: int) -> Iterator[PlanRow]:
    """Yield what expert parallelism needs: for tokens in transit, and on the rank whose experts get most of them."""
    width, own = compute_dtype(config).itemsize, config.placement
    rows = -(-tokens // own.tensor_parallel) * sizes.top_k
    sent = EXCHANGED * rows * sizes.hidden * width
    shape = f"{rows:,} tokens and experts x {sizes.hidden:,} x {width} B"
    yield PlanRow(TRAINER, "tokens on their way to experts", sent, f"{EXCHANGED} x {shape}")
    more = max(min(config.hardware.expert_imbalance, own.expert_parallel), 1) - 1
    of_row = 2 * sizes.hidden + 3 * sizes.expert_width  # in and out; gate, up and their product
    kept = 1 if config.model.activation_checkpointing else sizes.layers
    how = f"{1 + more:g} times the mean (hardware.expert_imbalance): {more:g} x {rows:,} x {of_row:,} x {width} B"
    layers = f" x {kept} layers" if kept > 1 else ""
    busy = int(more * rows) * of_row * width * kept
    yield PlanRow(TRAINER, "more tokens on the busiest rank", busy, f"{how}{layers}")


def _has_reference_model(config: GRPOConfig, sizes: ModelSizes) -> bool:
    arguments, where = config.loss.arguments, config.loss.reference
    is_read = bool(arguments.get("kl_to_ref_coeff")) or arguments.get("kl_mask_threshold") is not None
    return is_read and (where == "model" or (where == "auto" and not sizes.adapter))


def _micro_batch(config: GRPOConfig, hf_config: Any) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the tokens of each: all as long as they can be."""
    tokens = longest(config, hf_config)
    answers = config.rollout.prompts_per_step * config.rollout.group_size // config.optim.minibatches
    answers = max(1, answers * config.placement.tensor_parallel // config.hardware.trainer_gpus)
    if config.optim.max_tokens is None:
        return answers, tokens
    return max(1, min(answers, config.optim.max_tokens // tokens)), tokens
