"""``RunPlan``: what a run needs of GPUs, hosts and network, before anything is started."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchrl_moe._compat_memory import peak_bytes, without_memory
from torchrl_moe.modules.backends.checkpoint import check_reachable
from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection
from torchrl_moe.modules.policies.unstack import LoraLayers, base_model, has_adapters
from torchrl_moe.modules.replay.discovery import EXPERT_COUNTS
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, ModelConfig
from torchrl_moe.trainers.policy_model import prepared
from torchrl_moe.trainers.ranks import check_axes, not_in_this_transformers

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
PARTS = TRAINER, ENGINE, HOST, UPDATE = "trainer, each GPU", "engine, each GPU", "host of the trainer", "weight update"
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
        # weights that the adapter changes, each as it is sent
        adapted = 0
        if has_adapters(model):
            base = base_model(model)
            lora = LoraLayers(base)
            weights = dict(lora.own_weights(base.state_dict()))
            adapted = sum(weights[key].numel() for key in lora.in_use())
        # a token's cache: keys and values of each head, or DeepSeek's latent attention, which is one vector and the
        # rotated part of the keys
        latent = getattr(text, "kv_lora_rank", None)
        if latent:
            kv_heads, kv = 1, int(latent) + int(text.qk_rope_head_dim)
        else:
            kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
            kv = 2 * kv_heads * int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        return cls(
            parameters=sum(counts.values()),
            trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
            adapter=sum(n for name, n in counts.items() if "lora_" in name),
            adapted=adapted,
            layer=max(by_layer),
            outside=sum(counts.values()) - sum(by_layer),
            experts=sum(n for name, n in counts.items() if ".experts." in name and "lora_" not in name),
            largest=max(counts.values()),
            hidden=int(text.hidden_size),
            expert_width=_first(text, EXPERT_WIDTHS),
            layers=layers,
            top_k=_first(text, TOP_KS),
            num_experts=_first(text, EXPERT_COUNTS),
            kv=layers * kv,
            kv_heads=kv_heads,
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

        def step() -> None:
            # forward and backward as the trainer does: scores of all tokens, no logits; the inputs count, too
            scoring = ScoringModel(model)
            scoring.splits = True  # the check needs real values
            ids = torch.zeros(sequences, tokens, dtype=torch.long)
            inputs = {"input_ids": ids, "position_ids": torch.arange(tokens).expand(sequences, -1)}
            rows = torch.arange(ids.numel())
            selection = Selection(rows=rows, tokens=ids.flatten(), temperature=1.0, entropy=True)
            with torch.autocast("cpu", dtype, enabled=not sharded and dtype != torch.float32):
                log_probs, _, _ = scoring(inputs, selection)
            log_probs.sum().backward()

        return peak_bytes(step)


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


def _first(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    return next((int(getattr(text, name)) for name in names if getattr(text, name, None)), 0)


EXCHANGED = 4
"""Rows of hidden states that an exchange holds per token and expert, besides the experts' input: rows sent,
rows received back, the same rows reordered, and weighted (transformers 5.23, ``AllToAllEP``)."""
ADAM = 8
"""Bytes of the two moments of a trained parameter."""
UTILISATION = 0.9
"""vLLM's default share of a GPU's memory."""
ANSWERS_AT_A_TIME = 128
"""Of ``engine.kind=transformers``."""
TOKEN_BYTES = 8 + 4 + 4 + 2
"""Bytes of a token in a batch, besides its experts: id, log-prob, version, two masks."""
REPLICA_BYTES = int(1.9e9)
"""Resident memory of three processes of a replica, as on a GPU, besides its model (vLLM 0.30, on a CPU)."""
TOKEN_ID_BYTES = 4


class Needs:
    """What each part of a run holds and moves, as rows of its plan."""

    def __init__(self, config: GRPOConfig, hf_config: PreTrainedConfig) -> None:
        self.config, self.hf_config, self.sizes = config, hf_config, ModelSizes.of(hf_config, config.model)
        arguments, hardware = config.engine.arguments, config.hardware
        # of the trainer: forward passes on a GPU, ranks that a weight is split over, ranks of rank 0's host
        self.dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
        self.width, self.split = self.dtype.itemsize, hardware.trainer_gpus // config.placement.replicate
        self.over = f" / {self.split} ranks" if self.split > 1 else ""
        self.ranks_here = min(hardware.trainer_gpus, hardware.gpus_per_host)
        # of the engine: its longest sequence, its weights, which have no adapter (it is added to them, or served beside
        # them), and the GPUs of a replica
        self.longest = int(arguments.get("max_model_len") or hf_config.get_text_config().max_position_embeddings)
        self.base = self.sizes.parameters - self.sizes.adapter
        self.tensor_parallel = int(arguments.get("tensor_parallel_size") or 1)
        self.engine_width = _width(arguments.get("dtype") or getattr(hf_config, "dtype", None), 2)
        # weights are sent in the narrower dtype, or in the trainer's if so configured
        own = self.width if self.sizes.adapter else FLOAT32
        self.sent_width = own if config.engine.sync.get("dtype") == "trainer" else min(own, self.engine_width)

    def of_trainer(self) -> Iterator[PlanRow]:
        """Yield what each rank of the trainer holds, or, of what is offloaded, all ranks of a host."""
        config, sizes, own, over = self.config, self.sizes, self.config.placement, self.over
        # permanent first: weights, gradients and moments
        part, times, how = TRAINER, 1, over
        if own.cpu_offload:
            part, times = HOST, self.ranks_here
            how += f" x {times} of this host (placement.cpu_offload)"
        frozen, trained = sizes.parameters - sizes.trained, share_of(sizes.trained, self.split, FLOAT32)
        what = f"{sizes.trained:,} x 4 B" + (f" + {frozen:,} x {self.width} B" if frozen else "")
        yield PlanRow(part, "weights", times * (trained + share_of(frozen, self.split, self.width)), f"{what}{how}")
        yield PlanRow(part, "gradients", times * trained, f"{sizes.trained:,} x 4 B{how}")
        yield PlanRow(part, "AdamW's moments", 2 * times * trained, f"{sizes.trained:,} x 8 B{how}")
        if config.hardware.trainer_gpus > 1:
            yield from self._gathered()
        loss = config.loss
        reads_reference = loss.arguments.get("kl_to_ref_coeff") or loss.arguments.get("kl_mask_threshold") is not None
        if reads_reference and (loss.reference == "model" or (loss.reference == "auto" and not sizes.adapter)):
            copy = share_of(sizes.parameters, self.split, self.width)
            yield PlanRow(TRAINER, "reference model", copy, f"a second model{over}")
        # then what is there for a while; the worst micro-batch: each answer as long as the engine allows
        tokens, limit = self.longest, config.optim.max_tokens
        answers = config.rollout.prompts_per_step * config.rollout.group_size // config.optim.minibatches
        sequences = max(1, answers * own.tensor_parallel // config.hardware.trainer_gpus)
        if limit is not None:
            sequences = max(1, min(sequences, limit // tokens))
        is_sharded = config.hardware.trainer_gpus > 1
        used = activation_bytes(self.hf_config, config.model, sequences, tokens, self.dtype, sharded=is_sharded)
        checkpointed = ", layers computed again" if config.model.activation_checkpointing else ""
        how = f"forward and backward of {sequences} sequences of {tokens:,} tokens{checkpointed}"
        yield PlanRow(TRAINER, "a micro-batch", used, how, at_once=False)
        if own.expert_parallel > 1:
            yield from self._exchanged(sequences * tokens)
        if not own.cpu_offload:
            yield PlanRow(TRAINER, "an optimizer step", trained, "a number beside each trained one", at_once=False)

    def _gathered(self) -> Iterator[PlanRow]:
        """Yield what a rank briefly holds unsharded: two layers, what is in no layer, and a weight being written."""
        sizes, own, width = self.sizes, self.config.placement, self.width

        def of_rank(numbers: int, experts: int) -> int:
            return -(-(numbers - experts) // own.tensor_parallel) + -(-experts // own.expert_parallel)

        # two layers at a time: one computes while the next is gathered
        layer = of_rank(sizes.layer, min(sizes.layer, sizes.experts // sizes.layers))
        if own.reshard_after_forward:
            numbers = 2 * layer + of_rank(sizes.outside, 0)
            how = f"2 layers of {layer:,}, and what is in none, x {width} B"
        else:
            numbers, how = of_rank(sizes.parameters, sizes.experts), f"all layers x {width} B (placement)"
        how += f"; experts / {own.expert_parallel}" if own.expert_parallel > 1 else ""
        yield PlanRow(TRAINER, "gathered layers", numbers * width, how)
        if sizes.trained == sizes.parameters:
            yield PlanRow(TRAINER, "gradients that are being reduced", layer * FLOAT32, "1 layer x 4 B")
        part, times = (HOST, self.ranks_here) if own.cpu_offload else (TRAINER, 1)
        count = f" x {times} ranks" if own.cpu_offload else ""
        how = f"{sizes.largest:,} x 4 B{count}, when the model is saved; less in a weight update"
        whole = times * sizes.largest * FLOAT32
        yield PlanRow(part, "a weight that is gathered to be written", whole, how, at_once=False)

    def _exchanged(self, tokens: int) -> Iterator[PlanRow]:
        """Yield what expert parallelism needs: for tokens on their way, and on the rank whose experts get most."""
        sizes, own, width = self.sizes, self.config.placement, self.width
        # each token goes to its top_k experts; ranks that split layers send a part of them each
        rows = -(-tokens // own.tensor_parallel) * sizes.top_k
        sent = EXCHANGED * rows * sizes.hidden * width
        shape = f"{rows:,} tokens and experts x {sizes.hidden:,} x {width} B"
        yield PlanRow(TRAINER, "tokens on their way to experts", sent, f"{EXCHANGED} x {shape}")
        more = max(min(self.config.hardware.expert_imbalance, own.expert_parallel), 1) - 1
        of_row = 2 * sizes.hidden + 3 * sizes.expert_width  # in and out; gate, up and their product
        kept = 1 if self.config.model.activation_checkpointing else sizes.layers
        how = f"{1 + more:g} times the mean (hardware.expert_imbalance): {more:g} x {rows:,} x {of_row:,} x {width} B"
        layers = f" x {kept} layers" if kept > 1 else ""
        busy = int(more * rows) * of_row * width * kept
        yield PlanRow(TRAINER, "more tokens on the busiest rank", busy, f"{how}{layers}")

    def of_engine(self) -> Iterator[PlanRow]:
        """Yield what each GPU of a replica holds."""
        arguments, width, sizes, share = (
            self.config.engine.arguments,
            self.engine_width,
            self.sizes,
            self.tensor_parallel,
        )
        weights = share_of(self.base, share, width)
        over = f" / {share} GPUs" if share > 1 else ""
        yield PlanRow(ENGINE, "weights", weights, f"{self.base:,} x {width} B{over}")
        # the cache: as configured, as many answers as transformers takes, or what vLLM's share of the GPU leaves
        budget, plain = arguments.get("kv_cache_memory_bytes"), self.config.engine.kind == "transformers"
        if plain:
            how = "engine.kind=transformers: a second model, temporarily"
            yield PlanRow(ENGINE, "the next weights, loaded", weights, how)
        if budget is None and plain:
            budget = int(arguments.get("max_num_seqs", ANSWERS_AT_A_TIME)) * self.longest * sizes.kv * width
        if budget is None:
            utilisation = float(arguments.get("gpu_memory_utilization", UTILISATION))
            budget = max(0, int(utilisation * self.config.hardware.gpu_gb * 1e9) - weights)
        name = str(arguments.get("kv_cache_dtype", "auto"))
        kv_width = 1 if name.startswith("fp8") else _width(name, width)
        each = share_of(sizes.kv, min(share, sizes.kv_heads), kv_width)
        tokens = int(budget) // each if each else 0
        how = f"{each:,} B a token: {tokens:,} tokens, {tokens // self.longest:,} of the longest sequences"
        yield PlanRow(ENGINE, "KV cache", int(budget), how)

    def of_host(self) -> Iterator[PlanRow]:
        """Yield what the trainer's host holds."""
        config, sizes, rollout, sync = self.config, self.sizes, self.config.rollout, self.config.engine.sync
        answers = rollout.prompts_per_step * rollout.group_size
        # batches that wait for the trainer, beside the one that it trains on
        ahead = 1 + rollout.max_staleness
        tokens = ahead * answers * self.longest
        batches = f"{ahead} batch{'es' if ahead > 1 else ''} of {answers} answers x {self.longest:,} tokens"
        yield PlanRow(HOST, "rollouts", tokens * TOKEN_BYTES, f"{batches} x {TOKEN_BYTES} B")
        if config.loss.replay != "none" and sizes.route_bytes:
            each = sizes.route_bytes // (sizes.layers * sizes.top_k)
            how = f"{sizes.layers} layers x {sizes.top_k} experts x {each} B a token"
            yield PlanRow(HOST, "recorded experts", tokens * sizes.route_bytes, how)
        if rollout.top_k:
            kept = ahead * answers * rollout.max_new_tokens * rollout.top_k * TOKEN_ID_BYTES
            yield PlanRow(HOST, "kept tokens", kept, f"top_k={rollout.top_k} ids x 4 B an answer's token")
        if sync.get("lora") == "adapter":
            yield PlanRow(HOST, "weight store", 2 * sizes.adapter * FLOAT32, "2 versions of the adapter")
        else:
            versions = int(sync.get("keep_versions", 2))
            where = "in engine.sync.folder" if sync.get("folder") else "in /dev/shm"
            how = f"{versions} version{'s' if versions > 1 else ''} {where}"
            yield PlanRow(HOST, "weight store", versions * self.base * self.sent_width, how)
        # copies of the model that are there temporarily: to write it, and to load it
        ranks, width = self.ranks_here, self.width
        if config.checkpoint.every:
            size = ranks * share_of(sizes.trained, self.split, FLOAT32 + ADAM)
            how = f"{sizes.trained:,} x 12 B{self.over} x {ranks} of this host: weights and moments"
            yield PlanRow(HOST, "a checkpoint that is written", size, how, at_once=False)
        if ranks > 1 or sizes.adapter:
            saved = width if sizes.adapter else FLOAT32
            how = f"{self.base:,} x {saved} B on rank 0's host, to be written at the end"
            yield PlanRow(HOST, "the model that is saved", self.base * saved, how, at_once=False)
        if sizes.adapter and ranks > 1:
            how = f"{sizes.parameters:,} x {width} B x {ranks} ranks, which add an adapter to the whole"
            yield PlanRow(HOST, "the model that is loaded", ranks * sizes.parameters * width, how, at_once=False)
        if config.engine.backend == "local":
            count = config.engine.num_replicas
            yield PlanRow(HOST, "processes of replicas", count * REPLICA_BYTES, f"{count} x 1.9 GB")

    def of_update(self) -> Iterator[PlanRow]:
        """Yield what a weight update moves: the other ranks' parts to each rank, then all to each replica."""
        sizes, base, split = self.sizes, self.base, self.split
        if self.config.engine.sync.get("lora") == "adapter":
            how = f"{sizes.adapter:,} x 4 B: the adapter alone"
            yield PlanRow(UPDATE, "bytes to each replica", sizes.adapter * FLOAT32, how)
            return
        # each rank gathers what it lacks of the whole
        if split > 1:
            width = self.width if sizes.adapter else self.sent_width
            whole, how = base * width, f"{base:,} x {width} B"
            if sizes.adapter:
                whole += sizes.adapted * FLOAT32
                how += f" + {sizes.adapted:,} x 4 B that the adapter adds"
            gathered = whole - share_of(whole, split, 1)
            yield PlanRow(UPDATE, "bytes to each rank from the others", gathered, f"({how}) x {split - 1} / {split}")
        how = f"{base:,} numbers, as wide as the engine has them"
        yield PlanRow(UPDATE, "bytes to each replica", base * self.sent_width, how)

    def notes(self, plan: RunPlan) -> Iterator[str]:
        """Yield what does not fit, and what the numbers leave out."""
        config, hardware, engine = self.config, self.config.hardware, self.config.engine
        limits = {TRAINER: hardware.gpu_gb, ENGINE: hardware.gpu_gb, HOST: hardware.host_gb}
        for part, limit in limits.items():
            needed = plan.total(part) / 1e9
            if needed > limit:
                yield f"{part}: {needed:.1f} GB are needed, and there are {limit:g}"
        if not self.sizes.top_k and config.loss.replay != "none":
            yield "the model has no experts: loss.replay must be none"
        if problem := not_in_this_transformers(config.placement):
            yield problem
        # GPUs: of rank 0's host, and in all
        of_engine = engine.num_replicas * self.tensor_parallel
        here = of_engine + self.ranks_here
        if engine.backend == "local" and not engine.sleep and here > hardware.gpus_per_host:
            yield (
                f"rank 0's host needs {here} GPUs for its ranks and local replicas, and has {hardware.gpus_per_host}: "
                "engine.backend=ray places replicas on other hosts"
            )
        if config.placement.cpu_offload:
            yield (
                "placement.cpu_offload: ranks gather weights over gloo, as fast as TCP between them is, on one host too"
            )
        if engine.sleep:
            devices, how = max(hardware.trainer_gpus, of_engine), "engine and trainer take turns (engine.sleep=true)"
        else:
            devices = hardware.trainer_gpus + of_engine
            how = f"{hardware.trainer_gpus} for the trainer, {of_engine} for the engine"
        yield f"{devices} GPU{'s' * (devices != 1)} in all: {how}"
        yield "not counted: what CUDA, NCCL and torch's allocator keep for themselves, 1 to 3 GB a GPU"


def _width(dtype: object, otherwise: int) -> int:
    """Return the bytes of a number of a dtype, which may be given by its name."""
    named = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    return named.itemsize if isinstance(named, torch.dtype) else otherwise


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
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            count = int(config.engine.arguments.get(name) or 1)
            if count > 1:
                raise ConfigError(
                    f"plan=true does not count engine.arguments.{name}={count}: use tensor_parallel_size, or more "
                    "replicas (engine.num_replicas)"
                )
        # memory, then the bytes of an update, then what these say: notes need the totals
        needs = Needs(config, hf_config)
        updated = list(needs.of_update())
        rows = [*needs.of_trainer(), *needs.of_engine(), *needs.of_host(), *updated]
        moved = sum(row.bytes for row in updated)
        plan = cls(rows, {link: moved / 1e9 / speed for link, speed in config.hardware.links.items()})
        plan.notes.extend(needs.notes(plan))
        return plan

    def total(self, part: str) -> int:
        """Return the peak bytes of a part: what is permanent, plus the largest temporary item.

        Args:
            part: ``"trainer, each GPU"``, ``"engine, each GPU"``, ``"host of the trainer"`` or ``"weight update"``.

        Raises:
            ValueError: another part.
        """
        if part not in PARTS:
            raise ValueError(f"part must be one of {PARTS}, got {part!r}")
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
        for part in PARTS:
            table.add_section()
            table.add_row(f"[bold]{part}[/]", f"[bold]{self.total(part) / 1e9:.2f}[/]", "")
            for row in self.rows:
                if row.part == part:
                    passing = "" if row.at_once else " (temporarily)"
                    table.add_row(f"  {row.item}{passing}", f"{row.bytes / 1e9:.2f}", row.how)
        for link, seconds in self.seconds.items():
            table.add_row(f"  over {link}", f"{seconds:.2f} s", "")
        return table
