"""How a service is launched: its arguments, its devices, its start; scripted replicas in place of processes."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.replicas import ScriptedReplica
from support.waiting import until
from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules import AsyncVLLM, make_async_vllm_engine
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.serving.launch import (
    DeviceSets,
    devices_of_trainer,
    pretrained_arguments,
    ranks_here,
    ray_factory,
    ray_service,
    visible_devices,
)
from torchrl_moe.modules.serving.replica_table import FaultPolicy

# -- built and started, with scripted replicas in place of processes --------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``made``: the replicas, with the arguments of a local one; ``script``: what being ready is, by index."""
    scripted = SimpleNamespace(made=[], script={})

    def make(
        index: int, kind: Any, arguments: dict[str, Any], environment: dict[str, str], log_folder: Any
    ) -> ScriptedReplica:
        ready = {"ready": scripted.script[index]} if index in scripted.script else {}
        replica = ScriptedReplica(index, script=ready)
        vars(replica).update(arguments=arguments, environment=environment, log_folder=log_folder)
        scripted.made.append(replica)
        return replica

    monkeypatch.setattr("torchrl_moe.modules.backends.process.process_replica.LocalReplica", make)
    monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return scripted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model from outside."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_replicas_compute_where_they_are_told_to_and_not_where_the_trainer_does(
    scripted: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for choice, expected in [({}, ["0", "2"]), ({"devices": [[2], "cuda:1"]}, ["2", "1"])]:
        scripted.made.clear()
        with AsyncVLLM.from_pretrained(model, num_replicas=2, **choice):
            assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in scripted.made] == expected
    with pytest.raises(ValueError, match=r"3 replicas .* the trainer computes on 1\."):
        AsyncVLLM({"model": "m"}, 3)
    with pytest.raises(ValueError, match="Ray chooses devices"):
        AsyncVLLM.launch({"model": "m"}, 1, backend="ray", devices=[[0]])


def test_replicas_start_together_and_serve_when_all_are_ready(scripted: Any) -> None:
    order: list[str] = []
    scripted.script = {0: lambda: order.extend(replica.life[0] for replica in scripted.made)}
    with AsyncVLLM({"model": "m"}, 3) as engine:
        assert (engine.is_running, engine.admission.limit) == (False, 3 * 1024)
        assert [replica.life for replica in scripted.made] == [[], [], []]
        assert engine.start() is engine
        assert order == ["start"] * 3  # all before the first was waited for
        assert engine.is_running
        assert [entry.state.name for entry in engine.replica_table] == ["SERVING"] * 3
        assert repr(engine).startswith("AsyncVLLM('fake', 3 replicas)\n  #0 SERVING, v0, 0 in flight")
        assert engine.generate("hi", {"max_tokens": 2}, use_tqdm=False).prompt == "hi"
    assert [replica.life for replica in scripted.made] == [["start", "ready", "shutdown"]] * 3


def test_a_service_starts_once(scripted: Any) -> None:
    with AsyncVLLM.launch({"model": "m"}) as engine:
        with pytest.warns(UserWarning, match=r"the service is already running; start\(\) does nothing") as caught:
            assert engine.start() is engine
        assert caught[0].filename == __file__
        assert scripted.made[0].life == ["start", "ready"]
    never = AsyncVLLM({"model": "m"})
    never.shutdown()
    for ended in (engine, never):
        with pytest.raises(RuntimeError, match=r"start: the service was shut down\. Make a new one"):
            ended.start()


@pytest.mark.parametrize("error", [ReplicaDiedError("no memory"), KeyboardInterrupt(), ZeroDivisionError()], ids=repr)
def test_a_start_that_fails_ends_every_replica_and_passes_the_error_on(scripted: Any, error: BaseException) -> None:
    scripted.script = {1: error}
    engine = AsyncVLLM({"model": "m"}, 3)
    with pytest.raises(type(error)) as caught:
        engine.start()
    assert caught.value is error
    assert [replica.life[-1] for replica in scripted.made] == ["shutdown"] * 3
    assert not engine.is_running
    with pytest.raises(RuntimeError, match="shut down"):
        engine.start()


@pytest.mark.parametrize("seconds", [math.inf, 0])
def test_a_start_takes_a_finite_time(scripted: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds must be a finite number above 0"):
        AsyncVLLM({"model": "m"}).start(timeout_seconds=seconds)
    assert scripted.made[0].life == []


def test_a_start_that_takes_too_long_names_the_limit_which_is_for_all_replicas_together(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, launch = "TORCHRL_VLLM_TIMEOUT_SECONDS", {"model": "m"}
    scripted.script = {0: lambda: time.sleep(0.2)}
    with AsyncVLLM(launch, 2).start(timeout_seconds=5.0):
        first, second = (replica.asked("ready")[0] for replica in scripted.made)
        assert 4.0 < first <= 5.0
        assert second <= first - 0.2
    with AsyncVLLM.launch(launch):
        assert 590 < scripted.made[-1].asked("ready")[0] <= 600
    monkeypatch.setenv(name, "77")
    scripted.script = {0: EngineError("replica 0 was not ready")}
    advice = rf"^not all replicas started within 77 s: raise timeout_seconds, or the .*{name}; replica 0 was not ready"
    with pytest.raises(EngineError, match=advice):  # what to do stands before the log
        AsyncVLLM.launch(launch)
    assert scripted.made[-1].life[-1] == "shutdown"
    assert 70 < scripted.made[-1].asked("ready")[0] <= 77
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds, got 'soon'"):
        AsyncVLLM.launch(launch)


def test_arguments_reach_every_replica_and_are_read_as_torchrl_reads_them(scripted: Any, model: Path) -> None:
    engine = AsyncVLLM.from_pretrained(model, num_replicas=2, sampling_params={"max_tokens": 3}, seed=7)
    with engine:
        expected = {"model": str(model), "tensor_parallel_size": 1, "seed": 7}
        assert [replica.arguments for replica in scripted.made] == [expected, {**expected, "seed": 8}]
        assert [replica.index for replica in scripted.made] == [0, 1]
        assert engine.sampling_params == {"max_tokens": 3}
        given = engine.engine_args
        assert given == pickle.loads(pickle.dumps(given)) == expected
        assert (given.model, given.seed) == (str(model), 7)
        with pytest.raises(AttributeError, match=r"engine_args\.dtype: it was not given"):
            given.dtype  # noqa: B018


def test_a_replica_that_died_is_made_again_with_noise_of_its_own(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with AsyncVLLM.launch({"model": "m", "seed": 7}, 2, faults=FaultPolicy(first_delay=0.0)) as engine:
        scripted.made[1].die()
        until(lambda: engine.replica_table[1].restarts == 1 and engine.replica_table[1].state.name == "SERVING")
        _, old, new = scripted.made
        assert old.life == ["start", "ready", "shutdown"]
        assert new.life == ["start", "ready"]
        assert (new.index, new.arguments) == (1, {"model": "m", "seed": 9})
        assert new.environment == old.environment
        assert new.environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert new.life[-1] == "shutdown"


def test_prefix_caching_of_the_constructor_wins_over_the_engine_arguments(scripted: Any) -> None:
    name = "enable_prefix_caching"
    for enabled in (True, False):
        given = {"model": "m", name: not enabled}
        AsyncVLLM(given, enable_prefix_caching=enabled)
        AsyncVLLM(given)
        assert [replica.arguments[name] for replica in scripted.made[-2:]] == [enabled, not enabled]
        assert given == {"model": "m", name: not enabled}
    AsyncVLLM({"model": "m"})
    assert name not in scripted.made[-1].arguments


def test_logs_and_metrics_are_as_the_service_is_told(
    scripted: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    for told, expected in (
        ({"verbose": True, "metrics": False, "log_folder": "/logs"}, ("INFO", "/logs")),
        ({}, ("WARNING", None)),
    ):
        with AsyncVLLM.from_pretrained(model, **told) as engine:
            assert engine.metrics.enabled is told.get("metrics", True)
        replica = scripted.made[-1]
        assert (replica.environment["VLLM_LOGGING_LEVEL"], replica.log_folder) == expected


def test_make_async_vllm_engine_is_from_pretrained_under_torchrls_name(scripted: Any, model: Path) -> None:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    given = {"num_devices": 1, "num_replicas": 2, "verbose": True, "enable_prefix_caching": False, "seed": 3, **sizes}
    with make_async_vllm_engine(model_name=model, compile=False, enable_fp32_output=True, **given) as engine:
        assert isinstance(engine, AsyncVLLM)
        assert engine.num_replicas == 2
        assert scripted.made[1].arguments == {
            "model": str(model),
            "compilation_config": {"mode": 0},
            "enable_prefix_caching": False,
            "hf_overrides": {"head_dtype": "float32"},
            "seed": 4,
            **sizes,
        }


NO_SIZES = {"tensor_parallel_size": None, "data_parallel_size": None, "pipeline_parallel_size": None}
SIZES = {"tensor_parallel_size": 4, "data_parallel_size": 2}
OWN = {"custom_ops": ["none"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # devices are the tensor parallel size by another name
        (NO_SIZES, {"tensor_parallel_size": 1}),
        ({"devices": 4, **NO_SIZES}, {"tensor_parallel_size": 4}),
        ({"devices": 4, **SIZES}, SIZES),
        ({"devices": 4, "tensor_parallel_size": 2}, "num_devices=4 and tensor_parallel_size=2 differ"),
        # what is not compiled has vLLM's mode for it, unless another is named
        ({"compiles": False}, {"compilation_config": {"mode": 0}}),
        ({"compiles": False, "compilation_config": OWN}, {"compilation_config": {"mode": 0, **OWN}}),
        *(({"compiles": False, "compilation_config": one}, {"compilation_config": one}) for one in ({"mode": 3}, 3)),
        ({"compilation_config": {"mode": 1}}, {"compilation_config": {"mode": 1}}),
        # a float32 head is one more override
        ({"float32": True}, {"hf_overrides": {"head_dtype": "float32"}}),
        ({"float32": True, "hf_overrides": {"layers": 2}}, {"hf_overrides": {"layers": 2, "head_dtype": "float32"}}),
        ({"float32": True, "hf_overrides": dict}, "needs hf_overrides to be a mapping"),
        # a folder without a model is refused, and a hub's name is not
        ({"model": "EMPTY"}, "the folder has no config.json"),
        ({"model": "EMPTY/none"}, "the folder does not exist"),
        ({"model": "FULL"}, {}),
    ],
)
def test_arguments_of_a_pretrained_engine(tmp_path: Path, model: Path, given: dict[str, Any], expected: Any) -> None:
    (empty := tmp_path / "empty").mkdir()
    given = dict(given)
    name = given.pop("model", "org/model").replace("EMPTY", str(empty)).replace("FULL", str(model))
    how = given.pop("devices", None), given.pop("compiles", True), given.pop("float32", False)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            pretrained_arguments(name, *how, given)
    else:
        found = pretrained_arguments(name, *how, given)
        assert found == {"tensor_parallel_size": 1, **expected, "model": name}


ARGUMENTS = {"model": "m", "tensor_parallel_size": 2}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A cluster without GPUs; its one item says whether joining it had to start it."""
    answer = [False]
    monkeypatch.setattr(cluster, "join_cluster", lambda: answer[0])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0})
    return answer


def service_of(name: str | None = None, namespace: str | None = None, resources: Any = None, **arguments: Any) -> Any:
    kind, given = engine_kind("vllm"), {**ARGUMENTS, **arguments}
    return ray_service(kind, given, 3, name=name, namespace=namespace, resources=resources, verbose=True)


def test_an_access_token_does_not_travel_in_actor_arguments(started: list[bool]) -> None:
    with pytest.raises(ValueError, match=r"^hf_token: .* set HF_TOKEN"):
        service_of(hf_token="hf_secret")


def test_with_a_name_it_outlives_its_driver_and_without_has_one_that_nobody_else_has(started: list[bool]) -> None:
    one, two, named = service_of(), service_of(), service_of("policy", "ours", {"CPU": 3, "slot": 1})
    assert one.name != two.name
    assert (one.namespace, one.detached) == ("torchrl_moe", False)
    assert (one.num_replicas, one.arguments, one.verbose) == (3, ARGUMENTS, True)
    assert one.resources == {"CPU": 2.0}  # for each of its devices
    assert (named.name, named.namespace, named.detached) == ("policy", "ours", True)
    assert named.resources == {"CPU": 3.0, "slot": 1.0}
    make = ray_factory(one)
    made: list[Any] = [make(index) for index in (2, 0, 2)]
    # replicas of one service have seeds of their own
    assert [(replica.index, replica._service, replica._number) for replica in made] == [
        (2, one, 0),
        (0, one, 1),
        (2, one, 2),
    ]


def test_a_cluster_that_ends_with_this_process_cannot_keep_a_service(started: list[bool]) -> None:
    started[0] = True
    with pytest.warns(UserWarning, match="one was started that ends with this process, and the service 'policy' with"):
        service_of("policy")
    service_of()  # nothing was promised


# -- who gets which GPUs; that there are some is pretended -------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets which devices there are, which of them this process computes on, and the ranks that torchrun launched."""

    def pretend(
        count: int,
        named: str | None = None,
        current: int | None = None,
        filled: tuple[int, ...] = (),
        ranks: tuple[int | None, int | None] = (None, None),
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1 << 20 if index in filled else 0)
        names = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name, value in zip(names, (named, *ranks), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return pretend


@pytest.mark.parametrize(
    ("named", "count", "expected"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("", 0, []),
        ("-1", 0, []),
        ("3, 5", 2, ["3", "5"]),
        ("GPU-ab12,GPU-cd34", 2, ["GPU-ab12", "GPU-cd34"]),
        ("1,-1,0", 1, ["1"]),  # CUDA stops reading at the first bad name
    ],
)
def test_devices_have_the_names_that_the_driver_knows(
    machine: Callable[..., None], named: str | None, count: int, expected: list[str]
) -> None:
    machine(count, named)
    assert visible_devices() == expected


@pytest.mark.gpu
def test_a_machine_with_gpus_shows_them_and_a_trainer_that_has_filled_one_computes_on_it() -> None:
    assert len(visible_devices()) == torch.cuda.device_count() > 0
    kept = torch.zeros(8, device="cuda")
    assert kept.device.index in devices_of_trainer()


TWO: dict[str, Any] = {"count": 2, "named": "4,7"}
THREE: dict[str, Any] = {"count": 3, "named": "9,8,7"}
BUSY: dict[str, Any] = {"count": 4, "named": "6,5,4,3", "current": 0, "filled": (2,)}
NAMED: dict[str, Any] = {"count": 4, "named": "9,8,7,GPU-f", "current": 0}


@pytest.mark.parametrize(
    ("devices", "has", "num_replicas", "each", "expected"),
    [
        # each replica gets devices of its own
        (None, {"count": 4}, 4, 1, ["0", "1", "2", "3"]),
        (None, {"count": 4}, 2, 2, ["0,1", "2,3"]),
        (None, {"count": 4}, 1, 3, ["0,1,2"]),
        (None, {"count": 3, "named": "5,GPU-ab12,2"}, 2, 1, ["5", "GPU-ab12"]),
        (None, {"count": 0}, 2, 8, [None, None]),
        (None, TWO, 3, 1, "3 replicas of 1 GPU(s) need 3, but 2 are visible (4, 7). Use fewer"),
        (None, TWO, 1, 3, "1 replicas of 3 GPU(s) need 3, but 2 are visible"),
        (None, TWO, 2, 2, "2 replicas of 2 GPU(s) need 4, but 2 are visible"),
        # and none where the trainer computes; a single one is shared on purpose only
        (None, BUSY, 2, 1, ["5", "3"]),
        (None, BUSY, 1, 2, ["5,3"]),
        (None, BUSY, 3, 1, "4 are visible (6, 5, 4, 3), and the trainer computes on 6, 4. Use fewer replicas, a "),
        (None, {"count": 1, "current": 0}, 1, 1, "1 are visible (0), and the trainer computes on 0"),
        ([[0]], {"count": 1, "current": 0}, 1, 1, ["0"]),
        (None, {"count": 1}, 1, 1, ["0"]),  # a trainer that computes on the CPU, or has not begun
        # they are named by the numbers of this process, or by name
        ([[1], [2]], NAMED, 2, 1, ["8", "7"]),
        ([1, 2], NAMED, 2, 1, ["8", "7"]),
        (["cuda:3", torch.device("cuda", 0)], NAMED, 2, 1, ["GPU-f", "9"]),
        (["GPU-f", [2]], NAMED, 2, 1, ["GPU-f", "7"]),
        ([(3, 1), (0, 2)], NAMED, 2, 2, ["GPU-f,8", "9,7"]),
        ([1, 1], NAMED, 2, 1, ["8", "8"]),  # two engines on one: their memory is their user's business
        ([[0]], THREE, 2, 1, "has 1 entries, for 2 replicas"),
        ([[0], [1, 2]], THREE, 2, 1, "replica 1 needs 1 different GPU(s) (tensor, pipeline and data parallel ranks), "),
        ([[0], []], THREE, 2, 1, "replica 1 needs 1 different GPU(s)"),
        ([[0, 0], [1, 2]], THREE, 2, 2, "replica 0 needs 2 different GPU(s)"),
        ("cuda:0", THREE, 2, 1, "devices='cuda:0': give a list with one entry per replica"),
        ([0, 3], THREE, 2, 1, "there is no 3; there are 'cuda:0' to 'cuda:2', in this process's own numbers"),
        # "8": a number as text: of whose counting?
        *(([0, none], THREE, 2, 1, f"there is no {none!r}") for none in (-1, "cpu", "cuda", "8", 1.5)),
    ],
)
def test_each_replica_has_its_own_devices_or_the_reason_is_named(
    machine: Callable[..., None], devices: Any, has: dict[str, Any], num_replicas: int, each: int, expected: Any
) -> None:
    machine(**has)
    if isinstance(expected, str):
        with pytest.raises(ValueError) as error:
            DeviceSets(devices, num_replicas, each)
        assert expected in str(error.value)
    else:
        sets = DeviceSets(devices, num_replicas, each)
        assert [sets.of(index) for index in range(num_replicas)] == expected


def test_ranks_of_this_machine_are_counted_if_there_are_several(machine: Callable[..., None]) -> None:
    for ranks, expected in (((None, None), 0), ((1, 1), 0), ((4, 4), 4), ((16, 8), 8), ((2, 1), 1)):
        machine(0, ranks=ranks)
        assert ranks_here() == expected


@pytest.mark.parametrize("current", [None, 0])
def test_no_replica_ever_gets_a_ranks_device(machine: Callable[..., None], current: int | None) -> None:
    """Not one that is added later either; the other ranks may not have begun to fill theirs."""
    machine(8, current=current, ranks=(4, 4))
    assert devices_of_trainer() == [0, 1, 2, 3]
    listed = [0, 1]
    sets = DeviceSets(None, 2, 1, lambda: listed)
    assert [sets.of(0), sets.of(1)] == ["4", "5"]
    for index, expected in [(2, "6"), (3, "7")]:
        assert sets.of(index) == expected
        listed.append(index)
    with pytest.raises(ValueError, match=r"5 replicas .* the trainer computes on 0, 1, 2, 3\."):
        sets.of(4)
    added = DeviceSets([[4]], 1, 1, lambda: [0])
    assert [added.of(0), added.of(1)] == ["4", "5"]  # not 1, which is rank 1's
