"""Plain transformers as a kind of engine (:class:`~torchrl_moe.modules.backends.engine_kind.EngineKind`).

Its arguments have vLLM's names where the meaning is vLLM's; all others are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torchrl_moe.modules.backends.checkpoint import check_tokenizer, check_weights
from torchrl_moe.modules.backends.engine_kind import process_environment, with_own_seed

PROGRAM = "torchrl_moe.modules.backends.transformers.transformers_process"
seeded = with_own_seed

DTYPES = ("auto", "float32", "bfloat16", "float16")
ROUTER_DTYPES = ("auto", "float32")
POLICIES = ("fcfs", "priority")
PARITIES = (None, "exact")
ONE_DEVICE = (None, 1), "a replica computes on one device; raise num_replicas"
OF_VLLM: Mapping[str, tuple[tuple[object, ...], str]] = {
    "enforce_eager": ((None, True, False), ""),  # nothing is ever compiled
    "compilation_config": ((None, {}, {"mode": 0}), "nothing is compiled"),
    "tensor_parallel_size": ONE_DEVICE,
    "pipeline_parallel_size": ONE_DEVICE,
    "data_parallel_size": ONE_DEVICE,
    "enable_prefix_caching": (
        (None, False),
        "there is no prefix cache; equal prompts that come together are read once",
    ),
    "enable_sleep_mode": ((None, False), "the model stays in memory; shut the engine down instead"),
    "enable_lora": ((None, False), "it serves no adapters; send merged weights, VLLMWeightSyncScheme(lora='merged')"),
    "logprobs_mode": ((None, "processed_logprobs"), "log-probs are of the distribution that was sampled from"),
    "hf_overrides": ((), "the model is computed as its config says; enable_fp32_output is vLLM's"),
    "gpu_memory_utilization": ((), "memory grows with the answers that run; limit it by kv_cache_memory_bytes"),
}
"""Arguments of vLLM -> values that ask for what this engine does anyway, and what to do in place of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """What a replica is started with.

    ``parity="exact"``: each answer is read again in whole for each of its tokens, by itself, in a row of
    ``max_model_len`` tokens, with experts computed one by one. A scorer that does the same
    (``pad_model_input=max_model_len``) has the same log-probs, bit by bit; it takes ``max_model_len`` times the work.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    router_dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    kv_cache_memory_bytes: int | None = None
    scheduling_policy: str = "fcfs"
    enable_return_routed_experts: bool | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    parity: str | None = None

    def __post_init__(self) -> None:
        kinds = {"dtype": DTYPES, "router_dtype": ROUTER_DTYPES, "scheduling_policy": POLICIES, "parity": PARITIES}
        for name, allowed in kinds.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
        if self.parity == "exact" and self.max_model_len is None:
            raise ValueError("parity='exact' reads each answer in a row of max_model_len tokens: pass max_model_len")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


KNOWN = tuple(field.name for field in dataclasses.fields(EngineArguments))


def arguments_of(engine_args: object) -> dict[str, Any]:
    """Return the engine arguments that a user passed as a mapping; those of vLLM's that change nothing are left
    out.
    """
    if not isinstance(engine_args, Mapping):
        raise TypeError(
            f"engine='transformers' takes its arguments as a mapping, got {type(engine_args).__name__}: it has no "
            "vllm.AsyncEngineArgs"
        )
    arguments: dict[str, Any] = {}
    for name, value in engine_args.items():
        accepted, why = OF_VLLM.get(name, ((), ""))
        if value in accepted:  # it asks for what this engine does anyway
            continue
        if name not in KNOWN:
            why = why or f"it knows {', '.join(KNOWN)}"
            raise ValueError(f"engine='transformers' has no {name}={value!r}: {why}")
        arguments[name] = str(value).removeprefix("torch.") if name == "dtype" else value
    if not arguments.get("model"):
        raise ValueError("engine_args names no model: set 'model' to a folder or a hub name.")
    # here, in the driver: a wrong value or an empty folder costs no start of a process
    EngineArguments(**arguments)
    check_weights(arguments["model"])
    check_tokenizer(arguments["model"], arguments.get("tokenizer"))
    return arguments


def build_engine_args(arguments: Mapping[str, object]) -> EngineArguments:
    return EngineArguments(**arguments_of(arguments))


def engine_environment(devices: str | None = None, num_replicas: int = 1, verbose: bool = False) -> dict[str, str]:
    """Return the environment of an engine process: the driver's, and the log level of transformers."""
    environment = process_environment(devices, num_replicas)
    environment.setdefault("TRANSFORMERS_VERBOSITY", "info" if verbose else "warning")
    return environment
