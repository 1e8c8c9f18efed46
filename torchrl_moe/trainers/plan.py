"""``RunPlan``: what a run needs of GPUs, hosts and network, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.model_sizes import ModelSizes, activation_bytes, model_config_of
from torchrl_moe.trainers.placement_rules import check_axes

__all__ = ["PlanRow", "RunPlan"]

TRAINER, ENGINE, HOST, UPDATE = "trainer, each GPU", "engine, each GPU", "host of the trainer", "weight update"
FLOAT32 = 4
ADAM = 8
"""Bytes of a trained number's two moments."""
UTILISATION = 0.9
"""Of a GPU's memory, that vLLM takes unless it is told otherwise."""
ANSWERS_AT_A_TIME = 128
"""Of ``engine.kind=transformers``."""
TOKEN_BYTES = 8 + 4 + 4 + 2
"""Of a token in a batch, besides its experts: id, log-prob, version, two masks."""
REPLICA_BYTES = int(1.9e9)
"""Resident memory of the three processes of a replica, besides its model (measured with vLLM 0.30 on a CPU)."""
KEPT_WORD = 4


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A line of a plan.

    Attributes:
        part: of the machines.
        item: what needs it.
        bytes: how much, at most.
        how: how that is worked out.
        at_once: whether it is there at the same time as the others of its part.
    """

    part: str
    item: str
    bytes: int
    how: str
    at_once: bool = True


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run needs.

    Attributes:
        rows: memory, by part, and the bytes of a weight update.
        seconds: link -> seconds of a weight update to one replica over it.
        notes: what does not fit, and what else is to be known.
    """

    rows: list[PlanRow]
    seconds: dict[str, float]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: GRPOConfig) -> RunPlan:
        """Work out the plan of a run.

        Raises:
            ConfigError: the model's configuration cannot be found, or is no name or folder; so many ranks cannot share
                the model so.
        """
        source = config.model.source
        if source is None or ":" in source:
            raise ConfigError(
                f"plan=true reads the model's configuration: model.source={source} must be a folder or a hub name"
            )
        return cls.of_model(config, model_config_of(source))

    @classmethod
    def of_model(cls, config: GRPOConfig, hf_config: Any) -> RunPlan:
        """Work out the plan of a run of a model with that transformers configuration."""
        check_axes(config.hardware.trainer_gpus, config)
        sizes = ModelSizes.of(hf_config, config.model)
        rows = [
            *_trainer(config, hf_config, sizes),
            *_engine(config, hf_config, sizes),
            *_host(config, hf_config, sizes),
        ]
        update = _update_bytes(config, hf_config, sizes)
        rows.append(PlanRow(UPDATE, "bytes to each replica", update, _update_how(config, sizes)))
        seconds = {link: update / 1e9 / speed for link, speed in config.hardware.links.items()}
        plan = cls(rows, seconds)
        plan.notes.extend(_notes(plan, config, sizes))
        return plan

    def total(self, part: str) -> int:
        """Return the bytes of a part at its peak: what is there at once, and the largest of what comes and goes."""
        rows = [row for row in self.rows if row.part == part]
        passing = [row.bytes for row in rows if not row.at_once]
        return sum(row.bytes for row in rows if row.at_once) + max(passing, default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        totals = {part: self.total(part) for part in dict.fromkeys(row.part for row in self.rows)}
        return {**asdict(self), "totals": totals}

    def table(self) -> Table:
        """Return the plan as a table for terminals and notebooks."""
        table = Table(title="what this run needs, at most")
        table.add_column("what")
        table.add_column("GB", justify="right")
        table.add_column("how it is worked out")
        for part in (TRAINER, ENGINE, HOST, UPDATE):
            table.add_section()
            table.add_row(f"[bold]{part}[/]", f"[bold]{self.total(part) / 1e9:.2f}[/]", "")
            for row in self.rows:
                if row.part == part:
                    passing = "" if row.at_once else " (for a moment)"
                    table.add_row(f"  {row.item}{passing}", f"{row.bytes / 1e9:.2f}", row.how)
        for link, seconds in self.seconds.items():
            table.add_row(f"  over {link}", f"{seconds:.2f} s", "")
        return table


def _bytes(numbers: int, shards: int, each: int) -> int:
    return -(-numbers // shards) * each


def compute_dtype(config: GRPOConfig) -> torch.dtype:
    """Return the dtype of the trainer's forward passes on a GPU."""
    return torch.float32 if config.model.dtype == "float32" else torch.bfloat16


def _trainer(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what each rank of the trainer holds."""
    ranks, dtype = config.hardware.trainer_gpus, compute_dtype(config)
    yield from _states(config, sizes)
    if ranks > 1:
        yield from _gathered(config, sizes)
    if _has_reference_model(config, sizes):
        copy = _bytes(sizes.parameters, _shards(config), dtype.itemsize)
        yield PlanRow(TRAINER, "reference model", copy, f"a second model{_over(config)}")
    sequences, tokens = _micro_batch(config, hf_config)
    used = activation_bytes(hf_config, config.model, sequences, tokens, dtype, sharded=ranks > 1)
    shape = f"{sequences} sequences of {tokens:,} tokens"
    checkpointed = ", layers computed again" if config.model.activation_checkpointing else ""
    yield PlanRow(TRAINER, "a micro-batch", used, f"forward and backward of {shape}{checkpointed}", at_once=False)
    if not config.placement.cpu_offload:
        step = _bytes(sizes.trained, _shards(config), FLOAT32)
        yield PlanRow(TRAINER, "an optimizer step", step, "a number beside each trained one", at_once=False)


def _shards(config: GRPOConfig) -> int:
    """Return over how many ranks a weight is split."""
    return config.hardware.trainer_gpus // config.placement.replicate


def _ranks_of_host(config: GRPOConfig) -> int:
    return min(config.hardware.trainer_gpus, config.hardware.gpus_per_host)


def _over(config: GRPOConfig) -> str:
    return f" / {_shards(config)} ranks" if _shards(config) > 1 else ""


def _states(config: GRPOConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield weights, gradients and moments: of each rank, or of all ranks of a host that has them instead."""
    shards, width = _shards(config), compute_dtype(config).itemsize
    frozen = sizes.parameters - sizes.trained
    part, times = TRAINER, 1
    over = _over(config)
    if config.placement.cpu_offload:
        part, times = HOST, _ranks_of_host(config)
        over += f" x {times} of this host (placement.cpu_offload)"
    weights = _bytes(sizes.trained, shards, FLOAT32) + _bytes(frozen, shards, width)
    what = f"{sizes.trained:,} x 4 B" + (f" + {frozen:,} x {width} B" if frozen else "")
    yield PlanRow(part, "weights", times * weights, f"{what}{over}")
    gradients = times * _bytes(sizes.trained, shards, FLOAT32)
    yield PlanRow(part, "gradients", gradients, f"{sizes.trained:,} x 4 B{over}")
    yield PlanRow(part, "AdamW's moments", 2 * gradients, f"{sizes.trained:,} x 8 B{over}")


def _gathered(config: GRPOConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what FSDP2 has whole for a moment: a layer, the next one, and what is in none."""
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


def _has_reference_model(config: GRPOConfig, sizes: ModelSizes) -> bool:
    arguments, where = config.loss.arguments, config.loss.reference
    is_read = bool(arguments.get("kl_to_ref_coeff")) or arguments.get("kl_mask_threshold") is not None
    return is_read and (where == "model" or (where == "auto" and not sizes.adapter))


def _micro_batch(config: GRPOConfig, hf_config: Any) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the tokens of each: all as long as they can be."""
    longest = _longest(config, hf_config)
    answers = config.rollout.prompts_per_step * config.rollout.group_size // config.optim.minibatches
    answers = max(1, answers * config.placement.tensor_parallel // config.hardware.trainer_gpus)
    if config.optim.max_tokens is None:
        return answers, longest
    return max(1, min(answers, config.optim.max_tokens // longest)), longest


def _longest(config: GRPOConfig, hf_config: Any) -> int:
    text = hf_config.get_text_config()
    return int(config.engine.arguments.get("max_model_len") or text.max_position_embeddings)


def _engine_width(config: GRPOConfig, hf_config: Any) -> int:
    name = config.engine.arguments.get("dtype") or getattr(hf_config, "dtype", None) or torch.bfloat16
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), torch.bfloat16)
    assert isinstance(dtype, torch.dtype)
    return dtype.itemsize


def _engine(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what each GPU of a replica holds."""
    arguments, width = config.engine.arguments, _engine_width(config, hf_config)
    share = int(arguments.get("tensor_parallel_size", 1))
    base = sizes.parameters - sizes.adapter
    weights = _bytes(base, share, width)
    over = f" / {share} GPUs" if share > 1 else ""
    yield PlanRow(ENGINE, "weights", weights, f"{base:,} x {width} B{over}")
    if config.engine.sync.get("stage") == "shadow" and config.engine.kind == "vllm":  # "auto" is plain on a GPU
        yield PlanRow(ENGINE, "the next weights, staged", weights, "engine.sync.stage=shadow: a second model")
    budget, plain = arguments.get("kv_cache_memory_bytes"), config.engine.kind == "transformers"
    if plain:
        yield PlanRow(
            ENGINE, "the next weights, loaded", weights, "engine.kind=transformers: a second model for a moment"
        )
    if budget is None and plain:
        answers = int(arguments.get("max_num_seqs", ANSWERS_AT_A_TIME))
        budget = answers * _longest(config, hf_config) * sizes.kv * width
    if budget is None:
        utilisation = float(arguments.get("gpu_memory_utilization", UTILISATION))
        budget = max(0, int(utilisation * config.hardware.gpu_gb * 1e9) - weights)
    yield PlanRow(ENGINE, "KV cache", int(budget), _kv_how(config, hf_config, sizes, int(budget), share))


def _kv_width(config: GRPOConfig, hf_config: Any) -> int:
    name = str(config.engine.arguments.get("kv_cache_dtype", "auto"))
    if name.startswith("fp8"):
        return 1
    dtype = getattr(torch, name, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _engine_width(config, hf_config)


def _kv_how(config: GRPOConfig, hf_config: Any, sizes: ModelSizes, budget: int, share: int) -> str:
    each = _bytes(sizes.kv, min(share, sizes.kv_heads), _kv_width(config, hf_config))
    tokens = budget // each if each else 0
    return f"{each:,} B a token: {tokens:,} tokens, {tokens // _longest(config, hf_config):,} of the longest sequences"


def _host(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what the trainer's host holds."""
    rollout, sync = config.rollout, config.engine.sync
    answers = rollout.prompts_per_step * rollout.group_size
    tokens = answers * _longest(config, hf_config)
    each = TOKEN_BYTES + (sizes.route_bytes if config.loss.replay != "none" else 0)
    ahead = 1 + rollout.max_staleness
    batches = f"{ahead} batch{'es' if ahead > 1 else ''} of {answers} answers x {_longest(config, hf_config):,} tokens"
    yield PlanRow(HOST, "rollouts", ahead * tokens * TOKEN_BYTES, f"{batches} x {TOKEN_BYTES} B")
    if each > TOKEN_BYTES:
        how = f"{sizes.layers} layers x {sizes.top_k} experts x {sizes.route_bytes // (sizes.layers * sizes.top_k)} B"
        yield PlanRow(HOST, "recorded experts", ahead * tokens * sizes.route_bytes, f"{how} a token")
    if rollout.top_k:
        kept = ahead * answers * rollout.max_new_tokens * rollout.top_k * KEPT_WORD
        yield PlanRow(HOST, "kept tokens", kept, f"top_k={rollout.top_k} words x 4 B an answer's token")
    base = (sizes.parameters - sizes.adapter) * _engine_width(config, hf_config)
    if sync.get("lora") == "adapter":
        yield PlanRow(HOST, "weight store", 2 * sizes.adapter * FLOAT32, "2 versions of the adapter")
    else:
        versions = 1 if sync.get("transport") == "nccl" else int(sync.get("keep_versions", 2))
        where = "in engine.sync.folder" if sync.get("folder") else "in /dev/shm"
        how = f"{versions} version{'s' if versions > 1 else ''} {where}"
        yield PlanRow(HOST, "weight store", versions * base, how)
    yield from _copies(config, sizes)
    if config.engine.backend == "local":
        count = config.engine.num_replicas
        yield PlanRow(HOST, "processes of replicas", count * REPLICA_BYTES, f"{count} x 1.9 GB")


def _copies(config: GRPOConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what the host holds of the model for a moment: to write it, and to load it."""
    ranks = _ranks_of_host(config)
    if config.checkpoint.every:
        size = ranks * _bytes(sizes.trained, _shards(config), FLOAT32 + ADAM)
        how = f"{sizes.trained:,} x 12 B{_over(config)} x {ranks} of this host: weights and moments"
        yield PlanRow(HOST, "a checkpoint that is written", size, how, at_once=False)
    if sizes.adapter and ranks > 1:
        size, width = ranks * sizes.parameters * compute_dtype(config).itemsize, compute_dtype(config).itemsize
        how = f"{sizes.parameters:,} x {width} B x {ranks} ranks, which add an adapter to the whole"
        yield PlanRow(HOST, "the model that is loaded", size, how, at_once=False)


def _update_bytes(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> int:
    if config.engine.sync.get("lora") == "adapter":
        return sizes.adapter * FLOAT32
    return (sizes.parameters - sizes.adapter) * _engine_width(config, hf_config)


def _update_how(config: GRPOConfig, sizes: ModelSizes) -> str:
    if config.engine.sync.get("lora") == "adapter":
        return f"{sizes.adapter:,} x 4 B: the adapter alone"
    return f"{sizes.parameters - sizes.adapter:,} numbers, as wide as the engine has them"


def _notes(plan: RunPlan, config: GRPOConfig, sizes: ModelSizes) -> Iterator[str]:
    """Yield what does not fit."""
    hardware = config.hardware
    limits: Mapping[str, float] = {TRAINER: hardware.gpu_gb, ENGINE: hardware.gpu_gb, HOST: hardware.host_gb}
    for part, limit in limits.items():
        needed = plan.total(part) / 1e9
        if needed > limit:
            yield f"{part}: {needed:.1f} GB are needed, and there are {limit:g}"
    if not sizes.top_k and config.loss.replay != "none":
        yield "the model has no experts: loss.replay must be none"
    devices = hardware.trainer_gpus + config.engine.num_replicas * int(
        config.engine.arguments.get("tensor_parallel_size", 1)
    )
    yield f"{devices} GPUs in all, unless engine and trainer take turns on the same (engine.sleep)"
    yield "not counted: what CUDA, NCCL and torch's allocator keep for themselves, 1 to 3 GB a GPU"
