"""The order of an update, and what becomes of each replica when a step of it fails."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from tqdm.auto import tqdm

from support.processes import exit_code_of
from support.services import RestartingService
from support.waiting import in_thread, until
from support.weights import Connect, Fleet, UpdateCounter, always, value_in, values, weights
from torchrl_moe.errors import EngineError, ManifestMismatch, NoReplicaError, ReplicaDiedError, WeightSyncError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.modules.serving.replica_table import FaultPolicy, Recovery, ReplicaState
from torchrl_moe.store import WeightStoreReader
from torchrl_moe.store import writer as store_writer
from torchrl_moe.testing import FakeAsyncVLLM, make_tiny_moe
from torchrl_moe.testing.fake_weights import EXPECTED, FakeFleet, FakeWeightReplica
from torchrl_moe.weight_update import VLLMWeightSyncScheme, get_model_metadata, rolling
from torchrl_moe.weight_update.options import canary_of
from torchrl_moe.weight_update.sender import VLLMWeightSender
from torchrl_moe.weight_update.transports.registry import MemmapTransport

# -- the good case ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_is_updated_and_answers_once_it_is_awake(fleet: Fleet, level: int) -> None:
    engine, sender = fleet(2)
    engine.sleep(level)
    asked = in_thread(lambda: engine.generate([1], {"max_tokens": 2}, use_tqdm=False, timeout_seconds=60.0))
    report = sender.update_weights(weights(10))
    assert (report.failed, engine.versions) == ({}, [1, 1])
    assert [fake._asleep for fake in engine.fakes] == [{"kv_cache"}] * 2
    assert not asked.done()
    engine.wake_up()
    assert asked.result(60.0).outputs[0].policy_versions.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("choices", "pause", "clear_cache"),
    [({"kv": "salt"}, "keep", False), ({"kv": "recompute"}, "keep", True), ({"mode": "abort_resume"}, "abort", False)],
)
def test_mode_and_kv_say_what_becomes_of_requests_and_the_cache_and_how_to_stage_is_passed_on(
    connect: Connect, choices: dict[str, Any], pause: str, clear_cache: bool
) -> None:
    engine = FakeFleet(1)
    connect(engine, timeout_seconds=33.0, prefetch=3, verify="off", **choices).update_weights(weights())
    options = {"pause": pause, "clear_cache": clear_cache, "canary": None, "patience": 33.0}
    assert engine.fakes[0].told("swap_weights") == {"version": 1, **options}
    staging = {"version": 1, "verify": "off", "threads": 3, "manifest": None}
    assert engine.fakes[0].told("stage_weights") == staging


def test_the_engine_takes_weights_through_its_sender_and_no_weights_are_a_warning(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    report = engine.update_weights(iter(weights(4).items()))
    assert (report.version, report.failed, sender.version, values(engine)) == (1, {}, 1, [4.0, 4.0])
    with pytest.warns(UserWarning, match="no weights were given; nothing was done"):
        assert engine.update_weights(iter([])) is None
    assert engine.versions == [1, 1]
    sender.shutdown()
    with pytest.raises(RuntimeError, match=r"no sender has this engine\. Make one: VLLMWeightSyncScheme"):
        engine.update_weights(weights(4))
    engine.shutdown()
    with pytest.raises(RuntimeError, match="update_weights: the service is not running"):
        engine.update_weights({})


@pytest.mark.parametrize("progress", [True, False])
def test_a_long_update_shows_bytes_and_replicas_unless_told_not_to(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    """40 bytes in two replicas; in a terminal, once two seconds have passed."""
    _, sender = fleet(2)
    shown: list[dict[str, Any]] = []

    def noted(**options: Any) -> Any:
        shown.append(options)
        return tqdm(**options)

    monkeypatch.setattr(rolling, "tqdm", noted)
    sender.update_weights(weights(1), progress=progress)
    assert [(bar["total"], bar["unit"], bar["desc"]) for bar in shown] == [(2, "replica", "weights v1, 0 MB")]
    assert [(bar["delay"], bar["disable"]) for bar in shown] == [(2.0, None if progress else True)]


# -- set-up -----------------------------------------------------------------------------------------------------------


def test_an_engine_or_a_model_must_be_there() -> None:
    sender = VLLMWeightSyncScheme().create_sender()
    needs_model, needs_engine = r"no model; call register_model\(", "no engine: call init_all_workers_group"
    steps: list[tuple[Callable[[Any], Any], Any, str]] = [(sender.publish, None, needs_model)]
    steps += [(step, 1, needs_engine) for step in (sender.prefetch, sender.apply, sender.rollback)]
    for step, given, words in [*steps, (sender.update_weights, weights(), needs_engine)]:
        with pytest.raises(RuntimeError, match=words):
            step(given)
    assert sender.version == 0
    sender.shutdown()


def ended() -> FakeFleet:
    engine = FakeFleet(1)
    engine.shutdown()
    return engine


@pytest.mark.parametrize(
    ("choices", "engine", "kind", "words"),
    [
        ({}, "an engine", ValueError, "vllm_engine must be an AsyncVLLM, got str"),
        ({"num_replicas": 3}, FakeFleet(2), ValueError, "num_replicas=3, but the engine has 2"),
        ({"min_serving": 3}, FakeFleet(2), ValueError, "min_serving=3, but the engine has 2 replicas"),
        ({}, ended(), NoReplicaError, "no replica serves: FakeFleet"),
        ({}, FakeAsyncVLLM(), EngineError, "has no verb 'metadata'"),
    ],
)
def test_a_wrong_engine_is_refused(connect: Connect, choices: Any, engine: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        connect(engine, **choices)


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        ("guard", [5], "optimizer must be.* got int"),
        ("register_collector", [5], r"increment_version\(\), got int"),
        (
            "update_weights",
            [5, "weights", torch.ones(2), [torch.ones(2)], [("a",)]],
            "weights must be a model, a Tenso",
        ),
        *(
            (step, ["1", None, 1.0, True, math.nan], "version must be an int")
            for step in ("rollback", "prefetch", "apply")
        ),
    ],
)
def test_what_is_of_another_kind_is_refused(fleet: Fleet, call: str, given: list[Any], words: str) -> None:
    engine, sender = fleet(1)
    sender.update_weights(weights())
    for one in given:
        with pytest.raises(TypeError, match=words):
            getattr(sender, call)(one)
    with pytest.raises(TypeError, match="weights must be a model, a TensorDict, or names and tensors, got int"):
        engine.update_weights(5)
    assert engine.versions == [1]


def test_an_engine_whose_first_replica_never_came_is_taken(connect: Connect) -> None:
    """As a driver finds it that joins a service later."""
    engine = FakeFleet(2)
    engine.replica_table.mark_dead(0)
    engine.infos.pop()
    assert connect(engine).update_weights(weights()).failed == {0: "the replica is DEAD"}


def test_a_model_that_is_not_the_engines_is_refused_before_anything_is_sent(connect: Connect) -> None:
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(make_tiny_moe())
    with pytest.raises(ManifestMismatch, match=r"2 missing \(a, b\); \d+ unknown to the engine"):
        sender.init_all_workers_group(None, vllm_engine=FakeFleet(1))
    sender.shutdown()


def test_versions_continue_where_the_engine_is_and_only_what_it_has_may_be_sent_again(connect: Connect) -> None:
    engine = FakeFleet(2)
    first, second = connect(engine), VLLMWeightSyncScheme(timeout_seconds=5.0).create_sender()
    for _ in range(3):
        first.update_weights(weights(1))
    assert second.publish(weights(2)) == 1
    second.init_all_workers_group(None, vllm_engine=engine)
    assert second.version == 3
    with pytest.raises(WeightSyncError, match=r"version 1 is not the one published last \(none\)"):
        second.prefetch(1)
    assert (second.update_weights(weights(3)).version, values(engine)) == (4, [3.0, 3.0])
    second.init_all_workers_group(None, vllm_engine=engine)  # its own engine again
    engine.restart(1)
    second.bring(1)
    assert values(engine) == [3.0, 3.0]
    second.shutdown()


@pytest.mark.parametrize("command", ["metadata", "init_weights"])
@pytest.mark.parametrize("dies", [0, 2])
def test_a_replica_that_dies_while_the_engine_is_taken_is_its_own_affair(
    connect: Connect, command: str, dies: int
) -> None:
    engine = FakeFleet(3)
    engine.fakes[dies].fail[command] = always(ReplicaDiedError("the process ended"))
    sender = connect(engine)
    assert sender.has_engine
    report = sender.update_weights(weights(2))
    assert report.failed == ({dies: "ReplicaDiedError: the process ended"} if command == "init_weights" else {})
    engine.fakes[dies].fail.clear()
    sender.apply(report.version, replicas=[dies])  # it knows the store by now
    assert values(engine) == [2.0] * 3


@pytest.mark.parametrize(
    ("command", "error", "words"),
    [
        ("metadata", NoReplicaError, "no replica serves"),
        ("init_weights", ReplicaDiedError, "ended"),
        (None, ManifestMismatch, "metadata does not name the engine's checkpoint tensors: pass None"),
    ],
)
def test_an_engine_that_cannot_be_taken_leaves_the_sender_with_the_one_before(
    fleet: Fleet, command: str | None, error: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine, sender), other = fleet(1), FakeFleet(2, expected={"c": (torch.float32, torch.Size([1]))})
    for metadata in (EXPECTED, {"a": 0, "mlp.experts.gate_up_proj": 0}):  # the engine's names, or stacked ones
        sender.init_all_workers_group(metadata, vllm_engine=engine)
    closed: list[Any] = []
    monkeypatch.setattr(MemmapTransport, "close", lambda transport: closed.append(transport))
    for replica in other.fakes if command else ():
        replica.fail[command] = always(ReplicaDiedError("the process ended"))
    with pytest.raises(error, match=words):
        sender.init_all_workers_group(None if command else {"a": 0}, vllm_engine=other)
    assert len(closed) == (command == "init_weights")  # the new transport is closed
    assert sender._swap is not None and sender._swap.transport not in closed
    assert other.weight_sync is None
    assert command or other.fakes[0].asked == {"metadata": 1}
    assert (sender.update_weights(weights(5)).failed, value_in(engine, 0)) == ({}, 5.0)


def test_after_shutdown_the_store_is_gone_and_every_step_says_so_and_the_engine_asks_no_more(fleet: Fleet) -> None:
    engine, sender = fleet(1)
    sender.update_weights(weights())
    assert engine.weight_sync is not None
    sender.shutdown()
    sender.shutdown()
    assert engine.weight_sync is None and not sender.options.store.folder.exists()
    for step in (sender.update_weights, sender.publish, sender.prefetch, sender.apply, sender.register_model):
        with pytest.raises(RuntimeError, match="the sender was shut down"):
            step(weights())  # type: ignore[operator]


# -- failures before the swap -----------------------------------------------------------------------------------------


STACKED = "model.layers.1.mlp.experts.gate_up_proj"
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def registered(connect: Connect, **config: Any) -> tuple[Any, FakeFleet, VLLMWeightSender]:
    """A model, a replica that expects it, and their sender."""
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2, **config)
    engine = FakeFleet(1, expected=get_model_metadata(model))
    sender = connect(engine)
    sender.register_model(model)
    return model, engine, sender


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (HEAD, lambda own: own.t(), r"lm_head.weight has shape \[64, 259\], the registered model has \[259, 64\]"),
        (NORM, lambda own: own.long(), r"model.norm.weight is torch.int64, the registered model has torch.f"),
        (STACKED, lambda own: own.permute(1, 0, 2), r"gate_up_proj has shape \[64, 16, 64\], the registered"),
        ("model.extra", lambda own: torch.ones(1), "the registered model does not have model.extra"),
        (STACKED, lambda own: None, "gate_up_proj is of type NoneType, not a tensor"),
        (STACKED, lambda own: own.numpy(), "gate_up_proj is of type ndarray, not a tensor: torch.as_tensor"),
        (HEAD, lambda own: own.to("meta"), "lm_head.weight is on the meta device and has no values"),
        (HEAD, lambda own: own.to_sparse(), "lm_head.weight is torch.sparse_coo of torch.float32, and only de"),
        (HEAD, lambda own: torch.nested.nested_tensor([own]), "lm_head.weight is .*, and only dense tensors can"),
        (HEAD, lambda own: torch._neg_view(own), "lm_head.weight is a Tensor without memory of its own: send"),
        (NORM, lambda own: torch.empty(0), r"model.norm.weight has shape \[0\]"),
        (7, lambda own: torch.ones(1), "a tensor is named by a str, got 7"),
        (NORM, lambda own: torch.full_like(own, math.nan), "64 of the 64 numbers of model.norm.weight are NaN or inf"),
        (HEAD, lambda own: own / 0, "of the 16576 numbers of lm_head.weight are NaN or infinite"),
    ],
)
def test_what_is_given_is_what_is_sent_or_no_replica_is_touched(
    connect: Connect, name: Any, change: Any, words: str
) -> None:
    """Under the model's own names and, where they have the tensor, under those of the checkpoint."""
    model, engine, sender = registered(connect, mlp_only_layers=[])
    good = sender.update_weights(model.state_dict())
    assert good.digest == sender.update_weights().digest
    engine.log.clear()
    own = dict(model.state_dict())
    changed = {name: change(own.get(name))}
    given = [own | changed, *([] if name == STACKED else [checkpoint_tensors(model) | changed])]
    for weights_given in given:
        with pytest.raises(WeightSyncError, match=words if weights_given.keys() >= own.keys() else None):
            sender.update_weights(weights_given)
    assert (engine.log, sender.version, engine.states) == ([], 2, ["SERVING"])
    assert sender.update_weights().digest == good.digest


def test_a_tied_weight_with_two_values_and_a_model_that_was_resized_are_refused(connect: Connect) -> None:
    model, engine, sender = registered(connect, tie_word_embeddings=True)
    sender.update_weights({name: tensor.clone() for name, tensor in model.state_dict().items()})
    with pytest.raises(ManifestMismatch, match="are one weight in the registered model, and came with different valu"):
        sender.update_weights({**model.state_dict(), HEAD: model.lm_head.weight.detach() + 1})
    model.resize_token_embeddings(300, mean_resizing=False)
    with pytest.raises(ManifestMismatch, match=r"has shape \[300, 64\], register_model\(\) saw \[259, 64\]"):
        sender.update_weights()
    assert engine.versions == [1]


@pytest.mark.parametrize("dtype", ["engine", "trainer"])
@pytest.mark.parametrize("delta", [False, True])
def test_a_number_that_overflows_in_the_engines_dtype_is_not_sent(
    connect: Connect, tmp_path: Path, dtype: str, delta: bool
) -> None:
    expected = {"a": (torch.float16, torch.Size([2, 2])), "b": (torch.int64, torch.Size([3]))}
    engine = FakeFleet(1, expected=expected, dtype="float16")
    sender = connect(engine, dtype=dtype, folder=tmp_path, delta=delta)
    sender.update_weights(weights(1))
    words = r"4 of the 4 numbers of a are NaN or infinite in torch.float16, in which they are sent"
    refused = pytest.raises(WeightSyncError, match=words)
    with contextlib.nullcontext() if dtype == "trainer" else refused:
        sender.update_weights(weights(1e5))
    assert (sender.update_weights(weights(2)).failed, value_in(engine, 0)) == ({}, 2.0)


def test_a_store_that_cannot_be_used_is_named_and_one_that_was_removed_is_made_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    engine, sender = fleet(2, folder=tmp_path / "store", delta=True)
    sender.update_weights(weights(1))
    (tmp_path / "store" / ".STABLE.tmp").mkdir()
    with pytest.raises(WeightSyncError, match=r"the weight store '.*store' cannot be used: .*STABLE"):
        sender.update_weights(weights(2))
    assert values(engine) == [1.0, 1.0]
    shutil.rmtree(tmp_path / "store")
    engine.restart(1)
    with pytest.raises(WeightSyncError, match=r"replica 1 was not brought to version 1: .*not in the store"):
        sender.bring(1)
    report = sender.update_weights(weights(2))
    assert report.failed == {1: "the replica is STARTING"}
    sender.bring(1)
    assert values(engine) == [2.0, 2.0]
    assert sender.update_weights(weights(3)).failed == {}


def test_a_forked_process_leaves_the_store_to_the_one_that_made_it() -> None:
    engine, scheme = FakeFleet(1), VLLMWeightSyncScheme(timeout_seconds=20.0)
    sender = scheme.create_sender()
    sender.init_all_workers_group(None, vllm_engine=engine)
    sender.update_weights(weights(1))

    def end() -> None:
        sender.shutdown()
        scheme.shutdown()  # calls the finalizer, as its end would
        sender._publisher.close()

    assert exit_code_of(end, 20.0) == 0
    with pytest.raises(WeightSyncError, match="is written by process"):
        VLLMWeightSyncScheme(folder=scheme.folder).create_sender().publish(weights(9))
    for value in (2, 3):
        assert (sender.update_weights(weights(value)).failed, value_in(engine, 0)) == ({}, value)
    sender.shutdown()
    assert not scheme.folder.exists()


def test_a_version_that_does_not_fit_into_memory_is_refused_before_it_is_written(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, a file that is too large ends other programs; on a disk it is an error of its own."""
    large, memory = {"a": torch.zeros((1 << 18) + 9)}, psutil.virtual_memory()
    engine = FakeFleet(1, expected={"a": (torch.float32, torch.Size([(1 << 18) + 9]))})
    sender = connect(engine)
    sender.update_weights(large)
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1 << 20))
        with pytest.raises(
            WeightSyncError, match=r"no room for 1 MB in /dev/shm/.* \(which is in memory, of which 1 MB a"
        ):
            sender.update_weights(large)
        assert (sender.version, engine.versions) == (1, [1])
    assert [sender.update_weights(large).version for _ in range(3)] == [2, 3, 4]


def test_another_trainers_bytes_under_our_version_touch_no_replica(connect: Connect, tmp_path: Path) -> None:
    engine = FakeFleet(2)
    ours = connect(engine, folder=tmp_path)
    version = ours.publish(weights(1))
    ours._publisher.close()  # as if its lock were lost
    connect(FakeFleet(1), folder=tmp_path)._publisher.publish(weights(2), lambda: version)
    with pytest.raises(WeightSyncError, match="other bytes than were published: is the store shared"):
        ours.apply(version)
    assert engine.versions == [0, 0]


# -- late replicas ----------------------------------------------------------------------------------------------------


def test_a_replica_that_was_draining_continues_draining(connect: Connect) -> None:
    engine = FakeFleet(2)
    engine.replica_table.set_state(1, ReplicaState.DRAINING)
    sender = connect(engine)
    assert sender.update_weights(weights()).failed == {}
    assert (engine.states, engine.versions) == (["SERVING", "DRAINING"], [1, 1])


@pytest.mark.parametrize(
    ("happens", "state", "words"),
    [
        (lambda engine: engine.restart(0), "STARTING", None),
        (lambda engine: engine.replica_table.mark_dead(0), "DEAD", None),
        (lambda engine: engine.replica_table.set_state(0, ReplicaState.SYNCING), "SYNCING", "the replica is SYNCING"),
    ],
    ids=["restarted", "dies", "another sender has it"],
)
def test_one_with_which_something_happens_while_it_drains_is_left_to_it(
    fleet: Fleet, happens: Callable[[FakeFleet], object], state: str, words: str | None
) -> None:
    engine, sender = fleet(2, mode="drain")
    lease = engine.load_balancer.acquire_at(0, None)
    updating = in_thread(lambda: sender.update_weights(weights()))
    until(lambda: engine.replica_table[0].state is ReplicaState.DRAINING)
    happens(engine)
    if words:
        lease.release()
    assert updating.result(60.0).failed.keys() == {0}
    assert words in (None, updating.result().failed[0])
    assert (engine.states, engine.versions) == ([state, "SERVING"], [0, 1])
    lease.release()


# -- publishing while the next forward runs ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.add_(0.1),
        lambda weight: weight.detach().numpy().__iadd__(0.1),
        lambda weight: weight.data.copy_(weight + 0.1),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_write_that_torch_does_not_count_tears_no_version(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, write: Any, first: bool
) -> None:
    """Whether the copy has passed the tensor that is written, or not."""
    model, engine, sender = registered(connect)
    parameters = list(model.parameters())
    sender.update_weights()
    go = gate(monkeypatch, after=4)
    sender.publish(wait=False)
    write(parameters[0 if first else -1])
    go.set()
    engine.restart(0)
    sender.bring(0)  # it is the trainer's error, and not a restarted replica's
    with pytest.raises(ManifestMismatch, match=r"changed while they were copied: call sender\.wait_published"):
        sender.wait_published()
    assert (sender.version, engine.versions, engine.states) == (1, [1], ["SERVING"])
    sender.publish(wait=False)
    assert sender.wait_published() == 2
    write(parameters[0])  # now it may
    assert sender.apply(2).failed == {}


def gate(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> threading.Event:
    """Let writers wait before each tensor's bytes, after so many."""
    go, write, free = threading.Event(), store_writer.send, iter([True] * after)

    def held(*args: Any) -> str:
        assert next(free, False) or go.wait(60.0)
        return write(*args)

    monkeypatch.setattr(store_writer, "send", held)
    return go


def test_the_caller_continues_while_a_version_is_copied_and_a_guarded_optimiser_waits_before_its_step(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, go = FakeFleet(1), gate(monkeypatch)
    sender, parameter = connect(engine), nn.Parameter(torch.full((2, 2), 5.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    sender.guard(optimizer)
    parameter.grad = torch.ones(2, 2)
    assert sender.publish({"a": parameter, "b": weights()["b"]}, wait=False) == 1
    assert sender.version == 0  # not there yet
    threading.Timer(0.05, go.set).start()
    optimizer.step()
    assert (parameter.eq(4).all(), sender.version, sender.wait_published()) == (True, 1, 1)
    assert (sender.apply(1).failed, value_in(engine, 0)) == ({}, 5.0)


class Part(torch.Tensor):
    """Stands for a tensor of which other ranks hold parts."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_sharded_weights_are_not_copied_behind_the_next_forward(connect: Connect) -> None:
    engine = FakeFleet(1)
    sender = connect(engine)
    parts = {name: tensor.as_subclass(Part) for name, tensor in weights(6).items()}
    with pytest.raises(ValueError, match="wait=False: sharded weights are gathered by all ranks"):
        sender.publish(parts, wait=False)
    assert (sender.wait_published(), engine.versions) == (0, [0])
    assert sender.publish(parts) == 1
    assert (sender.apply(1).failed, value_in(engine, 0)) == ({}, 6.0)


# -- restarted replicas -----------------------------------------------------------------------------------------------


QUICK = FaultPolicy(first_delay=0.001, longest_delay=0.01, probe=math.inf, start=30.0)


def test_replicas_that_die_at_any_moment_come_back_to_the_newest_weights(connect: Connect) -> None:
    """Sender and supervisor at the same replicas: what dies in a swap is restarted while the swap still continues."""

    def make(index: int, _: int) -> FakeWeightReplica:
        replica = FakeWeightReplica(index)
        replica.fail = dict.fromkeys(("stage_weights", "swap_weights"), lambda _: time.sleep(0.003))
        return replica

    service = RestartingService(3, make, replace(QUICK, max_restarts=10_000, start=5.0))
    sender, chance, over = connect(service), random.Random(7), threading.Event()

    def kill() -> None:
        while not over.wait(chance.random() * 0.01):
            service.kill(chance.randrange(3))

    killing = in_thread(kill)
    last = 0
    while last < 8 or sum(service.restarts) <= 3:
        last += 1
        with contextlib.suppress(WeightSyncError):
            sender.update_weights(weights(last))
    over.set()
    killing.result()
    until(lambda: [(e.state.name, e.version) for e in service.replica_table] == [("SERVING", last)] * 3)
    assert [entry.replica.weights["b"][0].item() for entry in service.replica_table] == [last] * 3
    sender.shutdown()
    service.shutdown()


def dying(command: str, lives: int, policy: FaultPolicy) -> RestartingService:
    """A service of one replica, whose first lives end at a command; the first one bears it once."""

    def make(index: int, life: int) -> FakeWeightReplica:
        replica = FakeWeightReplica(index)

        def die(asked: int) -> Exception | None:
            if life >= lives or not (life or asked):
                return None
            replica.die("killed by signal 9")
            return ReplicaDiedError("killed by signal 9")

        replica.fail[command] = die
        return replica

    return RestartingService(1, make, policy)


@pytest.mark.parametrize("dies_in", ["stage_weights", "swap_weights"])
def test_the_only_replica_dies_in_an_update_which_waits_for_its_restart(connect: Connect, dies_in: str) -> None:
    service, collector = dying(dies_in, 1, QUICK), UpdateCounter()
    sender = connect(service)
    sender.register_collector(collector)
    assert sender.update_weights(weights(1)).failed == {}
    report = sender.update_weights(weights(2))
    assert (report.version, report.failed, len(report.replicas)) == (2, {}, 1)
    (entry,) = service.replica_table
    assert (entry.version, entry.replica.weights["b"][0].item(), sum(service.restarts)) == (2, 2, 1)
    assert collector.count == 2
    assert sender.update_weights(weights(3)).failed == {}
    service.shutdown()


def test_a_replica_that_is_given_up_ends_the_wait_with_its_cause(connect: Connect) -> None:
    service = dying("swap_weights", 9, replace(QUICK, max_restarts=2))
    sender = connect(service)
    sender.update_weights(weights(1))
    words = r"restarted 2 times .*killed by signal 9.* log: .*max_restarts=2"
    with pytest.raises(WeightSyncError, match=words) as caught:
        sender.update_weights(weights(2))
    assert caught.value.report.failed.keys() == {0}
    service.shutdown()


def test_one_that_waits_for_an_update_gets_it(connect: Connect) -> None:
    """The only one, restarted after its sender was shut down: nobody serves, and nobody else will bring it."""
    engine = FakeFleet(1)
    first = connect(engine)
    first.update_weights(weights(1))
    first.shutdown()
    engine.restart(0)
    engine.replica_table[0].version = 0
    engine.replica_table.set_recovery(0, Recovery.UPDATE)
    report = connect(engine).update_weights(weights(2))
    assert (report.version, report.failed) == (2, {})  # and not 1 again
    assert (engine.states, engine.versions, value_in(engine, 0)) == (["SERVING"], [2], 2.0)
    assert engine.replica_table[0].recovery is Recovery.SUPERVISOR


@pytest.mark.parametrize("pauses_later", [False, True])
def test_draining_a_paused_engine_fails_at_once_and_names_both_ways_out(fleet: Fleet, pauses_later: bool) -> None:
    engine, sender = fleet(1, mode="drain", timeout_seconds=60.0)
    engine.fakes[0].call(Engine.pause, 60.0, "keep", False) if pauses_later else engine.pause()  # it takes long
    asked = in_thread(lambda: engine.generate([1], {"max_tokens": 2}, use_tqdm=False, timeout_seconds=60.0))
    until(lambda: engine.replica_table[0].inflight == 1)
    update = in_thread(lambda: sender.update_weights(weights()))
    if pauses_later:
        until(lambda: engine.states == ["DRAINING"])
        engine.pause()
    words = r"paused, so its 1 requests in flight cannot finish: resume\(\) it, or use mode='hot_swap'"
    with pytest.raises(WeightSyncError, match=words):
        update.result(30.0)
    assert engine.states == ["SERVING"]
    engine.resume()
    asked.result(60.0)
    engine.pause()  # nothing is in flight
    assert sender.update_weights(weights(6)).failed == {}
    engine.resume()


# -- older versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found_by", ["an update", "a restarted replica"])
def test_after_a_version_that_a_replica_cannot_read_comes_a_whole_one(
    fleet: Fleet, tmp_path: Path, found_by: str
) -> None:
    """Its bytes were damaged, and its file has the length and the time that it had: the writer does not see it."""
    engine, sender = fleet(2, folder=tmp_path, delta=True)

    def changed(number: int) -> dict[str, torch.Tensor]:
        return {**weights(1), "b": torch.tensor([number, 1, 1])}

    for number in (1, 2, 3):  # "a" stays in the file of the first
        sender.update_weights(changed(number))
    assert WeightStoreReader(tmp_path).manifest(3).base == 2
    (base,) = tmp_path.glob("bytes-of-v1.safetensors")
    content, status = base.read_bytes(), base.stat()
    with base.open("r+b") as file:
        file.write(content[:-40] + b"\xff" + content[-39:])  # of "a", before "b"
    os.utime(base, ns=(status.st_atime_ns, status.st_mtime_ns))
    if found_by == "a restarted replica":
        engine.restart(1)
    with pytest.raises(WeightSyncError, match="bytes of a are not those published"):
        sender.update_weights(changed(4)) if found_by == "an update" else sender.bring(1)
    version = sender.publish(changed(5))
    assert WeightStoreReader(tmp_path).manifest(version).base is None
    assert sender.apply(version, replicas=[0, 1]).failed == {}
    assert [(fake.weights["a"][0, 0].item(), fake.weights["b"][0].item()) for fake in engine.fakes] == [(1.0, 5)] * 2


def test_a_damaged_manifest_costs_its_version_only(connect: Connect, tmp_path: Path) -> None:
    first = connect(FakeFleet(1), folder=tmp_path, delta=True)
    for number in (1, 2):
        first.update_weights(weights(number))
    first.shutdown()
    file = tmp_path / "v1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:40] + b"\xff" + content[41:])
    (tmp_path / "STABLE").write_bytes(b"v\xff")
    (tmp_path / "writer").write_bytes(b"\xff")
    engine = FakeFleet(1)
    second = connect(engine, folder=tmp_path, delta=True)
    assert (second.update_weights(weights(4)).failed, value_in(engine, 0)) == ({}, 4.0)


# -- what is sent -----------------------------------------------------------------------------------------------------
def test_an_fp32_trainer_sends_a_bf16_engine_half_the_bytes(connect: Connect) -> None:
    model = make_tiny_moe("deepseek_v3", num_hidden_layers=2)
    own = get_model_metadata(model)
    halved = {
        name: (dtype if "correction_bias" in name else torch.bfloat16, shape) for name, (dtype, shape) in own.items()
    }
    engine = FakeFleet(1, expected=halved, dtype="bfloat16")
    for dtype, share, kinds in (("engine", 0.5, halved), ("trainer", 1.0, own)):
        sender = connect(engine, dtype=dtype)
        sender.register_model(model)
        nbytes = sender.update_weights().nbytes
        assert nbytes == pytest.approx(share * sum(t.nbytes for t in model.state_dict().values()), rel=1e-3)
        held = engine.fakes[0].weights
        assert {name: held[name].dtype for name in own} == {name: kind for name, (kind, _) in kinds.items()}
        assert held["lm_head.weight"].float().allclose(model.lm_head.weight, rtol=1e-2)


def test_a_tied_name_that_the_engines_checkpoint_has_is_sent() -> None:
    model = make_tiny_moe("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=2)
    engine = FakeFleet(1, expected={**get_model_metadata(model), HEAD: (torch.float32, model.lm_head.weight.shape)})
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(dict.fromkeys(model.state_dict()), vllm_engine=engine)
    assert sender.update_weights().failed == {}
    assert torch.equal(engine.fakes[0].weights[HEAD], model.model.embed_tokens.weight)
    sender.shutdown()


def test_the_canary_goes_with_the_registered_model_only(connect: Connect) -> None:
    model = make_tiny_moe("mixtral", num_hidden_layers=1)
    engine = FakeFleet(1, expected=get_model_metadata(model))
    sender = connect(engine, verify="canary")
    sender.register_model(model)
    sender.update_weights()
    assert engine.fakes[0].told("swap_weights")["canary"] == canary_of(model)
    assert engine.fakes[0].told("stage_weights")["verify"] == "canary"
    sender.update_weights(model.state_dict())
    assert engine.fakes[0].told("swap_weights")["canary"] is None


# -- over and over ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("delta", [False, True])
def test_many_syncs_leave_memory_descriptors_and_the_folder_flat(fleet: Fleet, delta: bool, tmp_path: Path) -> None:
    _, sender = fleet(2, delta=delta, folder=tmp_path / "store", prefetch=2)
    figures = []
    for number in range(60):
        assert sender.update_weights(weights(number)).failed == {}
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        figures.append((len(os.listdir("/proc/self/fd")), threading.active_count(), len(files), size))
    early, late = figures[:10], figures[-10:]
    for column, slack in enumerate((0, 0, 0, 64)):  # a version's number grows by digits
        assert max(row[column] for row in late) <= max(row[column] for row in early) + slack
