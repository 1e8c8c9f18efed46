"""``RunPlan``: what a run needs of GPUs, hosts and network, before anything is started."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchrl_moe._compat_memory import peak_bytes, without_memory
from torchrl_moe.modules.backends.checkpoint import check_reachable
from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection
from torchrl_moe.modules.policies.unstack import LoraLayers, base_model, has_adapters
from torchrl_moe.modules.replay.discovery import EXPERT_COUNTS
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, ModelConfig
from torchrl_moe.trainers.policy_model import prepared
from torchrl_moe.trainers.ranks import check_axes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
try:
    from rich.console import Console as Console  # the command line draws with it too
    from rich.table import Table as RichTable
except ImportError as error:
    raise ImportError("the trainer's tables need rich: pip install 'torchrl_moe[train]'") from error


class Table(RichTable):
    """A table of rich's that is readable text where it is printed; terminals and notebooks draw it as rich does."""

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, color_system=None).print(self)
        return text.getvalue().rstrip()


# The machines that a line of a plan can refer to.
TRAINER, ENGINE, HOST, UPDATE = "trainer, each GPU", "engine, each GPU", "host of the trainer", "weight update"
FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A line of a plan: bytes of one thing on one machine; ``at_once``: for as long as the run lasts."""

    part: str
    item: str
    bytes: int
    how: str
    at_once: bool = True


def share_of(numbers: int, shards: int, each: int) -> int:
    """Return the bytes of the largest share, when elements of ``each`` bytes are split into so many shares."""
    return -(-numbers // shards) * each


def shards(config: GRPOConfig) -> int:
    """Return the number of ranks that a weight is split over."""
    return config.hardware.trainer_gpus // config.placement.replicate


def ranks_of_host(config: GRPOConfig) -> int:
    """Return the number of ranks on rank 0's host."""
    return min(config.hardware.trainer_gpus, config.hardware.gpus_per_host)


# The size of a model, computed from its configuration; no weights are loaded or allocated.
KNOWN = {
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "allenai/OLMoE-1B-7B-0125-Instruct": "olmoe_1b_7b",
    "allenai/OLMoE-1B-7B-0125": "olmoe_1b_7b",
}
"""Hub models whose ``config.json`` is in the package, so that a plan needs no network."""
MODELS = Path(__file__).parent / "configs" / "models"
EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")
TOP_KS = ("num_experts_per_tok", "moe_topk", "moe_k")
DENSE_FIRST = "first_k_dense_replace"
"""The config key of DeepSeek's families for the number of leading layers without experts."""


def model_config_of(source: str) -> PreTrainedConfig:
    """Return the transformers configuration of a folder, a hub name, or a hub model that is known here.

    >>> model_config_of("Qwen/Qwen3-30B-A3B").num_hidden_layers
    48
    """
    from transformers import AutoConfig

    kept = KNOWN.get(source)
    try:
        if not kept:
            check_reachable(source)
        return AutoConfig.from_pretrained(MODELS / f"{kept}.json" if kept else source)
    except (OSError, ValueError) as error:
        raise ConfigError.of(f"model.source={source}", error) from error


@dataclass(frozen=True, slots=True)
class _Settings:
    """A key for cached results: two are equal if the model and its training settings, written out, are."""

    described: str
    hf_config: PreTrainedConfig = field(compare=False)
    model_config: ModelConfig = field(compare=False)

    @classmethod
    def of(cls, hf_config: PreTrainedConfig, model_config: ModelConfig) -> _Settings:
        values = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
        attention = getattr(hf_config, "_attn_implementation", None)
        return cls(f"{type(hf_config)} {values} {attention} {model_config}", hf_config, model_config)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, as element counts, not bytes."""

    parameters: int
    trained: int
    adapter: int
    adapted: int
    layer: int
    outside: int
    experts: int
    largest: int
    hidden: int
    expert_width: int
    layers: int
    top_k: int
    num_experts: int
    kv: int
    kv_heads: int

    @classmethod
    def of(cls, hf_config: PreTrainedConfig, model_config: ModelConfig) -> ModelSizes:
        """Count; the result for equal arguments is kept."""
        return cls._counted(_Settings.of(hf_config, model_config))

    @classmethod
    @lru_cache(maxsize=32)
    def _counted(cls, settings: _Settings) -> ModelSizes:
        hf_config, model_config = settings.hf_config, settings.model_config
        text = hf_config.get_text_config()
        # the trainer's own preparation, on a model without memory: adapters and frozen weights are counted as they are
        with torch.device("meta"):
            model = prepared(
                _made(hf_config, torch.float32), replace(model_config, activation_checkpointing=False), torch.float32
            )
        counts = {name: weight.numel() for name, weight in model.named_parameters()}
        layers = int(text.num_hidden_layers)
        by_layer = [sum(n for name, n in counts.items() if f"layers.{i}." in name) for i in range(layers)]
        adapter = sum(n for name, n in counts.items() if "lora_" in name)
        return cls(
            parameters=sum(counts.values()),
            trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
            adapter=adapter,
            adapted=_adapted(model),
            layer=max(by_layer),
            outside=sum(counts.values()) - sum(by_layer),
            experts=sum(n for name, n in counts.items() if ".experts." in name and "lora_" not in name),
            largest=max(counts.values()),
            hidden=int(text.hidden_size),
            expert_width=_first(text, EXPERT_WIDTHS),
            layers=layers,
            top_k=_first(text, TOP_KS),
            num_experts=_first(text, EXPERT_COUNTS),
            kv=layers * _kv_per_layer(text),
            kv_heads=_kv_heads(text),
        )

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's recorded experts, as ``("routed_experts", "full")`` holds them."""
        return self.layers * self.top_k * (1 if self.num_experts <= 128 else 2)


def activation_bytes(
    hf_config: PreTrainedConfig,
    model_config: ModelConfig,
    sequences: int,
    tokens: int,
    dtype: torch.dtype,
    *,
    sharded: bool = False,
) -> int:
    """Return the peak bytes that a forward and backward pass need besides weights and their gradients.

    Two models with the same layers are run on shapes alone (meta tensors), one a layer deeper than the other; each
    further layer is assumed to take the difference. Attention is the CPU's implementation which, like flash attention,
    keeps no attention scores. The result for equal arguments is kept.
    """
    return _activation_bytes(_Settings.of(hf_config, model_config), sequences, tokens, dtype, sharded)


@lru_cache(maxsize=64)
def _activation_bytes(settings: _Settings, sequences: int, tokens: int, dtype: torch.dtype, sharded: bool) -> int:
    hf_config, model_config = settings.hf_config, settings.model_config
    text = hf_config.get_text_config()
    layers = int(text.num_hidden_layers)
    # with a single layer the peak is elsewhere
    fewer = min(int(getattr(text, DENSE_FIRST, 0) or 0) + 2, layers)
    # two depths, and the difference for each layer more
    given = (model_config, sequences, tokens, dtype, sharded)
    least = _peak(_cut(hf_config, fewer), *given)
    if fewer == layers:
        return least
    return least + (layers - fewer) * (_peak(_cut(hf_config, fewer + 1), *given) - least)


def _peak(
    hf_config: PreTrainedConfig,
    model_config: ModelConfig,
    sequences: int,
    tokens: int,
    dtype: torch.dtype,
    sharded: bool,
) -> int:
    with without_memory():
        frozen = model_config.lora.rank > 0
        model = prepared(_made(hf_config, dtype if frozen or sharded else torch.float32), model_config, dtype)
        for weight in model.parameters():
            if sharded:
                weight.data = weight.data.to(dtype)  # as it is gathered
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)  # accumulated by earlier micro-batches
        autocast: AbstractContextManager[object] = nullcontext()
        if not sharded and dtype != torch.float32:
            autocast = torch.autocast("cpu", dtype)
        return peak_bytes(lambda: _step(model, sequences, tokens, autocast))


def _step(model: nn.Module, sequences: int, tokens: int, precision: AbstractContextManager[object]) -> None:
    """Run a forward and backward pass as the trainer does: scores of all tokens, no logits."""
    scoring = ScoringModel(model)
    scoring.splits = True  # the check needs real values
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": torch.arange(tokens).expand(sequences, -1)}
    rows = torch.arange(ids.numel())
    selection = Selection(rows=rows, tokens=ids.flatten(), temperature=1.0, entropy=True)
    with precision:
        log_probs, _, _ = scoring(inputs, selection)
    log_probs.sum().backward()


def _made(hf_config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), dtype=dtype)


def _cut(hf_config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the configuration of a model of fewer layers."""
    cut = copy.deepcopy(hf_config)
    text = cut.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    return cut


def _adapted(model: PreTrainedModel) -> int:
    if not has_adapters(model):
        return 0
    base = base_model(model)
    lora = LoraLayers(base)
    weights = dict(lora.own_weights(base.state_dict()))
    return sum(weights[key].numel() for key in lora.in_use())


def _kv_heads(text: PreTrainedConfig) -> int:
    if getattr(text, "kv_lora_rank", None):
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _kv_per_layer(text: PreTrainedConfig) -> int:
    """Return the number of elements that a layer's cache holds per token."""
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # DeepSeek's latent attention: one vector, and the rotated part of the keys
        return int(latent) + int(text.qk_rope_head_dim)
    heads = _kv_heads(text)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * heads * width


def _first(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    return next((int(getattr(text, name)) for name in names if getattr(text, name, None)), 0)


# The trainer's part of a plan: what each rank holds, and what it gets from the others.
EXCHANGED = 4
"""Rows of hidden states that an exchange holds per token and expert, besides the experts' input: rows sent,
rows received back, the same rows reordered, and weighted (transformers 5.23, ``AllToAllEP``)."""


def compute_dtype(config: GRPOConfig) -> torch.dtype:
    """Return the dtype of the trainer's forward passes on a GPU."""
    return torch.float32 if config.model.dtype == "float32" else torch.bfloat16


def over(config: GRPOConfig) -> str:
    """Return the text by which a plan says how weights are split."""
    return f" / {shards(config)} ranks" if shards(config) > 1 else ""


def longest(config: GRPOConfig, hf_config: PreTrainedConfig) -> int:
    """Return the token count of the longest sequence that the engine accepts."""
    text = hf_config.get_text_config()
    return int(config.engine.arguments.get("max_model_len") or text.max_position_embeddings)


def of_trainer(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what each rank of the trainer holds."""
    ranks, dtype = config.hardware.trainer_gpus, compute_dtype(config)
    # permanent first, then what is there for a while
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
    # offloaded, the host holds the parts of all its ranks
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

    # two layers at a time: one computes while the next is gathered
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
    # each token goes to its top_k experts; ranks that split layers send a part of them each
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


def _micro_batch(config: GRPOConfig, hf_config: PreTrainedConfig) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the tokens of each: all as long as they can be."""
    # the worst case: each answer as long as the engine allows
    tokens = longest(config, hf_config)
    answers = config.rollout.prompts_per_step * config.rollout.group_size // config.optim.minibatches
    answers = max(1, answers * config.placement.tensor_parallel // config.hardware.trainer_gpus)
    if config.optim.max_tokens is None:
        return answers, tokens
    return max(1, min(answers, config.optim.max_tokens // tokens)), tokens


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
TOKEN_ID_BYTES = 4


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
    def of_model(cls, config: GRPOConfig, hf_config: PreTrainedConfig) -> RunPlan:
        """Work out the plan of a run of a model with the given transformers configuration."""
        check_axes(config.hardware.trainer_gpus, config)
        _check_engine(config)
        # memory, then the bytes of an update, then what these say: notes need the totals
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

    def to_dict(self) -> dict[str, object]:
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


def _engine_width(config: GRPOConfig, hf_config: PreTrainedConfig) -> int:
    name = config.engine.arguments.get("dtype") or getattr(hf_config, "dtype", None) or torch.bfloat16
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), torch.bfloat16)
    assert isinstance(dtype, torch.dtype)
    return dtype.itemsize


def _engine(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what each GPU of a replica holds."""
    arguments, width = config.engine.arguments, _engine_width(config, hf_config)
    # the engine's weights have no adapter: it is added to them, or served beside them
    share = int(arguments.get("tensor_parallel_size", 1))
    base = sizes.parameters - sizes.adapter
    weights = share_of(base, share, width)
    over = f" / {share} GPUs" if share > 1 else ""
    yield PlanRow(ENGINE, "weights", weights, f"{base:,} x {width} B{over}")
    # the cache: as configured, as many answers as transformers takes, or what vLLM's share of the GPU leaves
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


def _kv_width(config: GRPOConfig, hf_config: PreTrainedConfig) -> int:
    name = str(config.engine.arguments.get("kv_cache_dtype", "auto"))
    if name.startswith("fp8"):
        return 1
    dtype = getattr(torch, name, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _engine_width(config, hf_config)


def _kv_how(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes, budget: int, share: int) -> str:
    each = share_of(sizes.kv, min(share, sizes.kv_heads), _kv_width(config, hf_config))
    tokens = budget // each if each else 0
    return f"{each:,} B a token: {tokens:,} tokens, {tokens // longest(config, hf_config):,} of the longest sequences"


def _host(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what the trainer's host holds."""
    rollout, sync = config.rollout, config.engine.sync
    answers = rollout.prompts_per_step * rollout.group_size
    tokens = answers * longest(config, hf_config)
    each = TOKEN_BYTES + (sizes.route_bytes if config.loss.replay != "none" else 0)
    # batches that wait for the trainer, beside the one that it trains on
    ahead = 1 + rollout.max_staleness
    batches = f"{ahead} batch{'es' if ahead > 1 else ''} of {answers} answers x {longest(config, hf_config):,} tokens"
    yield PlanRow(HOST, "rollouts", ahead * tokens * TOKEN_BYTES, f"{batches} x {TOKEN_BYTES} B")
    if each > TOKEN_BYTES:
        how = f"{sizes.layers} layers x {sizes.top_k} experts x {sizes.route_bytes // (sizes.layers * sizes.top_k)} B"
        yield PlanRow(HOST, "recorded experts", ahead * tokens * sizes.route_bytes, f"{how} a token")
    if rollout.top_k:
        kept = ahead * answers * rollout.max_new_tokens * rollout.top_k * TOKEN_ID_BYTES
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


def _sent_width(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes) -> int:
    """Return the bytes per element sent to the engine: of the narrower dtype, or of the trainer's if configured."""
    own = compute_dtype(config).itemsize if sizes.adapter else FLOAT32
    return own if config.engine.sync.get("dtype") == "trainer" else min(own, _engine_width(config, hf_config))


def _sent(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes) -> int:
    return (sizes.parameters - sizes.adapter) * _sent_width(config, hf_config, sizes)


def _update(config: GRPOConfig, hf_config: PreTrainedConfig, sizes: ModelSizes) -> Iterator[PlanRow]:
    """Yield what a weight update moves: the other ranks' parts to each rank, then all to each replica."""
    if config.engine.sync.get("lora") == "adapter":
        how = f"{sizes.adapter:,} x 4 B: the adapter alone"
        yield PlanRow(UPDATE, "bytes to each replica", sizes.adapter * FLOAT32, how)
        return
    base, split = sizes.parameters - sizes.adapter, shards(config)
    # each rank gathers what it lacks of the whole
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
    # GPUs: of rank 0's host, and in all
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
        devices, how = max(hardware.trainer_gpus, of_engine), "engine and trainer take turns (engine.sleep=true)"
    else:
        devices = hardware.trainer_gpus + of_engine
        how = f"{hardware.trainer_gpus} for the trainer, {of_engine} for the engine"
    yield f"{devices} GPU{'s' * (devices != 1)} in all: {how}"
    yield "not counted: what CUDA, NCCL and torch's allocator keep for themselves, 1 to 3 GB a GPU"
