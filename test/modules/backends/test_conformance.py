"""What a replica promises, kept alike by each kind: fake, child process, actor, over toy engines and vLLM.

The toy engine stands behind the real engine process, so whatever is not vLLM's own is the real thing. What a service
promises over engines of each kind is in ``test/contract/test_engine_service.py``.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.actors import pids, ray_service, toy_actors
from support.completions import cut
from support.processes import ids_request, toy_replica
from support.waiting import until
from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.engine_kind import EngineKind, engine_kind
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.replica import Completion, Replica, Request
from torchrl_moe.testing.fake_engine import FakeReplica

SECONDS = 240.0  # a busy machine starts a Ray actor slowly


@dataclass
class Kind:
    """One kind of replica.

    ``make`` gives a new one, which ``kill`` ends as a fault would. ``quick`` and ``slow`` are sampling parameters: of
    a moment, and of a second or more.
    """

    make: Callable[[], Any]
    kill: Callable[[Any], None]
    quick: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 3})
    slow: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 3, "seconds": 1.0})
    refused: Request = field(default_factory=lambda: ids_request("bad", sampling_params={"refuse": "too long"}))


def make_fake() -> FakeReplica:
    def seconds(request: Request) -> float:
        return request.sampling_params.get("seconds", 0.0) / 3

    return FakeReplica(3, token_seconds=seconds, refuse=lambda request: request.sampling_params.get("refuse"))


def make_local() -> Any:
    replica = toy_replica(3)
    replica.start()
    return replica


def make_ray() -> Any:
    from torchrl_moe.modules.backends.ray.ray_replica import RayReplica

    with toy_actors():
        replica = RayReplica(3, ray_service(name="conformance"))
        replica.start()
        replica.wait_ready(SECONDS)
    return replica


PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def echo_code() -> str:
    (code,) = re.findall(r"^```python\n([^`]*class Echo\(EngineProgram\).*?)^```", PAGE.read_text(), re.M | re.S)
    return str(code)


@pytest.fixture(scope="session")
def echo_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineKind]:
    """The engine that docs/engines.md shows, as a user's module."""
    code = echo_code()
    assert code.count("\n") <= 150
    folder = tmp_path_factory.mktemp("echo")
    (folder / "echo_engine.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield engine_kind("echo_engine")


def make_echo(kind: EngineKind) -> Any:
    replica = LocalReplica(3, kind, kind.arguments_of({"step_seconds": 0.003}), kind.engine_environment())
    replica.start()
    return replica


def killing(pid_of: Callable[[Any], int]) -> Callable[[Any], None]:
    return lambda replica: os.kill(pid_of(replica), signal.SIGKILL)


kill_process = killing(lambda replica: replica._child.process.pid)
KINDS = {
    "fake": Kind(make_fake, FakeReplica.die),
    "local": Kind(make_local, kill_process),
    "ray": Kind(make_ray, killing(lambda replica: pids(replica)[1])),  # of an actor's death: test_ray_replica.py
}
REAL = Kind(
    make=lambda: None,
    kill=lambda replica: None,
    quick={"max_tokens": 3, "ignore_eos": True},
    slow={"max_tokens": 200, "ignore_eos": True},
    refused=ids_request("bad", [65] * 600, sampling_params={"max_tokens": 3}),  # more than a vLLM of the tests takes
)
RAY, ENGINE = pytest.mark.ray, pytest.mark.engine


@pytest.fixture(scope="module")
def lasting() -> Iterator[dict[str, Any]]:
    """The replicas that all tests share but those of deaths."""
    made: dict[str, Any] = {}
    yield made
    for replica in made.values():
        replica.shutdown()


@pytest.fixture(
    params=[
        *("fake", "local", "echo"),
        pytest.param("ray", marks=RAY),
        pytest.param("ray vllm", marks=[RAY, ENGINE]),
    ]
)
def one(request: pytest.FixtureRequest, lasting: dict[str, Any]) -> tuple[Replica, Kind]:
    """A replica that serves; leave it so."""
    name = request.param
    if name == "ray vllm":
        return request.getfixturevalue("ray_pair").replica_table[0].replica, REAL
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    if name not in lasting:
        is_echo = name == "echo"
        lasting[name] = make_echo(request.getfixturevalue("echo_kind")) if is_echo else KINDS[name].make()
        lasting[name].wait_ready(SECONDS)
    return lasting[name], KINDS.get(name, REAL)


@pytest.fixture(params=["fake", "local", "echo", pytest.param("ray", marks=RAY)])
def mortal(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Kind]]:
    """A replica to be killed."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    if request.param == "echo":
        engine = request.getfixturevalue("echo_kind")
        kind = replace(REAL, make=lambda: make_echo(engine), kill=kill_process)
    else:
        kind = KINDS[request.param]
    replica = kind.make()
    replica.wait_ready(SECONDS)
    yield replica, kind
    replica.shutdown()


@contextmanager
def paused(replica: Replica, mode: Any = "keep") -> Iterator[None]:
    replica.call(Engine.pause, SECONDS, mode, False)
    try:
        yield
    finally:
        replica.call(Engine.resume, SECONDS)


def requests(count: int, params: dict[str, Any], name: str = "r") -> list[Request]:
    return [ids_request(f"{name}{i}", (65 + i % 26, 66), sampling_params=params) for i in range(count)]


def prompts(completions: list[Completion]) -> list[list[int]]:
    return [completion.prompt_token_ids.tolist() for completion in completions]


def done(replica: Replica, *sent: Request) -> list[Completion]:
    return [future.result(SECONDS) for future in replica.submit(list(sent))]


# -- requests ---------------------------------------------------------------------------------------------------------
def test_each_request_has_one_completion_in_its_own_place(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    assert isinstance(replica, Replica)
    assert replica.is_alive()
    assert replica.wait_ready(0.0) == replica.wait_ready(SECONDS)  # may be asked again
    futures = replica.submit(sent := requests(20, kind.quick))
    replica.call(Engine.set_seed, SECONDS, 5)  # which is taken while requests run
    completions = [future.result(SECONDS) for future in futures]
    assert [completion.request_id for completion in completions] == [request.request_id for request in sent]
    assert prompts(completions) == [[65 + i, 66] for i in range(20)]
    assert all(len(completion.outputs) == 1 and completion.finished for completion in completions)
    assert {completion.outputs[0].finish_reason for completion in completions} <= {"stop", "length"}
    assert {completion.metrics.replica for completion in completions} == {replica.index}
    assert replica.submit([]) == []


def test_a_request_that_is_refused_is_a_value_error_and_fails_alone(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    bad, good = replica.submit([kind.refused, *requests(1, kind.quick)])
    with pytest.raises(ValueError):
        bad.result(SECONDS)
    assert good.result(SECONDS).request_id == "r0"


def test_a_request_continues_from_what_it_resumes(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    (whole,) = done(replica, *requests(1, kind.quick, "whole"))
    first = cut(replace(whole, prompt="AB"), 1, decode=lambda ids: "?")
    first.outputs[0].policy_versions = np.array([-5], np.int32)
    before = replica.call(Engine.stats, SECONDS).generated_tokens
    resuming = ids_request("r0", (65, 66), sampling_params=kind.quick, resume=first)
    completion, fresh = done(replica, resuming, *requests(1, kind.quick, "fresh"))
    (output,) = completion.outputs
    tokens = len(output.token_ids)
    assert (completion.request_id, completion.prompt, completion.prompt_token_ids.tolist()) == ("r0", "AB", [65, 66])
    assert output.token_ids[0] == whole.outputs[0].token_ids[0]
    assert len(output.policy_versions) == tokens > 1
    assert output.policy_versions[0] == -5
    assert (output.policy_versions[1:] >= 0).all()
    assert output.finish_reason in {"stop", "length"}
    assert completion.metrics.replica == replica.index
    made = replica.call(Engine.stats, SECONDS).generated_tokens - before
    assert made == tokens - 1 + len(fresh.outputs[0].token_ids)


@pytest.mark.parametrize("one", ["local", "echo"], indirect=True)
def test_an_engine_that_cannot_follow_recorded_experts_refuses_them_with_the_reason(one: tuple[Replica, Kind]) -> None:
    """Those that can are in ``test/contract/test_engine_service.py``."""
    replica, kind = one
    rows = np.full((1, 1, 1), -1, np.int8)
    asked = ids_request("bad", sampling_params=kind.quick, routed_experts=rows)
    bad, good = replica.submit([asked, *requests(1, kind.quick)])
    why = replica.wait_ready(SECONDS).forced_routing_unavailable_reason
    with pytest.raises(ValueError, match=f"cannot follow recorded experts: {why}"):
        bad.result(SECONDS)
    assert why and good.result(SECONDS).request_id == "r0"


def test_an_id_in_flight_is_refused_and_is_free_afterwards(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    with paused(replica):
        (first,) = replica.submit(requests(1, kind.quick))
        (twin,) = replica.submit(requests(1, kind.quick))
        with pytest.raises(ValueError, match="request id 'r0' is in flight already"):
            twin.result(SECONDS)
        assert not first.done()
    assert first.result(SECONDS).request_id == "r0"
    assert replica.submit(requests(1, kind.quick))[0].result(SECONDS).request_id == "r0"


def test_an_abort_cuts_those_it_names_and_no_other(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    with paused(replica):
        cut, spared = replica.submit(requests(2, kind.quick))  # neither continues during a pause
        replica.abort(["r0", "unknown"])
        assert cut.result(SECONDS).aborted
        assert cut.result().outputs[0].finish_reason == "abort"
        assert not spared.done()
    assert not spared.result(SECONDS).aborted
    replica.abort(["r0", "r1"])  # too late is no error


# -- pauses -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_freezes_cuts_or_lets_finish_what_runs_and_holds_what_comes(
    one: tuple[Replica, Kind], mode: Any
) -> None:
    replica, kind = one
    replica.call(Engine.pause, SECONDS, "keep", False)  # or all could be over before
    futures = replica.submit(requests(3, kind.slow))
    replica.call(Engine.stats, SECONDS)  # the engine has heard of them
    replica.call(Engine.resume, SECONDS)
    if mode == "wait":
        until(lambda: replica.call(Engine.stats, SECONDS).running, SECONDS)
    with paused(replica, mode):
        if mode != "keep":
            assert not wait_futures(futures, SECONDS).not_done
        (later,) = replica.submit(requests(1, kind.quick, "later"))
        assert not wait_futures([later, *(futures if mode == "keep" else [])], 0.3).done
    assert [future.result(SECONDS).aborted for future in futures] == [mode == "abort"] * 3
    assert not later.result(SECONDS).aborted


def test_an_abort_cuts_what_the_engine_is_still_taking_in(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    futures = replica.submit(requests(3, kind.slow))
    with paused(replica, "abort"):
        assert not wait_futures(futures, SECONDS).not_done
    assert all(future.result().aborted for future in futures)


def test_a_snapshot_shows_what_is_in_flight_and_disturbs_nothing(one: tuple[Replica, Kind]) -> None:
    replica, kind = one
    futures = replica.submit(requests(2, kind.slow, "seen"))
    until(lambda: len(replica.call(Engine.snapshot, SECONDS)) == 2, SECONDS)
    seen = sorted(replica.call(Engine.snapshot, SECONDS), key=lambda completion: completion.request_id)
    assert [completion.request_id for completion in seen] == ["seen0", "seen1"]
    assert [(completion.aborted, completion.metrics.replica) for completion in seen] == [(True, replica.index)] * 2
    assert prompts(seen) == [[65, 66], [66, 66]]
    replica.abort(["seen0", "seen1"])
    for future, before in zip(futures, seen, strict=True):
        after = future.result(SECONDS)
        assert after.aborted
        tokens = before.outputs[0].token_ids.tolist()
        assert after.outputs[0].token_ids.tolist()[: len(tokens)] == tokens
    assert replica.call(Engine.snapshot, SECONDS) == []


# -- commands ---------------------------------------------------------------------------------------------------------
def test_a_command_that_nobody_knows_is_refused_by_name_and_harms_nothing(one: tuple[Replica, Kind]) -> None:
    replica, kind = one

    async def no_such_thing(engine: Engine) -> None: ...

    with pytest.raises((ValueError, EngineError), match="has no verb 'no_such_thing'") as caught:
        replica.call(no_such_thing, SECONDS)
    assert not isinstance(caught.value, ReplicaDiedError)
    assert replica.submit(requests(1, kind.quick))[0].result(SECONDS).request_id == "r0"


# -- ends -------------------------------------------------------------------------------------------------------------
def check_dead(replica: Any, kind: Kind, futures: list[Future[Completion]]) -> None:
    for future in futures:
        with pytest.raises(ReplicaDiedError, match=f"replica {replica.index}"):
            future.result(SECONDS)
    assert not replica.is_alive()
    (late,) = replica.submit(requests(1, kind.quick, "late"))
    with pytest.raises(ReplicaDiedError):
        late.result(SECONDS)
    with pytest.raises(ReplicaDiedError):
        replica.call(Engine.stats, SECONDS)
    replica.abort(["late", "r0"])


@pytest.mark.parametrize("how", ["death", "shutdown"])
def test_an_end_fails_all_that_waits_and_all_that_comes(mortal: tuple[Any, Kind], how: str) -> None:
    replica, kind = mortal
    replica.call(Engine.pause, SECONDS, "keep", False)
    futures = replica.submit(requests(20, kind.slow))
    if how == "death":
        kind.kill(replica)
    else:
        replica.shutdown()
    check_dead(replica, kind, futures)
    replica.shutdown()
    replica.shutdown()  # it may be repeated


def test_an_engine_whose_answer_has_a_wrong_type_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = echo_code().replace('text="",', "text=7,")
    assert wrong != echo_code()
    (tmp_path / "numbers_for_text.py").write_text(wrong)
    monkeypatch.syspath_prepend(str(tmp_path))
    replica = make_echo(engine_kind("numbers_for_text"))
    try:
        replica.wait_ready(SECONDS)
        with pytest.raises(ReplicaDiedError, match=r"sent what is no message: .*[Ee]xpected `?str"):
            replica.submit([ids_request("one", sampling_params={"max_tokens": 3})])[0].result(SECONDS)
    finally:
        replica.shutdown()
