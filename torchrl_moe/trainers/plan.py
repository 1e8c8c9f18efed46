"""``RunPlan``: what a run needs of GPUs, hosts and network, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.model_sizes import ModelSizes, model_config_of
from torchrl_moe.trainers.placement_rules import check_axes
from torchrl_moe.trainers.plan_row import (
    ENGINE,
    FLOAT32,
    HOST,
    TRAINER,
    UPDATE,
    PlanRow,
    ranks_of_host,
    shards,
    share_of,
)
from torchrl_moe.trainers.rich_tables import Table
from torchrl_moe.trainers.trainer_plan import compute_dtype, longest, of_trainer, over

__all__ = ["RunPlan"]

ADAM = 8
"""Bytes of the two moments of a trained parameter."""
UTILISATION = 0.9
"""vLLM's default share of a GPU's memory."""
ANSWERS_AT_A_TIME = 128
"""Of ``engine.kind=transformers``."""
TOKEN_BYTES = 8 + 4 + 4 + 2
"""Bytes of a token in a batch, besides its experts: id, log-prob, version, two masks."""
REPLICA_BYTES = int(1.9e9)
"""Resident memory of the three processes of a replica, besides its model (measured with vLLM 0.30 on a CPU)."""
KEPT_WORD = 4


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run needs.

    Attributes:
        rows: memory by part, and the bytes of a weight update.
        seconds: link -> seconds of a weight update to one replica over that link: gathering from the ranks, then
            sending.
        notes: what does not fit, and further remarks.
    """

    rows: list[PlanRow]
    seconds: dict[str, float]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: GRPOConfig) -> RunPlan:
        """Work out the plan of a run.

        Raises:
            ConfigError: the model's configuration cannot be found, or is neither a name nor a folder; the ranks cannot
                share the model in this way; the engine is split in a way that the plan does not count.
        """
        source = config.model.source
        if source is None or ":" in source:
            raise ConfigError(
                f"plan=true reads the model's configuration: model.source={source} must be a folder or a hub name"
            )
        return cls.of_model(config, model_config_of(source))

    @classmethod
    def of_model(cls, config: GRPOConfig, hf_config: Any) -> RunPlan:
        """Work out the plan of a run of a model with the given transformers configuration."""
        check_axes(config.hardware.trainer_gpus, config)
        _check_engine(config)
        sizes = ModelSizes.of(hf_config, config.model)
        rows = [
            *of_trainer(config, hf_config, sizes),
            *_engine(config, hf_config, sizes),
            *_host(config, hf_config, sizes),
        ]
        updated = list(_update(config, hf_config, sizes))
        moved = sum(row.bytes for row in updated)
        plan = cls(rows + updated, {link: moved / 1e9 / speed for link, speed in config.hardware.links.items()})
        plan.notes.extend(_notes(plan, config, sizes))
        return plan

    def total(self, part: str) -> int:
        """Return the peak bytes of a part: what is permanent, plus the largest temporary item."""
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
                    passing = "" if row.at_once else " (temporarily)"
                    table.add_row(f"  {row.item}{passing}", f"{row.bytes / 1e9:.2f}", row.how)
        for link, seconds in self.seconds.items():
            table.add_row(f"  over {link}", f"{seconds:.2f} s", "")
        return table


def _check_engine(config: GRPOConfig) -> None:
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        count = int(config.engine.arguments.get(name) or 1)
        if count > 1:
            raise ConfigError(
                f"plan=true does not count engine.arguments.{name}={count}: use tensor_parallel_size, or more replicas "
                "(engine.num_replicas)"
            )


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
    weights = share_of(base, share, width)
    over = f" / {share} GPUs" if share > 1 else ""
    yield PlanRow(ENGINE, "weights", weights, f"{base:,} x {width} B{over}")
    budget, plain = arguments.get("kv_cache_memory_bytes"), config.engine.kind == "transformers"
    if plain:
        yield PlanRow(
            ENGINE, "the next weights, loaded", weights, "engine.kind=transformers: a second model, temporarily"
        )
    if budget is None and plain:
        answers = int(arguments.get("max_num_seqs", ANSWERS_AT_A_TIME))
        budget = answers * longest(config, hf_config) * sizes.kv * width
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
    each = share_of(sizes.kv, min(share, sizes.kv_heads), _kv_width(config, hf_config))
    tokens = budget // each if each else 0
    return f"{each:,} B a token: {tokens:,} tokens, {tokens // longest(config, hf_config):,} of the longest sequences"


def _host(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what the trainer's host holds."""
    rollout, sync = config.rollout, config.engine.sync
    answers = rollout.prompts_per_step * rollout.group_size
    tokens = answers * longest(config, hf_config)
    each = TOKEN_BYTES + (sizes.route_bytes if config.loss.replay != "none" else 0)
    ahead = 1 + rollout.max_staleness
    batches = f"{ahead} batch{'es' if ahead > 1 else ''} of {answers} answers x {longest(config, hf_config):,} tokens"
    yield PlanRow(HOST, "rollouts", ahead * tokens * TOKEN_BYTES, f"{batches} x {TOKEN_BYTES} B")
    if each > TOKEN_BYTES:
        how = f"{sizes.layers} layers x {sizes.top_k} experts x {sizes.route_bytes // (sizes.layers * sizes.top_k)} B"
        yield PlanRow(HOST, "recorded experts", ahead * tokens * sizes.route_bytes, f"{how} a token")
    if rollout.top_k:
        kept = ahead * answers * rollout.max_new_tokens * rollout.top_k * KEPT_WORD
        yield PlanRow(HOST, "kept tokens", kept, f"top_k={rollout.top_k} ids x 4 B an answer's token")
    base = _sent(config, hf_config, sizes)
    if sync.get("lora") == "adapter":
        yield PlanRow(HOST, "weight store", 2 * sizes.adapter * FLOAT32, "2 versions of the adapter")
    else:
        versions = int(sync.get("keep_versions", 2))
        where = "in engine.sync.folder" if sync.get("folder") else "in /dev/shm"
        how = f"{versions} version{'s' if versions > 1 else ''} {where}"
        yield PlanRow(HOST, "weight store", versions * base, how)
    yield from _copies(config, sizes)
    if config.engine.backend == "local":
        count = config.engine.num_replicas
        yield PlanRow(HOST, "processes of replicas", count * REPLICA_BYTES, f"{count} x 1.9 GB")


def _copies(config: GRPOConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield the model copies that the host holds temporarily: to write it, and to load it."""
    ranks = ranks_of_host(config)
    if config.checkpoint.every:
        size = ranks * share_of(sizes.trained, shards(config), FLOAT32 + ADAM)
        how = f"{sizes.trained:,} x 12 B{over(config)} x {ranks} of this host: weights and moments"
        yield PlanRow(HOST, "a checkpoint that is written", size, how, at_once=False)
    if ranks > 1 or sizes.adapter:
        width = compute_dtype(config).itemsize if sizes.adapter else FLOAT32
        base = sizes.parameters - sizes.adapter
        how = f"{base:,} x {width} B on rank 0's host, to be written at the end"
        yield PlanRow(HOST, "the model that is saved", base * width, how, at_once=False)
    if sizes.adapter and ranks > 1:
        size, width = ranks * sizes.parameters * compute_dtype(config).itemsize, compute_dtype(config).itemsize
        how = f"{sizes.parameters:,} x {width} B x {ranks} ranks, which add an adapter to the whole"
        yield PlanRow(HOST, "the model that is loaded", size, how, at_once=False)


def _sent_width(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> int:
    """Return the bytes per element sent to the engine: of the narrower dtype, or of the trainer's if configured."""
    own = compute_dtype(config).itemsize if sizes.adapter else FLOAT32
    return own if config.engine.sync.get("dtype") == "trainer" else min(own, _engine_width(config, hf_config))


def _sent(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> int:
    return (sizes.parameters - sizes.adapter) * _sent_width(config, hf_config, sizes)


def _update(config: GRPOConfig, hf_config: Any, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what a weight update moves: the other ranks' parts to each rank, then all to each replica."""
    if config.engine.sync.get("lora") == "adapter":
        how = f"{sizes.adapter:,} x 4 B: the adapter alone"
        yield PlanRow(UPDATE, "bytes to each replica", sizes.adapter * FLOAT32, how)
        return
    base, split = sizes.parameters - sizes.adapter, shards(config)
    if split > 1:
        width = compute_dtype(config).itemsize if sizes.adapter else _sent_width(config, hf_config, sizes)
        whole, how = base * width, f"{base:,} x {width} B"
        if sizes.adapter:
            whole += sizes.adapted * FLOAT32
            how += f" + {sizes.adapted:,} x 4 B that the adapter adds"
        gathered = whole - share_of(whole, split, 1)
        yield PlanRow(UPDATE, "bytes to each rank from the others", gathered, f"({how}) x {split - 1} / {split}")
    how = f"{base:,} numbers, as wide as the engine has them"
    yield PlanRow(UPDATE, "bytes to each replica", _sent(config, hf_config, sizes), how)


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
    of_engine = config.engine.num_replicas * int(config.engine.arguments.get("tensor_parallel_size") or 1)
    here = of_engine + ranks_of_host(config)
    if config.engine.backend == "local" and not config.engine.sleep and here > hardware.gpus_per_host:
        yield (
            f"rank 0's host needs {here} GPUs for its ranks and local replicas, and has {hardware.gpus_per_host}: "
            "engine.backend=ray places replicas on other hosts"
        )
    if config.placement.cpu_offload:
        yield "placement.cpu_offload: ranks gather weights over gloo, as fast as TCP between them is, on one host too"
    if config.engine.sleep:
        devices = max(hardware.trainer_gpus, of_engine)
        yield f"{_gpus(devices)} in all: engine and trainer take turns (engine.sleep=true)"
    else:
        devices = hardware.trainer_gpus + of_engine
        yield f"{_gpus(devices)} in all: {hardware.trainer_gpus} for the trainer, {of_engine} for the engine"
    yield "not counted: what CUDA, NCCL and torch's allocator keep for themselves, 1 to 3 GB a GPU"


def _gpus(count: int) -> str:
    return f"{count} GPU" + "s" * (count != 1)
