"""Families, pauses, caches and transports together, over real engines. The core runs always, the whole under soak."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import EngineShelf, start_engine
from support.reference import TOLERANCE
from support.versions import SECONDS, Versions, ask, let_run, random_ids
from torchrl_moe.errors import EngineError, SyncTimeout, WeightSyncError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.gloo import GlooGroup

Make = Callable[..., Versions]


@pytest.fixture
def make(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Versions] = []

    def versions(transport: str) -> Versions:
        family = request.node.get_closest_marker("engine").args[0]
        made.append(Versions(engine, shelf, family, tmp_path, transport))
        return made[-1]

    yield versions
    for one in made:
        one.close()


def answers(replica: Any) -> list[Completion]:
    futures = replica.submit([ask(f"new-{i}", random_ids(i, 20 + i), max_tokens=12, n=2) for i in range(3)])
    return [future.result(SECONDS) for future in futures]


def check_new(versions: Versions) -> None:
    """Whatever is asked for now is of the newest version, on all replicas."""
    for replica in versions.replicas:
        for completion in answers(replica):
            for output in completion.outputs:
                assert set(output.policy_versions.tolist()) == {versions.now}
                versions.check(completion, output)


@pytest.mark.engine("qwen3_moe", tensor_parallel_size=2)
@pytest.mark.parametrize(("transport", "pause", "clear_cache"), [("memmap", "abort", False), ("gloo", "keep", True)])
def test_two_workers_of_one_model_have_each_version_exactly(
    make: Make, transport: str, pause: str, clear_cache: bool
) -> None:
    versions = make(transport)
    (replica,) = versions.replicas
    before, manifest = versions.now, versions.prepare(1)
    assert versions.changed(before, manifest.version) > 100 * TOLERANCE
    futures = replica.submit([ask(f"t-{i}", random_ids(i, 20), max_tokens=150) for i in range(2)])
    let_run(replica, futures, 0.1)
    versions.swap(manifest, pause, clear_cache)
    for future in futures:
        completion = future.result(SECONDS)
        assert len(completion.outputs[0].token_ids) == 150
        versions.check(completion, completion.outputs[0])
    check_new(versions)


@pytest.mark.parity
@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_over_gloo_two_replicas_have_each_of_three_versions_exactly(make: Make) -> None:
    versions = make("gloo")
    for seed, (pause, clear_cache) in enumerate([("keep", False), ("keep", True), ("abort", False)]):
        before, manifest = versions.now, versions.prepare(seed)
        requests = [ask("running", random_ids(seed, 9), max_tokens=400, n=2)]
        futures = [replica.submit(requests)[0] for replica in versions.replicas]
        versions.swap(manifest, pause, clear_cache)
        assert versions.changed(before, versions.now) > 100 * TOLERANCE
        check_new(versions)
        for future in futures:
            completion = future.result(SECONDS)
            for output in completion.outputs:
                assert len(output.token_ids) == 400
                versions.check(completion, output, only=before if output.policy_versions[0] == before else None)


@pytest.mark.soak
@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_a_replica_that_stops_in_the_middle_of_a_broadcast_costs_only_its_own_version(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = make("gloo")
    versions.update(1)
    stopped, other = versions.replicas
    members = group_of(stopped)
    send = GlooGroup.broadcast

    def stop_and_send(group: GlooGroup, *arguments: Any) -> None:
        for member in members:
            os.kill(member, signal.SIGSTOP)
        send(group, *arguments)

    versions.change(2)
    manifest = versions.publish(versions.now + 1)
    monkeypatch.setattr(GlooGroup, "broadcast", stop_and_send)
    try:
        with pytest.raises((SyncTimeout, EngineError)):
            versions.transport.stage(stopped, manifest, StageOptions(), 2.0)
        monkeypatch.setattr(GlooGroup, "broadcast", send)
        assert versions.transport.stage(other, manifest, StageOptions(), SECONDS).digest == manifest.digest
    finally:
        for member in members:
            os.kill(member, signal.SIGCONT)
    versions.transport.stage(stopped, manifest, StageOptions(), SECONDS)  # it continues like any other
    versions.swap(manifest)
    versions.keep(manifest.version)
    check_new(versions)


def group_of(replica: Any) -> list[int]:
    """Return the processes of a local replica."""
    leader = replica._child.process.pid
    found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in found if _process_group(pid) == leader]


def _process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.soak
@pytest.mark.engine
def test_a_replica_killed_in_the_middle_of_a_broadcast_leaves_the_other_its_version(
    no_engine: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = no_engine.folder("qwen3_moe")
    with start_engine(folder, 2) as engine:
        versions = Versions(engine, no_engine, "qwen3_moe", tmp_path, "gloo")
        versions.update(1)
        killed, other = versions.replicas
        send = GlooGroup.broadcast

        def kill_and_send(group: GlooGroup, *arguments: Any) -> None:
            if threading.current_thread().name == "to be killed":
                for member in group_of(killed):
                    os.kill(member, signal.SIGKILL)
            send(group, *arguments)

        monkeypatch.setattr(GlooGroup, "broadcast", kill_and_send)
        versions.change(2)
        manifest = versions.publish(versions.now + 1)
        errors: list[Exception] = []

        def bring_the_first() -> None:
            try:
                versions.transport.stage(killed, manifest, StageOptions(), SECONDS)
            except (EngineError, WeightSyncError) as error:
                errors.append(error)

        started = time.monotonic()
        thread = threading.Thread(target=bring_the_first, name="to be killed")
        thread.start()
        versions.transport.stage(other, manifest, StageOptions(), SECONDS)
        thread.join(SECONDS)
        assert len(errors) == 1
        assert time.monotonic() - started < SECONDS / 2
        versions.replicas = [other]
        versions.swap(manifest)
        versions.keep(manifest.version)
        check_new(versions)
        versions.transport.close()


FAMILIES = [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("qwen3_moe", "mixtral", "deepseek_v3")]


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("transport", ["memmap", "gloo"])
@pytest.mark.parametrize("kv", ["salt", "recompute"])
@pytest.mark.parametrize("mode", ["hot_swap", "drain", "abort_resume"])
def test_every_token_is_of_the_version_that_it_says(
    family: str, transport: str, kv: str, mode: str, make: Make
) -> None:
    versions = make(transport)
    (replica,) = versions.replicas
    for seed in (1, 2):
        before, manifest = versions.now, versions.prepare(seed)
        futures = replica.submit([ask(f"r-{i}", random_ids(i, 30), max_tokens=300, n=2) for i in range(4)])
        if mode == "drain":
            for future in futures:
                future.result(SECONDS)
        else:
            let_run(replica, futures)
        versions.swap(manifest, "abort" if mode == "abort_resume" else "keep", kv == "recompute")
        check_new(versions)
        exact = None if mode != "hot_swap" or kv == "recompute" else before
        for future in futures:
            completion = future.result(SECONDS)
            for output in completion.outputs:
                assert output.finish_reason == "length"
                assert len(output.token_ids) == 300
                versions.check(completion, output, only=exact if output.policy_versions[0] == before else None)
