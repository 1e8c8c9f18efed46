"""vLLM as a kind of engine: its processes' environment, its arguments, its routers in float32."""

from __future__ import annotations

import asyncio
import contextlib
import os
import site
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import AutoConfig

import torchrl_moe
from support.engines import EngineShelf, start_engine
from torchrl_moe import _compat
from torchrl_moe._compat import make_async_llm
from torchrl_moe.cli.services import started
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.vllm import engine_args
from torchrl_moe.modules.backends.vllm.engine_args import (
    ROUTER_DTYPE,
    WORKER_EXTENSION,
    arguments_of,
    build_engine_args,
    check_vllm,
    devices_per_replica,
    engine_environment,
)
from torchrl_moe.modules.backends.vllm.engine_process import check_routers
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

pytestmark = pytest.mark.needs_vllm


# -- the environment ---------------------------------------------------------------------------------------------------
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def test_the_environment_is_the_drivers_without_its_rank_and_what_vllm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rank vLLM's own process group would look for torchrun's store, and wait."""
    for name in ("VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OF_THE_USER", "OF_RANK", *RANKS):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    ours = {
        "OMP_NUM_THREADS": "4",  # a core stays free, the others are shared
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": str(Path(torchrl_moe.__file__).parents[1]),
    }
    environment, on_gpus = engine_environment(num_replicas=2), engine_environment("2,3")
    assert {**ours, "OF_THE_USER": "1", "OF_RANK": "1"}.items() <= environment.items()
    assert not environment.keys() & {*RANKS}
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not on_gpus.keys() & {"TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", *RANKS}
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    # it gives way to the user
    for name, value in {"OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": "theirs"}.items():
        monkeypatch.setenv(name, value)
    environment = engine_environment(verbose=True)
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_LOGGING_LEVEL"]) == ("7", "DEBUG")
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["theirs"]
    # where the package is installed, all of site-packages would come before them
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(Path(torchrl_moe.__file__).parents[1])])
    assert engine_environment()["PYTHONPATH"] == "theirs"


@pytest.fixture(scope="module", autouse=True)
def inspected_here() -> Iterator[None]:
    """vLLM looks at models' classes in this process, as in an engine's: else each takes another one 9 s, once."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # put back at the end
        _compat.inspect_models_here()
        yield


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_moe(tmp_path_factory.mktemp("moe"), "qwen3_moe"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_moe(tmp_path_factory.mktemp("dense"), "qwen3"))


@pytest.fixture
def set_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether vLLM's platform is a CPU."""
    from vllm.platforms import current_platform

    return lambda on: monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on)


# -- what users pass --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("foo", 1, "no engine argument foo=1; vllm serve --help=all lists them"),
        ("max_model_len", "abc", "max_model_len='abc': .* is int, not text"),
        ("tensor_parallel_size", "two", "tensor_parallel_size must be an integer from 1 to 65536, or None, got 'two'"),
        ("router_dtype", "bfloat16", "router_dtype='bfloat16' must be 'auto', .* or 'float32'"),
        ("router_dtyp", "float32", r"no engine argument router_dtyp='float32': do you mean router_dtype\?"),
        ("model", "x", "model='x': the model is the first argument, here 'm'"),
        ("enforce_eager", "maybe", "enforce_eager='maybe': .* is bool, not text"),
        ("gpu_memory_utilization", "much", "gpu_memory_utilization='much': .* is float, not text"),
    ],
)
def test_an_argument_that_vllm_does_not_have_is_refused_before_a_start(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AsyncVLLM.from_pretrained("m", **{name: value})
    taken = {"model": "m", "max_model_len": "8", "quantization": "fp8", "enable_log_requests": True, "seed": None}
    assert arguments_of(taken) == taken


@pytest.mark.parametrize("kind", ["AsyncEngineArgs", "EngineArgs"])
def test_of_vllms_own_object_only_what_differs_from_its_defaults(kind: str) -> None:
    import vllm

    given = getattr(vllm, kind)(model="m", max_model_len=8, enforce_eager=True, enable_return_routed_experts=False)
    assert arguments_of(given) == {"model": "m", "max_model_len": 8, "enforce_eager": True}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        *((one, TypeError, "must be a mapping or .*, got .*from_pretrained") for one in ("path", None, RoutingLayout)),
        *((one, ValueError, "names no model: set 'model'") for one in ({}, {"model": None}, {"model": ""})),
    ],
)
def test_what_are_no_arguments_is_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        arguments_of(given)


def test_a_replica_spans_tensor_times_pipeline_times_data_devices() -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    for sizes, devices in (((None, 1, 1), 1), ((2, "3", 1), 6), ((2, 1, 4), 8)):
        given = dict(zip(names, sizes, strict=True))
        assert devices_per_replica({**given, "enable_expert_parallel": True}) == devices
    assert devices_per_replica({}) == 1


# -- what the engine process builds -----------------------------------------------------------------------------------
def test_routers_in_float32_are_asked_for_in_vllms_additional_config(moe: str) -> None:
    own = {"of_the_user": 1}
    built = build_engine_args({"model": moe, "additional_config": own, "router_dtype": "float32"})
    assert built.additional_config == {"of_the_user": 1, "torchrl_moe_router_dtype": "float32"}
    assert own == {"of_the_user": 1}
    assert build_engine_args({"model": moe, "router_dtype": "auto"}).additional_config == {}


@pytest.mark.parametrize(
    ("model", "name", "value", "words"),
    [
        ("dense", "router_dtype", "float32", "router_dtype='float32', but .* has no routers"),
        ("dense", "enable_return_routed_experts", True, "enable_return_routed_experts=True, but .* has no experts"),
        ("moe", "return_sampling_mask", True, "return_sampling_mask: .* leave it out"),
        ("moe", "weight_transfer_config", {}, "weight_transfer_config is the engine's own"),
        ("moe", "max_model_len", 10**9, "vLLM does not take this model: .*max_model_len"),
        ("moe", "worker_extension_cls", "theirs.One", "worker_extension_cls='theirs.One' is not supp"),
    ],
)
def test_what_the_model_or_the_engine_cannot_do_is_refused(
    model: str, name: str, value: Any, words: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ValueError, match=words):
        build_engine_args({"model": request.getfixturevalue(model), name: value})


def test_defaults_of_ours(moe: str) -> None:
    ours = {
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "distributed_executor_backend": "uni",  # on a CPU
        "return_sampling_mask": True,
        "enable_log_requests": False,  # a line per request is no log
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    for same in (WORKER_EXTENSION, "", None):
        built = build_engine_args({"model": moe, "worker_extension_cls": same})
        assert {name: getattr(built, name) for name in ours} == ours
        assert built.aux_output_config.enable_return_routed_experts is True
    assert not build_engine_args({"model": moe, "logprobs_mode": "raw_logprobs"}).return_sampling_mask


@pytest.mark.parametrize(
    ("binding", "given", "expected"),
    [
        ("nobind", {}, "uni"),
        ("auto", {}, "mp"),  # vLLM binds threads in a process of the worker's own
        ("nobind", {"distributed_executor_backend": "mp"}, "mp"),
        ("nobind", {"tensor_parallel_size": 2}, "mp"),
        ("nobind", {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "mp"),  # one process is too few
    ],
)
def test_one_worker_is_in_the_cores_process_where_threads_are_not_bound(
    moe: str, binding: str, given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config", lambda config, **_: config)
    config, _ = make_async_llm(build_engine_args({"model": moe, **given}), [])
    assert config.parallel_config.distributed_executor_backend == expected


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel_size=2: .* use tensor_parallel_size"),
        ("decode_context_parallel_size", 2, "decode_context_parallel_size=2: .* use tensor_parallel_size"),
        ("prefill_context_parallel_size", 2, "prefill_context_parallel_size=2: .* use tensor_parallel_size"),
        ("enable_prefix_caching", False, "enable_prefix_caching=False: .* leave it out"),
        ("kv_transfer_config", NIXL, "kv_transfer_config with NixlConnector: .* use another connector"),
        ("speculative_config", {"method": "ngram", "enable_adaptive_verification": True}, "verification: .* that out"),
    ],
)
def test_what_vllm_records_no_routes_with_is_named(name: str, value: Any, words: str, moe: str, dense: str) -> None:
    with pytest.raises(ValueError, match=f"{words}, or enable_return_routed_experts=False"):
        build_engine_args({"model": moe, name: value})
    for free in ({"model": moe, "enable_return_routed_experts": False}, {"model": dense}):
        assert not build_engine_args({**free, name: value}).aux_output_config.enabled


# -- which vLLM -------------------------------------------------------------------------------------------------------
def test_the_range_is_the_extras() -> None:
    extras = tomllib.loads((Path(torchrl_moe.__file__).parents[1] / "pyproject.toml").read_text())
    (needed,) = extras["project"]["optional-dependencies"]["vllm"]
    assert Requirement(needed).specifier == engine_args.SUPPORTED


def test_another_release_is_refused_with_the_range_and_the_line_that_installs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for release in ("0.32.0", "0.33.1.dev3+cpu"):
        monkeypatch.setattr(engine_args, "_release_of", {"vllm-cpu": release}.get)
        check_vllm({"VLLM_USE_V2_MODEL_RUNNER": "1"})
    for release in ("0.31.2", "0.34.0"):
        monkeypatch.setattr(engine_args, "_release_of", {"vllm": release}.get)
        with pytest.raises(EngineError, match=rf"vLLM {release} is installed, .* pip install 'vllm<0\.34,>=0\.32'"):
            check_vllm({})
    monkeypatch.setattr(engine_args, "_release_of", lambda name: None)
    with pytest.raises(EngineError, match="vLLM is not installed: pip install"):
        check_vllm({})


def test_the_old_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER=0 asks for vLLM's Model Runner V1.*unset it"):
        AsyncVLLM.from_pretrained("no such model")  # at once: nothing is started


# -- what vLLM's CPU kernels compute wrongly --------------------------------------------------------------------------
def test_latent_attention_runs_without_vllms_own_kernels_on_a_cpu(
    tmp_path: Path, moe: str, set_cpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an engine of a command, which is a user's engine."""
    folder = str(save_tiny_moe(tmp_path, "deepseek_v3"))

    def ops(model: str, *given: str) -> Any:
        return build_engine_args({"model": model, "compilation_config": {"custom_ops": [*given]}}).compilation_config

    asked: list[dict[str, Any]] = []

    def launch(arguments: dict[str, Any], *_: Any, **__: Any) -> Any:
        asked.append(arguments)
        return contextlib.nullcontext()

    monkeypatch.setattr(AsyncVLLM, "launch", launch)
    AsyncVLLM.from_pretrained(folder, dtype="float32", max_model_len=64)
    with started(folder, AutoConfig.from_pretrained(folder), "vllm", "float32", ["max_model_len=64"]):
        pass
    of_user, of_command = (build_engine_args(arguments) for arguments in asked)
    assert of_user == of_command
    assert of_user.compilation_config.custom_ops == ["none"]  # else its latents are wrong by 0.3
    assert ops(folder, "none").custom_ops == ["none"]
    with pytest.raises(ValueError, match=r"custom_ops=\['all'\]: on a CPU .* Leave custom_ops out"):
        ops(folder, "all")
    assert ops(moe).custom_ops == []
    set_cpu(False)
    assert ops(folder).custom_ops == []


def test_on_a_cpu_an_engine_takes_little_memory_and_says_so(
    moe: str, capsys: pytest.CaptureFixture[str], set_cpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_engine_args({"model": moe, "max_model_len": 64})
    assert (built.kv_cache_memory_bytes, built.enforce_eager) == (1 << 29, True)
    assert "kv_cache_memory_bytes=536870912: vLLM's default takes nearly all memory" in capsys.readouterr().out
    for given in ({"kv_cache_memory_bytes": 1 << 20}, {"gpu_memory_utilization": 0.5}):
        built = build_engine_args({"model": moe, "enforce_eager": False, **given})
        assert (built.kv_cache_memory_bytes, built.enforce_eager) == (given.get("kv_cache_memory_bytes"), False)
    monkeypatch.setattr(engine_args, "CPU_CACHE_BYTES", 1)  # less than one sequence
    one = 2 * 4 * 2 * 16 * 64 * 4  # keys and values, layers, heads, size, tokens, float32
    assert build_engine_args({"model": moe, "max_model_len": 64}).kv_cache_memory_bytes == 2 * one
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert build_engine_args({"model": moe}).kv_cache_memory_bytes is None
    set_cpu(False)
    built = build_engine_args({"model": moe})
    assert (built.kv_cache_memory_bytes, built.enforce_eager) == (None, False)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({"enable_lora": True}, "no LoRA kernel for experts on CPU"),
        ({"enable_lora": True, "lora_target_modules": ["experts"]}, r"for experts on CPU.*lora_target_modules=\["),
        # with these vLLM starts, and its first step ends the engine
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "over 2 workers.*SIGSEGV.*Leave it out"),
        ({"data_parallel_size": 2}, "data_parallel_size=2.*all_gatherv.*Use num_replicas="),
    ],
)
def test_what_vllms_experts_cannot_do_on_a_cpu_is_refused(
    refused: dict[str, Any], words: str, moe: str, dense: str, set_cpu: Callable[[bool], None]
) -> None:
    set_cpu(True)
    with pytest.raises(ValueError, match=words):
        build_engine_args({"model": moe, **refused})
    attention = {"enable_lora": True, "lora_target_modules": ["qkv_proj", "o_proj"]}
    for taken in ({"enable_expert_parallel": True}, {"tensor_parallel_size": 2}, attention):
        assert build_engine_args({"model": moe, **taken}).aux_output_config.enabled
    build_engine_args({"model": dense, **refused})
    set_cpu(False)
    build_engine_args({"model": moe, **refused})


# -- routers in float32 ------------------------------------------------------------------------------------------------
ROUTERS = [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)]


def look_inside(engine: AsyncVLLM) -> list[Any]:
    """From the worker: dtypes of a router's weight and logits, and its logits of known hidden states."""

    def look(saved: Mapping[str, Tensor], model: nn.Module) -> list[Any]:
        del saved
        gate: Any = model.get_submodule("model.layers.1.mlp.gate")
        with torch.no_grad():
            out = gate(torch.linspace(-1, 1, 3 * 64).reshape(3, 64).bfloat16())
        logits = out[0] if isinstance(out, tuple) else out
        return [str(gate.weight.dtype), str(logits.dtype), logits.float().flatten().tolist()]

    ((found,),) = engine.validate_model_params(look)
    return list(found)


@pytest.mark.engine
@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.parity), "deepseek_v3"])
def test_weights_and_logits_are_float32_after_a_sync_too(no_engine: EngineShelf, tmp_path: Path, family: str) -> None:
    folder = save_tiny_moe(tmp_path / "model", family, dtype=torch.bfloat16)
    master = make_tiny_moe(family, dtype=torch.bfloat16).float()
    with start_engine(folder, dtype="bfloat16", router_dtype="float32") as engine:
        held = engine.get_model_metadata()
        wide = {name for name, (dtype, _) in held.items() if dtype == torch.float32}
        assert wide == {*ROUTERS, *(name for name in held if "correction_bias" in name)}
        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(master)
        sender.init_all_workers_group(None, vllm_engine=engine)
        for step in range(2):
            with torch.no_grad():
                for name in ROUTERS:  # digits that bfloat16 does not have
                    master.get_parameter(name).mul_(1 + 2**-12)
            assert not sender.update_weights().failed, step
            *dtypes, logits = look_inside(engine)
            hidden = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).bfloat16().float()
            wanted = hidden @ master.get_parameter(ROUTERS[0]).detach().T
            assert dtypes == ["torch.float32", "torch.float32"]
            torch.testing.assert_close(torch.tensor(logits), wanted.flatten(), atol=1e-5, rtol=0)
        sender.shutdown()
        completion = engine.generate(prompt_token_ids=[1, 2, 3], sampling_params={"max_tokens": 4, "logprobs": 0})
        assert not isinstance(completion, list)
        assert completion.outputs[0].routed_experts is not None


def test_routers_that_are_not_float32_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from torchrl_moe.modules.backends.vllm import router_dtype

    def bare(kind: Any, **attributes: Any) -> Any:
        """A layer of vLLM's without an engine around it, which its constructor asks for its configuration."""
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        for name, value in attributes.items():
            setattr(layer, name, value)
        return layer

    def layer(gate: Any, kernel: Any = None) -> nn.Module:
        """A decoder layer with such a router, as a worker's model has it."""
        if isinstance(gate, torch.dtype):
            gate = bare(GateLinear, weight=nn.Parameter(torch.zeros(2, 2, dtype=gate)))
        config = SimpleNamespace(router_logits_dtype=kernel)
        experts = bare(MoERunner, moe_config=config) if kernel else nn.Identity()
        return nn.ModuleDict({"mlp": nn.ModuleDict({"gate": gate, "experts": experts})})

    monkeypatch.setattr(MoERunner, "_quant_method", property(lambda self: SimpleNamespace(is_monolithic=True)))
    wide, narrow = torch.float32, torch.bfloat16
    own = [nn.Linear(2, 2, dtype=narrow), nn.Linear(2, 2)]  # of a family with a layer of its own
    layers = [*map(layer, (wide, narrow, *own)), layer(wide, narrow), layer(wide, wide), layer(nn.Identity())]
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(layers)})})
    monkeypatch.setattr(_compat, "router_layer_ids", lambda _: range(6))  # the last is dense
    assert router_dtype.narrow_routers(model) == [f"model.layers.{layer}" for layer in (1, 2, 4)]


def test_a_family_that_makes_its_routers_otherwise_is_refused() -> None:
    narrow: list[list[str]] = [[], []]

    async def answer(method: str) -> list[list[str]]:
        assert method == "torchrl_moe_narrow_routers"
        return narrow

    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config={ROUTER_DTYPE: "float32"}),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["AriaForConditionalGeneration"])),
        collective_rpc=answer,
    )
    asyncio.run(check_routers(engine))
    narrow = [["model.layers.1"], ["model.layers.5"]]
    said = r"AriaForConditionalGeneration makes the routers of 2 layer\(s\), such as model\.layers\.1,"
    with pytest.raises(ValueError, match=said):
        asyncio.run(check_routers(engine))
