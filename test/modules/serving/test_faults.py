"""Real engines under real faults: processes killed and stopped under requests. Nothing is lost, nothing left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from support.completions import cut
from support.engines import EngineShelf, start_engine
from support.reference import TOLERANCE, Reference
from support.waiting import PATIENCE, until
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.serving.replica_table import FaultPolicy

ROOT = Path(__file__).parents[3]
RESTART = 150.0  # generous: an engine starts in twenty seconds, on a machine of its own
# two unanswered probes suffice; one that a busy machine starves so long is restarted, and its requests sent on
FAULTS = FaultPolicy(probe=4.0, patience=8.0, first_delay=0.1, attempts=6)


class Parts:
    """The processes of one replica, whose worker has one of its own or is in the engine core's."""

    def __init__(self, engine: AsyncVLLM, index: int) -> None:
        child = engine.replica_table[index].replica._child
        self.owner = psutil.Process(child.process.pid)
        (self.core,) = self._children(self.owner, "EngineCore")
        workers = self._children(self.core, "Worker")
        self.worker = workers[0] if workers else self.core
        self.all = [self.owner, self.core, *workers]

    def _children(self, parent: psutil.Process, name: str) -> list[psutil.Process]:
        return [child for child in parent.children() if name in " ".join([child.name(), *child.cmdline()])]


def segments(processes: Iterable[psutil.Process]) -> set[Path]:
    """The shared memory that processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {Path(area.path) for area in process.memory_maps() if area.path.startswith("/dev/shm/")}
    return found


@pytest.fixture
def clean_temporary(no_engine: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder that only the engines of this test use."""
    no_engine.folder("qwen3_moe")  # which is made elsewhere
    folder = Path(tempfile.mkdtemp())  # not tmp_path: its name is too long for sockets
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def engine(no_engine: EngineShelf, clean_temporary: Path, request: pytest.FixtureRequest) -> Iterator[AsyncVLLM]:
    """Two replicas that are watched closely. At the end no process, shared memory or file of theirs is left."""
    others = set(psutil.Process().children(recursive=True))  # the tracker of an earlier test's memory, say
    made = start_engine(no_engine.folder("qwen3_moe"), 2, faults=FAULTS, **getattr(request, "param", {}))
    try:
        yield made
    finally:
        made_since = [child for child in psutil.Process().children(recursive=True) if child not in others]
        family = [child for child in made_since if "ForkServer" not in child.name()]  # that waits for the next start
        shared = segments(family)
        made.shutdown()
    assert psutil.wait_procs(family, PATIENCE)[1] == []
    until(lambda: not any(segment.exists() for segment in shared))
    assert os.listdir(clean_temporary) == []


TOKENS = 60
PARAMS = {"max_tokens": TOKENS, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def flood(engine: AsyncVLLM, count: int = 40) -> Any:
    """Answers to so many different prompts."""
    prompts = [[65 + i % 26, 97 + i // 26, *range(48, 48 + i % 10)] for i in range(count)]
    return engine.generate(prompts, PARAMS, use_tqdm=False, timeout_seconds=2 * RESTART)


def check(engine: AsyncVLLM, completions: Any, expected: Any) -> None:
    """Every request was answered once, as without the fault."""
    assert len(completions) == len(expected)
    for got, want in zip(completions, expected, strict=True):
        assert got.prompt_token_ids.tolist() == want.prompt_token_ids.tolist()
        (output,) = got.outputs
        assert (output.finish_reason, output.token_ids.shape, output.logprobs.shape) == ("length", (TOKENS,), (TOKENS,))
        assert output.routed_experts.shape == (len(got.prompt_token_ids) + TOKENS - 1, 4, 4)
    same = sum(
        a.outputs[0].token_ids.tolist() == b.outputs[0].token_ids.tolist()
        for a, b in zip(completions, expected, strict=True)
    )
    assert same >= 0.97 * len(expected)  # ties may fall otherwise in another batch
    until(lambda: engine.get_num_unfinished_requests() == [0, 0])
    assert engine.admission.taken == 0


def until_serving(engine: AsyncVLLM, restarts: int) -> None:
    """Wait until both replicas serve, restarted that often; one that a busy machine starved may have been once more."""
    deadline = time.monotonic() + RESTART
    while not all(entry.state.name == "SERVING" and entry.restarts >= restarts for entry in engine.replica_table):
        assert time.monotonic() < deadline, [(e.state, e.restarts, e.last_error) for e in engine.replica_table]
        time.sleep(0.1)


def under_fire(engine: AsyncVLLM, expected: Any, *shots: tuple[int, str, signal.Signals]) -> None:
    """Shoot at processes of the replicas, which both are in the middle of a flood."""
    parts = [Parts(engine, index) for index in range(2)]
    shared = [segments(replica.all) for replica in parts]
    assert all(shared)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(flood, engine)
        until(lambda: min(entry.inflight for entry in engine.replica_table) > 12)
        for index, part, sign in shots:
            getattr(parts[index], part).send_signal(sign)
        assert not call.done()
        check(engine, call.result(3 * RESTART), expected)
    for index, _, _ in shots:
        assert psutil.wait_procs(parts[index].all, PATIENCE)[1] == []
        until(lambda index=index: not any(segment.exists() for segment in shared[index]))


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_killed_and_stopped_processes_lose_no_request(engine: AsyncVLLM) -> None:
    owners = [Parts(engine, index).owner for index in range(2)]
    assert [len(Parts(engine, index).all) for index in range(2)] == [2, 2]  # on a CPU the core holds the worker
    assert owners[0].ppid() == owners[1].ppid()  # one child of this process forked both
    assert psutil.Process(owners[0].ppid()).ppid() == os.getpid()
    leaders = {os.getpgid(pid) for pid in (os.getpid(), owners[0].ppid(), *(one.pid for one in owners))}
    assert len(leaders) == 4  # Ctrl-C is the driver's
    expected = flood(engine)
    # nobody serves until they are back
    under_fire(engine, expected, (0, "core", signal.SIGKILL), (1, "core", signal.SIGSTOP))
    until_serving(engine, 1)
    assert "gave no sign of life in 8 s and was ended" in str(engine.replica_table[1].last_error)
    check(engine, flood(engine, 10), expected[:10])
    # told to end, a core aborts what it has
    under_fire(engine, expected, (0, "core", signal.SIGTERM))
    until(lambda: engine.replica_table[0].restarts >= 2)


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.parametrize("engine", [{"distributed_executor_backend": "mp"}], indirect=True, ids=["worker apart"])
def test_each_process_of_a_replica_may_be_killed_under_answers_that_continue_too(
    engine: AsyncVLLM, no_engine: EngineShelf
) -> None:
    expected = flood(engine)
    under_fire(engine, expected, (0, "worker", signal.SIGKILL), (1, "owner", signal.SIGKILL))
    until_serving(engine, 1)
    check(engine, flood(engine), expected)
    resume_under_fire(engine, expected, Reference(no_engine.folder("qwen3_moe")))


def resume_under_fire(engine: AsyncVLLM, expected: Any, reference: Reference) -> None:
    """A replica is killed under answers that continue from a first part, whose experts no router here would choose."""
    rng = np.random.default_rng(0)
    firsts = [cut(completion, 30, decode=lambda ids: "") for completion in expected[:20]]
    for first in firsts:
        (output,) = first.outputs
        rows = np.zeros_like(output.routed_experts)
        rows[:, 1:] = rng.permuted(np.tile(np.arange(16), (len(rows), 3, 1)), axis=-1)[..., :4]
        first.outputs[0] = replace(output, routed_experts=rows)
    retried = engine.metrics.summary()["retried"]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, resume=firsts, sampling_params=PARAMS, use_tqdm=False)
        until(lambda: max(entry.inflight for entry in engine.replica_table) > 5)
        Parts(engine, max(engine.replica_table, key=lambda entry: entry.inflight).index).core.kill()
        completions = call.result(3 * RESTART)
    assert engine.metrics.summary()["retried"] > retried
    for first, completion in zip(firsts, completions, strict=True):
        (before,), (output,) = first.outputs, completion.outputs
        known = len(before.routed_experts)
        assert output.resume == "forced"
        assert output.token_ids[:30].tolist() == before.token_ids.tolist()
        assert (output.routed_experts[:known] == before.routed_experts).all()
        ids = torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids]))
        followed = torch.arange(len(output.routed_experts)) < known
        log_probs, _ = reference(ids, routes=output.routed_experts, followed=followed)
        off = torch.from_numpy(output.logprobs.copy()) - log_probs[len(completion.prompt_token_ids) :]
        assert off[30:].abs().max() <= TOLERANCE


DRIVER = """
    import os, signal, sys, threading, time
    from torchrl_moe.modules import AsyncVLLM

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
    arguments = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 512, "dtype": "float32"}
    prompts, params = [[65 + i] for i in range(20)], {"max_tokens": 500, "ignore_eos": True}
    engine = AsyncVLLM({"model": sys.argv[1], **arguments})
    print("starting", flush=True)
    try:
        engine.start()
    except KeyboardInterrupt:
        print("interrupted", engine.replica_table[0].state.name, flush=True)
    engine = AsyncVLLM.from_pretrained(sys.argv[1], **arguments)

    def take_it_easy(saved, model):  # it is to be busy, not to keep a processor so
        model.register_forward_pre_hook(lambda *_: time.sleep(0.05))

    def say_when_asked():
        while engine.get_num_unfinished_requests() != [20]:
            time.sleep(0.01)
        print("asked", flush=True)

    engine.validate_model_params(take_it_easy)
    print("serving", flush=True)
    try:
        threading.Thread(target=say_when_asked).start()
        engine.generate(prompts, params, use_tqdm=False)
    except KeyboardInterrupt:
        print("interrupted", engine.get_num_unfinished_requests(), engine.admission.taken, flush=True)
    tokens = len(engine.generate("Hello", {"max_tokens": 3, "ignore_eos": True}, use_tqdm=False).outputs[0].token_ids)
    print("answered", tokens, flush=True)
    engine.generate(prompts, params, use_tqdm=False)
"""


def loading(driver: int) -> list[psutil.Process]:
    """The processes of a driver, and those that they forked, that have torch in their memory."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any("libtorch_cpu" in area.path for area in process.memory_maps()):
                found.append(process)
    return found


@pytest.mark.engine
def test_ctrl_c_ends_a_start_and_calls_and_a_driver_that_is_killed_with_its_owner_leaves_nothing(
    no_engine: EngineShelf, clean_temporary: Path
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(no_engine.folder("qwen3_moe"))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "starting\n"
        until(lambda: loading(driver.pid))
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: the driver's group, not the engine's
        assert driver.stdout.readline() == "interrupted DEAD\n"
        assert driver.stdout.readline() == "serving\n"
        assert driver.stdout.readline() == "asked\n"
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.stdout.readline() == "interrupted [0] 0\n"
        assert driver.stdout.readline() == "answered 3\n"
        family = psutil.Process(driver.pid).children(recursive=True)
        # one, whatever was begun before it: the interrupted start left none
        (owner,) = [process for process in family if "Replica" in " ".join(process.cmdline())]
        shared = segments(family)
        assert shared
        driver.send_signal(signal.SIGSTOP)  # or it would see the owner's death, and clear up
        owner.kill()
        driver.kill()
    assert psutil.wait_procs(family, PATIENCE)[1] == []
    until(lambda: not any(segment.exists() for segment in shared))
    until(lambda: os.listdir(clean_temporary) == [])
